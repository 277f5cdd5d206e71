"""Finds the folder and config of a model, and builds the model without weights. GPT-2 and the models of
known_configs.json need no network for a plan, or for training from random weights."""

import copy
import errno
import inspect
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, GenerationConfig, GPT2Config, PretrainedConfig, PreTrainedModel, __version__
from transformers.initialization import guard_torch_init_functions

from lowmem import hub
from lowmem.config_switches import set_padding, without_switches
from lowmem.core.activations import fuse_activations
from lowmem.core.decoder import Decoder
from lowmem.core.dry_run import structure_of
from lowmem.core.encoder_decoder import stock_model, take_apart, with_target_tokens
from lowmem.core.kernels import Kernels
from lowmem.core.layers import cast_explicitly, fuse_gelu
from lowmem.core.norms import round_for_products
from lowmem.core.precision import WORKING_DTYPES
from lowmem.core.products import skippable_layers
from lowmem.core.residual_sums import fuse_sums
from lowmem.errors import InputError, first_line, some_of
from lowmem.models.gguf_cache import SUFFIX
from lowmem.models.recognize import check_fields, config_fields, needs_code, no_config, not_found
from lowmem.models.weight_files import usual_weight_files
from lowmem.settings import Settings
from lowmem.text_files import read_json

_GPT2_SHAPES = (12, 768, 12), (24, 1024, 16), (36, 1280, 20), (48, 1600, 25)
GPT2_SHAPES = dict(zip(hub.GPT2S, _GPT2_SHAPES, strict=True))  # n_layer, n_embd, n_head; else GPT2Config's defaults
# {name on the hub: fields of config.json, number of parameters, source of both}. gemma-3-4b-text is the text part of
# google/gemma-3-4b-pt, whose own config also has a part for pictures.
KNOWN_CONFIGS = json.loads(Path(__file__).with_name("known_configs.json").read_text(encoding="utf-8"))
_DEMO = "gpt2-demo"  # is not on the hub
_WEIGHT_PATTERNS = (("model.safetensors*", "model-*.safetensors"), ("pytorch_model.bin*", "pytorch_model-*.bin"))
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # configs and tokenizers
_SIZES = (  # transformers' common names for the sizes of a model
    *("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads"),
)
_MOST_LAYERS = 10_000  # to build more takes minutes


def model_folder(model: str, part: str) -> Path:
    """Returns the folder with the "config" or the "weights" (`part`) of `model`, a folder or a hub name. Downloads
    files that are not in the hub's cache. Raises InputError if they cannot be found or downloaded."""
    if Path(model).is_dir():
        return Path(model)
    names = hub.names_of(model)
    try:
        for name in names:
            cached = try_to_load_from_cache(name, "config.json")
            with suppress(InputError):  # some files of weights are missing
                if isinstance(cached, str) and (part == "config" or usual_weight_files(Path(cached).parent)):
                    return Path(cached).parent
        files = [item.rfilename for item in HfApi().model_info(names[0], timeout=hub.TIMEOUT_SECONDS).siblings]
        files = [name for name in files if "/" not in name]  # not the copies for other frameworks in subfolders
        kinds = [kind for kind in _WEIGHT_PATTERNS if any(fnmatch(name, p) for name in files for p in kind)]
        if part == "config" or kinds:
            patterns = (*_SMALL_FILES, *(kinds[0] if part == "weights" else ()))
            wanted = [name for name in files if any(fnmatch(name, pattern) for pattern in patterns)]
            return Path(snapshot_download(names[0], allow_patterns=wanted, etag_timeout=hub.TIMEOUT_SECONDS))
    except errors.HFValidationError:
        raise not_found(model) from None
    except errors.GatedRepoError:
        raise InputError(
            f"{model} is gated: accept its licence on {constants.ENDPOINT}/{names[0]} and run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"the hub has no model named {model}, or it is private (run `hf auth login`)") from None
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
    raise InputError(f"{model} has neither .safetensors nor .bin weights on the hub; choose another model")


def load_config(model: str, init: str) -> PretrainedConfig:
    """Returns the config of `model`: a folder, a config.json, a GGUF file or a hub name. GPT-2 and the models of
    known_configs.json have built-in configs. These are used if `init` is "random", or if the hub's config is not
    available. Raises InputError if there is no valid config."""
    name, path = hub.names_of(model)[-1], Path(model)
    for file in (path, path / "config.json"):
        if file.is_file():
            return _read_config(file)
    known = _known_config(name)
    if known is None and path.is_dir():
        raise no_config(model)
    if known is not None and (init == "random" or name == _DEMO):
        return known
    try:
        path = model_folder(model, "config") / "config.json"
    except InputError:
        if known is None:
            raise
        return known
    config = _read_config(path)
    shape = (config.model_type, *(getattr(config, key, None) for key in ("n_layer", "n_embd", "n_head")))
    if name in GPT2_SHAPES and shape != ("gpt2", *GPT2_SHAPES[name]):
        raise InputError(f"{path} is not the config of {name} (its shape differs); remove it from the hub's cache")
    return config


def _known_config(name: str) -> PretrainedConfig | None:
    if name in GPT2_SHAPES:
        n_layer, n_embd, n_head = GPT2_SHAPES[name]
        return GPT2Config(n_layer=n_layer, n_embd=n_embd, n_head=n_head)
    if name not in KNOWN_CONFIGS:
        return None
    fields = dict(KNOWN_CONFIGS[name]["config"])
    return CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)


