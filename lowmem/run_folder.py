"""Lists the files of a run folder, checks whether they can be written, and separates files of runs from training data.

Run folders and exported models in a folder of data are not read, nor is the file that stdout or stderr goes to. In a
run folder that is given as data, only files that training did not write are read. data/sources.py refuses a run folder
without such files, a folder that training wrote into one, and an exported model.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from lowmem.errors import InputError
from lowmem.fields import shown

FILES = (
    *("settings.json", "plan.json", "report.json", "metrics.jsonl", "samples.jsonl", "log.txt", "wandb-run-id"),
    *("loss.png", "memory.png", "report.html"),
)
FOLDERS = ("data", "checkpoints", "model", "tensorboard", "wandb")


def without_runs(files: Iterable[Path], root: Path, out: Path | None) -> tuple[list[Path], list[Path]]:
    """Splits `files`, all below `root`, into data and the output of runs. In the second list, a folder that a run has
    written replaces its files. `out`: the present run's output folder, or None."""
    out = None if out is None else out.resolve()
    output = set()
    for stream in (1, 2):
        with suppress(OSError):  # closed
            status = os.fstat(stream)
            output.add((status.st_dev, status.st_ino))

    @cache
    def source(path: Path) -> Path | None:
        if path in (root, path.parent):
            return None
        return source(path.parent) or (path if is_of_a_run(path, out) else None)

    sources = {}
    for file in files:
        status = file.stat()
        sources[file] = file if (status.st_dev, status.st_ino) in output else source(file)
    return [file for file in sources if sources[file] is None], list(dict.fromkeys(filter(None, sources.values())))


def is_of_a_run(path: Path, out: Path | None) -> bool:
    """Returns True if `path` is a run folder, a file or folder of one, or a folder with a model (weights and
    config.json). `out`: the present run's folder, resolved, or None; it counts even if it is empty."""
    if path.name in (*FILES, *FOLDERS) and (is_run(path.parent) or path.parent.resolve() == out):
        return True
    if path.is_file():
        return path.name == "plan.json" and _is_plan(path)
    return (
        path.resolve() == out
        or is_run(path)
        or _has(path, "manifest.json")
        and _has(path, "state.json", "data.json")
        or _has(path, "config.json")
        and _has(path, "*.safetensors", "pytorch_model*.bin")
        or path.name == "wandb"
        and _has(path, "run-*", "offline-run-*")
    )


def _has(folder: Path, *patterns: str) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def is_run(folder: Path) -> bool:
    """Returns True if a training run has begun in `folder`: it has settings.json and a valid plan.json."""
    return not missing_of_run(folder)


def missing_of_run(folder: Path) -> str:
    """Returns the names of files that every run writes and `folder` lacks, joined by " and "."""
    there = {"settings.json": os.path.isfile(folder / "settings.json"), "plan.json": _is_plan(folder / "plan.json")}
    return " and ".join(name for name, found in there.items() if not found)


def why_not_writable(out: Path) -> str | None:
    """Returns the reason why training cannot write its files into the folder `out`, or None."""
    for path in (*reversed(out.parents), out, *(out / name for name in (*FOLDERS, *FILES))):
        name = path.name if path.parent == out else str(path)
        if path.is_symlink() and not path.exists():
            return f"{name} is a link to {os.readlink(path)}, which is not there"
        if path.exists() and path.is_dir() == (path.parent == out and path.name in FILES):
            return f"{name} is {'a folder and no file' if path.is_dir() else 'a file and no folder'}"
    for name in ("data", "model"):  # a new folder replaces the old one by a rename
        path = (out / name).resolve()
        if shown(str(path)) != str(path):
            return f"it would be {shown(str(path.parent))}, and that name is not UTF-8"
        if not path.exists():
            continue
        if os.path.ismount(path):
            return f"a disk is mounted at {path}, which no folder can replace; make {name} a link to a folder on it"
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return f"{name} is a link to {path}, and the folder around that cannot be written"
        if (missing := missing_of_run(out.resolve())) and set(os.listdir(path)) - {"lost+found"}:  # on empty disks
            return f"it has a folder {name}, which a run would replace, but no {missing} of a run"
    return None


def not_writable(out: str | Path, reason: str | None) -> InputError:
    return InputError(f"--out {out} cannot be written: {reason}; give another folder")


def no_folder_to_resume(path: str | Path) -> InputError:
    return InputError(f"--resume {path}: there is no such folder")


def _is_plan(path: Path) -> bool:
    return read_run_json(path).keys() >= {"fits", "tokens_per_step", "predicted"}


def read_run_json(path: Path) -> dict:
    """Returns the object in a run's JSON file; {} if the file is missing or damaged."""
    try:
        return json_object(path.read_bytes())
    except OSError:
        return {}


def json_object(text: bytes | str) -> dict:
    """Returns the JSON object in `text`; {} if there is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
