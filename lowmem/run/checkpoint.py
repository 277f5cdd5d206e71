"""Saves and loads checkpoints. A run that is resumed from one computes the same bits as without the stop.

    checkpoints/step-00000123/
      block-0-matrices.safetensors   a block's matrices as flat tensors: `working`, `m`, ...; vectors have other files
      state.json                     step, updates, loss scale, settings that must stay the same, ...
      metrics.jsonl                  a row for each step so far, without times and memory
      manifest.json                  size and hash of each file; written last

No random state or data position is saved: dropout masks, batches and learning rates depend on the seed and counters.
"""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowmem.core.homes import drop_pages
from lowmem.core.optimizers import state_layout
from lowmem.core.parameters import Part, Store
from lowmem.errors import InputError, LowmemError
from lowmem.files import CHUNK_BYTES, Damaged, Manifest, flush_path, safetensors_header, to_json, write, write_manifest
from lowmem.run.folder import ASIDE, MARGIN_BYTES, TEMPORARY, checkpoint_of, checkpoints_in, step_of, sweep
from lowmem.run.identity import refuse_another_run
from lowmem.run_folder import json_object
from lowmem.units import format_size

_STATE, _METRICS = "state.json", "metrics.jsonl"
_STATE_KEYS = ("step", "updates", "loss_scale", "skipped", "eval_first", "recoveries")
_UNREADABLE = "unreadable-"
_ADVICE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some room on the disk or in the quota")
_ADVICE |= {errno.EFBIG: "Raise the limit of the size of files (ulimit -f)"}


class NotSaved(LowmemError):
    """Says that a checkpoint could not be written. `args`: the reason, and advice such as "Make the folder writable";
    both without a full stop."""

    def __str__(self) -> str:
        reason, advice = self.args
        return f"{reason}. {advice} and run the same command again"


def save_checkpoint(
    folder: Path, store: Store, state: dict, *, keep_last: int, best: int | None = None,
    metrics: Callable[[], str] | None = None,
) -> Path:  # fmt: skip
    """Saves weights, optimizer states and `state` (the content of state.json) as folder/checkpoints/step-..., and
    returns that path. Must be called through Ranks.on_first, after TrainingStep.flush. `metrics()` returns the text of
    metrics.jsonl; None: no such file is saved. Keeps the newest `keep_last` checkpoints and the one after step `best`.
    Removes all others, also any with more steps than this one. Raises NotSaved, with earlier checkpoints intact, if the
    files cannot be written."""
    assert not any(part.has_gradient for part in store.parts), "flush was not called"
    final = checkpoint_of(folder, state["step"])
    root = final.parent
    temporary = root / (TEMPORARY + final.name)
    there: list[Path] = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        there = checkpoints_in(root)
        rows = None if metrics is None else metrics().encode()
        _check_room(root, store, len(rows or b""))
        temporary.mkdir()
        entries = {_file_name(part): write(temporary / _file_name(part), _file_content(part)) for part in store.parts}
        entries[_STATE] = write(temporary / _STATE, [to_json(state)])
        if rows is not None:
            entries[_METRICS] = write(temporary / _METRICS, [rows])
        write_manifest(temporary, entries)
        flush_path(temporary)
        if final.exists():  # a rename cannot replace a folder; after a kill in between, `sweep` restores the old one
            os.rename(final, root / (ASIDE + final.name))
        # A checkpoint gets its final name when every byte is on the disk.
        os.rename(temporary, final)
        flush_path(root)
        flush_path(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        advice = _ADVICE.get(error.errno, "Make the folder writable")
        reason = f"step {state['step']} could not be saved in {root}: {error.strerror or error}"
        raise NotSaved(reason + "; earlier checkpoints are still there" * bool(there), advice) from error
    with suppress(OSError):  # the new checkpoint is safe; the next save tries again to remove old ones
        older = [path for path in there if step_of(path) < state["step"]]
        # Later steps exist if training was resumed from an earlier one.
        newer = [path for path in there if step_of(path) > state["step"]]
        for path in [*newer, *(path for path in older[keep_last - 1 :] if step_of(path) != best)]:
            os.rename(path, root / (TEMPORARY + path.name))  # half removed, it must not look like a checkpoint
        sweep(root)
    return final


def _check_room(root: Path, store: Store, more_bytes: int) -> None:
    tensors = [tensor for part in store.parts for tensor in _tensors(part).values()]
    needed_bytes = sum(entries * tensor.itemsize for tensor, entries in tensors) + more_bytes + MARGIN_BYTES
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"{format_size(needed_bytes)} needed, {format_size(free_bytes)} free on the disk")


def _tensors(part: Part) -> dict[str, tuple[Tensor, int]]:
    """Returns weights ("working") and optimizer states of `part`, {name: (this rank's shard, number of entries in all
    ranks' shards, without padding)}. A part is all matrices, or all vectors, of a unit such as a block."""
    layout = state_layout(part.optimizer, part.elements, part.working.dtype)
    whole = {"working": part.elements} | {name: entries for name, (entries, _) in layout.items()}
    return {name: (tensor, whole[name]) for name, tensor in {"working": part.working, **part.state}.items()}


def _file_name(part: Part) -> str:
    return part.name.replace(" ", "-") + ".safetensors"


def _header(part: Part) -> bytes:
    """Returns all bytes before the tensors in the .safetensors file of `part`, such as the matrices of a block."""
    tensors = {name: (tensor.dtype, (entries,)) for name, (tensor, entries) in _tensors(part).items()}
    # In part.places: the place of each parameter in the flat tensors, {parameter: [start, *shape]}.
    return safetensors_header(tensors, {"part": part.name, "parameters": json.dumps(part.places)}, (", ", ": "))


