"""Which model: its folder or its place on the hub, its config, and the model itself without weights.

The shapes of GPT-2 are known here, so that planning and training from random weights need no network. Everything else
is looked for in a folder, then in the hub's cache, then once, and quickly, on the hub itself.
"""

import copy
import errno
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GPT2Config,
    PretrainedConfig,
    PreTrainedModel,
    __version__,
)

from lowmem import hub
from lowmem.config_switches import set_padding, without_switches
from lowmem.core.decoder import Decoder
from lowmem.core.encoder_decoder import ATTENTION, is_encoder_decoder, take_apart
from lowmem.core.layers import cast_explicitly, fuse_gelu
from lowmem.core.precision import WORKING_DTYPES
from lowmem.errors import InputError, first_few, first_line
from lowmem.models.recognize import config_fields, needs_code, no_config, not_found
from lowmem.models.weight_files import usual_weight_files
from lowmem.settings import Settings
from lowmem.text_files import read_json

GPT2_SHAPES = {  # n_layer, n_embd, n_head; all else is GPT2Config's default
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
DEMO_MODEL = "gpt2-demo"  # the small model of `make demo`: its tokens are bytes
_DEMO = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": 257}
_WEIGHT_PATTERNS = (("model.safetensors*", "model-*.safetensors"), ("pytorch_model.bin*", "pytorch_model-*.bin"))
_SIZES = (  # of a model, by transformers' common names
    *("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads"),
)
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # configs and tokenizers


def model_folder(model: str, part: str) -> Path:
    """The folder that holds `part` ("config" or "weights") of `model`, which is a folder or a hub name.

    The hub's cache comes first and is enough where it is complete. Otherwise the hub is asked once (its client would
    wait for ever for a server that does not answer), and what is missing is downloaded. InputError, in one sentence,
    where neither works.
    """
    if Path(model).is_dir():
        return Path(model)
    short = model.removeprefix("openai-community/")  # older caches know the GPT-2s by that
    repository = f"openai-community/{short}" if short in GPT2_SHAPES else model
    try:
        cached = [try_to_load_from_cache(name, "config.json") for name in dict.fromkeys((repository, short))]
        for folder in (Path(path).parent for path in cached if isinstance(path, str)):
            if _has_part(folder, part):
                return folder
        files = [item.rfilename for item in HfApi().model_info(repository, timeout=hub.TIMEOUT_SECONDS).siblings]
        files = [name for name in files if "/" not in name]  # not the copies for other frameworks in subfolders
        patterns = list(_SMALL_FILES)
        if part == "weights":
            found = [kind for kind in _WEIGHT_PATTERNS if any(fnmatch(name, p) for name in files for p in kind)]
            if not found:
                raise InputError(f"{model} has neither .safetensors nor .bin weights on the hub; choose another model")
            patterns += found[0]
        wanted = [name for name in files if any(fnmatch(name, pattern) for pattern in patterns)]
        return Path(snapshot_download(repository, allow_patterns=wanted, etag_timeout=hub.TIMEOUT_SECONDS))
    except errors.HFValidationError:
        raise not_found(model) from None
    except errors.GatedRepoError:
        raise InputError(
            f"{model} is gated: accept its licence on {constants.ENDPOINT}/{repository} and run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"the hub has no model named {model}, or it is private: check the name, or run `hf auth login`"
        ) from None
    except InputError:
        raise
    except Exception as error:  # the client's network errors differ from version to version
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise InputError(
                f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}, so the {part} of {model} cannot be "
                "stored in the hub's cache; set HF_HOME to another folder, or give --model a local one"
            ) from error
        raise InputError(
            f"the {part} of {model} is not (or not completely) in the hub's cache, and the hub cannot be reached "
            f"({type(error).__name__}: {first_line(error)[:200]}): connect to the network and run again, "
            "or give --model a local folder"
        ) from error


def _has_part(folder: Path, part: str) -> bool:
    try:
        return part == "config" or bool(usual_weight_files(folder))
    except InputError:
        return False


def load_config(model: str, init: str) -> PretrainedConfig:
    """The configuration of `model`: a folder, a config.json, or a hub name; `init` is "pretrained" or "random".

    The GPT-2 names are known here and never need the network; for pretrained weights the real file is preferred where
    it can be had, and must agree with the known shape. InputError for a name that leads nowhere, a broken file, or a
    model that needs code from the hub (which is not run here).
    """
    name = model.removeprefix("openai-community/")
    path = Path(model)
    if path.is_file():
        return _read_config(path)
    if (path / "config.json").is_file():
        return _read_config(path / "config.json")
    if name == DEMO_MODEL:
        return GPT2Config(**_DEMO, bos_token_id=256, eos_token_id=256)
    if name not in GPT2_SHAPES:
        if path.is_dir():
            raise no_config(model)
        return _read_config(model_folder(model, "config") / "config.json")
    n_layer, n_embd, n_head = GPT2_SHAPES[name]
    known = GPT2Config(n_layer=n_layer, n_embd=n_embd, n_head=n_head)
    if init == "random":
        return known
    try:
        path = model_folder(name, "config") / "config.json"
    except InputError:
        return known
    config = _read_config(path)
    if (config.model_type, config.n_layer, config.n_embd, config.n_head) != ("gpt2", *GPT2_SHAPES[name]):
        raise InputError(f"{path} is not the config of {name} (its shape differs); remove it from the hub's cache")
    return config


def own_generation_config(
    model: str, init: str, say: Callable[[str], None] = lambda sentence: None
) -> GenerationConfig | None:
    """The generation config of pretrained `model` (a folder or a hub name); None if it has none, or if transformers
    cannot read it, which `say` gets as a sentence."""
    if init == "random":
        return None
    try:
        path = model_folder(model, "config") / "generation_config.json"
    except InputError:
        return None
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_dict(read_json(path))
    except Exception as error:  # values that generation cannot have, each refused in its own way
        say(f"warning: {path} is left out of the export, since transformers cannot read it: {first_line(error)}")
        return None


