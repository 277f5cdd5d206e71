"""Defines the cache of operations' costs (allocations and time), which depend on the arguments' shapes, not values."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowmem.cudasim.clock import Span

Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]  # with strides
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Outcome:
    """Holds the cached costs of an operation: what it allocates, and its time."""

    made: tuple[type, list[Shape]] | None  # container and tensors of its results; None if it must run each time
    allocated: tuple[int, ...]  # indices of the results that are allocated on the device, in order
    temporaries: tuple[int, ...]  # bytes
    spans: tuple[Span, Span]  # effects on the clock in forward and in backward


def tensors_in(result) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple | list) else (result,)) if isinstance(one, Tensor)]


@cache
def is_view(func) -> bool:
    """Returns True if all results of the operator `func` are views of its arguments. Then every call takes the same
    time, for all shapes, and no memory."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    only_views = bool(aliases) and not any(alias is None or alias.is_write for alias in aliases)
    return only_views and torch.Tag.inplace_view not in func.tags


def is_simulated(tensor: Tensor) -> bool:
    """Returns True if `tensor` has no data: a meta tensor, or a FakeTensor."""
    # A FakeTensor's `device` may be another one.
    return tensor.untyped_storage().device.type == "meta"


@cache
def may_resize(func) -> bool:
    resizes = torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default
    return func in resizes or any(a.is_out for a in func._schema.arguments)


def signature_of(func, args: tuple, kwargs: dict) -> tuple | None:
    """Returns the cache key of an operation: function; default dtype, which decides some results' dtype; shapes,
    strides and dtypes of tensors; other arguments. Returns None if its costs cannot be cached: a tensor has data or is
    passed twice, or an object is no plain value."""
    signature = [func, torch.get_default_dtype()]
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


def new_tensors_of(func, args: tuple, kwargs: dict, result) -> tuple[type, list[Shape]] | None:
    """Returns container (Tensor, tuple or list) and shapes of an operation's results, if each is a new tensor with a
    storage of its own and of its size. Then later calls need not run the operation. Returns None otherwise."""
    if is_view(func) or may_resize(func) or type(result) not in (Tensor, tuple, list):
        return None
    given = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.layout is torch.strided)
    storages, shapes = {one.untyped_storage()._cdata for one in given}, []
    for tensor in (result,) if type(result) is Tensor else result:
        if type(tensor) is not Tensor or not tensor.is_meta or tensor.layout is not torch.strided:
            return None
        if tensor.untyped_storage()._cdata in storages:
            return None
        storages.add(tensor.untyped_storage()._cdata)
        shapes.append((tensor.shape, tensor.stride(), tensor.dtype))
        if (
            tensor.storage_offset()
            or tensor.untyped_storage().nbytes() != _made(*shapes[-1]).untyped_storage().nbytes()
        ):
            return None
    return type(result), shapes


def made_again(kind: type, shapes: list[Shape]):
    """Returns new tensors without data, as described by `new_tensors_of`."""
    return _made(*shapes[0]) if kind is Tensor else kind(_made(*shape) for shape in shapes)


def _made(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
