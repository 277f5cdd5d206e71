"""The process of one job: calls the job's function, writes its rows. Started by __main__.py, never by hand.

    python -m experiments.gpu_acceptance.child probe        what this machine is, as JSON on stdout
    python -m experiments.gpu_acceptance.child '{task}'     one job; exit code 0 if every check held, 3 if one did not

The process ends when its standard input does: when the command that started it is gone, nothing stays on the GPU.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.gpu_acceptance import rows
from lowmem.units import GIB

OUTPUT_CHARACTERS = 4000
A_CHECK_FAILED = 3  # exit code; a crash is 1, or a signal


@dataclass(frozen=True)
class Setting:
    """What a job's function is given. `device`: "cuda" or "cpu"; `scratch`: a folder that is removed afterwards;
    `record(detail, values, checks)` writes a row at once, and says whether all checks held."""

    device: str
    dry_run: bool
    gpu_limit_bytes: int | None
    ram_limit_bytes: int | None
    scratch: Path
    record: Callable[[str, dict, dict[str, bool]], bool]


@dataclass(frozen=True)
class Result:
    """What a job's function returns: its last row's content."""

    values: dict
    checks: dict[str, bool]


def main() -> int:
    if sys.argv[1] == "probe":
        print(json.dumps(probe()))
        return 0
    task = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    path, scratch = Path(task["rows"]), Path(task["scratch"])
    started = last = time.perf_counter()

    def record(detail: str, values: dict, checks: dict[str, bool]) -> bool:
        nonlocal last
        now = time.perf_counter()
        _write(
            path, rows.make_row(task["common"], f"{task['name']}: {detail}", now - last, values=values, checks=checks)
        )
        last = now
        return all(checks.values())

    setting = Setting(
        task["device"], task["common"]["dry_run"], _bytes(task["gpu_gib"]), _bytes(task["ram_gib"]), scratch, record
    )
    module, function = task["target"].split(":")
    result = getattr(importlib.import_module(module), function)(setting, **task["options"])
    seconds = time.perf_counter() - started
    held = all(result.checks.values())
    output = None if held else output_of(scratch)
    row = rows.make_row(
        task["common"], task["name"], seconds, values=result.values, checks=result.checks, output=output
    )
    _write(path, row)
    return 0 if held else A_CHECK_FAILED


def probe() -> dict:
    """Asked in a process of its own: a CUDA context in the parent would take memory from every job."""
    import torch

    from lowmem.report import device_name, versions

    cuda = torch.cuda.is_available()
    names = {kind: device_name(torch.device(kind)) for kind in ("cpu", *(["cuda"] if cuda else []))}
    return {"names": names, "versions": versions() | {"cuda": torch.version.cuda}}


def output_of(scratch: Path) -> str | None:
    """The end of what a job wrote to stderr, which lies in its scratch folder."""
    path = scratch / "stderr.txt"
    text = path.read_text(errors="replace")[-OUTPUT_CHARACTERS:] if path.exists() else ""
    return text or None


def _write(path: Path, row: dict) -> None:
    rows.append(path, row)
    print(rows.summary(row), flush=True)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent's end of the pipe is closed
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
