"""Training state on disk: saved so that nothing is ever lost, loaded so that a run goes on bit for bit.

    checkpoints/step-00000123/
      block-0-matrices.safetensors   one per part of the store: `working`, `low`, `m`, `v`, ... as the flat tensors they
                                     are in memory, wherever they lie there; so any placement loads any other's file
      state.json                     what the caller gives: step, updates, loss scale, the run's identity
      manifest.json                  size and hash of each file; written last

There is no generator and no data position to save: dropout masks are functions of (seed, step, micro-batch, layer),
batches of (seed, step), the learning rate of the updates so far, so those numbers say it all.

A checkpoint counts once it stands under its final name, and it gets that name when every byte of it is on the disk:

    write .tmp-step-00000123/, fsync every file, then the folder  ->  rename  ->  fsync the parent  ->  remove old ones

Killed at any moment, the newest complete checkpoint is the one from before or the new one, and the next save or run
sweeps the rest away. Bytes that rot later are found by their hash, and the checkpoint before is taken.

RAM: one chunk of 16 MiB. Disk: the whole state (12 bytes per parameter for AdamW over 16-bit weights: XL 17.4 GiB),
keep_last times, and once more while saving. Time: the disk's own.
"""

import errno
import itertools
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lowmem.core.homes import drop_pages
from lowmem.core.parameters import Part, Store
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.files import (
    CHUNK_BYTES,
    MANIFEST,
    Damaged,
    Manifest,
    flush_path,
    safetensors_header,
    to_json,
    write,
    write_manifest,
)
from lowmem.models.export import BESIDE_WEIGHTS_BYTES
from lowmem.run_folder import no_folder_to_resume, not_writable
from lowmem.settings import FIELD_NAMES, Settings, option_name
from lowmem.units import MIB, format_size

