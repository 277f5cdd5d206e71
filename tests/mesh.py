"""Faults of a mesh's processes, each in all of them."""

from functools import partial
from unittest.mock import patch

from experiments.harness import parallel
from experiments.parallel_3d.run import WORK
from experiments.parallel_3d.worker import Job, Process, Told

COUNTED, CLIP = Process.counted_square, Process.clip
FAULTS = {  # methods of Process, and what stands in their place
    "a tied embedding's gradients are not added up": ("add_tied", lambda self: None),
    "the replicas' gradients are not added up": ("add_replicas", lambda self: None),
    "a tied embedding counts twice in the norm": (
        "counted_square",
        lambda self: patch.object(self.piece, "tied", None)(COUNTED)(self),
    ),
    "what is whole on all parts counts in each": (
        "counted_square",
        lambda self: patch.object(self, "place", self.place._replace(part=0))(COUNTED)(self),
    ),
    "a stage's norm counts alone": ("clip", lambda self: patch.object(self.axes.replica, "count", 1)(CLIP)(self)),
}


def trained(job: Job, fault: str | None = None) -> list[Told]:
    """Trains a job in as many processes as it has; with one of FAULTS in all of them."""
    return parallel.train(WORK, job, job.mesh.processes, None if fault is None else partial(_put, fault))


def _put(fault: str) -> None:
    setattr(Process, *FAULTS[fault])
