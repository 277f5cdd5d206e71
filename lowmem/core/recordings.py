"""Records the operations of a segment once, and repeats them without the model's own code (docs/recompute.md).

A small micro-batch keeps a GPU busy for less time than Python takes to launch its operations. A recording is a flat
list of these operations. Repeating it calls no module and builds no graph. It calls the same operations in the same
order, and frees each result where the recorded run freed it. So bits and memory are those of the recorded run.

Some calls are repeated as calls, by `repeated`: they decide anew each time where numbers are. A segment cannot be
recorded if its operations may depend on values, or if they use a tensor that is neither an argument, a parameter nor a
buffer. Then it runs as before.
"""

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RUNS_BEFORE = 2  # with the same key, before one is recorded: they learn which products can be skipped
MOST_SHAPES = 4  # of micro-batches whose recordings are kept
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_MASKS = (torch.bool, torch.uint8)
_COUNTS = (torch.int32, torch.int64)
_SHARED = (int, type(None), torch.dtype)  # types of values that are kept once
_COMPARABLE = (int, float, str, tuple, type(None), torch.dtype)
_aten = torch.ops.aten
_FASTER = {  # the same operators by Python's own names, which take half the time
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
_active: "Recorder | None" = None


def repeated(function: Callable[..., None], *arguments) -> None:
    """Calls `function`. A recording repeats the call, and not the operations inside of it."""
    if _active is None:
        function(*arguments)
    else:
        _active.call(function, arguments)


@dataclass
class _Call:
    """Describes a call of `function`. Numbers are places in the list of values.

    take:     gets the positional arguments from that list, as a tuple.
    results:  the place of the result, or one place or None for each of several; None if no result is used.
    dead:     the places that are not used afterwards, whose memory the recorded run freed here.
    """

    function: Callable
    take: Callable[[list], tuple]
    keywords: dict[str, Any]
    results: int | tuple[int | None, ...] | None
    dead: list[int] = field(default_factory=list)


class Recording:
    """Repeats the calls that a Recorder has noted."""

    def __init__(self, values: list, arguments: Sequence[tuple[int, int]], calls: Iterable[_Call], result: int):
        self._values, self._arguments, self._result = values, arguments, result
        self._calls = [
            (_FASTER.get(c.function, c.function), c.take, c.keywords, c.results, tuple(c.dead)) for c in calls
        ]

    def __call__(self, arguments: Sequence) -> Tensor:
        """Returns the result for `arguments`, which come in the order of those that were recorded."""
        values = self._values.copy()
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


class Recorder(TorchDispatchMode):
    """Notes the operations that run inside it. `arguments`: what these use and get anew each time, a tensor first.
    `constants`: modules whose parameters and buffers they may use, too.

    Autograd adds a second gradient to the first in its place if nothing else holds that, but never under a dispatch
    mode (accumulate in input_buffer.cpp). So this does it. `alone`: the _holders of a gradient that nothing else holds.
    """

    def __init__(self, arguments: Sequence, constants: Iterable[nn.Module], alone: tuple | None = None):
        super().__init__()
        self._device, self._alone = arguments[0].device, alone
        self.holders: tuple | None = None  # those of the last gradient to which another was added
        self.refusal: str | None = None  # why what runs cannot be repeated
        self._constants = [t for module in constants for t in (*module.parameters(), *module.buffers())]
        self._values: list = []
        self._plain: dict[tuple[type, Hashable], int] = {}  # places of numbers, dtypes and so on
        self._calls: list[_Call] = []
        # Places of tensors, by storage and geometry: of those that are always there, and of results.
        self._given: dict[int, dict[tuple, int]] = {}
        self._born: dict[int, tuple[weakref.ref, dict[tuple, int]]] = {}
        self._lists: list[int] = []  # places of lists of tensors, which only the next call uses
        self._paused = False
        self._arguments: list[tuple[int, int]] = []
        self._objects: dict[int, int] = {}  # places of arguments that are no tensors, by id
        for number, argument in enumerate(arguments):
            is_tensor = isinstance(argument, Tensor)
            known = self._given.setdefault(_storage(argument), {}) if is_tensor else self._objects
            key = _geometry(argument) if is_tensor else id(argument)
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
        return False  # the wrapper that hides operations from torch.compile would be the caller of each

    def recording(self, result: Tensor) -> Recording | None:
        """Returns what was noted, ending with `result`; None if it cannot be repeated."""
        place = self._place(result)
        return None if self.refusal else Recording(self._values, self._arguments, self._calls, place)

    def call(self, function: Callable, arguments: Sequence) -> None:
        """Notes a call of `function` as one, and makes it."""
        take = self._take(arguments)
        self._paused = True
        try:
            function(*arguments)
        finally:
            self._paused = False
        self._note(function, take, {}, None)

    def _note(self, function: Callable, take: Callable, keywords: dict, results) -> None:
        self._calls.append(_Call(function, take, keywords, results, self._lists))
        self._lists = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is _aten.add.Tensor and _called_by_the_engine():
            self.holders = _holders(args)
            if self.holders == self._alone and _is_dense(args[0]):
                function = _aten.add_.Tensor
        if self._paused or self.refusal:
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if function is _aten.lift_fresh.default:  # torch.tensor(...): numbers of Python are part of the code
            constant = self._new(result.clone())
            self._note(torch.clone, lambda values: (values[constant],), {}, self._result(result))
            return result
        several, is_view = isinstance(result, tuple | list), function.is_view
        results = result if several else (result,)
        self._refuse_values(function, [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)], results)
        take, keywords = self._take(args), kwargs
        if any(isinstance(value, Tensor) for value in kwargs.values()):
            take, keywords = self._take((*args, *kwargs.values())), {}
            function = partial(_with_keywords, function, tuple(kwargs))
        places = [self._result(one) for one in results]
        if is_view and all(place is None for place in places):
            return result  # the same elements of the same memory have a place
        self._note(function, take, keywords, tuple(places) if several else places[0])
        return result

    def _refuse_values(self, function, given: list[Tensor], results: Sequence) -> None:
        """Refuses an operation if Python code may have seen values, or if the operation changes what a tensor is."""
        whole = function is _aten.index.Tensor and not any(tensor.dtype in _MASKS for tensor in given)
        if _TAGS.intersection(function.tags) and not whole:
            self.refusal = f"{function} depends on values, or changes a tensor's shape"
        for result in results:
            if not isinstance(result, Tensor):
                continue
            if result.device != self._device:
                self.refusal = f"{function} copies to another device"
            elif result.device.type == "cpu" and result.dtype in _COUNTS and any(map(Tensor.is_floating_point, given)):
                self.refusal = f"{function} makes integers, which Python may read in the CPU's memory"
            elif result.is_complex():
                self.refusal = f"{function} makes complex numbers, of which views may be conjugates"

    def _new(self, value) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _take(self, arguments: Sequence) -> Callable[[list], tuple]:
        places = [self._place(argument) for argument in arguments]
        if len(places) > 1:
            return itemgetter(*places)
        return (lambda values, place=places[0]: (values[place],)) if places else lambda values: ()

    def _place(self, value) -> int:
        """Returns the place of an argument of a call."""
        if isinstance(value, Tensor):
            return self._place_of_tensor(value)
        if id(value) in self._objects:
            return self._objects[id(value)]
        if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
            made = self._new(None)
            self._calls.append(_Call(_listed, self._take(value), {}, made, []))
            self._lists.append(made)
            return made
        if not isinstance(value, _SHARED):
            return self._new(value)
        if (type(value), value) not in self._plain:
            self._plain[type(value), value] = self._new(value)
        return self._plain[type(value), value]

    def _place_of_tensor(self, tensor: Tensor) -> int:
        storage, geometry = _storage(tensor), _geometry(tensor)
        _, known = self._born.get(storage) or (None, self._given.setdefault(storage, {}))
        if geometry not in known:
            constant = next((c for c in self._constants if _storage(c) == storage and _geometry(c) == geometry), None)
            if constant is None:
                self.refusal = "it uses a tensor that is neither an argument nor a parameter"
            known[geometry] = self._new(constant)
        return known[geometry]

    def _result(self, result) -> int | None:
        """Returns a new place for a result of an operation; None if it needs none."""
        if not isinstance(result, Tensor):
            return None
        storage, geometry = _storage(result), _geometry(result)
        if storage in self._given:
            known = self._given[storage]
        else:
            if storage not in self._born:
                reference = weakref.ref(result.untyped_storage(), lambda _: self._died(storage))
                self._born[storage] = reference, {}
            _, known = self._born[storage]
        if geometry in known:
            return None
        known[geometry] = self._new(None)
        return known[geometry]

    def _died(self, storage: int) -> None:
        """Notes that the memory of a result was freed, after the last call."""
        _, places = self._born.pop(storage)
        self._calls[-1].dead.extend(places.values())