_MARGIN_BYTES = MIB  # headers, state.json, the manifest, and what a file system adds
_STATE = "state.json"
_STATE_KEYS = ("step", "updates", "loss_scale", "skipped", "eval_first", "recoveries")
_NAME = re.compile(r"step-([0-9]{8,})")
_UNREADABLE = "unreadable-"
_TEMPORARY, _ASIDE = ".tmp-", ".old-"  # before the name of a checkpoint that is not (yet, or any longer) one


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keeps a second run out of `folder` (made if need be) until the end of the block, or of the process, however it
    ends. What was made for the lock goes again where the block has put nothing into it. Raises InputError where another
    run holds it or the folder cannot be written."""
    folder = Path(os.path.abspath(folder))
    lock = FileLock(folder / ".lock", timeout=0)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = os.listdir(folder)
        lock.acquire()
    except Timeout:
        raise InputError(f"another run is writing to {folder}; wait for its end, or give another --out") from None
    except OSError as error:
        raise not_writable(folder, error.strerror) from None
    try:
        yield
    finally:
        with suppress(OSError):
            if set(os.listdir(folder)) - set(before) == {".lock"}:  # a run that was refused leaves nothing behind
                (folder / ".lock").unlink()
                for path in made:
                    path.rmdir()
        lock.release()


# ---------------------------------------------------------------------------------------------------------------- save


def check_disk(folder: Path, disk: dict[str, int], saves: int | None, states_folder: str | None = None) -> None:
    """PlanError where the disk under `folder` has no room for what a run writes there, `disk` (Plan.disk). `saves`: how
    often it saves, None where that is not known; then one checkpoint and the next have to fit. What is there of an
    earlier run counts as room, for it is what is gone on from, or replaced. States have to fit beside it where their
    folder is on the same disk; on another one their room is taken when they are made."""
    each = disk["one_being_written"]
    checkpoints = min(disk["checkpoints"] // each + 1, 2 if saves is None else max(saves, 1))
    places = {"checkpoints": checkpoints * each, "model": disk["export"] + BESIDE_WEIGHTS_BYTES}
    free, needed = {}, {}
    for part, size_bytes in places.items():
        place = (folder / part).resolve()
        disk_of = (place if place.exists() else folder).stat().st_dev
        half_made = place.parent.glob(f".{place.name}.*")  # by an export that was killed
        written = itertools.chain(place.rglob("*"), *(path.rglob("*") for path in half_made))
        there = sum(path.stat().st_size for path in written if path.is_file())
        free.setdefault(disk_of, shutil.disk_usage(place if place.exists() else folder).free)
        free[disk_of] += there
        needed[disk_of] = needed.get(disk_of, _MARGIN_BYTES) + size_bytes
    states_on = None
    if "states" in disk:
        path = Path(states_folder).resolve()
        states_on = next(place for place in (path, *path.parents) if place.exists()).stat().st_dev
        if states_on in needed:
            needed[states_on] += disk["states"]
    for disk_of, needed_bytes in needed.items():
        if needed_bytes > free[disk_of]:
            fewer = ", or --keep-last 1" if checkpoints > 2 else ""
            states = f", and {format_size(disk['states'])} of states" if disk_of == states_on else ""
            raise PlanError(
                f"{folder} is on a disk with room for {format_size(free[disk_of])}, and this run writes "
                f"{format_size(needed_bytes)}: {checkpoints} checkpoints of {format_size(each)}, the one that is being "
                f"written among them, and the model{states}. Free some room, or give another --out{fewer}."
            )


class NotSaved(LowmemError):
    """A checkpoint could not be written. `reason`: what and why; `advice`: what to do about it."""

    def __init__(self, reason: str, advice: str):
        self.reason, self.advice = reason, advice
        super().__init__(f"{reason}. What was saved before is still there: {advice} and run the same command again")


def save_checkpoint(folder: Path, store: Store, state: dict, *, keep_last: int, best: int | None = None) -> Path:
    """Writes `store` and `state` (JSON; "step" is the number of optimizer steps done) as folder/checkpoints/step-...

    No update may be waiting (TrainingStep.flush). Of the older checkpoints keep_last - 1 stay, and that of
    step `best`; those with a higher number were left behind by a run that went back to an earlier step, and go too.
    Raises NotSaved where the disk or a quota is full or the folder cannot be written: what was saved before is still
    there then."""
    if any(part.gradient is not None for part in store.parts):
        raise RuntimeError("updates are waiting: call TrainingStep.flush before saving")
    final = checkpoint_of(folder, state["step"])
    root = final.parent
    temporary = root / (_TEMPORARY + final.name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        _check_room(root, store)
        temporary.mkdir()
        entries = {_file_name(part): write(temporary / _file_name(part), _file_content(part)) for part in store.parts}
        entries[_STATE] = write(temporary / _STATE, [to_json(state)])
        write_manifest(temporary, entries)
        flush_path(temporary)
        if final.exists():  # no rename replaces a folder; killed in between, _sweep puts the old one back
            os.rename(final, root / (_ASIDE + final.name))
        os.rename(temporary, final)
        flush_path(root)
        flush_path(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some room on the disk or in the quota" if full else "make the folder writable"
        reason = f"step {state['step']} could not be saved in {root}: {error.strerror or error}"
        raise NotSaved(reason, advice) from error
    with suppress(OSError):  # the new checkpoint is safe; what cannot be removed now is tried again at the next save
        older = [path for path in _checkpoints(root) if _step(path) < state["step"]]
        newer = [path for path in _checkpoints(root) if _step(path) > state["step"]]
        for path in [*newer, *(path for path in older[keep_last - 1 :] if _step(path) != best)]:
            os.rename(path, root / (_TEMPORARY + path.name))  # half removed, it must not look like a checkpoint
        _sweep(root)
    return final


def _check_room(root: Path, store: Store) -> None:
    needed_bytes = sum(t.nbytes for part in store.parts for t in _tensors(part).values()) + _MARGIN_BYTES
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"{format_size(needed_bytes)} needed, {format_size(free_bytes)} free on the disk")


def _tensors(part: Part) -> dict[str, Tensor]:
    return {"working": part.working, **part.state}


def _file_name(part: Part) -> str:
    return part.name.replace(" ", "-") + ".safetensors"


def _header(part: Part) -> bytes:
    """How a part's .safetensors file begins; in the metadata, where in the flat tensors each parameter lies
    ([start, *shape])."""
    views = {name: part.view(part.working, name) for name in part.names()}
    places = {name: [view.storage_offset(), *view.shape] for name, view in views.items()}
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in _tensors(part).items()}
    return safetensors_header(tensors, {"part": part.name, "parameters": json.dumps(places)}, (", ", ": "))


def _file_content(part: Part) -> Iterator[bytes | memoryview]:
    yield _header(part)
    for tensor in _tensors(part).values():
        for chunk in _chunks(tensor):
            yield memoryview(chunk.cpu().numpy())
            drop_pages(chunk)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of the bytes of `tensor` [n], each uint8 [at most CHUNK_BYTES]."""
    return tensor.view(torch.uint8).split(CHUNK_BYTES)


