"""Writes a trained model in Hugging Face format, tensor by tensor, in a few MiB of RAM, whatever the model's size."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lowmem.core.precision import chunks
from lowmem.errors import InputError, LowmemError, first_line, some_of
from lowmem.files import flush_path, remove, safetensors_header, write_at
from lowmem.models.build import build_model
from lowmem.models.description import write_description
from lowmem.units import MIB, format_size

TRAINED = "every parameter trained with lowmem"  # in the README.md of an export; marks the folder as replaceable
BESIDE_WEIGHTS_BYTES = 16 * MIB  # about: tokenizer, config and README of an exported model


class BeyondRange(LowmemError):
    """Is raised for a finite weight that is too large for the export's dtype."""


def export_model(
    folder: Path, config: PretrainedConfig, parameters: Iterable[tuple[str, Tensor]], *, tokenizer, readme: str,
    generation_config: GenerationConfig | None = None, tokenizer_files: Path | None = None,
    order: Sequence[str] | None = None, dtype: torch.dtype = torch.float32, shard_bytes: int = 256 * MIB,
) -> list[str]:  # fmt: skip
    """Writes a trained model into `folder`; transformers' `from_pretrained` then computes the same logits, bit for bit
    if `dtype` is fp32. Replaces an older folder only after the new one is complete and on the disk. Returns sentences
    on weights that are not finite, and on other files that could not be written. Raises BeyondRange if `dtype` cannot
    hold a weight, and LowmemError if the folder cannot be written.

    `parameters`: (name, tensor) of all parameters. A tensor may come as several flat chunks, in order. The memory of a
    tensor may be reused when the next one is asked for. `order`: the parameters' names in the order of the files; None:
    the model's order. `tokenizer_files`: a folder with tokenizer files to copy; None to make new ones.
    """
    try:
        model = build_model(config)
    except InputError as error:  # the trained model was built from it: now the machine fails
        raise LowmemError(f"{folder} cannot be written ({error}); what was saved is safe") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    needed_bytes = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize + BESIDE_WEIGHTS_BYTES
    with _replacing(folder.resolve()) as partial:  # a link leads to a larger disk
        free_bytes = shutil.disk_usage(partial).free
        if free_bytes < needed_bytes:
            raise LowmemError(
                f"{folder} needs {format_size(needed_bytes)}, and {format_size(free_bytes)} are left on "
                f"the disk: free some room{_older(folder)}"
            )
        problems = _write_shards(partial, model, shapes, order or list(shapes), parameters, dtype, shard_bytes)
        failed = write_description(partial, model, tokenizer, generation_config, dtype, readme, tokenizer_files)
    return problems + [f"{name} could not be written ({first_line(error)})" for name, error in failed.items()]


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields a new, empty folder. After the `with` block, flushes it to the disk, and only then puts it in place of
    `folder`. If anything fails, `folder` stays as it was."""
    partial, previous = (folder.parent / f".{folder.name}.{state}" for state in ("partial", "previous"))
    placed = False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if previous.exists() and not folder.exists():  # a run was killed between the two renames below
            previous.rename(folder)
        for stale in (partial, previous):
            remove(stale)
        partial.mkdir()
        yield partial
        for path in (*partial.rglob("*"), partial):
            flush_path(path)
        if folder.exists():
            folder.rename(previous)
        partial.rename(folder)
        placed = True
        flush_path(folder.parent)
    except OSError as error:
        with suppress(OSError):
            if placed:
                folder.rename(partial)
            if previous.exists() and not folder.exists():
                previous.rename(folder)
        other = error.filename is not None and folder.parent not in Path(str(error.filename)).parents
        why = error if other else error.strerror or error
        raise LowmemError(f"{folder} cannot be written ({why}){_older(folder)}") from error
    finally:
        remove(partial)
    remove(previous)


def _older(folder: Path) -> str:
    return "; an older export is untouched" if os.path.exists(folder) else ""


def _write_shards(
    folder: Path, model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], order: Sequence[str],
    parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int,
) -> list[str]:  # fmt: skip
    """Writes `parameters` into safetensors shards of about `shard_bytes`. A parameter's place follows from `order` and
    `shapes`, so `parameters` may come in any order. Returns a warning in a list if values are not finite, else []."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    named = dict(model.named_parameters())
    # The names that `save_pretrained` would write; some may be older names.
    written_as = {id(tensor): name for name, tensor in revert_weight_conversion(model, named).items()}
    file_name = {name: written_as.get(id(parameter), name) for name, parameter in named.items()}
    split = split_state_dict_into_shards_factory(
        {name: sizes[name] for name in order}, get_storage_size=int, max_shard_size=shard_bytes,
        filename_pattern="model{suffix}.safetensors",
    )  # fmt: skip
    places: dict[str, tuple[Path, int]] = {}
    for shard, names in split.filename_to_tensors.items():
        names = sorted(names, key=lambda name: file_name[name].encode())  # as safetensors itself does
        header = safetensors_header(
            {file_name[name]: (dtype, shapes[name]) for name in names}, {"format": "pt"}, separators=(",", ":")
        )
        write_at(folder / shard, 0, header)
        starts = accumulate((sizes[name] for name in names), initial=len(header))
        places |= {name: (folder / shard, start) for name, start in zip(names, starts, strict=False)}

    written, not_finite = dict.fromkeys(shapes, 0), {}
    for name, values in parameters:
        known = name in shapes and (values.dim() == 1 or tuple(values.shape) == shapes[name])
        if not known or written[name] + values.numel() * dtype.itemsize > sizes[name]:
            raise ValueError(f"{name} {tuple(values.shape)} is no parameter of this config, or came twice")
        path, start = places[name]
        for chunk in chunks(values.detach()):
            cast = chunk.to("cpu", dtype)
            if not cast.isfinite().all():
                if math.isfinite(largest := chunk.abs().max().item()):
                    kind, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
                    raise BeyondRange(f"{name} holds {largest:.6g}, and {kind} ends at {most:.6g}")
                not_finite[name] = True
            content = memoryview(cast.view(torch.uint8).numpy())
            write_at(path, start + written[name], content)
            written[name] += len(content)
        del values
    if missing := [name for name in shapes if written[name] < sizes[name]]:
        raise ValueError(f"{len(missing)} parameters were not given: {some_of(missing)}")
    if split.is_sharded:
        weight_map = {file_name[name]: shard for name, shard in split.tensor_to_filename.items()}
        index = {"metadata": split.metadata, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return [f"NaN or infinity in {len(not_finite)} tensors ({some_of(not_finite)})"] if not_finite else []