def _read_config(path: Path) -> PretrainedConfig:
    fields = config_fields(path)
    kind = fields["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise needs_code(path, f"the model type {kind!r}")
        raise InputError(
            f"{path}: the model type {kind!r} is not known to transformers {__version__}; choose another model or a "
            "newer transformers"
        )
    theirs = CONFIG_MAPPING[kind].attribute_map
    for name in (own for common in _SIZES for own in (common, theirs.get(common))):
        if isinstance(size := fields.get(name), int) and size < 1:
            raise InputError(f"{path}: {name} is {size}, and it must be at least 1")
    try:
        config = CONFIG_MAPPING[kind].from_dict(without_switches(fields))
        config.get_text_config()  # some have several
    except Exception as error:  # every architecture checks its fields in its own way
        raise InputError(f"{path} is not a valid {kind} config: {' '.join(str(error).split())}") from error
    set_padding(config, str(path))
    return config


def check_length(config: PretrainedConfig, seq: int) -> None:
    """InputError where `seq` tokens are more than the model has positions. On a GPU that is an assertion that kills the
    process, so it is found here, beforehand."""
    positions = most_positions(config)
    if positions is not None and seq > positions:
        raise InputError(f"--seq {seq} is longer than the {positions} positions of this model; lower --seq")
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    table = rotary.get("original_max_position_embeddings")
    if rotary.get("rope_type") == "longrope" and seq > table:
        raise InputError(
            f"--seq {seq} is longer than {table} tokens, from which on longrope (in this config.json) computes with "
            "other frequencies; lower --seq"
        )


def fitted(settings: Settings, config: PretrainedConfig) -> Settings:
    """`settings` for the model of `config`: with the length of targets, where it is an encoder-decoder. InputError
    where sequences are too long for it, or something is asked for that such a model does not do."""
    check_length(config, settings.seq)
    if not is_encoder_decoder(config):
        if settings.target_tokens is not None:
            raise InputError("--target-tokens is for encoder-decoders, and this model is none: leave it out")
        return settings
    if settings.masks_documents:
        raise InputError(
            "an encoder-decoder has one source and one target in a row: leave out --document-mask on and --pack packed"
        )
    if settings.train_on == "all":
        raise InputError("an encoder-decoder learns targets, never sources: leave out --train-on all")
    return replace(settings, target_tokens=settings.target_tokens or max(settings.seq // 4, 1))


def decoder_start(config: PretrainedConfig) -> int | None:
    """The id that an encoder-decoder's targets begin behind; None for decoders."""
    if not is_encoder_decoder(config):
        return None
    said = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    return next((number for number in said if number is not None), 0)


def most_positions(config: PretrainedConfig) -> int | None:
    """The longest sequence that the model of `config` takes; None where it has no such limit (XLNet says -1)."""
    text = config.get_text_config()
    said = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))  # the second is MPT's
    return next((number for number in said if isinstance(number, int) and number > 0), None)


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of `config`, or the encoder-decoder, in training mode: fp32 parameters on `meta`,
    buffers real, on the CPU.

    Tied parameters are one object, as the config says. Attention is SDPA where transformers has it for the architecture
    and eager where not (GPT-J, GPT-Neo, BLOOM, CodeGen). Not thread-safe while it runs. InputError for architectures
    that transformers cannot build or that keep learned state in buffers.
    """
    with parameters_placed(lambda tensor: tensor.to("meta")):
        model = model_from_config(config)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if state := model.state_dict().keys() - names:
        raise InputError(f"{type(model).__name__} keeps state in buffers ({first_few(sorted(state))}): unsupported")
    return model.train()


def make_decoder(config: PretrainedConfig, precision: str, residual: str, fused_kernels: bool = False) -> Decoder:
    """The decoder of `config` without weights, ready for a working precision ("bf16", "fp16", "fp32"); `residual`:
    "fp32" or "16bit", of the residual stream; `fused_kernels`: whether its layers run operators.py's."""
    model = build_model(config)
    fuse_gelu(model)
    if precision != "fp32":
        cast_explicitly(model, torch.float32 if residual == "fp32" else WORKING_DTYPES[precision], fused_kernels)
    return take_apart(model, fused_kernels)


@contextmanager
def parameters_placed(place: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Whatever parameter a module registers is moved by `place` at that moment, before anything is written into it."""
    register = nn.Module.register_parameter

    def register_placed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, "_is_placed"):  # a tied one comes twice: it stays the same
            parameter = nn.Parameter(place(parameter.detach()), requires_grad=parameter.requires_grad)
            parameter._is_placed = True
        register(module, name, parameter)

    nn.Module.register_parameter = register_placed
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def model_from_config(config: PretrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)  # from_config writes the dtype into it
    kind, options, wanted = AutoModelForCausalLM, {}, "causal language model"
    if is_encoder_decoder(config):
        kind, options, wanted = AutoModelForSeq2SeqLM, {"attn_implementation": ATTENTION}, "encoder-decoder"
    try:
        model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False, **options)
    except Exception as error:  # no such model of this type, or fields that every architecture checks itself
        reason = first_line(error)[:300]
        raise InputError(f"this {config.model_type} config makes no {wanted}: {reason}") from error
    _keep_rotary_frequencies(model)
    return model


def _keep_rotary_frequencies(model: PreTrainedModel) -> None:
    """Rotary tables whose frequencies follow the sequence keep those of short ones: `check_length` admits no others."""
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.forward = torch.no_grad()(partial(inspect.unwrap(type(module).forward), module))
