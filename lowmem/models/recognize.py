"""Recognizes, before PyTorch is imported, the kind of model that a user gave. Refuses adapters, other trainers'
checkpoints and the like, each with advice."""

import os
import re
from pathlib import Path

from lowmem.errors import InputError
from lowmem.families import ENCODER_DECODERS, ENCODERS
from lowmem.models.gguf_cache import SUFFIX, check_gguf
from lowmem.models.weight_files import weight_files
from lowmem.text_files import read_json

_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_READ = ("*.json", "*.txt", "*.jinja", "*.model", "*.safetensors")  # files of a model's folder that are read

# Files that a user may give instead of a folder, {ends of their names: sentence}.
_NANOGPT = (
    "is a checkpoint of nanoGPT or alike, with names and shapes of its own; write its weights as transformers' "
    "GPT2LMHeadModel (its matrices are transposed there) with save_pretrained, and give that folder"
)
_FILES = {
    (".ggml",): "is a file for an old llama.cpp; give the model as a GGUF file, or in the format of Hugging Face",
    (".safetensors", ".bin", ".h5", ".msgpack"): "has only weights; give the folder that holds it, with the "
    "model's config.json and tokenizer files",
    ("ckpt.pt",): _NANOGPT,
    (".pt", ".pth", ".ckpt"): "is a checkpoint of another trainer, which can hold anything; export the model as a "
    "Hugging Face folder there (config.json and .safetensors), and give that",
}
# Folders that are no model: {a file's pattern: sentence}. The second table is for folders without a config.json.
_FOLDERS = {
    "adapter_config.json": "is a LoRA or PEFT adapter{base}, and no whole model; to train every parameter from there, "
    "merge it first (peft: merge_and_unload, then save_pretrained into another folder) and give the merged folder",
    "model_index.json": "is a diffusers pipeline, which makes pictures and not text; give a language model",
}
_WITHOUT_CONFIG = {
    "modules.json": "is a sentence-transformers model, which makes vectors of texts and predicts no next token; give "
    "a language model",
    "*.gguf": "holds no config.json but a GGUF file; give that file, --model DIR/NAME.gguf",
    "ckpt.pt": f"holds no config.json; its ckpt.pt {_NANOGPT}",
    "*.safetensors": "holds weights and no config.json; copy config.json and the tokenizer's files there, from the "
    "model that the weights were trained from",
}
_IN_TRANSFORMERS_4 = (
    "holds weights for {} only; give a copy with .safetensors, or convert it with transformers 4: "
    "AutoModelForCausalLM.from_pretrained(DIR, from_{}=True).save_pretrained(NEW)"
)
_OTHER_WEIGHTS = {  # of folders with a config.json and no weights that are read; one of the patterns is enough
    ("tf_model*.h5", "*.ckpt.index"): _IN_TRANSFORMERS_4.format("TensorFlow", "tf"),
    ("flax_model*.msgpack",): _IN_TRANSFORMERS_4.format("Flax", "flax"),
    ("*.onnx", "onnx/*.onnx"): "holds weights for ONNX only; give the model that it was exported from",
    ("*.gguf",): "holds no weights but a GGUF file; give that file, --model DIR/NAME.gguf",
    ("consolidated*",): "holds weights under Meta's or Mistral's own names (consolidated...); give the copy of the "
    "model in the format of transformers, or convert it with the convert_*_weights_to_hf.py of its family there",
    ("zero_to_fp32.py", "global_step*/*.pt"): "is a checkpoint of DeepSpeed in pieces; put them together with its "
    "zero_to_fp32.py: python zero_to_fp32.py DIR DIR/pytorch_model.bin",
    ("*.distcp", "*/*.distcp"): "is a sharded checkpoint of PyTorch (FSDP); put it together with accelerate "
    "merge-weights",
    ("lit_model.pth",): "is a checkpoint of litgpt, with names of its own; convert it with litgpt convert_from_litgpt",
}


def recognize(model: str, with_weights: bool) -> tuple[str, str | None]:
    """Returns the model to use, and a remark for the user or None. Replaces a run folder by the run's exported model.
    `with_weights`: the weights will be read, too. Raises InputError, with advice, for something that is no model."""
    path = Path(model)
    if path.is_dir():
        return _recognize_folder(model, path, with_weights)
    for ends, kind in _FILES.items():
        if path.name.endswith(ends):
            raise InputError(f"{model} {kind if path.is_file() else 'is no file or folder here; check the path'}")
    if path.name.endswith(SUFFIX):
        check_gguf(path)
    elif path.is_file():
        config_fields(path)
        if with_weights:
            raise InputError(f"{model} is a config without weights; give the model's folder, or --init random")
    elif path.suffix == ".json" or not is_hub_name(model):
        raise not_found(model)
    return model, None


