"""What lies at a path that was given as the model, said by its files' names and its config.json alone.

People give what they have: an adapter, a file for llama.cpp, a checkpoint of another trainer. Each is answered with
what it is and the way out, in a sentence, before PyTorch is imported: nothing here needs more than JSON.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from lowmem.errors import InputError
from lowmem.models.weight_files import weight_files
from lowmem.text_files import read_json

_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_NOT_CAUSAL = "each token attends to later tokens, so it is no causal language model"
_ENCODERS = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert"),
    *("flaubert", "longformer", "mobilebert", "modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "xlm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)

# What a file is that was given in the place of a folder, by the ends of its name.
_FILES = {
    (".gguf", ".ggml"): "is a GGUF file, whose weights are made for llama.cpp and mostly quantised; give the folder or "
    "hub name of the model that it was made from",
    (".safetensors", ".bin", ".h5", ".msgpack"): "is a file of weights alone; give the folder that holds it, with the "
    "model's config.json and tokenizer files",
    ("ckpt.pt",): "is a checkpoint of nanoGPT or alike, with names and shapes of its own; write its weights as "
    "transformers' GPT2LMHeadModel (its matrices are transposed there) with save_pretrained, and give that folder",
    (".pt", ".pth", ".ckpt"): "is a checkpoint of another trainer, which can hold anything; export the model as a "
    "Hugging Face folder there (config.json and .safetensors), and give that",
}


class _Kind(NamedTuple):
    """A folder that is no model: `marks` are patterns of names, each of which it has; of `others` it has none."""

    marks: tuple[str, ...]
    said: str
    others: tuple[str, ...] = ()


_FOLDERS = (
    _Kind(
        ("adapter_config.json",),
        "is a LoRA or PEFT adapter{base}, and no whole model; to train every parameter from there, merge it first "
        "(peft: merge_and_unload, then save_pretrained into another folder) and give the merged folder",
    ),
    _Kind(
        ("model_index.json",),
        "is a diffusers pipeline, which makes pictures and not text; give a language model",
    ),
    _Kind(
        ("modules.json",),
        "is a sentence-transformers model, which makes vectors of texts and predicts no next token; give a language "
        "model",
        ("config.json",),
    ),
    _Kind(("*.gguf",), f"holds no config.json; the .gguf {_FILES['.gguf', '.ggml']}", ("config.json",)),
    _Kind(("ckpt.pt",), f"holds no config.json; its ckpt.pt {_FILES[('ckpt.pt',)]}", ("config.json",)),
    _Kind(
        ("*.safetensors",),
        "holds weights and no config.json; copy config.json and the tokenizer's files there, from the model that the "
        "weights were trained from",
        ("config.json",),
    ),
)
_READ = ("*.json", "*.txt", "*.jinja", "*.model", "*.safetensors")  # of a model's folder, by whoever reads it
_SENSES = ("vision_config", "audio_config")  # a model that has one reads more than text
_ENCODER_DECODERS = ("t5", "mt5")  # that come apart (core/encoder_decoder.py), said here without importing PyTorch
_IN_TRANSFORMERS_4 = (
    "holds weights for {} only; give a copy with .safetensors, or convert it with transformers 4: "
    "AutoModelForCausalLM.from_pretrained(DIR, from_{}=True).save_pretrained(NEW)"
)
_OTHER_WEIGHTS = (  # of folders with a config.json; one of the marks is enough
    _Kind(("tf_model*.h5", "*.ckpt.index"), _IN_TRANSFORMERS_4.format("TensorFlow", "tf")),
    _Kind(("flax_model*.msgpack",), _IN_TRANSFORMERS_4.format("Flax", "flax")),
    _Kind(("*.onnx", "onnx/*.onnx"), "holds weights for ONNX only; give the model that it was exported from"),
    _Kind(("*.gguf",), f"holds a .gguf file, which {_FILES['.gguf', '.ggml']}"),
    _Kind(
        ("consolidated*",),
        "holds weights under Meta's or Mistral's own names (consolidated...); give the copy of the model in the format "
        "of transformers, or convert it with the convert_*_weights_to_hf.py of its family there",
    ),
    _Kind(
        ("zero_to_fp32.py", "global_step*/*.pt"),
        "is a checkpoint of DeepSpeed in pieces; put them together with its zero_to_fp32.py: python zero_to_fp32.py "
        "DIR DIR/pytorch_model.bin",
    ),
    _Kind(
        ("*.distcp", "*/*.distcp"),
        "is a sharded checkpoint of PyTorch (FSDP); put it together with accelerate merge-weights",
    ),
    _Kind(
        ("lit_model.pth",),
        "is a checkpoint of litgpt, with names of its own; convert it with litgpt convert_from_litgpt",
    ),
)


class Recognized(NamedTuple):
    """The model to take in the place of what was given, and what has to be said of it, or None."""

    model: str
    remark: str | None = None


def recognize(model: str, with_weights: bool) -> Recognized:
    """What to take for `model`, a path or a hub name; `with_weights`: whether its weights will be read, not its config
    alone. InputError where it cannot be trained, or is neither a path nor what the hub could know."""
    path = Path(model)
    if path.is_dir():
        return _recognize_folder(model, path, with_weights)
    for ends, said in _FILES.items():
        if path.name.endswith(ends):
            raise InputError(f"{model} {said if path.is_file() else 'is no file or folder here; check the path'}")
    if path.is_file():
        config_fields(path)
        if with_weights:
            raise InputError(f"{model} is a config without weights; give the model's folder, or --init random")
    elif path.suffix == ".json" or not is_hub_name(model):
        raise not_found(model)
    return Recognized(model)


def is_hub_name(model: str) -> bool:
    """Whether the Hugging Face hub could have a model of this name."""
    return _HUB_NAME.fullmatch(model) is not None and not re.search(r"--|\.\.|^[.-]|[.-]$|/[.-]|[.-]/", model)


def not_found(model: str) -> InputError:
    return InputError(f"{model!r} is neither a folder here nor a name on the Hugging Face hub; check the spelling")


def no_config(folder: str) -> InputError:
    said = f"{folder} holds no config.json; give the folder of a Hugging Face model"
    if is_hub_name(folder):
        said = (
            f"the folder {folder} hides the hub's model of that name, and holds no config.json; rename the folder, or "
            "start in another one, to get the hub's"
        )
    return InputError(said)


def _recognize_folder(model: str, folder: Path, with_weights: bool) -> Recognized:
    if (folder / "manifest.json").is_file() and (folder / "state.json").is_file():
        raise InputError(
            f"{model} is a checkpoint of a run of lowmem; to go on from it give --resume {model}, to train its model "
            f"anew --model {folder.parent.parent / 'model'}, which a run exports at its end"
        )
    if (folder / "settings.json").is_file() and not _has(folder, "config.json"):
        exported = f"{model.rstrip('/')}/model"  # "./~" would lose its "./" as a Path
        if not Path(exported, "config.json").is_file():
            raise InputError(
                f"{model} is a run of lowmem that has not exported its model yet; let it come to its end first, with "
                "the command that it was begun with"
            )
        return Recognized(exported, f"{model} is a run of lowmem: its exported model, {exported}, is taken")
    for link in (path for pattern in _READ for path in folder.glob(pattern) if not path.exists()):
        raise InputError(
            f"{link} is a link to {os.readlink(link)}, which is not there; copy the folder again with the files "
            "behind its links (cp -rL)"
        )
    for kind in _FOLDERS:
        if all(_has(folder, mark) for mark in kind.marks) and not any(_has(folder, other) for other in kind.others):
            raise InputError(f"{model} {kind.said.format(base=_adapted(folder))}")
    if not _has(folder, "config.json"):
        raise _newest_checkpoint(model, folder) or no_config(model)
    config_fields(folder / "config.json")
    if with_weights:
        try:
            weight_files(folder)
        except InputError as none_found:
            for kind in _OTHER_WEIGHTS:
                if any(_has(folder, mark) for mark in kind.marks):
                    raise InputError(f"{model} {kind.said}") from None
            raise none_found
    if with_weights and _has(folder, "trainer_state.json"):
        return Recognized(
            model,
            f"{model} is a checkpoint of Hugging Face's Trainer: its weights are taken, and neither its optimizer's "
            "state nor its step",
        )
    return Recognized(model)


def _has(folder: Path, pattern: str) -> bool:
    return any(path.is_file() for path in folder.glob(pattern))


def _adapted(folder: Path) -> str:
    """Of which model the adapter in `folder` is, in words, where it says so."""
    try:
        base = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, InputError, KeyError, TypeError):
        return ""
    return f" of {base}" if base else ""


def _newest_checkpoint(model: str, folder: Path) -> InputError | None:
    """What is said of a Trainer's output folder with nothing but checkpoint-N in it."""
    numbered = {
        int(path.name.removeprefix("checkpoint-")): path
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal() and path.is_dir()
    }
    if not numbered:
        return None
    newest = numbered[max(numbered)]
    return InputError(
        f"{model} holds checkpoints of Hugging Face's Trainer and no model itself; give {newest}, the newest"
    )


