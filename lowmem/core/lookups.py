"""Adds the gradient of an embedding to its fp32 accumulator [V, D], without a dense gradient [V, D].

No GPU has run this code yet.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

AddRows = Callable[[Tensor, Tensor], None]  # called with ids [N] and rows [N, D]: adds rows[i] to row ids[i]


def register_add_rows(parameter: nn.Parameter, add_rows: AddRows) -> None:
    """Makes lookups in the table `parameter` [V, D] pass their gradient to `add_rows(ids, rows)`, if they run inside
    `with SparseLookups()`. `add_rows` must add rows[i] to row ids[i] of an accumulator [V, D]."""
    parameter._lowmem_add_rows = add_rows


# A dense gradient has zeros for all ids that do not occur. To write and add it moves 12 bytes per element of a 16-bit
# table. Bits differ from autograd's only in T5, of whose two lookups autograd sums the gradients first, and where a
# GPU's atomics round numbers below 1.2e-38 to zero.
class SparseLookups(TorchFunctionMode):
    """Replaces lookups of fewer than V ids, inside `with`, in tables [V, D] that `register_add_rows` was called for.
    Backward computes only the gradient rows of these ids, and adds them to an accumulator. Leaves out tables with
    hooks, and lookups with `max_norm` or `scale_grad_by_freq`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.embedding and _may_be_sparse(*args, **kwargs):
            padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
            return _Lookup.apply(*args[:2], padding)
        return func(*args, **kwargs)


def _may_be_sparse(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> bool:  # fmt: skip
    registered = hasattr(weight, "_lowmem_add_rows") and weight.requires_grad and torch.is_grad_enabled()
    hooked = registered and weight._backward_hooks  # a user's hook gets the whole gradient
    return registered and not hooked and max_norm is None and not scale_grad_by_freq and ids.numel() < len(weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: nn.Parameter, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        ids = ctx.saved_tensors[0].flatten()
        rows = _summed_by_id(ids, gradient.reshape(len(ids), gradient.shape[-1]), len(ctx.weight))
        if ctx.padding_idx is not None:
            rows.masked_fill_((ids == ctx.padding_idx % len(ctx.weight))[:, None], 0)
        ctx.weight._lowmem_add_rows(ids, rows)
        return None, None, None


def _summed_by_id(ids: Tensor, gradient: Tensor, words: int) -> Tensor:
    """Sums the rows of `gradient` [N, D] that have equal `ids` [N]. Returns rows [N, D]: the sum is at the first
    position of each id, and other rows are zeros. `words`: number of rows in the table."""
    positions = torch.arange(len(ids), device=ids.device)
    first = torch.full((words,), len(ids), device=ids.device).scatter_reduce_(0, ids, positions, "amin")
    # The sums have the bits of autograd's dense gradient, because this operator computes them, too.
    return torch.ops.aten.embedding_dense_backward(gradient, first.gather(0, ids), len(ids), -1, False)
