"""Writes the files of an exported model other than weights: config, tokenizer, generation config, README.

transformers 4 and 5 must read the same settings, so some are written under both versions' names. A generation config is
written as published, because transformers refuses to save many published ones.
"""

import codecs
import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lowmem import hub
from lowmem.config_switches import as_given
from lowmem.core.encoder_decoder import decoder_start
from lowmem.errors import NO_ERRORS, InputError
from lowmem.families import ROPE_FACTORS_ONLY, ROPE_NAMES, ROPE_NAMES_BY_ATTENTION, ROPE_TYPE_AND_FACTOR
from lowmem.files import remove
from lowmem.models.build import build_model
from lowmem.text_files import read_json

# Fields on how a tokenizer was read, and the chat template of an earlier training.
_NOT_EXPORTED = ("auto_map", "is_local", "local_files_only", "name_or_path", "chat_template")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKENIZER_FILES = (
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)


class Rehearsal(NamedTuple):
    """Holds parts of an export that are made before training: a generation config, and a `folder` with the tokenizer's
    files. If the generation config is None, the export makes one from the model's config."""

    generation_config: GenerationConfig | None
    folder: Path
    remarks: list[str]  # sentences on differences from transformers' own export


@contextmanager
def rehearsed(
    folder: Path, config: PretrainedConfig, tokenizer, generation_config: GenerationConfig | None, dtype: torch.dtype
) -> Iterator[Rehearsal]:
    """Tries an export before training: writes all files except weights into `folder`. Yields a Rehearsal, which has the
    parts that the export after training takes over. Removes the folder after the `with` block. Raises InputError for a
    file that cannot be made. `dtype`: dtype of the exported weights."""
    remove(folder)
    folder.mkdir(parents=True)
    try:
        failed = write_description(folder, build_model(config), tokenizer, generation_config, dtype, "")
        for name, error in failed.items():
            if isinstance(error, OSError):
                raise error
            reason = " ".join(str(error).split())
            raise InputError(f"the model could not be exported after training: {name} cannot be written ({reason})")
        remarks = []
        try:
            if generation_config is not None:
                generation_config.validate(strict=True)
        except ValueError as error:
            found = ", ".join(line.split("`")[1] for line in str(error).splitlines() if line.startswith("- `"))
            remarks.append(
                f"generation_config.json has values without effect ({found or error}); it is exported as it came"
            )
        if not _in_version_4(read_json(folder / "config.json")):
            remarks.append(
                "the exported config.json is for transformers 5 only: version 4 has no fields for its rotary embedding"
            )
        # The files stay until the run ends, because the tokenizer's original folder may be gone by then.
        yield Rehearsal(generation_config, folder, remarks)
    finally:
        remove(folder)


def write_description(
    folder: Path, model: PreTrainedModel, tokenizer, generation_config: GenerationConfig | None, dtype: torch.dtype,
    readme: str, tokenizer_files: Path | None = None,
) -> dict[str, BaseException]:  # fmt: skip
    """Writes all files of an exported model except weights into `folder`. Returns {file: error} for files that could
    not be written. `generation_config`: None to make one from the model's config. `dtype`: dtype of the exported
    weights. `tokenizer_files`: a folder with tokenizer files to copy, made before training; None to make new ones."""
    exported = partial(_exported_config, model, tokenizer, dtype)
    parts: dict[str, Callable[[], None]] = {
        "config.json": lambda: _write_json(folder / "config.json", as_given(config_fields(exported()))),
        "generation_config.json": lambda: _write_generation(folder, exported(), generation_config, tokenizer),
        "the tokenizer": lambda: _write_tokenizer(folder, tokenizer, tokenizer_files),
        "README.md": lambda: _write(folder / "README.md", f"{readme.rstrip()}\n{_on_ties(model)}"),
    }
    failed = {}
    for name, write in parts.items():
        try:
            write()
        except NO_ERRORS:
            raise
        except BaseException as error:  # a panic of `tokenizers` is no Exception
            failed[name] = error
    return failed


