"""Records what PyTorch code allocates and frees, and how long it would take, by running it on tensors without data.

The code runs on the *meta* device: tensors have shapes, dtypes and storages, but no memory. FakeTensors would be
slower, and transformers builds other masks for them. An operation takes 0.1 ms, or a tenth of that with cached costs.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lowmem.cudasim import cuda_ops
from lowmem.cudasim import temporaries as sizes_of
from lowmem.cudasim.clock import NOTHING, SYNCHRONIZE, Clock, Span
from lowmem.cudasim.device_model import DeviceModel
from lowmem.cudasim.outcomes import (
    Outcome,
    is_simulated,
    is_view,
    made_again,
    may_resize,
    new_tensors_of,
    signature_of,
    tensors_in,
)
from lowmem.cudasim.tape import FREED, Chunk, Operation, Tape

FORWARD, BACKWARD = 0, 1  # CUDA runs them on two host threads, each with its own cuBLAS handle
_aten = torch.ops.aten
# Operators that autograd's own code calls only under a dispatch mode; else it changes the first argument (_settle).
_IN_PLACE_OF_THE_FIRST = {
    _aten.add.Tensor, _aten.scatter.src, _aten.scatter_add.default, _aten.index_add.default, _aten.index_put.default
}  # fmt: skip


@dataclass
class Region:
    """Holds a part of a tape (a list of allocations and frees), so that it can be replayed."""

    base: int  # number of its first storage on the tape
    count: int = 0  # number of its storages
    # Its storages are numbered from 0. If it frees storage n of an earlier region, that has the number -1 - n.
    operations: list[Operation] = field(default_factory=list)
    span: Span = NOTHING  # the effect on the clock

    def relative(self, storage: int, earlier: "Region | None") -> int:
        """Returns the number in `operations` of the storage with the number `storage` on the tape (list of
        allocations). Raises AssertionError if it is older than this region and not of the region `earlier`."""
        if storage >= self.base:
            return storage - self.base
        if earlier is None or not earlier.base <= storage < earlier.base + earlier.count:
            raise AssertionError("a region that is to be replayed freed a storage that was born before it")
        return -1 - (storage - earlier.base)


class Recorder(TorchDispatchMode):
    """Records the allocations, frees and time of the PyTorch code inside `with recorder:`, which runs on meta tensors.
    `name_of(frame)` names the storages that the code of a Python frame allocates; if it returns None, the calling frame
    decides. `outcomes`: a cache {signature: costs of an operation} that recorders of one `device_model` may share."""

    def __init__(
        self, device_model: DeviceModel | None = None, name_of: Callable = lambda frame: None,
        outcomes: dict | None = None,
    ):  # fmt: skip
        super().__init__()
        self.device_model = device_model or DeviceModel()
        self.tape, self.clock = Tape(), Clock()
        self._name_of, self._outcomes = name_of, outcomes
        self._count = 0  # storages born so far
        self._numbers: dict[int, int | None] = {}  # number of each live storage, by address; None: not on the device
        self._references: dict[int, weakref.ref] = {}  # to each live storage, by address
        self._births: dict[int, tuple[list[Operation], int]] = {}  # where each allocation is on the tape: (list, index)
        self._threads: set[int] = set()  # threads that have a workspace
        self._open: list[tuple[Region, str]] = []  # regions being recorded, with the name for their storages
        self.number_read: Callable[[], None] = lambda: None  # called if code reads a tensor's value, which is then 1
        self._sum: tuple | None = None  # the sum of two gradients that was just computed (_settle), else None
        self._paused = self._ended = False
        self._operations: list[Operation] = []
        self._begin_chunk()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides operations from torch.compile costs as much as an operation

    def __enter__(self):
        self._collects = gc.isenabled()
        gc.disable()  # a collection would free storages at arbitrary points of the tape
        return super().__enter__()

    def __exit__(self, *exception):
        self._ended = True  # storages that are still alive stay alive on the tape
        if self._collects:
            gc.enable()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: the operations on its local tensor come here by themselves
        if func is _aten._local_scalar_dense.default and args[0].is_meta:  # .item(): the host waits
            self.number_read()
            self._advance(SYNCHRONIZE)
            return 1.0 if args[0].is_floating_point() else 1
        if func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # a copy from the device to the host
        key = None
        if self._outcomes is not None:
            key = func if is_view(func) else signature_of(func, args, kwargs)
        outcome = None if key is None else self._outcomes.get(key)
        if outcome is not None and outcome.made is not None:
            result = made_again(*outcome.made)
        else:
            result = self.device_model.run(func, args, kwargs)
        if not self._paused:
            if outcome is None:
                made = None if key is None else new_tensors_of(func, args, kwargs, result)
                outcome = self._outcome(func, args, kwargs, result, made)
                if key is not None:
                    self._outcomes[key] = outcome
            self._record(func, args, result, outcome)
        return result

    def _outcome(self, func, args: tuple, kwargs: dict, result, made: tuple | None) -> Outcome:
        model, results = self.device_model, tensors_in(result)
        owners = results[:1] if is_view(func) else results  # views share a storage, and may be more the next time
        places = {id(tensor): index for index, tensor in enumerate(results)}
        seconds, temporaries = (of(func, args, kwargs, result) for of in (model.seconds, model.hidden_bytes))
        host = (each + model.more_host_seconds.get(func, 0.0) for each in model.host_seconds)
        if results and not any(map(is_simulated, results)):  # user code on the CPU
            seconds, temporaries = 0.0, ()
        return Outcome(
            made,
            tuple(places[id(tensor)] for tensor in model.allocated(func, args, kwargs, owners)),
            tuple(temporaries),
            tuple(Span.of_operation(each, seconds) for each in host),
        )

    def _record(self, func, args: tuple, result, outcome: Outcome) -> None:
        thread = FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD
        if func in cuda_ops.CUBLAS_OPERATORS and is_simulated(args[0]):
            self._take_workspace(thread)
        self._settle()
        copied_first = func in sizes_of.COPIED_FIRST
        temporaries = self._temporaries(outcome) if copied_first else []
        if func in _IN_PLACE_OF_THE_FIRST and thread == BACKWARD and not args[0]._is_view() and _called_by_the_engine():
            self._sum = result.untyped_storage(), self.number_of(args[0]), args[0].untyped_storage().nbytes()
        else:
            results = tensors_in(result)
            for place in outcome.allocated:
                self.note(results[place])
            for tensor in results if len(outcome.allocated) < len(results) else ():
                if tensor.untyped_storage()._cdata not in self._numbers:
                    self._bind(tensor.untyped_storage(), None)  # not on the device
        if may_resize(func):
            for tensor in tensors_in(result):
                self.resized(tensor.untyped_storage())
        if not copied_first:
            temporaries = self._temporaries(outcome)
        for number in reversed(temporaries):  # C++ destroys a function's variables last first
            self._freed(number)
        self._advance(outcome.spans[thread])

    def _temporaries(self, outcome: Outcome) -> list[int]:
        return [self._born(size, "inside_operations") for size in outcome.temporaries]

    def _advance(self, span: Span) -> None:
        self.clock.advance(span)
        for region, _ in self._open:
            region.span = region.span.then(span)

    @contextmanager
    def region(self, name: str, earlier: Region | None = None) -> Iterator[Region]:
        """Records the code inside `with` as a region, a part of the tape (list of allocations) for `replay`. Names its
        storages `name`. Raises AssertionError if it frees an older storage, except of the region `earlier`."""
        self.take_workspaces()  # not inside the region: a replay would take them again
        self._settle()
        region = Region(self._count)
        self._begin_chunk()
        first = len(self.tape.chunks) - 1
        self._open.append((region, name))
        try:
            yield region
        finally:
            self._settle()
            self._open.pop()
            chunks = self.tape.chunks[first:]
            self._begin_chunk()
        region.count = self._count - region.base
        operations = chunks[0].operations if len(chunks) == 1 else list(Tape(chunks))  # _births points into this list
        operations[:] = [(region.relative(storage, earlier), size, name) for storage, size, name in operations]
        region.operations = operations
        if len(chunks) == 1 and operations:  # _begin_chunk has dropped an empty one
            earlier_base = earlier.base if earlier else 0
            self.tape.chunks[first] = Chunk(operations, region.base, earlier_base, chunks[0].seconds)

    def replay(self, region: Region, earlier_base: int = 0) -> int:
        """Appends the operations of `region` to the tape (list of allocations) again. Returns the new number of its
        first storage. `earlier_base`: if `region` frees storages of another region, the result of that one's replay."""
        self._settle()
        base = self._count
        self._count += region.count
        self.tape.chunks.append(Chunk(region.operations, base, earlier_base, self.clock.gpu))
        self._advance(region.span)
        self._begin_chunk()
        return base

    def stand_in(self, size: int, number: int, *, held: bool = False) -> torch.UntypedStorage:
        """Returns a storage of `size` bytes without data. It stands for the storage `number` on the tape (list of
        allocations), which a replay has allocated. When Python frees it, the tape records that `number` is freed. With
        `held`, it does not: the replay of a backward pass records that later."""
        self._bind(storage := torch.UntypedStorage(size, device="meta"), number, held)
        return storage

    @contextmanager
    def off_the_tape(self) -> Iterator[None]:
        """Records the code inside `with` on a separate tape (list of allocations) and clock, which are dropped at its
        end. Regions recorded there can be replayed on the real tape later. The code must free all that it allocates."""
        self._settle()
        kept = self.tape, self.clock, self._threads, self._open, self._operations
        self.tape, self.clock, self._threads, self._open = Tape(), Clock(), {FORWARD, BACKWARD}, []
        self._begin_chunk()
        try:
            yield
        finally:
            self._settle()
            self.tape, self.clock, self._threads, self._open, self._operations = kept

    def paused(self) -> AbstractContextManager:
        """Returns a context in which operations run without being recorded."""
        return patch.object(self, "_paused", True)

    def take_workspaces(self) -> None:
        """Allocates the cuBLAS workspaces of the forward and the backward thread, if they are missing."""
        for thread in (FORWARD, BACKWARD):
            self._take_workspace(thread)

    def number_of(self, tensor: Tensor) -> int | None:
        # None if it is not on the tape
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def note(self, tensor: Tensor, name: str | None = None) -> None:
        """Records the storage of `tensor` as allocated now. Does nothing if it has data, or if it is on the tape (list
        of allocations). Without `name`, the storage is named like those that the calling code allocates."""
        self._settle()
        storage = tensor.untyped_storage()
        if is_simulated(tensor) and storage._cdata not in self._numbers:
            self._bind(storage, self._born(storage.nbytes(), name or self._name()))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records that `storage` has another size now: CUDA allocates the new memory, then frees the old."""
        old = self._numbers.get(storage._cdata)
        if place := self._births.get(old):
            operations, index = place
            _, size, name = operations[index]
            if size != storage.nbytes():
                self._numbers[storage._cdata] = self._born(storage.nbytes(), name)
                self._freed(old)

    def leave_out(self, tensor: Tensor) -> None:
        """Keeps the storage of `tensor`, which must have been made inside `paused`, off the tape (list of allocations)
        for good. Without this call, a later view of `tensor` would record the storage as allocated."""
        self._bind(tensor.untyped_storage(), None)

    def rename(self, tensor: Tensor, name: str) -> None:
        """Renames the storage of `tensor` on the tape (the list of allocations). Does nothing if the storage is freed,
        or if a replay allocated it."""
        if place := self._births.get(self.number_of(tensor)):
            operations, index = place
            operations[index] = (*operations[index][:2], name)

    def _name(self) -> str:
        if self._open:
            return self._open[-1][1]
        frame = sys._getframe(1)
        while frame is not None:
            if (name := self._name_of(frame)) is not None:
                return name
            frame = frame.f_back
        return "other"

    def _bind(self, storage: torch.UntypedStorage, number: int | None, held: bool = False) -> None:
        address = storage._cdata
        self._numbers[address] = number
        self._references[address] = weakref.ref(storage, lambda _: self._died(address, held))

    def _born(self, size: int, name: str) -> int:
        number = self._count
        self._count += 1
        self._births[number] = (self._operations, len(self._operations))
        self._operations.append((number, size, name))
        return number

    def _died(self, address: int, held: bool) -> None:
        number = self._numbers.pop(address)
        del self._references[address]
        if self._ended or number is None:
            return
        if self._sum is not None:
            storage, *first = self._sum
            if first == [number, storage.nbytes()]:  # the sum is computed in place of the first gradient
                self._sum = None
                self._bind(storage, number, held)
                return
            self._settle()
        if not held:
            self._freed(number)

    # Without a dispatch mode, autograd adds a second gradient to the first in place, if nothing else holds the first,
    # and scatters a gradient into zeros in place. So `_record` leaves the sum's storage open. If the first is freed
    # next, `_died` gives its storage to the sum. Any other event calls `_settle` first, which records a new storage.
    def _settle(self) -> None:
        if self._sum is not None:
            (storage, *_), self._sum = self._sum, None
            on_device = storage.device.type == "meta"
            self._bind(storage, self._born(storage.nbytes(), self._name()) if on_device else None)

    def _freed(self, number: int) -> None:
        self._births.pop(number, None)
        self._operations.append((number, FREED, ""))

    def _take_workspace(self, thread: int) -> None:
        sizes = self.device_model.workspace_bytes if thread == FORWARD else self.device_model.workspace_bytes[:1]
        if thread not in self._threads and sizes:
            self._begin_chunk()
            for size in sizes:
                self._born(size, "workspaces")
            self._begin_chunk()
        self._threads.add(thread)

    def _begin_chunk(self) -> None:
        chunks = self.tape.chunks
        if chunks and chunks[-1].operations is self._operations and not self._operations:
            chunks.pop()
        self._operations = []
        chunks.append(Chunk(self._operations, 0, 0, self.clock.gpu))


def _called_by_the_engine() -> bool:
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    # autograd's engine itself, or a backward in C++
    return frame.f_code.co_name == "_engine_run_backward"
