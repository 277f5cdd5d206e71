"""Implements ranks.py for several ranks, which shard the matrices of the model (docs/several-gpus.md).

Sums over ranks are made in the order of the ranks, so their bits do not depend on the backend.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import sqrt

import torch
from torch import Tensor

from lowmem.core.decoder import Decoder
from lowmem.core.optimizers import BLOCK
from lowmem.core.parameters import Part, Store
from lowmem.core.ranks import Item, Ranks

SLICE = 2**22  # elements of each share that are exchanged at a time; a rank's two buffers have ranks x SLICE each


class Among(StrEnum):
    SHARES = "the ranks that store a model together"
    REPLICAS = "the ranks that store the same share"


class Gatherer:
    """All-gathers the sharded matrices of a unit, such as a block. Subclasses define three methods: `_gather()` starts
    and returns a handle, `_arrive(handle)` makes later kernels wait, and `_free()` frees the weights."""

    def __init__(self, part: Part):
        self._part = part
        self._version: int | None = None  # `version` of the part when it was gathered; None if it is not
        self._coming: object | None = None  # handle from `_gather`, until the weights have arrived

    @property
    def is_here(self) -> bool:
        """Returns True if the gathered weights have arrived and are the newest."""
        return self._version == self._part.version and self._coming is None

    def start(self) -> None:
        """Starts to gather the weights, unless the newest are here or on their way."""
        if self._version != self._part.version:
            self.let_go()
            self._coming, self._version = self._gather(), self._part.version

    def wait(self) -> None:
        """Makes kernels launched from now on wait for the gathered weights."""
        if self._coming is not None:
            self._arrive(self._coming)
            self._coming = None

    def let_go(self) -> None:
        if self._version is not None:
            self.wait()
            self._free()
            self._version = None


class GatheredWeights:
    """All-gathers sharded weights before the blocks that use them run, instead of WeightWindow (segment_windows.py).
    `units`: {number of a block: its Gatherer}, with -1 for the embeddings and len(blocks) for an untied head. `blocks`:
    the numbers of all blocks. `staying`: those whose weights stay from forward to backward."""

    def __init__(self, units: dict[int, Gatherer], blocks: range, staying: range):
        self._units, self._blocks, self._leaving = units, blocks, [each for each in blocks if each not in staying]

    def watch(self, decoder: Decoder) -> None:
        """Registers hooks that gather weights in an evaluation. All ranks must run the modules in the same order."""
        decoder.before_blocks(self._blocks, self._called)
        decoder.model.register_forward_pre_hook(lambda *_: self._called(-1))
        last = {id(parameter) for parameter in decoder.units[-1].parameters.values()}
        for module in decoder.model.modules():
            if any(id(parameter) in last for parameter in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda *_: self._called(len(self._blocks)))

    def fit(self, segments: Iterable[range]) -> None:
        """Does nothing: memory is allocated when weights are gathered."""

    def fetches_any_of(self, blocks: range) -> bool:
        return True

    def bring(self, blocks: range, following: range | None = None) -> None:
        """Makes the weights of `blocks` available to kernels launched from now on. Starts to gather those of
        `following`, the blocks that run next. Frees those of other blocks, except of the constructor's `staying`
        blocks. All ranks must make the same calls in the same order. No update of `blocks` or `following` may be
        pending."""
        following = following or range(0)
        for block in self._leaving:
            if block not in blocks and block not in following:
                self.let_go(block)
        for unit in (here := self._of(blocks)):
            unit.start()
        for unit in here:
            unit.wait()
        for unit in self._of(following):
            unit.start()

    def let_go(self, block: int) -> None:
        """Frees the gathered weights of `block`, which no kernel needs any more."""
        for unit in self._of([block]):
            unit.let_go()

    def _of(self, blocks: Iterable[int]) -> list[Gatherer]:
        return [self._units[block] for block in blocks if block in self._units]

    def _called(self, block: int) -> None:
        if not all(unit.is_here for unit in self._of([block])):
            for other in self._blocks:  # also the blocks `staying`: an evaluation has no backward to keep them for
                if other not in (block, block + 1):
                    self.let_go(other)
            following = range(block + 1, block + 2) if block + 1 in self._blocks and block in self._blocks else None
            self.bring(range(block, block + 1), following)


class Shares(Ranks):
    """Represents this process as rank number `rank` of `count`.

    Subclasses define these methods. `among` says which ranks exchange data, and r is a number among those ranks:

        gatherer(part, parameters)    the Gatherer of a unit's matrices {name: parameter}
        exchange(came, sent, among)   all-to-all: row r of `sent` goes to rank r, row r of `came` comes from rank r
        gather(came, own, among)      all-gather: row r of `came` becomes `own` [n] of rank r
        beside()                      context manager of a second stream, which waits for earlier kernels
        mark()                        an event after all kernels launched in `beside`
        wait(event)                   makes the compute stream wait for `event`

    They also define `total`, `most`, `on_first`, `on_all` and `range_of` of Ranks, unless they simulate one process.
    """

    def __init__(self, count: int, rank: int):
        self.count, self.rank = count, rank
        self.share_among(count)
        self._weights: GatheredWeights | None = None
        self._vectors: list[Part] = []  # vectors whose gradients are still to be summed
        self._leaving: list[tuple[Part, Tensor, object]] = []  # sums under way, as `_sum_matrices` returns them

    def share_among(self, sharing: int) -> None:
        self.sharing, self.place = sharing, self.rank % sharing

    def share(self, elements: int) -> int:
        return -(-elements // (self.sharing * BLOCK)) * BLOCK

    def window(self, decoder: Decoder, store: Store) -> GatheredWeights:
        units = {
            part.unit - 1: self.gatherer(
                part, {name: decoder.units[part.unit].parameters[name] for name in part.names()}
            )
            for part in store.parts
            if part.is_matrices
        }
        blocks = range(len(decoder.blocks))
        staying = blocks[max(0, len(blocks) - store.layout.gathered) :]
        self._weights = GatheredWeights(units, blocks, staying)
        return self._weights

    def own(self, micro_batches: Sequence[Item]) -> Sequence[Item]:
        return micro_batches[self.rank :: self.count]

    def rounds(self, micro_batches: Sequence[Item]) -> list[tuple[Item, bool]]:
        # All ranks must run equally many micro-batches, because they gather weights together. A rank without one in the
        # last round computes micro-batch 0, and its loss does not count.
        missing = -len(micro_batches) % self.count
        padded = [*((each, True) for each in micro_batches), *[(micro_batches[0], False)] * missing]
        return padded[self.rank :: self.count]

    def summed(self, parts: Sequence[Part], now: bool) -> list[Part]:
        # The sums of one call are made beside the backward pass of the next unit, and are ready in the next call.
        ready, self._leaving = self._leaving, []
        for part in parts:
            if part.is_matrices:
                (ready if now else self._leaving).append(self._sum_matrices(part))
                self._weights.let_go(part.unit - 1)
            else:
                self._vectors.append(part)
        for _, _, event in ready:
            self.wait(event)
        if now:
            self._sum_vectors()
            vectors, self._vectors = self._vectors, []
        return [part for part, _, _ in ready] + (vectors if now else [])

    def discard(self) -> None:
        for _, _, event in self._leaving:  # their memory may be used until then
            self.wait(event)
        self._leaving, self._vectors = [], []

    def _sum_matrices(self, part: Part) -> tuple[Part, Tensor, object]:
        """Starts to sum the gradient of `part` over all ranks. `part.gradient` becomes this rank's share of the sum.
        Returns (part, old gradient, event). After the event, the sum is ready, and the old gradient may be freed."""
        size = part.working.numel()
        own = _gradient(part, size * self.sharing).view(self.sharing, size)
        part.gradient = own.new_empty(size)
        with self.beside():
            self._sum_slices(part.gradient, own)
        return part, own, self.mark()

    def _sum_slices(self, total: Tensor, own: Tensor) -> None:
        for start in range(0, len(total), SLICE):
            of_machine = self._reduced(own[:, start : start + SLICE].contiguous(), Among.SHARES)
            total[start : start + SLICE] = self._sum_of_machines(of_machine)

    def _reduced(self, sent: Tensor, among: Among) -> Tensor:
        """Reduce-scatters `sent` [ranks, n] over the ranks `among`: row r goes to rank r. Returns the sum [n] of
        the rows that come to this rank."""
        came = torch.empty_like(sent)
        self.exchange(came, sent, among)
        return in_order(came)

    def _sum_of_machines(self, own: Tensor) -> Tensor:
        """All-reduces `own` [n]: returns the sum [n] over the ranks that store the same share of the model."""
        machines = self.count // self.sharing
        if machines == 1:
            return own
        # Each of these ranks adds up one range of the n numbers, and sends the result to the others.
        padded = torch.nn.functional.pad(own, (0, -len(own) % machines)).view(machines, -1)
        total = torch.empty_like(padded)
        self.gather(total, self._reduced(padded, Among.REPLICAS), Among.REPLICAS)
        return total.view(-1)[: len(own)]

    def _sum_vectors(self) -> None:
        if not self._vectors:
            return
        sizes = [part.working.numel() for part in self._vectors]
        own = torch.cat([_gradient(part, size) for part, size in zip(self._vectors, sizes, strict=True)])
        for ranks, among in ((self.sharing, Among.SHARES), (self.count // self.sharing, Among.REPLICAS)):
            if ranks > 1:
                came = own.new_empty(ranks, own.numel())
                self.gather(came, own, among)
                own = in_order(came)
        for part, total in zip(self._vectors, own.split(sizes), strict=True):
            part.gradient = total

    def norm(self, norms: Sequence[tuple[Part, Tensor]]) -> float:
        # Each gradient must count once. All ranks have all vectors, so rank 0 counts them. The ranks that store the
        # first copy of the model count their shares of the matrices.
        of_first = self.rank < self.sharing
        counted = [each for each in norms if (of_first if each[0].is_matrices else self.rank == 0)]
        own = super().norm(counted) if counted else 0.0
        return sqrt(self.total(own * own))


def _gradient(part: Part, size: int) -> Tensor:
    if part.gradient is None:
        # This rank computed no micro-batch.
        return torch.zeros(size, device=part.working.device)
    return part.gradient


def in_order(parts: Tensor) -> Tensor:
    """Returns the sum of the rows of `parts`, added from the first to the last."""
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    return total