def _exported_config(model: PreTrainedModel, tokenizer, dtype: torch.dtype) -> PretrainedConfig:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype  # from_pretrained loads in this dtype unless told otherwise
    vars(config).pop("auto_map", None)  # names Python files of the repository, which are not exported
    if (start := decoder_start(config)) is not None:
        config.decoder_start_token_id = start  # `generate` needs it
    _set_ends(config.get_text_config(), tokenizer)
    return config


def _set_ends(settings: PretrainedConfig | GenerationConfig, tokenizer) -> None:
    for key in ("bos_token_id", "eos_token_id") if tokenizer is not None else ():
        token_id, old = getattr(tokenizer, key), getattr(settings, key, None)
        one_of_several = isinstance(old, list) and token_id in old
        if token_id is not None and not one_of_several:
            setattr(settings, key, token_id)


def _write_generation(
    folder: Path, config: PretrainedConfig, generation_config: GenerationConfig | None, tokenizer
) -> None:
    generation_config = copy.deepcopy(generation_config) or GenerationConfig.from_model_config(config)
    if generation_config.decoder_start_token_id is None:
        generation_config.decoder_start_token_id = decoder_start(config)
    _set_ends(generation_config, tokenizer)
    # save_pretrained would refuse values without effect, which published files have.
    generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


# ------------------------------------------------------------------------------------------------------------ config


def config_fields(config: PretrainedConfig) -> dict:
    """Returns the content of config.json for `config`, with RoPE settings under the names of transformers 4 and 5.
    Leaves out version 4's names if version 5 would then read settings that differ from `config`."""
    fields = json.loads(config.to_json_string())
    try:
        both = _in_both_spellings(copy.deepcopy(fields))
        wanted, found = _all_fields(config), _all_fields(type(config).from_dict(copy.deepcopy(both)))
    except Exception:  # every family checks its fields in its own way
        return fields
    return both if all(found.get(name) == wanted[name] for name in wanted if name != "_name_or_path") else fields


def _all_fields(config: PretrainedConfig) -> dict:
    values = json.loads(config.to_json_string(use_diff=False))
    rope = values.get("rope_parameters") or {}
    # The type of a rotary embedding is compared only under its newer key, `rope_type`.
    for part in (rope, *rope.values()):
        if isinstance(part, dict):
            part.pop("type", None)
    return values


