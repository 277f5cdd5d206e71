"""Copies tensors between a device and RAM or a disk. All windows (sets of buffers on the device; window.py) use this
interface.

A lane is a queue of work that is done in order: on a GPU, a CUDA stream. An event occurs when a lane has done all the
work that it had when the event was made. A copy waits for earlier work of its lane, and for the events passed with it.

Updates have a separate lane so that more states can be fetched ahead. On the lane COMPUTE, an update would wait for the
forward operations queued before it. So would the next copy into the update's slot (a buffer on the device).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

import torch
from torch import Tensor

from lowmem.core import homes

Pairs = Sequence[tuple[Tensor, Tensor]]  # (destination, source)
MakeTensor = Callable[[int, torch.dtype], Tensor]  # (entries, dtype) -> zeros [entries]


class Lane(StrEnum):
    """Names the queues of work. On a GPU, these are CUDA streams."""

    HOST = "host"  # the Python program
    COMPUTE = "compute"  # forward and backward
    UPDATES = "updates"  # the optimizer's rule
    STATES_IN = "states in"  # copies to the device of states, and of gradients that waited in RAM
    STATES_OUT = "states out"  # copies of updated states back
    WEIGHTS_IN = "weights in"
    BOUNDARIES_IN = "boundaries in"
    RAM_OUT = "boundaries and gradients out"  # to RAM


class Transfers:
    """Copies tensors by the CPU, for a device whose memory is RAM. Each copy is done when the call returns, so nothing
    has to wait. `host_buffer`: function that allocates page-locked RAM for copies from and to a disk; None in this
    class."""

    host_buffer: MakeTensor | None = None

    def copy(self, lane: Lane, pairs: Pairs, *after):
        """Copies each (destination, source) on `lane` (a CUDA stream) after the events `after`. On a GPU, queues the
        copies and returns at once. Returns an event that occurs when the copies are done; None on the CPU."""
        for destination, source in pairs:
            destination.copy_(source)

    def mark(self, lane: Lane):
        """Returns an event that occurs when `lane` (a CUDA stream) has done all its work so far; None on the CPU."""

    def wait(self, lane: Lane, *events) -> None:
        """Makes later work of `lane` (a CUDA stream) wait for `events`. For the lane HOST (the Python program), returns
        when the events have occurred. Ignores events that are None."""

    def updating(self) -> AbstractContextManager:
        """Returns a context manager. Kernels launched inside it run on the lane (CUDA stream) UPDATES."""
        return nullcontext()

    def synchronize(self) -> None:
        """Waits until all copies are done."""

    def read_ahead(self, places: Iterable[Tensor]) -> None:
        """Asks the operating system to read the tensors `places`, which are on a disk, into the page cache. Does not
        wait."""
        for place in places:
            homes.read_ahead(place)

    def read(self, pairs: Pairs) -> None:
        """Copies each pair (destination in RAM, source on a disk) by the CPU. Returns when the copies are done."""
        for destination, source in pairs:
            homes.copy(destination, source)

    def write(self, pairs: Pairs) -> None:
        """Copies each pair (destination on a disk, source in RAM) by the CPU. Returns when the copies are done."""
        Transfers.read(self, pairs)


class CudaTransfers(Transfers):
    """Copies tensors on CUDA streams, one for each lane (a queue of work) with three exceptions. HOST is the Python
    program itself. COMPUTE is the current stream. UPDATES is the current stream, too, unless updates are `concurrent`
    with forward and backward. Concurrent updates must not allocate memory."""

    def __init__(self, device: torch.device, concurrent: bool, host_buffer: MakeTensor):
        others = {Lane.HOST, Lane.COMPUTE} if concurrent else {Lane.HOST, Lane.COMPUTE, Lane.UPDATES}
        self._streams = {lane: torch.cuda.Stream(device) for lane in Lane if lane not in others}
        self.host_buffer = host_buffer

    def copy(self, lane, pairs, *after):
        self.wait(lane, *after)
        with torch.cuda.stream(self._stream(lane)):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self.mark(lane)

    def mark(self, lane):
        return self._stream(lane).record_event()

    def wait(self, lane, *events):
        for event in events:
            if event is not None and lane is Lane.HOST:
                event.synchronize()
            elif event is not None:
                self._stream(lane).wait_event(event)

    def updating(self):
        return torch.cuda.stream(self._stream(Lane.UPDATES))

    def synchronize(self):
        for stream in self._streams.values():
            stream.synchronize()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams[lane] if lane in self._streams else torch.cuda.current_stream()


def transfers_for(device: torch.device, concurrent: bool, host_buffer: MakeTensor) -> Transfers:
    """Returns the object that copies tensors between RAM and `device`. `concurrent`: True to run updates on a separate
    CUDA stream. `host_buffer`: function that allocates page-locked RAM for copies from and to a disk."""
    return CudaTransfers(device, concurrent, host_buffer) if device.type == "cuda" else Transfers()
