"""Runs one job in this process: calls its function, and writes its rows of results. Programs start it, never a user.

    python -m experiments.harness.child probe        describes this machine, as JSON on stdout
    python -m experiments.harness.child '{task}'     one job; exit code 0 if every check held, 3 if one did not

The process ends when its standard input closes, so that nothing stays on the GPU.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.harness import rows
from experiments.harness.progress import Progress
from lowmem.units import GIB

OUTPUT_CHARACTERS = 4000
A_CHECK_FAILED = 3  # exit code; a crash is 1, or a signal
DRY_RUN_SECONDS = 200.0  # more are planned for whatever runs on processors alone, which others may keep busy


@dataclass(frozen=True)
class Result:
    values: dict
    checks: dict[str, bool]

    @property
    def held(self) -> bool:
        return all(self.checks.values())


@dataclass(frozen=True)
class Setting:
    """Describes how a job runs. `scratch`: a folder that is removed after the job. `record(detail, values, checks)`
    writes a row, and returns True if all checks held. `kept`: folder for files next to the rows; None: write none.
    `stand_in`: True if the GPU is simulated, so times mean nothing. `flops_per_second`: in large 16-bit matmuls."""

    device: str
    dry_run: bool
    gpu_limit_bytes: int | None
    ram_limit_bytes: int | None
    scratch: Path
    record: Callable[[str, dict, dict[str, bool]], bool]
    kept: Path | None = None
    stand_in: bool = False
    flops_per_second: float = float("inf")

    def expect(self, planned_seconds: float) -> None:
        """Tells the command that started this job how many seconds the next work should take. The command ends the
        job's process if it takes much longer."""
        self._begin(None, planned_seconds)

    def attempt(self, case: str, work: Callable[[], Result], planned_seconds: float = 0.0) -> Result:
        """Calls `work`, writes a row for `case` and returns the result. If the case ended in an earlier process of this
        job, only returns that case's result. Must be called for a job's cases in a fixed order."""
        progress = Progress(self.scratch)
        known = progress.done().get(case)
        if known is not None:
            return Result(**known)
        self._begin(case, planned_seconds)
        result = work()
        self.record(case, result.values, result.checks)
        progress.end(case, result.values, result.checks)
        self.expect(0.0)  # for what the job does between its cases
        return result

    def _begin(self, case: str | None, planned_seconds: float) -> None:
        Progress(self.scratch).begin(case, planned_seconds + (DRY_RUN_SECONDS if self.dry_run else 0.0))

    def passed(self, case: str) -> bool:
        return case in Progress(self.scratch).done()


class Unavailable(Exception):
    """This machine lacks something that a job needs: neither a crash nor a result."""


def main() -> int:
    if sys.argv[1] == "probe":
        print(json.dumps(probe()))
        return 0
    threading.Thread(target=end_with_parent, daemon=True).start()
    return run(json.loads(sys.argv[1]))


def run(task: dict) -> int:
    """Runs the job that `task` describes: calls its function, named in `task["target"]`, and writes its rows. Returns
    the exit code: 0 if every check held, else 3."""
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
        task["device"], task["common"]["dry_run"], _bytes(task["gpu_gib"]), _bytes(task["ram_gib"]), scratch, record,
        path.parent, task["common"]["stand_in"], task["flops_per_second"],
    )  # fmt: skip
    missing, output = None, None
    try:
        result = named(task["target"])(setting, **task["options"])
    except Unavailable as error:
        missing, result = str(error), Result({}, {})
    held = missing is None and result.held
    if missing is None and not held:
        output = output_of(scratch)
    row = rows.make_row(
        task["common"], task["name"], time.perf_counter() - started, values=result.values, checks=result.checks,
        error=missing, output=output,
    )  # fmt: skip
    _write(path, row)
    return 0 if held else A_CHECK_FAILED


def named(name: str):
    """Imports and returns the object "module:attribute". So jobs name other experiments' functions, and import none."""
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def machine_here() -> dict:
    """Returns the result of `probe`, called in another process. Names and versions are empty if that process fails."""
    # A CUDA context in this process would take memory from every job.
    command = [sys.executable, "-m", "experiments.harness.child", "probe"]
    result = subprocess.run(command, cwd=rows.ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    return json.loads(result.stdout) if result.returncode == 0 else {"names": {}, "versions": {}}


def probe() -> dict:
    """Returns {"names": {"cpu": ..., "cuda": ... if there is a GPU}, "versions": {...}, "cards": number of GPUs}."""
    import torch

    from lowmem.run.report import device_name, versions

    cuda = torch.cuda.is_available()
    names = {kind: device_name(torch.device(kind)) for kind in ("cpu", *(["cuda"] if cuda else []))}
    more = {"cuda": torch.version.cuda}
    return {"names": names, "versions": versions() | more, "cards": torch.cuda.device_count()}


def output_of(scratch: Path) -> str | None:
    """Returns the end of a job's stderr, or None if the job wrote nothing. `scratch`: the job's folder."""
    path = scratch / "stderr.txt"
    text = path.read_text(errors="replace")[-OUTPUT_CHARACTERS:] if path.exists() else ""
    return text or None


def _write(path: Path, row: dict) -> None:
    rows.append(path, row)
    print(rows.summary(row), flush=True)


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def end_with_parent() -> None:
    """Ends this process when its standard input closes. Runs in a thread."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    from experiments.harness import child  # not this copy of it, whose Unavailable is another class than the jobs'

    sys.exit(child.main())