def _file_content(part: Part) -> Iterator[bytes | memoryview]:
    yield _header(part)
    for tensor, entries in _tensors(part).values():
        at_once = CHUNK_BYTES // tensor.itemsize
        for start in range(0, entries, at_once):
            chunk = part.ranks.range_of(tensor, start, min(start + at_once, entries)).view(torch.uint8)
            yield memoryview(chunk.cpu().numpy())
            drop_pages(chunk)


def newest_state(checkpoints: list[Path]) -> tuple[Path, dict] | None:
    """Returns path and state.json of the newest checkpoint whose state.json is undamaged, or None. `checkpoints`:
    newest first."""
    for checkpoint in checkpoints:
        with suppress(Damaged):  # load_newest reports it
            return checkpoint, _read_state(Manifest(checkpoint))
    return None


def load_newest(
    checkpoints: list[Path], store: Store, identity: dict, say: Callable[[str], None], required: bool = False
) -> tuple[Path, dict] | None:
    """Loads the newest undamaged of `checkpoints` (newest first) into `store`. Returns its path and the content of
    state.json, with metrics.jsonl's text under "metrics"; None without checkpoints. `identity`: this run's settings,
    data and model. Raises InputError if the checkpoint's differ. `say` gets a sentence about each damaged one skipped.
    If all are damaged: raises Damaged if `required`; else renames them, fills `store` with zeros, and returns None."""
    for checkpoint in checkpoints:
        try:
            return checkpoint, store.ranks.on_all(lambda each=checkpoint: load_checkpoint(each, store, identity))
        except Damaged as problem:
            if required and checkpoint == checkpoints[-1]:
                raise
            say(f"warning: skipped the checkpoint {checkpoint.name}: {problem}")
    if checkpoints:
        store.clear()
        for path in checkpoints:  # else the next save would remove them
            store.ranks.on_first(partial(os.rename, path, path.with_name(f"{_UNREADABLE}{path.name}")))
        kept = f"{_UNREADABLE}step-... in {checkpoint.parent}"
        say(f"warning: training starts from step 0; those checkpoints are kept as {kept}")
    return None


def load_checkpoint(checkpoint: Path, store: Store, identity: dict) -> dict:
    """Loads weights and optimizer states into `store`. Returns the content of state.json, and under "metrics" the text
    of metrics.jsonl, or None. `identity`: settings, data and model of this run. Raises InputError, before it changes
    `store`, if the checkpoint is another run's or model's, or lacks files. Raises Damaged if bytes have changed since
    the save; `store` may then be partly overwritten."""
    manifest = Manifest(checkpoint)
    parts = {_file_name(part): part for part in store.parts}
    state = _read_state(manifest)
    refuse_another_run(checkpoint, state, identity)
    metrics = manifest.read(_METRICS).decode() if _METRICS in manifest.entries else None
    odd = sorted(manifest.entries.keys() - {_METRICS} ^ {*parts, _STATE})
    if odd:
        raise InputError(f"{checkpoint} is incomplete or another model's: only one of the two has {odd[0]}")
    for name, part in parts.items():
        _compare_headers(manifest, name, part)
    for name, part in parts.items():
        with manifest.checked(name) as fill:
            manifest.skip(fill, len(_header(part)))
            for tensor, entries in _tensors(part).values():
                before = min(part.ranks.place * tensor.numel(), entries)
                here = min(tensor.numel(), entries - before)
                manifest.skip(fill, before * tensor.itemsize)  # other ranks store these numbers
                for chunk in tensor[:here].view(torch.uint8).split(CHUNK_BYTES):
                    host = chunk if chunk.device.type == "cpu" else torch.empty_like(chunk, device="cpu")
                    fill(memoryview(host.numpy()))
                    if host is not chunk:
                        chunk.copy_(host)
                    drop_pages(chunk)
                manifest.skip(fill, (entries - before - here) * tensor.itemsize)
        part.version += 1  # so that no window goes on with older weights that it has copied
    return state | {"metrics": metrics}


def verify_checkpoint(checkpoint: Path) -> None:
    """Reads the whole checkpoint, and raises Damaged if a byte has changed since it was written."""
    manifest = Manifest(checkpoint)
    for name in manifest.entries:
        manifest.verify(name)


def _read_state(manifest: Manifest) -> dict:
    if _STATE not in manifest.entries:
        raise InputError(f"{manifest.folder} is incomplete: it has no {_STATE}")
    state = json_object(manifest.read(_STATE))
    missing = [key for key in _STATE_KEYS if key not in state]
    if missing:
        path = manifest.folder / _STATE
        raise InputError(f"{path} lacks {', '.join(missing)}, so no run can go on from it; take another checkpoint")
    return state


def _compare_headers(manifest: Manifest, name: str, part: Part) -> None:
    path, header = manifest.folder / name, _header(part)
    try:
        with open(path, "rb") as file:
            if file.read(len(header)) == header:
                return
            file.seek(0)
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            found = json_object(file.read(min(header_bytes, CHUNK_BYTES)))
    except (OSError, struct.error):
        found = {}
    manifest.verify(name)  # raises Damaged for a damaged file
    wanted = json_object(header[8:])
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            what = "the parameters" if key == "__metadata__" else f"the tensor {key}"
            how = "missing" if key not in found else "unknown here" if key not in wanted else "not as in this run"
            raise InputError(f"{path}: {what}: {how} (incomplete, or another model, optimizer or precision)")
    raise InputError(f"{path}: its header is not in the order in which this version writes it")
