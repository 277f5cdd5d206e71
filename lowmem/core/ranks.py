"""Defines how a training step communicates with other ranks, the processes that train one model
(docs/several-gpus.md)."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class Ranks:
    """Does what the processes (ranks) of a run must do together, such as sums and agreeing on errors. This class is for
    a run with one process; its subclass Shares (shares.py) is for several."""

    count, rank = 1, 0  # number of processes; this process's number, from 0
    sharing, place = 1, 0  # number of processes that shard one copy of the model; this process's number among them
    machines, alike = 1, True  # number of machines; True: all have the same number of processes
    on_machine = 1  # the most processes on one machine

    def share_among(self, sharing: int) -> None:
        """Divides the ranks (processes) into groups of `sharing` consecutive ones. Each group shards one copy of the
        model. Must be called before a Store is made."""

    def share(self, elements: int) -> int:
        """Returns how many of `elements` numbers each process stores, padding included."""
        return elements

    def window(self, decoder, store):
        """Returns an object that gathers sharded weights, to be used instead of WeightWindow (copies weights from RAM).
        Returns None if this process has all weights."""

    def own(self, micro_batches: Sequence[Item]) -> Sequence[Item]:
        """Returns those of a step's `micro_batches` that this process computes."""
        return micro_batches

    def rounds(self, micro_batches: Sequence[Item]) -> list[tuple[Item, bool]]:
        """Returns the micro-batches that this process computes in an evaluation, as pairs (micro-batch, True if its
        loss counts). All processes get equally many, so some may get one that does not count."""
        return [(each, True) for each in micro_batches]  # processes gather weights together in each round

    def summed(self, parts: Sequence, now: bool) -> Sequence:
        """Starts to sum the final gradients of `parts` over all processes. Returns all parts whose sums are ready and
        that no earlier call has returned; they need not be among `parts`. `now`: True to wait for all sums. A process
        that trains alone returns those of `parts` that have a gradient."""
        return [part for part in parts if part.gradient is not None]

    def total(self, value: float) -> float:
        """Returns the sum of `value` over all processes, in fp64."""
        return value

    def norm(self, norms: Sequence[tuple]) -> float:
        """Returns the norm of all gradients over all processes, in fp64. `norms`: pairs of a Part and a tensor. The
        tensor has a gradient norm for each range of the part that one update changes."""
        return torch.linalg.vector_norm(torch.cat([norms_of_part for _, norms_of_part in norms]).double()).item()

    def range_of(self, shares: Tensor, start: int, stop: int) -> Tensor:
        """Returns elements `start` to `stop` - 1 of a sharded tensor. `shares`: this process's share. May be called
        only in the `work` of `on_first`."""
        return shares[start:stop]

    def on_first(self, work: Callable[[], Item]) -> Item:
        """Calls `work` in process 0 only. Returns its result, or raises its error, in all processes."""
        return work()

    def on_all(self, work: Callable[[], Item]) -> Item:
        """Calls `work`, which must not communicate, in all processes. Returns this process's result. If some processes
        fail, all raise the error of the one with the lowest rank."""
        return work()

    def agree_on(self, value) -> bool:
        """Returns True if `value` has the same `repr` in all processes."""
        number = int.from_bytes(sha256(repr(value).encode()).digest()[:7])
        return self.most(number) == -self.most(-number)

    def discard(self) -> None:
        """Drops the gradients that `summed` was given and has not returned, such as those of a failed step."""

    def most(self, number: int) -> int:
        """Returns the largest `number` of all processes."""
        return number