def _read_config(path: Path) -> PretrainedConfig:
    if path.suffix == SUFFIX:
        from lowmem.models.gguf_conversion import read_config_fields  # and with it the package gguf, which is optional

        check_fields(path, fields := read_config_fields(path))
    else:
        fields = config_fields(path)
    kind = fields["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise needs_code(path, f"the model type {kind!r}")
        raise InputError(f"{path}: the model type {kind!r} is not known to transformers {__version__}; use a newer one")
    theirs = CONFIG_MAPPING[kind].attribute_map
    for name in (own for common in _SIZES for own in (common, theirs.get(common))):
        if isinstance(size := fields.get(name), int) and size < 1:
            raise InputError(f"{path}: {name} is {size}, and it must be at least 1")
    layers = fields.get("num_hidden_layers", fields.get(theirs.get("num_hidden_layers")))
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise InputError(f"{path}: {layers:,} layers are more than {_MOST_LAYERS:,}, the most that are built here")
    try:
        config = CONFIG_MAPPING[kind].from_dict(without_switches(fields))
        config.get_text_config()  # raises an error if there are several
    except Exception as error:  # every architecture checks its fields in its own way
        raise InputError(f"{path} is not a valid {kind} config: {' '.join(str(error).split())}") from error
    set_padding(config, str(path))
    return config


def own_generation_config(
    model: str, init: str, say: Callable[[str], None] = lambda sentence: None
) -> GenerationConfig | None:
    """Returns the generation config published with `model`, or None if `init` is "random" or there is none. Also
    returns None, after a warning to `say`, if the file cannot be read."""
    path = None
    try:
        if init != "random":
            path = model_folder(model, "config") / "generation_config.json"
        return GenerationConfig.from_dict(read_json(path)) if path and path.is_file() else None
    except Exception as error:  # values that generation cannot have, each refused in its own way
        if path:
            say(f"warning: {path} is left out of the export, since transformers cannot read it: {first_line(error)}")
        return None


def most_positions(config: PretrainedConfig) -> int | None:
    """Returns the length in tokens of the model's longest sequence; None if there is no limit (XLNet's config says
    -1)."""
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))  # the second is MPT's
    return next((number for number in limits if isinstance(number, int) and number > 0), None)


def check_length(config: PretrainedConfig, seq: int) -> None:
    """Raises InputError if sequences of `seq` tokens are too long for the model of `config`."""
    positions = most_positions(config)
    # On a GPU, a failed assertion would end the process.
    if positions is not None and seq > positions:
        raise InputError(f"--seq {seq} is longer than the {positions} positions of this model; lower --seq")
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    table = rotary.get("original_max_position_embeddings")
    if rotary.get("rope_type") == "longrope" and not isinstance(table, int):
        raise InputError(f"original_max_position_embeddings is {table!r} in config.json: it must be a whole number")
    if rotary.get("rope_type") == "longrope" and seq > table:
        raise InputError(
            f"--seq {seq} is longer than {table} tokens, from which on longrope (in this config.json) computes with "
            "other frequencies; lower --seq"
        )