def config_fields(path: Path) -> dict:
    """What a config.json says. InputError where it is none, or that of a model which is not trained here."""
    try:
        fields = read_json(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except InputError as error:
        if path.name == "config.json":
            raise
        raise InputError(f"{path} cannot be read as a config.json ({error})") from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind is None and isinstance(fields, dict) and "auto_map" in fields:  # MiniCPM's
        raise needs_code(path, f"{_architecture(fields, 'the model')}, without a model_type,")
    if kind is None:
        raise InputError(f"{path} names no model_type, so it is no config of a Hugging Face model; give another file")
    if quantised := fields.get("quantization_config"):
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise InputError(
            f"{path}: the weights are quantised ({method or 'quantization_config'}), and every parameter is trained "
            "here, with fp32 master weights; choose the model in its original precision"
        )
    named = _architecture(fields, kind)
    if senses := [key.removesuffix("_config") for key in _SENSES if isinstance(fields.get(key), dict)]:
        raise InputError(
            f"{path}: {named} reads {' and '.join(senses)} beside text; only models of text alone are trained here: "
            "choose one of that family"
        )
    other = kind not in _ENCODER_DECODERS and not str(named).endswith("ForCausalLM")
    if fields.get("is_encoder_decoder") is True and other:
        raise InputError(f"{path}: {named} is an encoder-decoder; of these only T5 and mT5 can be trained here")
    if kind in _ENCODERS and not fields.get("is_decoder"):
        raise InputError(f"{path}: {named} is an encoder: {_NOT_CAUSAL}; choose a decoder, such as gpt2, or T5")
    return fields


def _architecture(fields: dict, otherwise: str) -> str:
    """The class that a config names first."""
    architectures = fields.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else otherwise


def needs_code(path: Path, model: str) -> InputError:
    return InputError(
        f"{path}: {model} needs Python code from its repository, which is not run here; choose a model of "
        "transformers' own"
    )