def _sweep(root: Path) -> None:
    """Removes what a killed save left; a checkpoint that it had put aside gets its place back if that is empty."""
    for aside in root.glob(f"{_ASIDE}step-*"):
        final = root / aside.name.removeprefix(_ASIDE)
        os.rename(aside, root / (_TEMPORARY + aside.name) if final.exists() else final)
    for stale in root.glob(f"{_TEMPORARY}*"):
        if stale.is_symlink():  # a checkpoint that was moved to another disk
            stale.unlink()
        else:
            shutil.rmtree(stale, ignore_errors=True)


def _checkpoints(root: Path) -> list[Path]:
    """All checkpoints in `root` by name, newest first."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=_step, reverse=True)


def _step(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name)[1])


# ---------------------------------------------------------------------------------------------------------------- find


def find_checkpoints(folder: Path, resume: str, say: Callable[[str], None]) -> list[Path]:
    """The checkpoints to go on from, the newest first, for load_newest; none: start from step 0. The caller holds
    lock_run(folder).

    `resume` is "never", "auto" (those of `folder`), or a folder: a checkpoint or a run folder. Raises InputError where
    that folder holds no checkpoint.
    """
    root = folder / "checkpoints"
    if root.is_dir():
        _sweep(root)
    if resume == "auto":
        return _checkpoints(root)
    found = [] if resume == "never" else _named_checkpoints(Path(resume))
    used = {path.resolve() for path in found}
    unused = [path.name for path in _checkpoints(root) if path.resolve() not in used]
    if unused:
        say(f"not used, and replaced by what this run will save: {', '.join(unused)} in {root}")
    return found


def _named_checkpoints(path: Path) -> list[Path]:
    if not path.is_dir():
        raise no_folder_to_resume(path)
    if _NAME.fullmatch(path.resolve().name) or (path / MANIFEST).exists():
        return [path]
    found = _checkpoints(path / "checkpoints") or _checkpoints(path)
    if not found:
        raise InputError(f"--resume {path} is neither a checkpoint nor a run folder with one")
    return found


def checkpoint_of(folder: Path, step: int) -> Path:
    """Where the run in `folder` has the checkpoint of `step`, if it has one."""
    return folder / "checkpoints" / f"step-{step:08d}"


def newest_state(checkpoints: list[Path]) -> tuple[Path, dict] | None:
    """The first of `checkpoints` whose state can be read, and that state; None where there is none."""
    for checkpoint in checkpoints:
        with suppress(Damaged):  # which load_newest says
            return checkpoint, _read_state(Manifest(checkpoint))
    return None


# ---------------------------------------------------------------------------------------------------------------- load


Check = Callable[[Path, dict], object]  # of a checkpoint and its state; InputError where a run cannot go on from it


def load_newest(
    checkpoints: list[Path], store: Store, check: Check, say: Callable[[str], None], required: bool = False
) -> tuple[Path, dict] | None:
    """load_checkpoint of the first of `checkpoints` that is whole, and its state; those that are incomplete or damaged
    are skipped with a sentence to `say`. Where none is whole: None, with a store of zeros, as it was made, and they are
    renamed; or, where one is `required`, what is wrong with the last is raised."""
    for checkpoint in checkpoints:
        try:
            return checkpoint, load_checkpoint(checkpoint, store, check)
        except Damaged as problem:
            if required and checkpoint == checkpoints[-1]:
                raise
            say(f"warning: skipped the checkpoint {checkpoint.name}: {problem}")
    if checkpoints:
        store.clear()
        for checkpoint in checkpoints:  # else the next save would remove them
            os.rename(checkpoint, checkpoint.with_name(f"{_UNREADABLE}{checkpoint.name}"))
        say(
            f"warning: training starts anew; those checkpoints are kept as {_UNREADABLE}step-... in {checkpoint.parent}"
        )
    return None


def load_checkpoint(checkpoint: Path, store: Store, check: Check) -> dict:
    """Reads every tensor straight into its place in `store`, each file once; returns what was given as `state`.

    Raises what `check` does, and InputError if the state or a tensor is missing, or if the tensors are another model's,
    optimizer's or precision's: all of that before `store` is touched. Bytes that are not what was written are
    refused as they are read; `store` is then of no use.
    """
    manifest = Manifest(checkpoint)
    parts = {_file_name(part): part for part in store.parts}
    state = _read_state(manifest)
    check(checkpoint, state)
    odd = sorted(manifest.entries.keys() ^ {*parts, _STATE})
    if odd:
        raise InputError(
            f"{checkpoint} is incomplete or another model's: compared with this one it has or lacks {odd[0]}"
        )
    for name, part in parts.items():
        _compare_headers(manifest, name, part)
    for name, part in parts.items():
        with manifest.checked(name) as fill:
            fill(memoryview(bytearray(len(_header(part)))))
            for tensor in _tensors(part).values():
                for chunk in _chunks(tensor):
                    host = chunk if chunk.device.type == "cpu" else torch.empty_like(chunk, device="cpu")
                    fill(memoryview(host.numpy()))
                    if host is not chunk:
                        chunk.copy_(host)
                    drop_pages(chunk)
    return state


def verify_checkpoint(checkpoint: Path) -> None:
    """Reads all of it; Damaged where it is not what was written."""
    manifest = Manifest(checkpoint)
    for name in manifest.entries:
        manifest.verify(name)


def _read_state(manifest: Manifest) -> dict:
    path = manifest.folder / _STATE
    if _STATE not in manifest.entries:
        raise InputError(f"{manifest.folder} is incomplete: it has no {_STATE}")
    state = _parsed(manifest.read(_STATE))
    missing = [key for key in _STATE_KEYS if key not in state]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}, so nothing can go on from it; take another checkpoint")
    return state


def refuse_differences(checkpoint: Path, state: dict, expected: dict) -> None:
    """InputError, with all of them, where `expected` is not a part of `state`, dicts within it included."""
    differences = list(_differences(state, json.loads(json.dumps(expected))))
    if differences:
        raise InputError(
            f"refused to go on from {checkpoint}: {'; '.join(differences)}. Go on with what that run was started with, "
            "or start anew with another --out"
        )


def _differences(saved: dict, wanted: dict) -> Iterator[str]:
    for key, value in wanted.items():
        name = option_name(key) if key in FIELD_NAMES else key
        if key not in saved and key in FIELD_NAMES and value == getattr(Settings, key):
            continue  # an option that is younger than the checkpoint had its default
        if key not in saved:
            yield f"{name} is missing there"
        elif isinstance(value, dict) and isinstance(saved[key], dict):
            if key == "config":  # another version of transformers may know fields that this one does not
                known = {field: value[field] for field in value if field in saved[key]}
                yield from (f"config.json's {difference}" for difference in _differences(saved[key], known))
            else:
                yield from _differences(saved[key], value)
        elif key == "data" and saved[key] != value:
            yield "the data, their weights or the tokenizer are not what they were"
        elif saved[key] != value:
            old, new = (item if isinstance(item, str) else json.dumps(item) for item in (saved[key], value))
            yield f"{name} {old} -> {new}"


def _compare_headers(manifest: Manifest, name: str, part: Part) -> None:
    """Raises InputError, which says what is different, unless file `name` begins as this part's would."""
    path, header = manifest.folder / name, _header(part)
    try:
        with open(path, "rb") as file:
            if file.read(len(header)) == header:
                return
            file.seek(0)
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            found = _parsed(file.read(min(header_bytes, CHUNK_BYTES)))
    except (OSError, struct.error):
        found = {}
    manifest.verify(name)  # damaged or another's?
    wanted = _parsed(header[8:])
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            what = "the parameters" if key == "__metadata__" else f"the tensor {key}"
            how = "missing" if key not in found else "unknown here" if key not in wanted else "not as in this run"
            raise InputError(f"{path}: {what}: {how} (incomplete, or another model, optimizer or precision)")
    raise InputError(f"{path}: its header is not in the order in which this version writes it")


def _parsed(text: bytes) -> dict:
    """The JSON object in `text`; empty where there is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
