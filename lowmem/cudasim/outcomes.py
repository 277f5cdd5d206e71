"""What is known of an operation on tensors without data, so that it is not run again for the same shapes.

An operation's signature is its function with the shapes, strides and dtypes of its arguments. Its outcome says what its
results look like, what it allocates and how long it takes, whatever the tensors are.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowmem.cudasim.clock import Span

_RUN, _FIRST = "run", "the first argument"  # in the place of an outcome's results
_NO_TENSOR = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Outcome:
    """What is known of an operation on arguments of certain shapes. `results`: Tensor, tuple, list or None, whichever
    it returns, and the shape, stride and dtype of each tensor in that; _FIRST: its first argument; _RUN: it has to be
    run, as a view has. `allocated`: which of the results are allocated on the device, in order; `temporaries`: sizes;
    `spans`: its effect on the clock, in forward and in backward."""

    results: tuple[type | None, list[tuple]] | str
    allocated: tuple[int, ...]
    temporaries: tuple[int, ...]
    spans: tuple[Span, Span]


def tensors_in(result) -> list[Tensor]:
    return [one for one in (result if isinstance(result, tuple | list) else (result,)) if isinstance(one, Tensor)]


@cache
def is_view(func) -> bool:
    """Whether an operation returns a view of what it is given and does nothing else, whatever that is: it has to be
    run, and costs the host the same every time."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    only_views = bool(aliases) and not any(alias is None or alias.is_write for alias in aliases)
    return only_views and torch.Tag.inplace_view not in func.tags


def signature_of(func, args: tuple, kwargs: dict) -> tuple | None:
    """What the outcome of an operation depends on; None where that cannot be said: tensors that have data or are of
    another class, one that is given twice, objects that are neither tensors nor numbers."""
    signature, seen = [func], set()
    if not _add_to_signature(signature, args, seen):
        return None
    for name, value in kwargs.items():
        signature.append(name)
        if not _add_to_signature(signature, (value,), seen):
            return None
    return tuple(signature)


def _add_to_signature(signature: list, values: tuple | list, seen: set[int]) -> bool:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if not value.is_meta or id(value) in seen:
                return False
            seen.add(id(value))
            strides = value.stride()
            signature += (value.shape, strides, value.dtype)
            if 0 in strides:  # how much there is of it
                signature.append(value.untyped_storage().nbytes())
        elif kind in _NO_TENSOR:
            signature += (kind, value)
        elif kind is list or kind is tuple:
            signature += (kind, len(value))
            if not _add_to_signature(signature, value, seen):
                return False
        else:
            return False
    return True


def results_of(func, args: tuple, kwargs: dict, result) -> tuple[type | None, list[tuple]] | str:
    """The `results` of an Outcome: what can be made without running it are tensors with a storage each, all of it."""
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
    """What `func` returns, of which this outcome is known."""
    if outcome.results is _RUN:
        return func(*args, **kwargs)
    if outcome.results is _FIRST:
        return args[0]
    kind, shapes = outcome.results
    if kind is None:
        return None
    return _made(shapes[0]) if kind is Tensor else kind(map(_made, shapes))


def _made(shape: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> Tensor:
    return torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")
