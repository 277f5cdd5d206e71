"""Records the PyTorch operations of a piece of code, and later repeats them without its Python (recordings.py)."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_FASTER = {  # Python functions for the same operators, which take half the time
    _aten.view.default: Tensor.view,
    _aten.transpose.int: Tensor.transpose,
    _aten.permute.default: Tensor.permute,
    _aten.new_empty.default: Tensor.new_empty,
    _aten.empty_like.default: torch.empty_like,
    _aten.mm.default: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten.add.Tensor: torch.add,
    _aten.mul.Tensor: torch.mul,
    _aten.sum.dim_IntList: torch.sum,
    _aten.cat.default: torch.cat,
    _aten.gelu.default: functional.gelu,
    _aten.native_dropout.default: torch.native_dropout,
}
# Not repeated: Python may have read values, or the shape of a tensor depends on values or changes.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_MASKS = (torch.bool, torch.uint8)
_COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Not new_empty: a skipped product returns such a tensor without values, which is read (products.py).
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default)
_active: "OperationRecorder | None" = None


def called_again(function: Callable[..., None], *arguments) -> None:
    """Calls `function(*arguments)`. If operations are being recorded, records this call instead of the operations that
    `function` runs. So `function` is called again whenever the recording is repeated."""
    if _active is None:
        function(*arguments)
    else:
        _active.call(function, arguments)


@dataclass
class _Call:
    # Integers are indices in the recording's list of values.
    function: Callable
    take: Callable[[list], tuple]  # gets the positional arguments from that list
    keywords: dict[str, Any]
    results: int | tuple[int | None, ...] | None  # index of the result or of each; None if it is not used
    dead: list[int] = field(default_factory=list)  # not used after this call: the recorded run freed their memory here


class Recording:
    """Repeats recorded operations on new arguments, given as a list. `values`: list with the recorded constants, and
    None in the places of arguments and results. `arguments`: pairs (index in `values`, index in the list of new
    arguments). `result`: index in `values` of the tensor that a repeat returns."""

    def __init__(self, values: list, arguments: Sequence[tuple[int, int]], calls: Iterable[_Call], result: int):
        self._values, self._arguments, self._result = values, arguments, result
        self._calls = [
            (_FASTER.get(call.function, call.function), call.take, call.keywords, call.results, tuple(call.dead))
            for call in calls
        ]

    def __call__(self, arguments: Sequence) -> Tensor:
        values = self._values.copy()  # only the constants are set
        for place, number in self._arguments:
            values[place] = arguments[number]
        with torch._C._AutoDispatchBelowAutograd():
            for function, take, keywords, results, dead in self._calls:
                result = function(*take(values), **keywords)
                if type(results) is int:
                    values[results] = result
                elif results is not None:
                    for place, one in zip(results, result, strict=True):
                        if place is not None:
                            values[place] = one
                result = one = None  # noqa: F841  a reference would keep memory
                for place in dead:
                    values[place] = None
        return values[self._result]


class OperationRecorder(TorchDispatchMode):
    """Records the PyTorch operations that run inside `with`. `arguments`: tensors and objects that are replaced when
    the recording is repeated; the first must be a tensor. `constants`: modules whose parameters and buffers the
    operations may use. `alone`: the result of `holders_if_alone` to add up gradients in place, as autograd does; None
    to add them out of place."""

    def __init__(self, arguments: Sequence, constants: Iterable[nn.Module], alone: tuple | None = None):
        super().__init__()
        self._device, self._alone = arguments[0].device, alone
        self.holders: tuple | None = None  # counts for the last gradient that another was added to
        self.refusal: str | None = None  # why the run cannot be repeated; None if it can
        self._constants = [t for module in constants for t in (*module.parameters(), *module.buffers())]
        self._values: list = []
        self._calls: list[_Call] = []
        # Indices of tensors in `_values`, by storage and geometry: of arguments and constants, and of results.
        self._given: dict[int, dict[tuple, int]] = {}
        self._born: dict[int, tuple[weakref.ref, dict[tuple, int]]] = {}
        self._unwritten: set[int] = set()  # storages into which no operation has written
        self._lists: list[int] = []  # places of lists of tensors, which only the next call uses
        self._paused = False
        self._arguments: list[tuple[int, int]] = []
        self._objects: dict[int, int] = {}  # places of arguments that are no tensors, by id
        for number, argument in enumerate(arguments):
            is_tensor = isinstance(argument, Tensor)
            known = self._given.setdefault(address_of(argument), {}) if is_tensor else self._objects
            key = geometry_of(argument) if is_tensor else id(argument)
            if key not in known:
                known[key] = self._new(None)
                self._arguments.append((known[key], number))

    def __enter__(self):
        global _active
        _active = self
        return super().__enter__()

    def __exit__(self, *exception):
        global _active
        _active = None
        return super().__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch.compile's wrapper would be the caller of each operation

    def recording(self, result: Tensor) -> Recording | None:
        """Returns a Recording of the operations so far, which returns `result` when it is repeated. Returns None if
        they cannot be repeated; `refusal` then says why."""
        place = self._place(result)
        return None if self.refusal else Recording(self._values, self._arguments, self._calls, place)

    def call(self, function: Callable, arguments: Sequence) -> None:
        """Calls `function`, and records this call without the operations inside."""
        take = self._take(arguments)
        with patch.object(self, "_paused", True):
            function(*arguments)
        self._note(function, take, {}, None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Without a dispatch mode, autograd adds a second gradient to the first in place if nothing else holds the first
        # (accumulate in input_buffer.cpp). Under a dispatch mode it never does, so it is done here, unless `alone` is
        # None.
        if function is _aten.add.Tensor and _called_by_the_engine() and args[0].shape == args[1].shape:
            self.holders = _holders(args)
            if self.holders == self._alone and _is_dense(args[0]):
                function = _aten.add_.Tensor
                increment_version(args[0])  # PyTorch does it only without a dispatch mode
        result = function(*args, **kwargs)
        if not (self._paused or self.refusal):
            self._note_operation(function, args, kwargs, result)
        return result

    def _note_operation(self, function, args: tuple, kwargs: dict, result) -> None:
        several, is_view = isinstance(result, tuple | list), function.is_view
        results = result if several else (result,)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if function is _aten.lift_fresh.default:  # torch.tensor(...): numbers of Python are part of the code
            constant = self._new(result.to("cpu", copy=True))  # on the device it would take memory between repeats
            again = {"device": result.device, "copy": True}
            self._note(Tensor.to, lambda values: (values[constant],), again, self._result(result))
            return
        self._refuse(function, given, [one for one in results if isinstance(one, Tensor)])
        if self.refusal:
            return
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(kwargs)):
            function = partial(_with_keywords, function, tuple(kwargs))
            args, kwargs = (*args, *kwargs.values()), {}
        take = self._take(args)
        places = [self._result(one) for one in results]
        if is_view and all(place is None for place in places):
            return  # the same elements of the same memory have a place
        self._note(function, take, kwargs, tuple(places) if several else places[0])

    def _note(self, function: Callable, take: Callable, keywords: dict, results) -> None:
        self._calls.append(_Call(function, take, keywords, results, self._lists))
        self._lists = []

    def _refuse(self, function, given: list[Tensor], results: list[Tensor]) -> None:
        whole = function is _aten.index.Tensor and not any(tensor.dtype in _MASKS for tensor in given)
        if _TAGS.intersection(function.tags) and not whole:
            self.refusal = f"{function} depends on values, or changes a tensor's shape"
        if any(tensor.layout is not torch.strided or tensor.is_complex() for tensor in results):
            self.refusal = f"{function} makes a tensor that is sparse or complex"
            return
        if any(tensor.device != self._device for tensor in results):
            self.refusal = f"{function} copies to another device"
        elif self._device.type == "cpu" and any(map(Tensor.is_floating_point, given)):
            if any(tensor.dtype in _COUNTS for tensor in results):
                self.refusal = f"{function} makes integers, which Python may read in the CPU's memory"
        addresses = {address_of(tensor) for tensor in given}
        if function in _EMPTY:
            self._unwritten.update(map(address_of, results))
        elif function._schema.is_mutable:
            self._unwritten -= addresses
        elif not function.is_view and self._unwritten & addresses:
            self.refusal = f"{function} reads memory that no operation has written: a kernel that is no operator has"

    def _new(self, value) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _take(self, arguments: Sequence) -> Callable[[list], tuple]:
        places = [self._place(argument) for argument in arguments]
        if len(places) > 1:
            return itemgetter(*places)
        return (lambda values, place=places[0]: (values[place],)) if places else lambda values: ()

    def _place(self, value) -> int:
        if isinstance(value, Tensor):
            return self._place_of_tensor(value)
        if id(value) in self._objects:
            return self._objects[id(value)]
        if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
            made = self._new(None)
            self._calls.append(_Call(lambda *values: list(values), self._take(value), {}, made, []))
            self._lists.append(made)
            return made
        return self._new(value)

    def _place_of_tensor(self, tensor: Tensor) -> int:
        address, geometry = address_of(tensor), geometry_of(tensor)
        _, known = self._born.get(address) or (None, self._given.setdefault(address, {}))
        if geometry not in known:
            same = (c for c in self._constants if address_of(c) == address and geometry_of(c) == geometry)
            constant = next(same, None)
            if constant is None:
                self.refusal = "it uses a tensor that is neither an argument nor a parameter"
            known[geometry] = self._new(constant)
        return known[geometry]

    def _result(self, result) -> int | None:
        """Reserves a place in the list of values for `result`, an operation's result, and returns its index. Returns
        None if `result` is no tensor, or if a tensor of the same memory and shape has a place already."""
        if not isinstance(result, Tensor):
            return None
        address, geometry = address_of(result), geometry_of(result)
        if address in self._given:
            known = self._given[address]
        else:
            if address not in self._born:
                reference = weakref.ref(result.untyped_storage(), lambda _: self._died(address))
                self._born[address] = reference, {}
            _, known = self._born[address]
        if geometry in known:
            return None
        known[geometry] = self._new(None)
        return known[geometry]

    def _died(self, address: int) -> None:
        _, places = self._born.pop(address)  # the run has freed this storage after the call that was recorded last
        self._unwritten.discard(address)
        self._calls[-1].dead.extend(places.values())


@cache
def holders_if_alone() -> tuple | None:
    """Returns the reference counts that an OperationRecorder sees for a gradient that only autograd holds. Another
    gradient may be added to it in place."""
    with torch.enable_grad(), OperationRecorder([x := torch.ones(1, requires_grad=True)], []) as recorder:
        y = 2 * x
        (3 * y - 4 * y).backward()
    return recorder.holders


def _holders(arguments: tuple) -> tuple[int, int, int]:
    first = arguments[0]
    # References in C++, to the storage, and in Python.
    return first._use_count(), torch._C._storage_Use_Count(address_of(first)), sys.getrefcount(first)


def _is_dense(tensor: Tensor) -> bool:
    # No gaps in memory, in any order of the dimensions.
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def _called_by_the_engine() -> bool:
    frame = sys._getframe(1).f_back  # the caller of the dispatch mode; None in one of autograd's threads
    return frame is None or frame.f_code.co_name == "_engine_run_backward"  # not a backward in Python


def address_of(tensor: Tensor) -> int:
    """Returns an address that identifies the tensor's storage."""
    return tensor.untyped_storage()._cdata


def geometry_of(tensor: Tensor) -> tuple:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _with_keywords(function: Callable, names: tuple[str, ...], *values):
    positional = len(values) - len(names)
    return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))
