"""Numbers the processes of a mesh, and makes their groups.

Process (p D + d) T + t has stage p, replica d and part t of a mesh of P x D x T. Parts of layers send most, so their
processes are neighbours; stages send least between machines, so theirs are farthest apart.
"""

from dataclasses import dataclass
from typing import NamedTuple

from experiments.harness import group
from experiments.tensor_parallel.collectives import Ranks


class Place(NamedTuple):
    stage: int
    replica: int
    part: int


@dataclass(frozen=True)
class Mesh:
    pp: int
    dp: int
    tp: int

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.tp

    def place(self, process: int) -> Place:
        rest, part = divmod(process, self.tp)
        return Place(*divmod(rest, self.dp), part)

    def process(self, stage: int, replica: int, part: int) -> int:
        return (stage * self.dp + replica) * self.tp + part

    def pipelines(self) -> list[list[int]]:
        pairs = [(d, t) for d in range(self.dp) for t in range(self.tp)]
        return [[self.process(p, d, t) for p in range(self.pp)] for d, t in pairs]

    def tensor_groups(self) -> list[list[int]]:
        pairs = [(p, d) for p in range(self.pp) for d in range(self.dp)]
        return [[self.process(p, d, t) for t in range(self.tp)] for p, d in pairs]

    def data_groups(self) -> list[list[int]]:
        pairs = [(p, t) for p in range(self.pp) for t in range(self.tp)]
        return [[self.process(p, d, t) for d in range(self.dp)] for p, t in pairs]

    def replica_groups(self) -> list[list[int]]:
        """Returns the processes that share one copy of the model."""
        return [[n for n in range(self.processes) if self.place(n).replica == d] for d in range(self.dp)]

    def end_groups(self) -> list[list[int]]:
        """Returns the first and last process of each pipeline; none if both are the same."""
        return [[processes[0], processes[-1]] for processes in self.pipelines()] if self.pp > 1 else []


class Axes:
    """The groups of process `own`, which all processes have to make at the same time. `ends` is None unless the process
    is one of two ends of a pipeline."""

    def __init__(self, mesh: Mesh, own: int):
        self.tensor = _ranks(mesh.tensor_groups(), own)
        self.data = _ranks(mesh.data_groups(), own)
        self.replica = _ranks(mesh.replica_groups(), own)
        self.ends = _ranks(mesh.end_groups(), own)


def _ranks(groups: list[list[int]], own: int) -> Ranks | None:
    found = None
    for members in groups:
        made = group.new(members) if len(members) > 1 else None
        if own in members:
            found = Ranks(members.index(own), len(members), made)
    return found