def is_hub_name(model: str) -> bool:
    """Returns True if `model` has the form of a model's name on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(model) is not None and not re.search(r"--|\.\.|^[.-]|[.-]$|/[.-]|[.-]/", model)


def not_found(model: str) -> InputError:
    return InputError(f"{model!r} is neither a folder here nor a name on the Hugging Face hub; check the spelling")


def no_config(folder: str) -> InputError:
    if not is_hub_name(folder):
        return InputError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
    return InputError(
        f"the folder {folder} hides the hub's model of that name, and holds no config.json; rename the folder, or "
        "start in another one, to get the hub's"
    )


def needs_code(path: Path, model: str) -> InputError:
    return InputError(f"{path}: {model} needs Python code from its repository, which is not run here; choose another")


def _recognize_folder(model: str, folder: Path, with_weights: bool) -> tuple[str, str | None]:
    has_config = _has(folder, "config.json")
    if _has(folder, "manifest.json") and _has(folder, "state.json"):
        raise InputError(
            f"{model} is a checkpoint of a run of lowmem; to resume it give --resume {model}, to train its model "
            f"again --model {folder.parent.parent / 'model'}, which a run exports at its end"
        )
    if _has(folder, "settings.json") and not has_config:
        exported = f"{model.rstrip('/')}/model"  # "./~" would lose its "./" as a Path
        if not Path(exported, "config.json").is_file():
            raise InputError(f"{model} is a run of lowmem that has not exported its model yet; let it finish first")
        return exported, f"{model} is a run of lowmem: its exported model, {exported}, is taken"
    for link in (path for pattern in _READ for path in folder.glob(pattern) if not path.exists()):
        raise InputError(f"{link} is a link to {os.readlink(link)}, which is not there; copy the folder with cp -rL")
    for mark, kind in (_FOLDERS if has_config else _FOLDERS | _WITHOUT_CONFIG).items():
        if _has(folder, mark):
            raise InputError(f"{model} {kind.format(base=_adapted(folder))}")
    if not has_config:
        numbered = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
        if not numbered:
            raise no_config(model)
        newest = max(numbered, key=lambda path: int(path.name[11:]))
        if _has(newest, "adapter_config.json"):
            raise InputError(f"{newest} {_FOLDERS['adapter_config.json'].format(base=_adapted(newest))}")
        raise InputError(
            f"{model} holds checkpoints of Hugging Face's Trainer and no model itself; give {newest}, the newest"
        )
    config_fields(folder / "config.json")
    if not with_weights:
        return model, None
    try:
        weight_files(folder)
    except InputError:
        for marks, kind in _OTHER_WEIGHTS.items():
            if any(_has(folder, mark) for mark in marks):
                raise InputError(f"{model} {kind}") from None
        raise
    if not _has(folder, "trainer_state.json"):
        return model, None
    remark = "its weights are taken, and neither its optimizer's state nor its step"
    return model, f"{model} is a checkpoint of Hugging Face's Trainer: {remark}"


def _has(folder: Path, pattern: str) -> bool:
    return any(path.is_file() for path in folder.glob(pattern))


def _adapted(folder: Path) -> str:
    """Returns " of NAME" if the adapter in `folder` names its base model, NAME; else ""."""
    try:
        base = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, InputError, KeyError, TypeError):
        return ""
    return f" of {base}" if base else ""


def config_fields(path: Path) -> dict:
    """Returns the content of the config.json `path`. Raises InputError if the config's model cannot be trained."""
    try:
        fields = read_json(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except InputError as error:
        if path.name == "config.json":
            raise
        raise InputError(f"{path} cannot be read as a config.json ({error})") from None
    check_fields(path, fields)
    return fields


def check_fields(path: Path, fields: dict) -> None:
    """Raises InputError if `fields`, read from `path`, are no model's config, or if that model cannot be trained."""
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    classes = fields.get("architectures") if isinstance(fields, dict) else None
    named = str(classes[0]) if isinstance(classes, list) and classes else kind or "the model"
    if kind is None and isinstance(fields, dict) and "auto_map" in fields:  # as in MiniCPM's config
        raise needs_code(path, f"{named}, without a model_type,")
    if kind is None:
        raise InputError(f"{path} names no model_type, so it is no config of a Hugging Face model; give another file")
    if "attribute_map" in fields:
        raise InputError(f"{path}: attribute_map is no field of a config.json: remove it")
    if quantised := fields.get("quantization_config"):
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise InputError(
            f"{path}: the weights are quantised ({method or 'quantization_config'}), and every parameter is trained "
            "here, with fp32 master weights; choose the model in its original precision"
        )
    if senses := " and ".join(name for name in ("vision", "audio") if isinstance(fields.get(f"{name}_config"), dict)):
        raise InputError(f"{path}: {named} also reads {senses}; only models of text are trained here")
    is_trained = kind in ENCODER_DECODERS or str(named).endswith("ForCausalLM")
    if fields.get("is_encoder_decoder") is True and not is_trained:
        raise InputError(f"{path}: {named} is an encoder-decoder; of these only T5 and mT5 can be trained here")
    if kind in ENCODERS and not fields.get("is_decoder"):
        raise InputError(
            f"{path}: {named} is an encoder: each token attends to later tokens, so it is no causal language model; "
            "choose a decoder, such as gpt2, or T5"
        )
