"""Compares a split model (embedding, blocks and head, run in turn) with the model's own forward. Only execution shows
if a model scales or caps its logits, or if a block attends to later tokens.

A training run compares both on the real weights. A plan compares them on a small random copy, if possible.
`architecture_blamed` distinguishes errors in the model's code from lowmem's.
"""

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from lowmem.core.decoder import Decoder
from lowmem.core.encoder_decoder import take_apart
from lowmem.core.precision import WORKING_DTYPES
from lowmem.errors import InputError, LowmemError, first_line
from lowmem.models.build import build_model, decoder_of, model_from_config

_BLOCKS, _HEADS, _VOCABULARY = 2, 4, 64
_MOST_PARAMETERS = 60_000_000
_WIDTHS = (  # families' names for the width of the matrices in a block, or in each of its many experts
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
_OURS, _THEIRS = str(Path(__file__).parents[1]), str(Path(transformers.__file__).parent)
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)


def check_pieces(decoder: Decoder, vocabulary_size: int, document_mask: bool = False) -> None:
    """Compares the logits of embedding, blocks and head, run in turn, with those of the whole model. Raises InputError
    if `difference` (with the same arguments) finds a fault, or if the model cannot run."""
    training = decoder.model.training
    decoder.model.eval()
    try:
        found = difference(decoder, vocabulary_size, document_mask)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the card's error, not the model's
    except RuntimeError as error:
        where, advice = "in this precision", "try --precision fp32"
        if decoder.head_weight.dtype is torch.float32:
            where, advice = "with these weights", "they may be damaged: take others"
        raise InputError(f"{decoder.architecture} cannot run {where}: {first_line(error)}; {advice}") from error
    finally:
        decoder.model.train(training)
    if found is not None:
        raise InputError(found)


@torch.no_grad()
def difference(decoder: Decoder, vocabulary_size: int, document_mask: bool) -> str | None:
    """Compares the logits of embedding, blocks and head, run in turn, with those of the whole model, on two rows of
    token ids below `vocabulary_size`. Returns a sentence on the first fault, or None. Faults: the logits differ, blocks
    get trained tensors from outside, tokens attend to later ones, or (if `document_mask`) document masks are ignored.
    Raises RuntimeError if logits are not finite."""
    name, head_weight = decoder.architecture, decoder.head_weight
    input_ids, *others = decoder.example(vocabulary_size)
    whole = decoder.whole(input_ids, *others)
    if not whole.isfinite().all():
        raise RuntimeError("its logits are not finite")
    made_up = torch.linspace(-100, 100, whole.numel(), device=whole.device)  # in fp16 it would count beyond 65,504
    made_up = made_up.to(head_weight.dtype).view_as(whole)
    returned = decoder.with_head_output(made_up, input_ids, *others)
    pieces = decoder.logits(input_ids, *others)
    if not _close(returned, decoder.logit_function(made_up)) or not _close(whole, pieces):
        return f"{name} cannot be trained in pieces: its logits are not those of embedding, blocks and head in turn"
    with torch.enable_grad():
        _, extras = decoder.embed(input_ids, *others)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(extras)):
        return f"{name} passes trained tensors from outside into its blocks, which is not supported"
    changed = input_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary_size
    if not _close(whole[:, :-1], decoder.whole(changed, *others)[:, :-1]):
        return f"{name} attends to later tokens, so it is no causal language model"
    if document_mask:
        positions = torch.arange(8, device=whole.device).repeat(2).view(1, 16)
        packed = decoder.logits(input_ids.view(1, 16), positions, positions.new_tensor([[0] * 8 + [1] * 8]))
        if not _close(whole.view(1, 16, -1), packed):
            return f"{name} does not honour a document mask; use --document-mask off, and not --pack packed"
    return None


def _close(whole: Tensor, pieces: Tensor) -> bool:
    # Rounding depends on the shapes of matmuls.
    tolerance = 1e-4 if whole.dtype is torch.float32 else 3e-2
    return whole.shape == pieces.shape and bool((whole - pieces).abs().max() <= tolerance * whole.abs().max())


