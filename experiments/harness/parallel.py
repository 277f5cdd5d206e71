"""Runs a training in several processes, new ones or torchrun's, and collects their results."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.harness import group
from experiments.harness.child import named
from experiments.harness.curves import draw_curves
from lowmem.errors import LowmemError
from lowmem.run.metrics import write_json

TASK, TOLD = "task.pt", "told.pt"


def train(work: str, job: Any, ranks: int, prepare: Callable[[], None] | None = None) -> list | None:
    """Calls work(job, rank, device) in `ranks` processes, which it starts unless torchrun has. `work`: name of the
    function, "module:function". Returns all results by rank; None in torchrun's processes of other ranks than 0.
    `prepare`: called first in each started process. Raises ProcessFailed, with the cause, if one of these fails."""
    if group.is_one_of_torchruns():
        rank = int(os.environ["RANK"])
        device = group.begin(None, rank, ranks)
        jobs = [job]  # of each process its own; what was measured to make one differs, so rank 0's counts
        dist.broadcast_object_list(jobs, src=0)
        told = _told(work, jobs[0], rank, device)
        dist.destroy_process_group()
        return told
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((work, job, ranks), folder / TASK)
        group.run(partial(_take_part, prepare=prepare), folder, ranks)
        return torch.load(folder / TOLD, weights_only=False)


def _take_part(folder: Path, rank: int, prepare: Callable[[], None] | None) -> None:
    if prepare is not None:
        prepare()
    work, job, ranks = torch.load(folder / TASK, weights_only=False)
    told = _told(work, job, rank, group.begin(folder, rank, ranks))
    if told is not None:
        torch.save(told, folder / TOLD)
    dist.destroy_process_group()


def _told(work: str, job: Any, rank: int, device: torch.device) -> list | None:
    own = named(work)(job, rank, device)
    told = [None] * dist.get_world_size() if rank == 0 else None
    with group.peer_errors():
        dist.gather_object(own, told)
    return told


def write_report(report: dict, out: Path, said: str) -> None:
    """Writes `report` and its loss curves into `out`, prints `said`. Raises LowmemError if the training diverged."""
    if report["losses"]:
        draw_curves(report["losses"], out / "curves.png")
    write_json(out / "report.json", report)
    print(f"{said}\nsee {out / 'report.json'}")
    if report["diverged"]:
        raise LowmemError(report["diverged"])
