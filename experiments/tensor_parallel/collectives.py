"""Collectives that autograd knows, each counted. `copy_in` and `reduce` are f and g of Megatron-LM (Shoeybi et al.
2019, arXiv 1909.08053); `gather` and `reduce_scatter` are those of Korthikanti et al. 2022, arXiv 2205.05198."""

from collections import Counter
from functools import partialmethod

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.harness.group import peer_errors

FORWARD, BACKWARD = "forward", "backward"
NOTHING, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, PART = "nothing", "all-reduce", "all-gather", "reduce-scatter", "part"


class Ranks:
    """Process `rank` of `count` that share a model, in `group` (None: all processes). `calls` counts collectives by
    (place, pass, kind); place is the value of `place` in forward. `sent` counts the bytes that a rank sends in a
    ring."""

    def __init__(self, rank: int, count: int, group: dist.ProcessGroup | None = None):
        self.rank, self.count, self.group = rank, count, group
        self.place = ""
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.sent: Counter[tuple[str, str, str]] = Counter()

    def _apply(self, tensor: Tensor, forward: str, backward: str, dim: int = 1) -> Tensor:
        return tensor if self.count == 1 else _Collective.apply(tensor, self, forward, backward, dim)

    copy_in = partialmethod(_apply, forward=NOTHING, backward=ALL_REDUCE)
    reduce = partialmethod(_apply, forward=ALL_REDUCE, backward=NOTHING)
    reduce_both_ways = partialmethod(_apply, forward=ALL_REDUCE, backward=ALL_REDUCE)
    gather = partialmethod(_apply, forward=ALL_GATHER, backward=REDUCE_SCATTER)
    reduce_scatter = partialmethod(_apply, forward=REDUCE_SCATTER, backward=ALL_GATHER)
    gather_replicated = partialmethod(_apply, forward=ALL_GATHER, backward=PART)

    def all_reduce(self, tensor: Tensor, key: tuple[str, str], operation=dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` over all ranks in place, and returns it. `key`: place and pass, for the counts."""
        if self.count > 1:
            with peer_errors():
                dist.all_reduce(tensor, operation, group=self.group)
            self._count(key, ALL_REDUCE, 2 * tensor.nbytes)
        return tensor

    def _all_gather(self, tensor: Tensor, dim: int, key: tuple[str, str]) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        with peer_errors():
            dist.all_gather(parts, tensor, group=self.group)
        self._count(key, ALL_GATHER, self.count * tensor.nbytes)
        return torch.cat(parts, dim)

    def _reduce_scatter(self, tensor: Tensor, dim: int, key: tuple[str, str]) -> Tensor:
        parts = [part.contiguous() for part in tensor.chunk(self.count, dim)]
        found = torch.empty_like(parts[0])
        with peer_errors():
            dist.reduce_scatter(found, parts, group=self.group)
        self._count(key, REDUCE_SCATTER, tensor.nbytes)
        return found

    def _count(self, key: tuple[str, str], kind: str, bytes_of_ring: int) -> None:
        self.calls[*key, kind] += 1
        # In a ring: (N - 1) / N of the tensor for an all-gather or a reduce-scatter, twice that for an all-reduce.
        self.sent[*key, kind] += bytes_of_ring * (self.count - 1) // self.count

    def do(self, kind: str, tensor: Tensor, dim: int, key: tuple[str, str]) -> Tensor:
        """Returns the result of a collective of this kind as a new tensor; of NOTHING as a view."""
        if kind == NOTHING:
            return tensor.view_as(tensor)
        if kind == PART:
            return tensor.chunk(self.count, dim)[self.rank].contiguous()
        if kind == ALL_REDUCE:
            return self.all_reduce(tensor.clone(memory_format=torch.contiguous_format), key)
        return (self._all_gather if kind == ALL_GATHER else self._reduce_scatter)(tensor.contiguous(), dim, key)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, ranks: Ranks, forward: str, backward: str, dim: int) -> Tensor:
        ctx.of = ranks, backward, dim, ranks.place
        return ranks.do(forward, tensor, dim, (ranks.place, FORWARD))

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ranks, backward, dim, place = ctx.of
        return ranks.do(backward, gradient, dim, (place, BACKWARD)), None, None, None, None