def compare_small_copy(config: PretrainedConfig, document_mask: bool, precision: str, residual: str) -> str | None:
    """Makes a small copy of the model of `config` with random weights, and looks for faults with `difference`. Returns
    None after a comparison, or the reason why none was possible. Raises InputError if there is a fault, or if the copy
    does not run in `precision`. `residual`: dtype of the residual stream, "fp32" or "16bit"."""
    try:
        # A comparison takes about 0.1 s and at most 0.25 GiB. Of transformers' 189 default configs of causal language
        # models, 91 agree and 16 differ (version 5.23); most others cannot be split at any size.
        small = small_copy(config)
        parameters = sum(parameter.numel() for parameter in build_model(small).parameters())
        if parameters > _MOST_PARAMETERS:
            return f"a copy with {_BLOCKS} narrow blocks still has {parameters:,} parameters"
        vocabulary_size = small.get_text_config().vocab_size
        model = _with_random_weights(small)
        found = difference(take_apart(model), vocabulary_size, document_mask)
    except Exception as error:  # the copy's config is made up: the original may still run
        return f"a small copy of it does not run ({first_line(error)})"
    if found is not None:
        raise InputError(found)
    if precision == "fp32":
        return None
    dtype = WORKING_DTYPES[precision]
    decoder = decoder_of(model, precision, residual)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data = parameter.data.to(dtype)
    try:
        with torch.no_grad():
            decoder.logits(*decoder.example(vocabulary_size))
    except Exception as error:
        found = f"{decoder.architecture} does not run with matrices in {str(dtype).removeprefix('torch.')}"
        raise InputError(f"{found}: {first_line(error)}; --precision fp32 takes more memory and may work") from None
    return None


def small_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of `config` with fewer blocks, token ids and heads, and a smaller width. Heads keep their size."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    blocks, heads, width = text.num_hidden_layers, getattr(text, "num_attention_heads", None), text.hidden_size
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == blocks:  # the kind of each block, and the like
            setattr(text, name, value[:_BLOCKS])
    _change(text, ("num_hidden_layers", "num_decoder_layers"), lambda depth: min(_BLOCKS, depth))
    text.vocab_size = min(_VOCABULARY, text.vocab_size)
    for holder in (config, text):
        special = ("pad_token_id", "bos_token_id", "eos_token_id")
        _change(holder, special, lambda number: min(number, text.vocab_size - 1))
    if heads is not None and heads > _HEADS:
        text.hidden_size = width * _HEADS // heads
        text.num_attention_heads = _HEADS
        # The second name is Falcon's.
        _change(text, ("num_key_value_heads", "num_kv_heads"), lambda groups: max(1, groups * _HEADS // heads))
        _change(text, _WIDTHS, lambda _: text.hidden_size // _HEADS)
        # OPT-350m's embeddings are narrower than its blocks.
        _change(text, ("word_embed_proj_dim",), lambda projected: projected * text.hidden_size // width)
    return config


def _change(config: PretrainedConfig, names: tuple[str, ...], change) -> None:
    for name in names:
        if isinstance(number := getattr(config, name, None), int):
            setattr(config, name, change(number))


def _with_random_weights(config: PretrainedConfig) -> nn.Module:
    # transformers' initial weights would hide errors: normalization layers scale by 1, and biases are 0.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = model_from_config(config)
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs, too
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(mean=1, std=0.1)
    return model.eval()


@contextmanager
def architecture_blamed(model: str, precision: str) -> Iterator[None]:
    """Turns errors of the model's code in the `with` block into InputError: those of transformers, of code called from
    there, and of autograd. Other errors, such as those of lowmem's code, pass unchanged."""
    try:
        yield
    except LowmemError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        # A model's code calls operators through lowmem's torch modes. An operator has no frame, so if it refuses
        # arguments, the last frame is lowmem's. It raises RuntimeError, as lowmem does not, or fails in the two
        # functions named here.
        by_operator = isinstance(error, RuntimeError) or last.name in ("__torch_function__", "__torch_dispatch__")
        ours = last.filename.startswith(_OURS) and not by_operator
        if ours or not any(frame.filename.startswith((_THEIRS, _AUTOGRAD)) for frame in frames):
            raise
        reason = first_line(error)
        raise InputError(f"{model} cannot be simulated in {precision}, so it is not trained: {reason}") from error