def _in_both_spellings(fields: dict) -> dict:
    """Writes settings also under the names that transformers 4 reads, such as `torch_dtype` for `dtype`. Does so in a
    config.json's `fields` and in configs inside them, in place. Returns `fields`."""
    for value in fields.values():
        if isinstance(value, dict) and "model_type" in value:
            _in_both_spellings(value)
    if "dtype" in fields:
        fields["torch_dtype"] = fields["dtype"]
    kind, rope = fields.get("model_type"), fields.get("rope_parameters")
    if kind == "gpt2":
        fields.setdefault("n_ctx", fields["n_positions"])  # llama.cpp's converter wants this name of published files
    if not rope:
        return fields
    theta, share = ROPE_NAMES.get(kind, ("rope_theta", "partial_rotary_factor"))
    if "full_attention" in rope:
        if kind not in ROPE_NAMES_BY_ATTENTION:  # version 4 has no such model
            return fields
        theta, sliding_theta = ROPE_NAMES_BY_ATTENTION[kind]
        if sliding_theta is not None:
            fields[sliding_theta] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    fields[theta] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        fields[share] = rope["partial_rotary_factor"]
    rope_type, elsewhere = rope["rope_type"], ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    scaling = {name: value for name, value in rope.items() if name not in elsewhere}
    if kind in ROPE_FACTORS_ONLY and rope_type == "longrope":
        scaling = {"type": rope_type, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    elif scaling or rope_type != "default":
        scaling = {"type" if kind in ROPE_TYPE_AND_FACTOR else "rope_type": rope_type} | scaling
    fields["rope_scaling"] = scaling or None
    return fields


def _in_version_4(fields: dict) -> bool:
    """Returns True if transformers 4 reads the same RoPE settings from `fields` as transformers 5."""
    rope = fields.get("rope_parameters") or {}
    kinds = (rope.get(kind) for kind in ("full_attention", "sliding_attention"))
    full, sliding = (kind.get("rope_theta") if isinstance(kind, dict) else None for kind in kinds)
    needs_one = ROPE_NAMES_BY_ATTENTION.get(fields["model_type"], ("", ""))[1] is None
    return "torch_dtype" in fields and not (needs_one and full != sliding)


# --------------------------------------------------------------------------------------------------------- tokenizer


def _write_tokenizer(folder: Path, tokenizer, made: Path | None) -> None:
    """Writes the tokenizer's published files, with the chat template of the training. Edits them so that transformers 4
    and 5 read the same tokenizer. `made`: a folder in which this was done before training. If it exists, the
    tokenizer's files are copied from there."""
    if tokenizer is None:
        return
    if made is not None and made.is_dir():
        others = shutil.ignore_patterns("config.json", "generation_config.json", "README.md")
        shutil.copytree(made, folder, ignore=others, copy_function=shutil.copyfile, dirs_exist_ok=True)
        return
    tokenizer.save_pretrained(folder)
    source = tokenizer.name_or_path and hub.local_folder(tokenizer.name_or_path)
    path = folder / "tokenizer_config.json"
    saved = read_json(path)
    published = source and (source / path.name).is_file() and read_json(source / path.name)
    fields = {name: value for name, value in (published or saved).items() if name not in _NOT_EXPORTED}
    own = type(tokenizer).__name__
    if own == "TokenizersBackend":  # version 5's class for "as tokenizer.json says"
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        for name in _SPECIAL_TOKENS:  # perhaps named only by tokenizer.json's padding, which is not exported
            if getattr(tokenizer, name) is not None and fields.get(name) is None:
                fields[name] = getattr(tokenizer, name)
    else:  # version 5 follows tokenizer.json, version 4 these fields
        fields["tokenizer_class"] = fields.get("tokenizer_class") or own
        ids = tokenizer("a")["input_ids"]
        fields["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id]
        fields["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id]
    if isinstance(fields.get("extra_special_tokens"), list):  # version 4 wants a dict there
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    if template := tokenizer.chat_template:  # version 4 had no file for it until late
        several = isinstance(template, dict)
        fields["chat_template"] = [{"name": n, "template": t} for n, t in template.items()] if several else template
    _write_json(path, fields)
    for name in _TOKENIZER_FILES if source else ():  # transformers 5 writes only tokenizer.json
        if (source / name).is_file() and not (folder / name).exists():
            (folder / name).write_bytes((source / name).read_bytes().removeprefix(codecs.BOM_UTF8))


# ------------------------------------------------------------------------------------------------------------- README


def _on_ties(model: PreTrainedModel) -> str:
    """Returns a paragraph for the README on tied weights, which are stored once; "" without tied weights."""
    names = dict(model.named_parameters())
    tied = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in names]
    if not tied:
        return ""
    source = next(name for name, parameter in names.items() if parameter is model.get_parameter(tied[0]))
    return (
        f"\nThe files hold no `{tied[0]}`: it is tied to `{source}`, and transformers ties it "
        "on load. Loaders that look every weight up by its name (a strict `load_state_dict` of the files, some "
        "model classes of vLLM and text-generation-inference) call it missing or, worse, leave it random: "
        f"give them a copy of `{source}` under that name.\n"
    )


def _write_json(path: Path, content: dict) -> None:
    _write(path, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    # File names of another system may have characters that UTF-8 cannot encode.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
