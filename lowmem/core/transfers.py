"""Copies tensors between a device and RAM or a disk, on lanes: queues of work, which are CUDA streams on a GPU."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

import torch
from torch import Tensor

from lowmem.core import homes

Pairs = Sequence[tuple[Tensor, Tensor]]  # (destination, source)
MakeTensor = Callable[[int, torch.dtype], Tensor]  # (entries, dtype) -> zeros [entries]


class Lane(StrEnum):
    """Names a queue of work that runs in order. On a GPU, each but HOST is a CUDA stream."""

    HOST = "host"  # the Python program
    COMPUTE = "compute"  # forward and backward
    # The optimizer's rule. On COMPUTE, an update would wait for forward operations queued before it, and so would the
    # next copy into the update's buffer.
    UPDATES = "updates"
    STATES_IN = "states in"  # copies to the device of states, and of gradients that waited in RAM
    STATES_OUT = "states out"  # copies of updated states back, and of weights that are in RAM
    WEIGHTS_IN = "weights in"
    BOUNDARIES_IN = "boundaries in"
    RAM_OUT = "boundaries and gradients out"  # to RAM


class Transfers:
    """Copies tensors if the device is the CPU: each copy is done when the call returns. CudaTransfers is for GPUs."""

    host_buffer: MakeTensor | None = None  # allocates page-locked RAM for copies from and to a disk; None: not needed

    def copy(self, lane: Lane, pairs: Pairs, *after):
        """Copies each (destination, source) on `lane` after the events `after`. Returns an event that occurs when all
        are copied; None on the CPU."""
        for destination, source in pairs:
            destination.copy_(source)

    def mark(self, lane: Lane):
        """Returns an event that occurs when all work queued on `lane` so far is done; None on the CPU."""

    def wait(self, lane: Lane, *events) -> None:
        """Makes later work of `lane` wait for `events`. If `lane` is HOST, returns when the events have occurred."""

    def updating(self) -> AbstractContextManager:
        """Returns a context in which kernels run on UPDATES, the lane (CUDA stream) of optimizer updates."""
        return nullcontext()

    def synchronize(self) -> None:
        """Waits until all copies are done."""

    def read_ahead(self, places: Iterable[Tensor]) -> None:
        """Asks the operating system to read tensors on a disk into the page cache."""
        for place in places:
            homes.read_ahead(place)

    def read(self, pairs: Pairs) -> None:
        """Copies each (destination in RAM, source on a disk), and waits."""
        for destination, source in pairs:
            homes.copy(destination, source)

    def write(self, pairs: Pairs) -> None:
        """Copies each (destination on a disk, source in RAM), and waits."""
        Transfers.read(self, pairs)


class CudaTransfers(Transfers):
    """Copies tensors on CUDA streams, one per lane. COMPUTE is the current stream. `concurrent`: True to give UPDATES
    its own stream, on which kernels must not allocate memory; False for the current stream."""

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
    """Returns the Transfers of `device`. `concurrent`: True to run updates on a separate stream. `host_buffer`:
    allocates page-locked RAM."""
    return CudaTransfers(device, concurrent, host_buffer) if device.type == "cuda" else Transfers()
