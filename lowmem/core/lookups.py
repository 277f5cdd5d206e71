"""Adds the gradient of an embedding to its fp32 accumulator [V, D], without a dense gradient [V, D].

Autograd's gradient of an embedding lookup has a row for each token id of the vocabulary. The rows of all ids that do
not occur are zero. For each micro-batch, writing and adding this gradient moves 12 bytes per element of a 16-bit table.
`SparseLookups` adds only the rows of the micro-batch's ids. The bits are those of autograd's gradient, except:

  * T5 looks up one table twice. Autograd sums both gradients first, while this code adds each to the accumulator.
  * On a GPU, atomic additions round numbers below 1.2e-38 to zero.

No GPU has run this code yet.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

AddRows = Callable[[Tensor, Tensor], None]  # called with ids [N] and rows [N, D]: adds rows[i] to row ids[i]


def accumulated_by_rows(parameter: nn.Parameter, add_rows: AddRows) -> None:
    """Makes `SparseLookups` pass the gradient of `parameter` [V, D] to `add_rows`, which must add it to the parameter's
    accumulator."""
    parameter._lowmem_add_rows = add_rows


class SparseLookups(TorchFunctionMode):
    """Replaces `F.embedding` inside `with`, for tables that `accumulated_by_rows` has registered. Backward then adds
    only the gradient rows of the ids to the table's accumulator. Some lookups stay as they are: those with at least as
    many ids as the table has rows, with `max_norm` or `scale_grad_by_freq`, and those in tables with a user's hook."""

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
    """Sums the rows of `gradient` [N, D] that have the same id. Returns rows [N, D]. The first position of each id has
    the sum over all positions with this id; all other rows are zero. `ids` [N] are below `words`. The sums have the
    bits of autograd's dense gradient."""
    positions = torch.arange(len(ids), device=ids.device)
    first = torch.full((words,), len(ids), device=ids.device).scatter_reduce_(0, ids, positions, "amin")
    return torch.ops.aten.embedding_dense_backward(gradient, first.gather(0, ids), len(ids), -1, False)
