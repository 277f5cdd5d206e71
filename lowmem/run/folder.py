"""Manages the output folder of a training run: its lock, the room on its disk, and its checkpoints."""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lowmem.errors import InputError, PlanError
from lowmem.files import MANIFEST, remove
from lowmem.run_folder import no_folder_to_resume, not_writable, read_run_json
from lowmem.units import MIB, format_size

MARGIN_BYTES = MIB  # for headers, state.json, the manifest, and the file system's own data
TEMPORARY, ASIDE = ".tmp-", ".old-"  # prefixes: unfinished or being removed; moved aside by a save of the same step
_NAME = re.compile(r"step-([0-9]{8,})")


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Creates the run folder `folder`, and locks it until the end of the `with` block or of the process. If the block
    writes nothing, removes the folders that were created. Raises InputError if another run has locked the folder, or if
    it cannot be written."""
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
            if set(os.listdir(folder)) - set(before) == {".lock"}:
                (folder / ".lock").unlink()
                for path in made:
                    path.rmdir()
        lock.release()


def check_disk(folder: Path, disk: dict[str, int], saves: int | None, states_folder: str | None = None) -> None:
    """Raises PlanError if a disk has too little room for checkpoints, model or optimizer states. `disk`: {name: bytes
    that training writes} (Plan.disk). `saves`: number of checkpoints that will be written, None if unknown."""
    each = disk["one_being_written"]
    checkpoints = min(disk["checkpoints"] // each + 1, 2 if saves is None else max(saves, 1))
    places = {"checkpoints": checkpoints * each, "model": disk["export"] + disk["beside_exported_weights"]}
    size, model = format_size(each), format_size(places["model"])
    files = f"{checkpoints} checkpoints of {size}, including the one being written, and {model} for the model"
    fewer = ", or --keep-last 1" if checkpoints > 2 else ""
    free, needed, said = {}, {}, {}  # by disk
    for part, size_bytes in places.items():
        place = (folder / part).resolve()
        there = place if place.exists() else folder
        device = there.stat().st_dev
        half_made = place.parent.glob(f".{place.name}.*")  # by an export that was killed
        written = itertools.chain(place.rglob("*"), *(path.rglob("*") for path in half_made))
        free.setdefault(device, shutil.disk_usage(there).free)
        # Files of an earlier run count as free room, because they are replaced.
        free[device] += sum(path.stat().st_size for path in written if path.is_file())
        needed[device] = needed.get(device, MARGIN_BYTES) + size_bytes
        said[device] = folder, files, f"another --out{fewer}"
    if "states" in disk:
        path = Path(states_folder).resolve()
        there = next(place for place in (path, *path.parents) if place.exists())
        device, states = there.stat().st_dev, f"{format_size(disk['states'])} of states"
        free.setdefault(device, shutil.disk_usage(there).free)
        needed[device] = needed.get(device, MARGIN_BYTES) + disk["states"]
        if device in said:
            said[device] = folder, f"{files}, and {states}", said[device][2]
        else:
            said[device] = states_folder, states, "another --states-folder"
    for device, (place, what, other) in said.items():
        if needed[device] > free[device]:
            raise PlanError(
                f"{place} is on a disk with room for {format_size(free[device])}, and this run writes "
                f"{format_size(needed[device])}: {what}. Free some room, or give {other}."
            )


def checkpoint_of(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step`, which need not exist."""
    return folder / "checkpoints" / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name)[1])


def checkpoints_in(root: Path) -> list[Path]:
    """Returns all paths in `root` that have a checkpoint's name (step-...), the one with most steps first."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def sweep(root: Path) -> None:
    """Removes unfinished and half-removed checkpoints from `root`, the folder of checkpoints. Restores a checkpoint
    that a killed save of the same step has moved aside, unless the new one is complete."""
    for aside in root.glob(f"{ASIDE}step-*"):
        final = root / aside.name.removeprefix(ASIDE)
        os.rename(aside, root / (TEMPORARY + aside.name) if final.exists() else final)
    for stale in root.glob(f"{TEMPORARY}*"):
        remove(stale)  # a link if the checkpoint was moved to another disk


def find_checkpoints(folder: Path, resume: str, say: Callable[[str], None]) -> list[Path]:
    """Returns the checkpoints to resume from, the preferred one first; [] to start at step 0. `folder`: the run folder,
    which the caller must have locked by `lock_run`. `resume`: "never", "auto" (checkpoints in `folder`), or the path of
    a checkpoint or of another run's folder. `say` gets a sentence if checkpoints in `folder` are not used. Raises
    InputError if the path has no checkpoint."""
    root = folder / "checkpoints"
    sweep(root)
    if resume == "auto":
        return checkpoints_in(root)
    found = []
    if resume != "never":
        # Checkpoints that this command has saved come first, and suffice if the folder `resume` is gone.
        place = str(Path(resume).resolve())
        found = [path for path in checkpoints_in(root) if read_run_json(path / "state.json").get("resume") == place]
        if not found or Path(resume).is_dir():
            found = list(dict.fromkeys([*found, *_named_checkpoints(Path(resume))]))
    used = {path.resolve() for path in found}
    unused = [path.name for path in checkpoints_in(root) if path.resolve() not in used]
    if unused:
        say(f"not used, and replaced once this run saves: {', '.join(unused)} in {root}")
    return found


def _named_checkpoints(path: Path) -> list[Path]:
    if not path.is_dir():
        raise no_folder_to_resume(path)
    if _NAME.fullmatch(path.resolve().name) or (path / MANIFEST).exists():
        return [path]
    found = checkpoints_in(path / "checkpoints") or checkpoints_in(path)
    if not found:
        raise InputError(f"--resume {path} is neither a checkpoint nor a run folder with one")
    return found
