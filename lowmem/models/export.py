"""A trained model in Hugging Face format, written run by run: a few MiB are in RAM, whatever the model's size."""

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lowmem.core.precision import runs
from lowmem.errors import InputError, LowmemError, first_few, first_line
from lowmem.files import flush_path, remove, safetensors_header, write_at
from lowmem.models.build import build_model
from lowmem.models.description import write_description
from lowmem.units import MIB, format_size

BESIDE_WEIGHTS_BYTES = 16 * MIB  # tokenizer, config, README of an exported model, about


class BeyondRange(LowmemError):
    """A finite weight that the dtype of the export cannot hold."""


def export_model(
    folder: Path,
    config: PretrainedConfig,
    parameters: Iterable[tuple[str, Tensor]],
    *,
    tokenizer,
    readme: str,
    generation_config: GenerationConfig | None = None,
    tokenizer_files: Path | None = None,
    order: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 256 * MIB,
) -> list[str]:
    """Writes `folder` so that `AutoModelForCausalLM.from_pretrained` loads it with the same logits, bit for bit.

    `parameters` yields each name of `build_model(config).named_parameters()` with its tensor, or with flat runs of it
    one after the other, in any order, on any device; the memory behind it may be used again once the next is asked for.
    `generation_config`, `tokenizer_files`: as write_description's. `order`: that of the names, by which they are put
    into files; None: the config's. Names in files are those that `save_pretrained` would write. The folder is made
    beside the old one and takes its place only when it is complete and on the disk.
    Returns sentences on weights that are not finite and on other files that could not be written. Raises LowmemError if
    disk or RAM are too small, BeyondRange if `dtype` is, ValueError if `parameters` are not the config's.
    """
    try:
        model = build_model(config)
    except InputError as error:  # the model that was trained was built from it: now it is the machine that fails
        raise LowmemError(f"the export to {folder} failed ({error}); what was saved is safe") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    folder = folder.resolve()  # a link leads to a larger disk
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, previous = (folder.parent / f".{folder.name}.{state}" for state in ("partial", "previous"))
    if previous.exists() and not folder.exists():  # a run was killed between the two renames below
        previous.rename(folder)
    for stale in (partial, previous):
        remove(stale)
    needed_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < needed_bytes + BESIDE_WEIGHTS_BYTES:
        raise LowmemError(
            f"the export to {folder} needs {format_size(needed_bytes)}, and {format_size(free_bytes)} are left on the "
            "disk: free some room; an older export is untouched"
        )
    partial.mkdir()
    try:
        problems = _write_shards(partial, model, shapes, order or list(shapes), parameters, dtype, shard_bytes)
        failed = write_description(partial, model, tokenizer, generation_config, dtype, readme, tokenizer_files)
        problems += [f"{name} could not be written ({first_line(error)})" for name, error in failed.items()]
        for path in (*partial.rglob("*"), partial):
            flush_path(path)
        if folder.exists():
            folder.rename(previous)
        partial.rename(folder)
        flush_path(folder.parent)
    except OSError as error:
        raise LowmemError(f"the export to {folder} failed ({error}); an older export is untouched") from error
    finally:
        remove(partial)
    remove(previous)
    return problems


def _write_shards(
    folder: Path,
    model: PreTrainedModel,
    shapes: dict[str, tuple[int, ...]],
    order: Sequence[str],
    parameters: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int,
) -> list[str]:
    """The shapes tell the place of each value, so values are written as they come. A sentence on values that are not
    finite, if there are any."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]  # the parameters in each file
    for name in order:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    numbers = range(1, len(shards) + 1)
    files = [folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers]
    if len(shards) == 1:
        files = [folder / "model.safetensors"]

    file_name = _file_names(model)
    places: dict[str, tuple[Path, int]] = {}
    for path, names in zip(files, shards, strict=True):
        names = sorted(names, key=lambda name: file_name[name].encode())  # as safetensors itself does
        ends = [0, *accumulate(sizes[name] for name in names)]
        text = safetensors_header(
            {file_name[name]: (dtype, shapes[name]) for name in names}, {"format": "pt"}, separators=(",", ":")
        )
        write_at(path, 0, text)
        places |= {name: (path, len(text) + start) for name, start in zip(names, ends, strict=False)}

    written, not_finite = dict.fromkeys(shapes, 0), {}
    for name, values in parameters:
        known = name in shapes and (values.dim() == 1 or tuple(values.shape) == shapes[name])
        if not known or written[name] + values.numel() * dtype.itemsize > sizes[name]:
            raise ValueError(f"{name} {tuple(values.shape)} is no parameter of this config, or came twice")
        path, start = places[name]
        for run in runs(values.detach()):
            cast = run.to("cpu", dtype)
            if not cast.isfinite().all():
                _check_range(name, run, dtype)
                not_finite[name] = True
            content = memoryview(cast.view(torch.uint8).numpy())
            write_at(path, start + written[name], content)
            written[name] += len(content)
        del values
    if missing := [name for name in shapes if written[name] < sizes[name]]:
        raise ValueError(f"{len(missing)} parameters were not given: {first_few(missing)}")

    if len(shards) > 1:
        weight_map = {file_name[name]: path.name for name, (path, _) in places.items()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return [f"NaN or infinity in {len(not_finite)} tensors ({first_few(not_finite)})"] if not_finite else []


def _check_range(name: str, values: Tensor, dtype: torch.dtype) -> None:
    largest = values.abs().max().item()
    if math.isfinite(largest):
        kind = str(dtype).removeprefix("torch.")
        raise BeyondRange(f"{name} holds {largest:.6g}, and {kind} ends at {torch.finfo(dtype).max:.6g}")


def _file_names(model: PreTrainedModel) -> dict[str, str]:
    """{parameter's name: its name in files}: older names where transformers still writes those."""
    parameters = dict(model.named_parameters())
    old_name = {id(tensor): name for name, tensor in revert_weight_conversion(model, parameters).items()}
    return {name: old_name.get(id(parameter), name) for name, parameter in parameters.items()}
