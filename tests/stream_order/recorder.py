"""Records what a program gives to CUDA's streams, on the CPU: streams and events are imitated (checker.py).

Every operator of PyTorch's dispatcher counts as one kernel on the current stream. Its schema says which bytes it reads
and writes. All memory counts as the device's, but for tensors of `Recorder.host_tensor` and those computed from them.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.core import homes, step, transfers
from tests.stream_order.checker import HOST, Access, Allocate, Free, Record, Trace, Wait, Work

_aten = torch.ops.aten
_WITHOUT_VALUES = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_PACKAGE = str(Path(transfers.__file__).parent)


class Stream:
    """torch.cuda.Stream, as far as the project uses it."""

    def __init__(self, recorder: "Recorder", number: int):
        self._recorder, self.number = recorder, number

    def wait_event(self, event: "Event") -> None:
        if event.number is not None:  # an event that was never recorded is no obstacle
            self._recorder.trace.operations.append(Wait(self.number, event.number))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> "Event":
        event = Event(self._recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """torch.cuda.Event; `number`: of its last record, None before the first."""

    def __init__(self, recorder: "Recorder"):
        self._recorder = recorder
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.number = next(self._recorder.numbers)
        number = (stream or self._recorder.current).number
        self._recorder.trace.operations.append(Record(self.number, number))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._recorder.current).wait_event(self)

    def synchronize(self, reading: bool = False) -> None:
        if self.number is not None:
            self._recorder.trace.operations.append(Wait(HOST, self.number, reading))


class Recorder(TorchDispatchMode):
    """Fills `trace` with what happens inside `with recorder.imitating():`."""

    def __init__(self):
        super().__init__()
        self.trace = Trace()
        self.numbers = count()  # of events
        self._default = self._new_stream("compute")
        self._current = [self._default]
        self._memories: dict[int, int] = {}  # numbers of the live storages, by address
        self._on_host: set[int] = set()  # numbers of those that are the host's
        self._ended = False

    @property
    def current(self) -> Stream:
        return self._current[-1]

    @contextmanager
    def imitating(self) -> Iterator[Trace]:
        """Replaces torch.cuda's streams and events by the recorder's, and a CPU device's transfers by CUDA's."""
        cuda = patch.multiple(
            torch.cuda,
            Stream=lambda device=None: self._new_stream("another"),
            Event=lambda: Event(self),
            stream=self._on,
            current_stream=lambda device=None: self.current,
        )
        try:
            with cuda, patch.object(step, "transfers_for", self._transfers), self:
                yield self.trace
        finally:
            self._ended = True

    def _transfers(self, *arguments) -> transfers.CudaTransfers:
        made = transfers.CudaTransfers(*arguments)
        for lane, stream in made._streams.items():
            self.trace.streams[stream.number] = str(lane)
        return made

    def host_tensor(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of homes.host_tensor, in memory that counts as the host's."""
        tensor = homes.host_tensor(entries, dtype)
        self._on_host.add(self._memory(tensor))
        return tensor

    def _new_stream(self, name: str) -> Stream:
        self.trace.streams.append(name)
        return Stream(self, len(self.trace.streams) - 1)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func, args, kwargs, result) -> None:
        written = _arguments(func)
        given = dict(zip(written, args, strict=False)) | kwargs
        touched = [(tensor, written[name]) for name, value in given.items() for tensor in _tensors(value)]
        inputs = {tensor.untyped_storage()._cdata for tensor, _ in touched}
        returned = _tensors(result)
        fresh = [t for t in returned if (at := t.untyped_storage()._cdata) not in inputs and at not in self._memories]
        reads_a_number = bool(func._schema.returns) and not returned  # .item(), torch.equal
        if not (fresh or reads_a_number or any(is_written for _, is_written in touched)):
            for tensor in returned:  # views
                self._memory(tensor)
            return

        hosts = [self._memory(tensor) in self._on_host for tensor, _ in touched]
        is_transfer = func.overloadpacket is _aten.copy_ and any(hosts) and not all(hosts)
        computed_by_host = any(hosts) and not is_transfer
        for tensor in fresh:
            self._allocate(tensor, computed_by_host)
        if func.overloadpacket in _WITHOUT_VALUES:
            return
        touched += [(tensor, True) for tensor in fresh]
        name = str(func.overloadpacket).removeprefix("aten.")
        stream = self._default if func.namespace == "bitsandbytes" else self.current  # it launches on the null stream
        if computed_by_host:
            self._work_of_host(name, touched, stream)
        else:
            self._work(stream, name, touched)
            if reads_a_number:
                stream.record_event().synchronize(reading=True)
            elif is_transfer and not given.get("non_blocking"):
                stream.synchronize()

    def _work_of_host(self, name: str, touched: list[tuple[Tensor, bool]], stream: Stream) -> None:
        places: dict[bool, list[tuple[Tensor, bool]]] = {False: [], True: []}
        for tensor, written in touched:
            places[self._memory(tensor) in self._on_host].append((tensor, written))
        # Device memory is first copied to the host, which waits for it.
        if places[False]:
            self._work(stream, f"{name} (copied for the host)", places[False])
            stream.synchronize()
        self._work(None, name, places[True])

    def _work(self, stream: Stream | None, name: str, touched: list[tuple[Tensor, bool]]) -> None:
        accesses = tuple(
            Access(self._memory(tensor), *_bytes(tensor), written) for tensor, written in touched if tensor.numel()
        )
        self.trace.operations.append(Work(HOST if stream is None else stream.number, name, accesses))

    def _allocate(self, tensor: Tensor, on_host: bool) -> None:
        number = self._memory(tensor)
        if on_host:
            self._on_host.add(number)
        else:
            self.trace.operations.append(Allocate(number, self.current.number))

    def _memory(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's memory, also if no operator has made it."""
        storage = tensor.untyped_storage()
        number = self._memories.get(storage._cdata)
        if number is None:
            number = self._memories[storage._cdata] = len(self.trace.memories)
            self.trace.memories.append(_place())
            weakref.finalize(storage, self._died, storage._cdata).atexit = False
        return number

    def _died(self, address: int) -> None:
        number = self._memories.pop(address)
        if number in self._on_host:  # which no pool hands out
            self._on_host.remove(number)
        elif not self._ended:
            self.trace.operations.append(Free(number))


@cache
def _arguments(func) -> dict[str, bool]:
    """Returns {argument of an operator, in order: whether it is written}."""
    arguments = func._schema.arguments
    return {a.name: a.alias_info is not None and a.alias_info.is_write for a in arguments}


def _tensors(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, int | float | torch.dtype | torch.device):
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Returns the range from the first byte to the one after the last, with gaps between the rows of a view."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _place() -> str:
    """Returns the name of the project's function that is running."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "?"
    function = frame.f_code.co_qualname.partition(".<locals>")[0]
    return f"{function} ({Path(frame.f_code.co_filename).name})"
