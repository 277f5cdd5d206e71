"""What a piece of PyTorch code allocates and frees, and how long it would take, found by running it without data.

The code runs on the *meta* device: tensors have shapes, dtypes and storages, but no memory behind them and no numbers
in them. A `Recorder` sees every operation, notes each storage that comes into being and each that dies, and adds up
what the operations would cost on a card. The record is a `Tape`; allocator.py says what a GPU makes of it.

Meta tensors and not FakeTensors: the model's code takes the branches that it takes for real ones (transformers builds
other masks for FakeTensors), and an operation costs a fraction as much to run.

Training repeats the same block with the same shapes many times. What happens between two points can be recorded as a
`Region` and afterwards be replayed: its operations are referred to, not copied, and its effect on the clock is one span
(clock.py). A replay leaves the tape that running the code again would leave, to the last operation.

Where outcomes are kept (`Recorder(outcomes=...)`), an operation that has been run with arguments of the same shapes is
not run again: what comes out is made anew in the same shapes, and what it costs is looked up.

Cost: about 0.1 ms per operation that runs, a third of that where its outcome is known, next to nothing per operation
that is replayed.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lowmem.cudasim.clock import NOTHING, SYNCHRONIZE, Clock, Span
from lowmem.cudasim.device_model import DeviceModel
from lowmem.cudasim.outcomes import Outcome, is_view, result_of, results_of, signature_of, tensors_in
from lowmem.cudasim.tape import FREED, Chunk, Operation, Tape

FORWARD, BACKWARD = 0, 1  # CUDA runs them on two host threads, each with a cuBLAS handle of its own
_FIRST_WORKSPACE = 1 << 60  # storages outside the count, in which a region's must follow one another
_aten = torch.ops.aten


@dataclass
class Region:
    """What was recorded between two points; `base`, `count`: the storages born in it, when it was recorded; `span`: its
    effect on the clock; `threads`: those that ran a matrix product."""

    base: int
    count: int = 0
    operations: list[Operation] = field(default_factory=list)
    span: Span = NOTHING
    threads: set[int] = field(default_factory=set)

    def _relative(self, storage: int, earlier: "Region | None") -> int:
        if storage >= self.base:
            return storage - self.base
        if earlier is None or not earlier.base <= storage < earlier.base + earlier.count:
            raise AssertionError("a region that is to be replayed freed a storage that was born before it")
        return -1 - (storage - earlier.base)


@dataclass
class _Open:
    """A region that is being recorded: what its storages are called, and where on the tape it begins."""

    region: Region
    name: str
    first_chunk: int


class Recorder(TorchDispatchMode):
    """Records what runs inside `with recorder:` onto `tape`, and moves `clock`. `name_of(frame)`: what a storage born
    in that Python frame is called; None: ask the frame's caller. `outcomes`: a dict of what is known of operations,
    kept between recorders of one machine; with None every operation is run."""

    def __init__(
        self, machine: DeviceModel | None = None, name_of: Callable = lambda frame: None, outcomes: dict | None = None
    ):
        super().__init__()
        self.machine = machine or DeviceModel()
        self._outcomes = outcomes
        self.tape = Tape()
        self.clock = Clock()
        self._name_of = name_of
        self._count = 0
        self._numbers: dict[int, int | None] = {}  # of live storages, by address; None: of one that is elsewhere
        self._references: dict[int, weakref.ref] = {}  # to live storages, by address
        self._births: dict[int, tuple[list[Operation], int]] = {}  # where the birth of a live storage is written
        self._held: set[int] = set()  # storages whose end a replay will write
        self._threads: set[int] = set()  # those that have a workspace
        self._open: list[_Open] = []
        self._sum: tuple | None = None  # of two gradients, just made: its storage, number and bytes of the first one's
        self._paused = False
        self._ended = False
        self._operations: list[Operation] = []
        self._begin_chunk()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides operations from torch.compile costs as much as an operation

    def __enter__(self):
        self._collected = gc.isenabled()
        gc.disable()  # a collection would free storages at arbitrary points of the tape
        return super().__enter__()

    def __exit__(self, *exception):
        self._ended = True  # what is still alive stays so on the tape
        if self._collected:
            gc.enable()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        key = None
        if self._outcomes is not None:
            key = func if is_view(func) else signature_of(func, args, kwargs)
        outcome = None if key is None else self._outcomes.get(key)
        if outcome is not None:
            result = result_of(outcome, func, args, kwargs)
        elif any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: the operations on its local tensor come here by themselves
        elif func is _aten._local_scalar_dense.default and args[0].device.type == "meta":
            self._advance(SYNCHRONIZE)
            return 1.0 if args[0].is_floating_point() else 1
        elif func is _aten.copy_.default and args[1].device.type == "meta" != args[0].device.type:
            return args[0]  # from the device to the host
        elif func is _aten._grouped_mm.default and args[0].device.type == "meta":  # knows bf16 alone; kernels know all
            result = func(*(factor.to(torch.bfloat16) for factor in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
        else:
            result = func(*args, **kwargs)
        if outcome is None:
            outcome = self._outcome(func, args, kwargs, result)
            if key is not None:
                self._outcomes[key] = outcome
        if not self._paused:
            self._record(func, args, result, outcome)
        return result

    @contextmanager
    def region(self, name: str, earlier: Region | None = None) -> Iterator[Region]:
        """Records a region, whose storages are called `name`; regions may lie within regions. It may free what is born
        in it or was born in `earlier`, nothing else: AssertionError."""
        self._settle()
        region = Region(self._count)
        self._begin_chunk()
        opened = _Open(region, name, len(self.tape.chunks) - 1)
        self._open.append(opened)
        try:
            yield region
        finally:
            self._settle()
            self._open.pop()
            chunks = self.tape.chunks[opened.first_chunk :]
            self._begin_chunk()
        region.count = self._count - region.base
        operations, base = (chunks[0].operations if len(chunks) == 1 else Tape(chunks)), region.base
        relative = [
            (n - base if n >= base else region._relative(n, earlier), size, name) for n, size, name in operations
        ]
        if len(chunks) == 1:  # in place: that the births stand in this list is noted
            region.operations = operations
            operations[:] = relative
        else:
            region.operations = relative
        if len(chunks) == 1 and region.operations:  # one that allocates nothing is off the tape already
            earlier_base = earlier.base if earlier else 0
            chunk = Chunk(region.operations, region.base, earlier_base, chunks[0].seconds)
            self.tape.chunks[opened.first_chunk] = chunk
        for outer in self._open:
            outer.region.threads |= region.threads

    def replay(self, region: Region, earlier_base: int = 0) -> int:
        """Puts `region` on the tape once more; the number of the first storage born in it."""
        self._settle()
        base = self._count
        self._count += region.count
        for thread in sorted(region.threads):
            self._need_workspace(thread)
        for outer in self._open:
            outer.region.threads |= region.threads
        self.tape.chunks.append(Chunk(region.operations, base, earlier_base, self.clock.gpu))
        self._advance(region.span)
        self._begin_chunk()
        return base

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of the storage of `tensor`; None for one that this record has not seen."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def note(self, tensor: Tensor, name: str | None = None) -> None:
        """Takes the storage of `tensor`, if it is not known yet, as one that is born now."""
        self._settle()
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" and storage._cdata not in self._numbers:
            self._bind(storage, self._born(storage.nbytes(), name or self._name()))

    def stand_in(self, size: int, number: int, *, held: bool = False) -> torch.UntypedStorage:
        """A storage of `size` bytes for the one numbered `number` that a replay has put on the tape. Its end is written
        when it dies or, if it is `held` (by a graph that the replay stands for), by a later replay."""
        storage = torch.UntypedStorage(size, device="meta")
        if held:
            self._held.add(number)
        self._bind(storage, number)
        return storage

    @contextmanager
    def off_the_tape(self) -> Iterator[None]:
        """Regions recorded in here are kept, but nothing of it stands on the tape or moves the clock. What is born in
        here dies in here."""
        self._settle()
        kept = self.tape, self.clock, self._threads, self._open, self._operations
        self.tape, self.clock, self._threads, self._open = Tape(), Clock(), set(), []
        self._begin_chunk()
        try:
            yield
        finally:
            self._settle()
            self.tape, self.clock, self._threads, self._open, self._operations = kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is called in here is not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def rename(self, tensor: Tensor, name: str) -> None:
        """Calls the storage of `tensor` by another name; a replayed one has its region's."""
        if place := self._births.get(self.number_of(tensor)):
            operations, index = place
            operations[index] = (*operations[index][:2], name)

    def _outcome(self, func, args, kwargs, result) -> Outcome:
        machine = self.machine
        results = tensors_in(result)
        places = {id(tensor): index for index, tensor in enumerate(results)}
        seconds, more = machine.seconds(func, args, kwargs, result), machine.more_host_seconds.get(func, 0.0)
        return Outcome(
            results_of(func, args, kwargs, result),
            tuple(places[id(tensor)] for tensor in machine.allocated(func, args, kwargs, results)),
            tuple(machine.hidden_bytes(func, args, kwargs, result)),
            tuple(Span.of_operation(host + more, seconds) for host in machine.host_seconds),
        )

    def _record(self, func, args, result, outcome: Outcome) -> None:
        thread = FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD
        if func in self.machine.products:
            for opened in self._open:
                opened.region.threads.add(thread)
            self._need_workspace(thread)
        self._settle()
        copied_first = func in self.machine.copied_first
        temporaries = self._temporaries(outcome) if copied_first else []
        if func is _aten.add.Tensor and thread == BACKWARD and not args[0]._is_view() and _called_by_the_engine():
            self._sum = result.untyped_storage(), self.number_of(args[0]), args[0].untyped_storage().nbytes()
        else:
            results = tensors_in(result)
            for place in outcome.allocated:
                self.note(results[place])
            for tensor in results if len(outcome.allocated) < len(results) else ():
                if tensor.untyped_storage()._cdata not in self._numbers:
                    self._bind(tensor.untyped_storage(), None)  # not on the device
        if not copied_first:
            temporaries = self._temporaries(outcome)
        for number in reversed(temporaries):  # as C++ destroys what a function holds
            self._freed(number)
        self._advance(outcome.spans[thread])

    def _temporaries(self, outcome: Outcome) -> list[int]:
        return [self._born(size, "inside_operations") for size in outcome.temporaries]

    def _advance(self, span: Span) -> None:
        self.clock.advance(span)
        for opened in self._open:
            opened.region.span = opened.region.span.then(span)

    def _name(self) -> str:
        if self._open:
            return self._open[-1].name
        frame = sys._getframe(3)
        while frame is not None:
            name = self._name_of(frame)
            if name is not None:
                return name
            frame = frame.f_back
        return "other"

    def _settle(self) -> None:
        """Autograd adds a second gradient into the first one if nothing else holds that, but never so under a dispatch
        mode (accumulate in input_buffer.cpp). Nothing else held it if it dies right after (a view holds its base, which
        dies with it); if something else happens first, the sum is a storage of its own."""
        if self._sum is not None:
            storage, *_ = self._sum
            self._sum = None
            self._bind(storage, self._born(storage.nbytes(), self._name()))

    def _bind(self, storage: torch.UntypedStorage, number: int | None) -> None:
        self._numbers[storage._cdata] = number
        address = storage._cdata
        self._references[address] = weakref.ref(storage, lambda _: self._died(address))

    def _born(self, size: int, name: str) -> int:
        number = self._count
        self._count += 1
        self._births[number] = (self._operations, len(self._operations))
        self._operations.append((number, size, name))
        return number

    def _died(self, address: int) -> None:
        number = self._numbers.pop(address)
        del self._references[address]
        if self._ended or number is None:
            return
        if self._sum is not None:
            storage, *first = self._sum
            if first == [number, storage.nbytes()]:
                self._sum = None
                self._bind(storage, number)
                return
            self._settle()
        if number in self._held:
            self._held.remove(number)
        else:
            self._freed(number)

    def _freed(self, number: int) -> None:
        self._births.pop(number, None)
        self._operations.append((number, FREED, ""))

    def take_workspaces(self) -> None:
        """Both threads have computed products before what follows, and have their workspaces."""
        for thread in (FORWARD, BACKWARD):
            self._need_workspace(thread)

    def _need_workspace(self, thread: int) -> None:
        """Written before the region that needs it: it happens once, and a region is replayed."""
        if thread not in self._threads and self.machine.workspace_bytes:
            workspace = (_FIRST_WORKSPACE + thread, self.machine.workspace_bytes, "workspaces")
            place = self._open[0].first_chunk if self._open else len(self.tape.chunks)
            self.tape.chunks.insert(place, Chunk([workspace], 0, 0, self.clock.gpu))
            for opened in self._open:
                opened.first_chunk += 1
            if not self._open:
                self._begin_chunk()
        self._threads.add(thread)

    def _begin_chunk(self) -> None:
        chunks = self.tape.chunks
        if chunks and chunks[-1].operations is self._operations and not self._operations:
            chunks.pop()
        self._operations = []
        self.tape.chunks.append(Chunk(self._operations, 0, 0, self.clock.gpu))


def _called_by_the_engine() -> bool:
    """Whether what is recorded now was called by autograd's engine, or by a backward that is written in C++, and not by
    Python code that runs in a backward pass."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"
