"""Do a decoder's pieces make the whole, and whose error is an error?

What happens to the logits after the head, or a block that sees later tokens, shows only when a model computes. Before
training the real weights do that; before there are any, a plan makes a copy of the model with two narrow blocks and
random weights, and runs 64 tokens through it on the CPU. A copy that cannot be made or run says nothing about the
model: then the plan says that it was not compared.

Of the default configs of transformers' 189 causal language models 91 agree, 16 differ, and most of the rest do not come
apart at any size (5.23). Costs about 0.1 s (XL: 0.08 s, 24 MiB; Falcon-H1's scan in Python 9 s), at most 0.25 GiB.
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

from lowmem.core.decoder import Decoder, forward_replaced
from lowmem.core.encoder_decoder import EncoderDecoder, is_encoder_decoder, take_apart
from lowmem.core.layers import cast_explicitly
from lowmem.core.precision import WORKING_DTYPES
from lowmem.errors import InputError, LowmemError, first_line
from lowmem.models.build import build_model, model_from_config

_BLOCKS, _HEADS, _VOCABULARY = 2, 4, 64
_MOST_PARAMETERS = 60_000_000
_WIDTHS = (  # what families call that of the matrices within a block, or within each of its many experts
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")  # the second is Falcon's
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_OURS, _THEIRS = str(Path(__file__).parents[1]), str(Path(transformers.__file__).parent)
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)


def check_pieces(decoder: Decoder, vocabulary_size: int, document_mask: bool = False) -> None:
    """The pieces against the whole model on a few tokens; raises InputError if they differ. Needs real weights."""
    try:
        found = difference(decoder, vocabulary_size, document_mask)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # that is the card's error and says nothing of the model
    except RuntimeError as error:
        where, advice = "in this precision", "try --precision fp32"
        if decoder.head_weight.dtype is torch.float32:
            where, advice = "with these weights", "they may be damaged: take others"
        raise InputError(f"{decoder.architecture} cannot run {where}: {first_line(error)}; {advice}") from error
    if found is not None:
        raise InputError(found)


@torch.no_grad()
def difference(decoder: Decoder, vocabulary_size: int, document_mask: bool) -> str | None:
    """In what the pieces, in evaluation mode, differ from the whole model, or the model from a causal one; None for
    nothing. Raises what the model raises."""
    training = decoder.model.training
    decoder.model.eval()
    try:
        return _difference(decoder, vocabulary_size, document_mask)
    finally:
        decoder.model.train(training)


def _difference(decoder: Decoder, vocabulary_size: int, document_mask: bool) -> str | None:
    if isinstance(decoder, EncoderDecoder):
        return _difference_of_encoder_decoder(decoder, vocabulary_size)
    model, name, head_weight = decoder.model, decoder.architecture, decoder.head_weight
    device = head_weight.device
    input_ids = (torch.arange(16, device=device).view(2, 8) * 7919) % vocabulary_size
    whole = model(input_ids=input_ids, use_cache=False).logits
    if not whole.isfinite().all():
        raise RuntimeError("its logits are not finite")
    made_up = torch.linspace(-100, 100, 16 * head_weight.shape[0], device=device, dtype=head_weight.dtype)
    made_up = made_up.view(2, 8, -1)
    with forward_replaced(model.get_output_embeddings(), lambda hidden: made_up):
        returned = model(input_ids=input_ids, use_cache=False).logits
    if not _close(returned, decoder.logit_function(made_up)) or not _close(whole, decoder.logits(input_ids)):
        return f"{name} cannot be trained in pieces: its logits are not those of embedding, blocks and head in turn"
    with torch.enable_grad():
        _, extras = decoder.embed(input_ids)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(extras)):
        return f"{name} hands its blocks what is trained outside of them, which is not supported"
    changed = input_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary_size
    if not _close(whole[:, :-1], model(input_ids=changed, use_cache=False).logits[:, :-1]):
        return f"{name} attends to later tokens, so it is no causal language model"
    if document_mask:
        positions = torch.arange(8, device=device).repeat(2).view(1, 16)
        packed = decoder.logits(input_ids.view(1, 16), positions, positions.new_tensor([[0] * 8 + [1] * 8]))
        if not _close(whole.view(1, 16, -1), packed):
            return f"{name} does not honour a document mask; use --document-mask off, and not --pack packed"
    return None


def _difference_of_encoder_decoder(decoder: EncoderDecoder, vocabulary_size: int) -> str | None:
    """The same; of two sources one is half padding."""
    model, name = decoder.model, decoder.architecture
    device = decoder.head_weight.device
    source, target = (torch.arange(32, device=device).view(2, 2, 8) * 7919 % vocabulary_size).unbind()
    mask = torch.ones_like(source, dtype=torch.bool)
    mask[1, 4:] = False

    def whole(source: Tensor, target: Tensor) -> Tensor:
        return model(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target, use_cache=False).logits

    logits = whole(source, target)
    if not logits.isfinite().all():
        raise RuntimeError("its logits are not finite")
    if not _close(logits, decoder.logits(torch.cat([source, target], dim=1), None, None, mask)):
        return f"{name} cannot be trained in pieces: its logits are not those of embedding, blocks and head in turn"
    changed = target.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary_size
    if not _close(logits[:, :-1], whole(source, changed)[:, :-1]):
        return f"{name} attends to later tokens of a target, so it is no language model"
    return None


def _close(whole: Tensor, pieces: Tensor) -> bool:
    """Equal but for the rounding of products computed in other shapes."""
    tolerance = 1e-4 if whole.dtype is torch.float32 else 3e-2
    return whole.shape == pieces.shape and bool((whole - pieces).abs().max() <= tolerance * whole.abs().max())


def compare_small_copy(config: PretrainedConfig, document_mask: bool, precision: str, residual: str) -> str | None:
    """InputError where the pieces of a small copy of `config`'s model do not make the whole, or where it does not run
    in `precision`; None where all is well; in a few words why not, where the two were not compared."""
    try:
        small = small_copy(config)
        parameters = sum(parameter.numel() for parameter in build_model(small).parameters())
        if parameters > _MOST_PARAMETERS:
            return f"a copy with {_BLOCKS} narrow blocks still has {parameters:,} parameters"
        vocabulary_size = small.get_text_config().vocab_size
        model = _with_random_weights(small)
        found = difference(take_apart(model), vocabulary_size, document_mask)
    except Exception as error:  # nobody ever made such a model: what it runs into need not be the original's fault
        return f"a small copy of it does not run ({first_line(error)})"
    if found is not None:
        raise InputError(found)
    if precision != "fp32":
        _run_in_16_bit(model, WORKING_DTYPES[precision], residual, vocabulary_size)
    return None


def _run_in_16_bit(model: nn.Module, dtype: torch.dtype, residual: str, vocabulary_size: int) -> None:
    """InputError where `model`, with its matrices in `dtype` as training has them, does not run."""
    cast_explicitly(model, torch.float32 if residual == "fp32" else dtype)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data = parameter.data.to(dtype)
    decoder = take_apart(model)
    input_ids = torch.arange(16).view(2, 8) % vocabulary_size
    source = (None, None, torch.ones((2, 4), dtype=torch.bool)) if isinstance(decoder, EncoderDecoder) else ()
    try:
        with torch.no_grad():
            decoder.logits(input_ids, *source)
    except Exception as error:
        raise InputError(
            f"{decoder.architecture} does not run with matrices in {str(dtype).removeprefix('torch.')}: "
            f"{first_line(error)}; --precision fp32 takes more memory and may work"
        ) from None


def small_copy(config: PretrainedConfig) -> PretrainedConfig:
    """`config` with fewer blocks, heads (of the same size), tokens and a smaller width; everything else is as it was.
    Raises whatever the config raises where it cannot be changed so."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    blocks, heads, width = text.num_hidden_layers, getattr(text, "num_attention_heads", None), text.hidden_size
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == blocks:  # what kind each block is of, and the like
            setattr(text, name, value[:_BLOCKS])
    text.num_hidden_layers = min(_BLOCKS, blocks)
    if is_encoder_decoder(config) and isinstance(getattr(text, "num_decoder_layers", None), int):
        text.num_decoder_layers = min(_BLOCKS, text.num_decoder_layers)
    text.vocab_size = min(_VOCABULARY, text.vocab_size)
    for holder in (config, text):
        for name in _SPECIAL_TOKENS:
            if isinstance(number := getattr(holder, name, None), int):
                setattr(holder, name, min(number, text.vocab_size - 1))
    if heads is not None and heads > _HEADS:
        text.hidden_size = width * _HEADS // heads
        for name in _KEY_HEADS:
            if isinstance(groups := getattr(text, name, None), int):
                setattr(text, name, max(1, groups * _HEADS // heads))
        text.num_attention_heads = _HEADS
        for name in _WIDTHS:
            if isinstance(getattr(text, name, None), int):
                setattr(text, name, text.hidden_size // _HEADS)
        if isinstance(
            projected := getattr(text, "word_embed_proj_dim", None), int
        ):  # OPT-350m's embeddings are narrower
            text.word_embed_proj_dim = projected * text.hidden_size // width
    return config


def _with_random_weights(config: PretrainedConfig) -> nn.Module:
    """Not as models begin: a norm that scales by 1 and a bias of 0 would hide what they do. Leaves torch's random
    numbers as they were."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = model_from_config(config)
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(mean=1, std=0.1)
    return model.eval()


@contextmanager
def architecture_blamed(model: str, precision: str) -> Iterator[None]:
    """Makes an InputError of what goes wrong in the code of `model`'s architecture: some do not run in pieces, or in
    this precision, or not without data. Errors of ours stay what they are."""
    try:
        yield
    except LowmemError:
        raise
    except Exception as error:
        if not _of_the_architecture(error):
            raise
        raise InputError(
            f"{model} cannot be simulated in {precision}, so it is not trained: {first_line(error)}"
        ) from error


def _of_the_architecture(error: Exception) -> bool:
    """Whether `error` came up beneath transformers' code, or in the backward pass of what that has computed, and not in
    a line of ours. Ours stand below theirs too: each of their operations passes through our modes, where an operator
    that refuses its arguments has no frame of its own. It raises RuntimeError then, which no line of ours does, or
    another error in the two functions that hand all operations on."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    by_operator = isinstance(error, RuntimeError) or last.name in ("__torch_function__", "__torch_dispatch__")
    ours = last.filename.startswith(_OURS) and not by_operator
    return not ours and any(frame.filename.startswith((_THEIRS, _AUTOGRAD)) for frame in frames)
