"""Runs the main scripts in separate processes, and reads their reports."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from experiments.harness.rows import ROOT
from lowmem.errors import LowmemError
from lowmem.run import ending, prepare, saver
from lowmem.units import format_size

DISK_MARGIN_BYTES = 2**30


def check_room(folder: str | Path, needed_bytes: int, name: str) -> None:
    """Raises LowmemError, about the model `name`, if `folder` has no room for `needed_bytes` and DISK_MARGIN_BYTES."""
    needed_bytes += DISK_MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise LowmemError(
            f"a run of {name} leaves {format_size(needed_bytes)} in {folder} until it ends, and "
            f"{format_size(free_bytes)} are free there: free some room, or let TMPDIR name a larger disk"
        )


def report_of(command: list[str], out: Path, name: str) -> dict:
    """Runs `command` with --out `out`, and returns its report.json. Raises LowmemError, about `name`, if it fails."""
    ended = subprocess.run([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise LowmemError(f"the run of {name} ended with exit code {ended.returncode}: {said[0]}")
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def ram_of(report: dict) -> dict:
    """Returns a row's fields on a run's RAM: the plan's figures, and the process's high-water mark."""
    plan = report["plan"]
    return {
        "steps": report["steps"],
        "parameters": plan["parameters"],
        "device": report["device"],
        "choice": plan["choice"],
        "predicted_ram_peak_bytes": plan["predicted"]["ram_peak_bytes"],
        "predicted_ram": plan["ram_breakdown"],
        "ram_peak_bytes": report["measured"]["ram_peak_bytes"],
        "step_seconds": report["measured"]["step_seconds"],
    }


@contextmanager
def memory_alone() -> Iterator[None]:
    """Inside `with`, runs in this process skip random weights, checkpoints, export, and checks of disk and RAM. Their
    GPU memory is unchanged."""
    with ExitStack() as stack:
        for patched in (
            patch.object(prepare, "random_weights", lambda *arguments: iter(())),
            patch.object(saver, "save_checkpoint"),
            patch.object(prepare, "check_disk"),
            patch.object(ending, "export_model"),
            patch.object(prepare, "ram_available_bytes", lambda: (2**62, "nothing of it is touched")),
        ):
            stack.enter_context(patched)
        yield
