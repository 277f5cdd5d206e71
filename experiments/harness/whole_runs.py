"""Whole runs of the main scripts, each in a separate process, for what their reports say.

`memory_alone` is for runs of which only the GPU's memory matters, on the stand-in: what takes a large model's minutes
and disk, and nothing of the card, is left out.
"""

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
    """Raises LowmemError if `folder` has no room for a run of `name`, which needs so many bytes until it ends."""
    needed_bytes += DISK_MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise LowmemError(
            f"a run of {name} leaves {format_size(needed_bytes)} in {folder} until it ends, and "
            f"{format_size(free_bytes)} are free there: free some room, or let TMPDIR name a larger disk"
        )


def report_of(command: list[str], out: Path, name: str) -> dict:
    """Runs `command`, which writes under `out`, and returns its report.json. LowmemError, with its last words, if it
    fails."""
    ended = subprocess.run([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise LowmemError(f"the run of {name} ended with exit code {ended.returncode}: {said[0]}")
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def ram_of(report: dict) -> dict:
    """Returns a row's fields on a run's RAM: its plan's figures, and the kernel's high-water mark of the process."""
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
    """Lets runs in this process draw no random weights, write no checkpoint and no model, and ignore free disk and RAM.
    None of this is on the card. On the stand-in, without values, nothing of the model is then touched."""
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
