"""Defines the cache of operations' costs: allocations and time, which depend only on the arguments' shapes, not values.

The cache key of an Outcome is the operation's signature: its function, and the shapes, strides and dtypes of its
arguments.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowmem.cudasim.clock import Span

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Outcome:
    """Holds the cached costs of an operation that has run once: what it allocates, and how it changes the simulated
    clock."""

    allocated: tuple[int, ...]  # indices of the results that are allocated on the device, in order
    temporaries: tuple[int, ...]  # bytes
    spans: tuple[Span, Span]  # effects on the clock in forward and in backward


def tensors_in(result) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple | list) else (result,)) if isinstance(one, Tensor)]


@cache
def is_view(func) -> bool:
    """Returns True if all results of the operator `func` are views of its arguments, according to its schema. Such an
    operation allocates nothing, and takes equally long for all arguments. So all its calls can share one cached Outcome
    (allocations and time)."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    only_views = bool(aliases) and not any(alias is None or alias.is_write for alias in aliases)
    return only_views and torch.Tag.inplace_view not in func.tags


def is_simulated(tensor: Tensor) -> bool:
    """Returns True if `tensor` has no data: a meta tensor, or a FakeTensor. A FakeTensor's `device` may be another one,
    but its storage is on meta."""
    return tensor.untyped_storage().device.type == "meta"


@cache
def may_resize(func) -> bool:
    """Returns True if an operator may change the size of the storages of its results: `resize_`, `resize_as_`, or an
    operator with an `out` argument."""
    resizes = torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default
    return func in resizes or any(a.is_out for a in func._schema.arguments)


def signature_of(func, args: tuple, kwargs: dict) -> tuple | None:
    """Returns the cache key of an operation, for its costs. Returns None if the costs cannot be cached. These arguments
    prevent it: a tensor with data, a tensor that is passed twice, and a value that is neither a tensor nor plain (such
    as a number)."""
    signature = [func]
    known = _add_to_signature(signature, (*args, *kwargs, *kwargs.values()), set())
    return tuple(signature) if known else None


def _add_to_signature(signature: list, values: tuple | list, seen: set[int]) -> bool:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if not value.is_meta or id(value) in seen:
                return False
            seen.add(id(value))
            strides = value.stride()
            signature += (value.shape, strides, value.dtype)
            if 0 in strides:  # then the shape does not say how many bytes exist
                signature.append(value.untyped_storage().nbytes())
        elif kind in _PLAIN:
            signature += (kind, value)
        elif kind is list or kind is tuple:
            signature += (kind, len(value))
            if not _add_to_signature(signature, value, seen):
                return False
        else:
            return False
    return True
