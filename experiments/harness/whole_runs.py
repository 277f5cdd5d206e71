"""Whole runs of the main scripts, each in a process of its own, for what their reports say.

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
    """LowmemError where a run of `name`, which leaves so much in `folder` until it ends, has no room there."""
    needed_bytes += DISK_MARGIN_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise LowmemError(
            f"a run of {name} leaves {format_size(needed_bytes)} in {folder} until it ends, and "
            f"{format_size(free_bytes)} are free there: free some room, or let TMPDIR name a larger disk"
        )


def report_of(command: list[str], out: Path, name: str) -> dict:
    """The report.json of a run of `name`: `command`, which is told to write under `out` by its last words.
    LowmemError, with the last of what it said, where it fails."""
    ended = subprocess.run([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        said = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise LowmemError(f"the run of {name} ended with exit code {ended.returncode}: {said[0]}")
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def ram_of(report: dict) -> dict:
    """What a row says of the RAM of a run: its plan's, and the kernel's high-water mark of the process."""
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
    """Runs in this process draw no random weights, write no checkpoint and no model, and are not held to the disk and
    the RAM that are free, none of which is on the card. On the stand-in, without values, nothing of the model is
    touched then."""
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
