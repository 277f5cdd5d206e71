"""Remembers the outcomes of operations, which depend only on the shapes of the arguments.

The key of an outcome is the operation's signature: its function, and the shapes, strides and dtypes of its arguments.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowmem.cudasim.clock import Span

Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]  # with strides
_RUN, _FIRST = "run it", "the first argument"
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Outcome:
    """Holds what is known of an operation after it has run once: its results' shapes, what it allocates, and its effect
    on the clock."""

    results: tuple[type | None, list[Shape]] | str  # the returned type and its tensors' shapes, _FIRST, or _RUN
    allocated: tuple[int, ...]  # indices of the results that are allocated on the device, in order
    temporaries: tuple[int, ...]  # bytes
    spans: tuple[Span, Span]  # effects on the clock in forward and in backward


def tensors_in(result) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple | list) else (result,)) if isinstance(one, Tensor)]


@cache
def is_view(func) -> bool:
    """Returns True if all results of the operator `func` are views of its arguments, according to its schema. Such an
    operation must run each time, because its results share the arguments' memory. It allocates nothing, and takes
    equally long for all arguments. So one Outcome is stored for each such operator."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    only_views = bool(aliases) and not any(alias is None or alias.is_write for alias in aliases)
    return only_views and torch.Tag.inplace_view not in func.tags


def is_simulated(tensor: Tensor) -> bool:
    """Returns True if `tensor` has no numbers. A FakeTensor does not say that it is on meta; its storage is."""
    return tensor.untyped_storage().device.type == "meta"


@cache
def may_resize(func) -> bool:
    """Returns True if an operator may change the size of the storages of its results (`resize_`, or with `out`)."""
    resizes = torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default
    return func in resizes or any(a.is_out for a in func._schema.arguments)


def signature_of(func, args: tuple, kwargs: dict) -> tuple | None:
    """Returns the key under which an operation's outcome is stored. Returns None if its arguments do not allow that: if
    one is a tensor with data, a tensor that is passed twice, or neither a tensor nor a plain value."""
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


def results_of(func, args: tuple, kwargs: dict, result) -> tuple[type | None, list[Shape]] | str:
    """Describes an operation's results, so that later calls need not run it. Returns their container (Tensor, tuple or
    list; None for no result) and their shapes, or _FIRST if the result is the first argument. Returns _RUN if results
    share memory with arguments or each other: such an operation must run each time."""
    if torch.Tag.inplace_view in func.tags or is_view(func):
        return _RUN
    if args and result is args[0]:
        return _FIRST
    if result is None:
        return None, []
    if type(result) not in (Tensor, tuple, list):
        return _RUN
    storages = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
    shapes = []
    for tensor in (result,) if type(result) is Tensor else result:
        if type(tensor) is not Tensor or not tensor.is_meta:
            return _RUN
        storage, shape = tensor.untyped_storage(), (tensor.shape, tensor.stride(), tensor.dtype)
        whole = storage.nbytes() == _made(shape).untyped_storage().nbytes()
        if storage._cdata in storages or tensor.storage_offset() or not whole:
            return _RUN
        storages.add(storage._cdata)
        shapes.append(shape)
    return type(result), shapes


def result_of(outcome: Outcome, func, args: tuple, kwargs: dict):
    if outcome.results is _RUN:
        return func(*args, **kwargs)
    if outcome.results is _FIRST:
        return args[0]
    kind, shapes = outcome.results
    if kind is None:
        return None
    return _made(shapes[0]) if kind is Tensor else kind(map(_made, shapes))


def _made(shape: Shape) -> Tensor:
    return torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")