def settings_for(settings: Settings, config: PretrainedConfig) -> Settings:
    """Returns `settings` with an encoder-decoder's `target_tokens` filled in. Raises InputError for settings that do
    not fit the model of `config`."""
    check_length(config, settings.seq)
    return with_target_tokens(settings, config)


def make_decoder(
    config: PretrainedConfig, precision: str, residual: str, fused_kernels: Kernels = Kernels.NONE
) -> Decoder:
    """Makes a Decoder (a model split into embedding, blocks and head) from `config`, without weights. `precision`:
    dtype of the matrices in forward and backward, such as "bf16". `residual`: dtype of the residual stream, "fp32" or
    "16bit". `fused_kernels`: kernels that layers may use. Raises InputError if the model cannot be trained."""
    model = build_model(config)
    fuse_gelu(model)
    return decoder_of(model, precision, residual, fused_kernels)


def decoder_of(model: PreTrainedModel, precision: str, residual: str, fused_kernels: Kernels = Kernels.NONE) -> Decoder:
    """Splits `model` into a Decoder: embedding, blocks and head. If `precision` is "bf16" or "fp16", makes layers of
    `model` compute matrix products in this dtype. The other arguments are those of `make_decoder`."""
    dtype = WORKING_DTYPES[precision]
    if precision != "fp32":
        cast_explicitly(model, torch.float32 if residual == "fp32" else dtype, fused_kernels)
    decoder = take_apart(model, fused_kernels)
    if precision != "fp32":
        if Kernels.ACTIVATIONS in fused_kernels:
            fuse_activations(decoder, dtype)
        if Kernels.NORMS in fused_kernels:
            round_for_products(decoder, dtype)
        if Kernels.SUMS in fused_kernels:
            fuse_sums(decoder, dtype)
    decoder.skippable_layers, decoder.structure = skippable_layers(decoder, dtype), structure_of(model)
    return decoder


def build_model(config: PretrainedConfig) -> PreTrainedModel:
    """Builds the model of `config` in training mode: fp32 parameters on `meta`, real buffers on the CPU, tied
    parameters as one object. Not thread-safe. Raises InputError if the model keeps state in buffers, or if RoPE
    frequencies are not finite."""
    with guard_torch_init_functions(), parameters_placed(lambda tensor: tensor.to("meta")):
        model = model_from_config(config)
    for parameter in model.parameters():
        parameter._is_hf_initialized = False  # random_weights initializes it
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if state := model.state_dict().keys() - names:
        raise InputError(f"{type(model).__name__} keeps state in buffers ({some_of(sorted(state))}): unsupported")
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not buffer.isfinite().all():
            wrong = f"this {config.model_type} config makes {name} infinite or NaN"
            raise InputError(f"{wrong}: correct its rope_theta or scaling factor")
    return model.train()


def parameters_placed(place: Callable[[Tensor], Tensor]) -> AbstractContextManager:
    """Returns a context manager in which each parameter that a module registers is first replaced by
    `place(parameter)`."""
    # If a parameter is on `meta`, transformers and guarded functions of torch skip its initialization, which saves
    # time.
    register = nn.Module.register_parameter

    def register_placed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not hasattr(parameter, "_is_placed"):  # a tied one is registered twice
            parameter = nn.Parameter(place(parameter.detach()), requires_grad=parameter.requires_grad)
            parameter._is_placed, parameter._is_hf_initialized = True, parameter.is_meta
        register(module, name, parameter)

    return patch.object(nn.Module, "register_parameter", register_placed)


def model_from_config(config: PretrainedConfig) -> PreTrainedModel:
    """Returns the model of `config`, with fp32 weights as transformers initializes them. RoPE frequencies do not change
    with the length of a sequence. Raises InputError if the config makes neither a causal language model nor T5."""
    config = copy.deepcopy(config)  # from_config writes the dtype into it
    try:
        model = stock_model(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # no such model of this type, or fields that every architecture checks itself
        reason = first_line(error)[:300]
        raise InputError(f"this {config.model_type} config makes no causal language model or T5: {reason}") from error
    for module in model.modules():  # frequencies that follow the length stay those of short sequences (check_length)
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.forward = torch.no_grad()(partial(inspect.unwrap(type(module).forward), module))
    return model