def _is_dense(tensor: Tensor) -> bool:
    """Returns True if the elements of `tensor` fill a range of memory, in any order of the dimensions."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def _holders(arguments: tuple) -> tuple[int, int, int]:
    """Counts what holds the first of `arguments`: in C++, its memory, and in Python."""
    first = arguments[0]
    return first._use_count(), torch._C._storage_Use_Count(_storage(first)), sys.getrefcount(first)


@cache
def _holders_of_one_alone() -> tuple | None:
    """Returns the _holders of a gradient that nothing but autograd holds, as a Recorder counts them."""
    with Recorder([x := torch.ones(1, requires_grad=True)], []) as recorder:
        y = 2 * x
        (3 * y - 4 * y).backward()
    return recorder.holders


def _called_by_the_engine() -> bool:
    """Returns True if autograd's engine called the current operation, and no backward written in Python."""
    frame = sys._getframe(1).f_back  # of what called the dispatch mode; None in a thread of autograd's own
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _with_keywords(function: Callable, names: tuple[str, ...], *values):
    positional = len(values) - len(names)
    return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


def _listed(*values) -> list:
    return list(values)


class Recordings:
    """Records what has run often enough, and repeats it. Keeps recordings of the MOST_SHAPES shapes of micro-batches
    that ran last."""

    def __init__(self):
        self._shapes: dict[tuple, dict[Hashable, int | Recording | None]] = {}

    def run(
        self, name: Hashable, run: Callable[[], Tensor], arguments: Sequence, extras: Iterable[tuple[tuple, dict]],
        modules: Iterable[nn.Module], learnt: Callable[[], object],
    ) -> Tensor:  # fmt: skip
        """Returns `run()`, or repeats it for these `arguments`, a tensor first, and `extras`, the blocks' others.

        `name`: equal ones run the same code. `modules`: whose parameters and buffers that uses. `learnt()`: if it
        changes while `run` runs, the next run may be another one.
        """
        others = list(_leaves(extras))
        shape = _shape_of([*(argument for argument in arguments if isinstance(argument, Tensor)), *others])
        arguments = [*arguments, *others]
        if shape is None:
            return run()
        known = self._shapes.pop(shape, {})
        self._shapes[shape] = known  # the last one now
        if len(self._shapes) > MOST_SHAPES:
            del self._shapes[next(iter(self._shapes))]
        found = known.get(name, 0)
        if isinstance(found, Recording):
            return found(arguments)
        if found is None or found < RUNS_BEFORE:
            known[name] = None if found is None else found + 1
            return run()
        before = learnt()
        with Recorder(arguments, modules, _holders_of_one_alone()) as recorder:
            result = run()
        if learnt() == before:
            known[name] = recorder.recording(result)
        return result


def _leaves(extras: Iterable[tuple[tuple, dict]]) -> Iterator:
    for arguments, keywords in extras:
        yield tuple(keywords)
        for value in (*arguments, *keywords.values()):
            yield from value if type(value) is tuple else (value,)
            yield type(value) is tuple and len(value)


def _shape_of(arguments: Iterable) -> tuple | None:
    """Returns all that operations on `arguments` depend on but the values of tensors: which of these share memory,
    their shapes, and the arguments that are no tensors. None if one of these cannot be compared."""
    storages: dict[int, int] = {}
    shape = []
    for value in arguments:
        if isinstance(value, Tensor):
            shape.append((storages.setdefault(_storage(value), len(storages)), *_geometry(value)))
        elif isinstance(value, _COMPARABLE):
            shape.append((type(value), value))
        else:
            return None
    return tuple(shape)
