"""Defines the methods that a training step calls to communicate with other ranks, the processes that train one model.

`Ranks` is for a process that trains alone. Its subclass for several ranks is in shares.py. The ranks of one machine, or
of all machines, shard one copy of the model. Each of these ranks stores an equal share of every unit's matrices (a unit
is mostly a block), and of the gradients and optimizer states of these matrices. Each rank stores all vectors.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class Ranks:
    """Represents the ranks of a run with one process. `rank`: this process's number, from 0 to `count` - 1. `sharing`:
    number of processes that shard one copy of the model; this process stores share number `place` of that copy."""

    count, rank = 1, 0
    sharing, place = 1, 0
    machines, alike = 1, True  # alike: all machines have the same number of processes
    on_machine = 1  # the most processes on one machine

    def share_among(self, sharing: int) -> None:
        """Divides the processes into groups of `sharing` consecutive ranks. The processes of each group shard one copy
        of the model. Must be called before a Store is made."""

    def share(self, elements: int) -> int:
        """Returns the number of elements that each process stores of a flat tensor with `elements` elements, padding
        included."""
        return elements

    def window(self, decoder, store):
        """Returns an object that gathers sharded weights before blocks run, with WeightWindow's methods. Returns None
        if this process has all weights."""

    def own(self, micro_batches: Sequence[Item]) -> Sequence[Item]:
        """Returns the micro-batches of a step that this process computes."""
        return micro_batches

    def rounds(self, micro_batches: Sequence[Item]) -> list[tuple[Item, bool]]:
        """Returns (micro-batch, True if its loss counts) for each micro-batch of an evaluation that this process
        computes. All processes compute equally many micro-batches, because they gather weights together."""
        return [(each, True) for each in micro_batches]

    def summed(self, parts: Sequence, now: bool) -> Sequence:
        """Starts to sum the gradients of `parts` (units' matrices or vectors) over all processes. This process must not
        add to these gradients any more. Returns the parts whose sums are ready, each part once; some may be from
        earlier calls. Leaves out parts without a gradient. If `now`, waits for all sums, and returns all parts that
        were not returned yet."""
        return [part for part in parts if part.gradient is not None]

    def total(self, value: float) -> float:
        """Returns the sum of `value` over all processes, in fp64."""
        return value

    def norm(self, norms: Sequence[tuple]) -> float:
        """Returns the norm of the gradients of all parameters over all processes, in fp64. `norms` has a pair for each
        part (a unit's matrices or vectors) with a gradient. The pair is (part, gradient norms of the ranges that the
        part consists of)."""
        return torch.linalg.vector_norm(torch.cat([norms_of_part for _, norms_of_part in norms]).double()).item()

    def range_of(self, shares: Tensor, start: int, stop: int) -> Tensor:
        """Returns elements `start` to `stop` - 1 of a flat tensor that is sharded over several processes. `shares`:
        this process's share of that tensor. Must be called only by the `work` of `on_first`. The other processes wait
        in `on_first` meanwhile, and send their elements."""
        return shares[start:stop]

    def on_first(self, work: Callable[[], Item]) -> Item:
        """Calls `work` in process 0 only. `work` may call `range_of` to read elements that other processes store.
        Returns the result of `work` in all processes, or raises the error of `work` in all."""
        return work()

    def on_all(self, work: Callable[[], Item]) -> Item:
        """Calls `work` in all processes, and returns this process's result. `work` must not communicate with other
        processes. If it fails in some processes, all processes raise the error of the one with the lowest rank."""
        return work()

    def agree_on(self, value) -> bool:
        """Returns True if `value` has the same `repr` in all processes."""
        number = int.from_bytes(sha256(repr(value).encode()).digest()[:7])
        return self.most(number) == -self.most(-number)

    def discard(self) -> None:
        """Drops the gradients whose sums over all processes are not ready yet. Called after a step that has failed."""

    def most(self, number: int) -> int:
        """Returns the largest `number` that any process passes."""
        return number
