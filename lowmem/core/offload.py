"""Optimizer states that live in RAM, or on a disk: exact-size buffers, and the ring through which they visit the GPU.

A pass over the pieces of the model brings each piece's state to the device `AHEAD` pieces before it is needed, hands
it out, and writes it back after use; copies in, copies out and the updates have a stream each, so that on a GPU both
directions of the bus and the compute stream work at once. If updates ran on the compute stream, a slot would not be
free before the forward pass ahead of its update had ended, and copies could never be further ahead than the ring is
long. The ring is a fixed set of slots, each as large as the largest piece. Where memory runs out within a pass, the
same call can be made again.

Buffers in RAM are anonymous mappings of exactly the size asked for, registered with CUDA: PyTorch's own page-locked
allocator rounds sizes up to powers of two (2.25 GiB take 4 GiB). What is on a disk is read READ_AHEAD pieces ahead, by
the kernel, and by the host into RAM when it is fetched; it is written back when its slot's buffers are needed again, so
that the host waits for a disk that is slower than the updates (disk.py).

On the CPU the same ring works synchronously: states are copied into a slot and back, and everything that does not say
`cuda` is tested there; the rest on the stand-in (tests/cuda), in every order of streams that events allow.
"""

import mmap
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lowmem.core import disk

State = dict[str, Tensor]
AHEAD = 2
READ_AHEAD = 8


class Piece(Protocol):
    """What the ring needs to know of a piece: its state, whether that is not on the device already, what of it is not
    even in RAM, and what comes with it and is not written back."""

    state: State
    streamed: bool
    on_disk: tuple[str, ...]
    fetched_only: State


class _Mapping(mmap.mmap):
    """Memory that CUDA is told of when it goes: an address that stays registered cannot be registered again."""

    locked_address: int | None = None

    def __del__(self):
        if self.locked_address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.locked_address)


_mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()  # by address


def host_tensor(entries: int, dtype: torch.dtype) -> Tensor:
    """Zeros [entries] of `dtype` in RAM, in a mapping of their own that lives as long as the tensor and its views."""
    size_bytes = entries * dtype.itemsize
    mapping = _Mapping(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _mappings[memory.data_ptr()] = mapping
    return memory[:size_bytes].view(dtype)


def page_lock(tensor: Tensor) -> bool:
    """Registers a `host_tensor` with CUDA and says whether it worked; all its pages become resident at once.

    A process that is forked later does not have this memory: Linux would copy page-locked pages for it at once, which
    doubles the RAM that is used (older kernels share them, and the first write would part the CPU from the GPU).

    Where CUDA refuses (a limit on locked memory) the tensor stays pageable: copies then run at about half the speed and
    do not overlap.
    """
    if _mappings[tensor.data_ptr()].locked_address is not None:
        return True
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        mapping = _mappings[tensor.data_ptr()]
        mapping.locked_address = tensor.data_ptr()
        mapping.madvise(mmap.MADV_DONTFORK)
        return True
    with suppress(RuntimeError):  # the refusal would be reported by the next kernel's check, so let this be the next
        torch.zeros(1, device="cuda")
    return False


class StagingRing:
    """AHEAD + 1 slots on `device` through which streamed states pass."""

    def __init__(
        self, device: torch.device, pieces: Sequence[Piece], beside: bool = False,
        host_buffer: Callable[[int, torch.dtype], Tensor] | None = None,
    ):  # fmt: skip
        """The slots are made to hold the largest streamed piece; none are made where nothing is streamed. `beside`:
        whether updates run beside what computes, for which they must not allocate. `host_buffer(entries, dtype)`:
        makes page-locked memory, for pieces that are on a disk."""
        self._device = device
        self._slots: list[State] = [{} for _ in range(AHEAD + 1)]
        self._views: dict[tuple[int, int], State] = {}  # by slot and piece
        self.fits = True  # whether the slots were made: memory may have run out
        self.fit(pieces)
        self.copies = copies_for(device, beside, host_buffer or host_tensor)
        self.begin(())

    def fit(self, pieces: Sequence[Piece]) -> None:
        """Makes the slots anew where they are too small for `pieces`; nothing may be in flight."""
        largest: dict[str, tuple[int, torch.dtype]] = {}
        for piece in pieces:
            for name, tensor in _homes(piece).items() if piece.streamed else ():
                largest[name] = (max(tensor.numel(), largest.get(name, (0,))[0]), tensor.dtype)
        slot = self._slots[0]
        if all(name in slot and slot[name].numel() >= entries for name, (entries, _) in largest.items()):
            return
        self._slots, self._views = [{} for _ in range(AHEAD + 1)], {}  # the old ones' memory is free from here on
        self.fits = False
        del slot
        self._slots = [
            {name: torch.empty(entries, dtype=dtype, device=self._device) for name, (entries, dtype) in largest.items()}
            for _ in range(AHEAD + 1)
        ]
        self.fits = True

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begins a pass over `pieces`: each is taken, worked on and given back, one after the other, in this order.

        One pass at a time, and always the same pieces in the same order, unless nothing is in flight: a fetch waits for
        its slot, not for its home. A pass that is left early leaves alone what has not been given back."""
        self._streamed = [piece for piece in pieces if piece.streamed]
        self._fetched = self._used = 0
        self._from_disk = iter([piece for piece in self._streamed if piece.on_disk])
        for _ in range(READ_AHEAD):
            self._read_ahead()

    def take(self, piece: Piece) -> State:
        """The state of `piece`, the next one of the pass, on the device; the same if asked again."""
        while self._fetched < min(self._used + AHEAD + 1, len(self._streamed)):
            following = self._streamed[self._fetched]
            slot = self._fetched % len(self._slots)
            self.copies.fetch(slot, _homes(following), self._slot(self._fetched), following.on_disk)
            self._fetched += 1
            if following.on_disk:
                self._read_ahead()
        if not piece.streamed:
            return piece.state
        state = self._slot(self._used)
        self.copies.wait_fetched(self._used % len(self._slots))
        return state

    def give_back(self, piece: Piece) -> None:
        """Keeps what has been done to the state of `piece` since it was taken."""
        if piece.streamed:
            slot = self._used % len(self._slots)
            self.copies.write_back(slot, self._slot(self._used), piece.state, piece.on_disk)
            self._used += 1

    def _read_ahead(self) -> None:
        """Of the pieces on the disk the next one."""
        for piece in islice(self._from_disk, 1):
            self.copies.read_ahead({name: piece.state[name] for name in piece.on_disk})

    def _slot(self, index: int) -> State:
        number, piece = index % len(self._slots), self._streamed[index]
        views = self._views.get((number, id(piece)))
        if views is None:
            slot = self._slots[number]
            views = {name: slot[name][: home.numel()] for name, home in _homes(piece).items()}
            self._views[number, id(piece)] = views
        return views

    def synchronize(self) -> None:
        """Returns when everything written back has arrived where it belongs."""
        self.copies.synchronize()


def _homes(piece: Piece) -> State:
    """Where what comes to the device for the piece's update lies."""
    return piece.state | piece.fetched_only


def copies_for(
    device: torch.device, beside: bool, host_buffer: Callable[[int, torch.dtype], Tensor]
) -> "_CudaCopies | _SynchronousCopies":
    """What carries states to and from `device`. Tests give the CUDA transfers imitated streams here."""
    return _CudaCopies(device, beside, host_buffer) if device.type == "cuda" else _SynchronousCopies()


class _SynchronousCopies:
    """The CPU's transfers: done when the call returns."""

    def read_ahead(self, home: State) -> None:
        for tensor in home.values():
            disk.read_ahead(tensor)

    def fetch(self, slot: int, home: State, state: State, on_disk: Sequence[str] = ()) -> None:
        for name, tensor in home.items():
            if name in on_disk:
                disk.read(tensor, state[name])
            else:
                state[name].copy_(tensor)

    def wait_fetched(self, slot: int) -> None:
        pass

    def fetch_weights(self, slot: int, home: State, weights: State) -> None:
        self.fetch(slot, home, weights)

    def wait_weights(self, slot: int) -> None:
        pass

    def leave(self, slot: Hashable, tensor: Tensor, home: Tensor) -> None:
        home.copy_(tensor)

    def wait_left(self, slot: Hashable) -> None:
        pass

    def fetch_what_left(self) -> None:
        pass

    def come_back(self, slot: int, home: Tensor, tensor: Tensor) -> None:
        tensor.copy_(home)

    def wait_back(self, slot: int) -> None:
        pass

    def updating(self) -> AbstractContextManager:
        return nullcontext()

    def wait_for_compute(self) -> None:
        pass

    def hold_compute(self) -> None:
        pass

    def write_back(self, slot: int, state: State, home: State, on_disk: Sequence[str] = ()) -> None:
        for name, tensor in home.items():
            if name in on_disk:
                disk.write(state[name], tensor)
            else:
                tensor.copy_(state[name])

    def synchronize(self) -> None:
        pass


class _CudaCopies:
    """Transfers on two side streams, updates on a third or, if not `beside`, on the one that computes; a slot is
    refilled only after its write-back."""

    def __init__(self, device: torch.device, beside: bool, host_buffer: Callable[[int, torch.dtype], Tensor]):
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._updates = torch.cuda.Stream(device) if beside else torch.cuda.current_stream(device)
        self._in.wait_stream(torch.cuda.current_stream())  # kernels issued before may still use the slots' memory
        self._fetched = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        self._written = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        self._updated = torch.cuda.Event()
        self._device = device
        self._weights: torch.cuda.Stream | None = None  # on which streamed weights come, where there are any
        self._brought: dict[int, torch.cuda.Event] = {}  # by slot
        self._leaving: torch.cuda.Stream | None = None  # of boundaries and gradients that wait in RAM
        self._coming: torch.cuda.Stream | None = None  # of boundaries
        self._left: dict[Hashable, torch.cuda.Event] = {}
        self._back: dict[int, torch.cuda.Event] = {}
        self._buffers = disk.DiskBuffers(host_buffer)

    def read_ahead(self, home: State) -> None:
        for tensor in home.values():
            disk.read_ahead(tensor)

    def fetch(self, slot: int, home: State, state: State, on_disk: Sequence[str] = ()) -> None:
        if on_disk:
            self._written[slot].synchronize()  # for the host is about to read its buffers, and to fill them anew
            home = home | self._buffers.fill(slot, {name: home[name] for name in on_disk})
        self._in.wait_event(self._written[slot])  # an event never recorded is no obstacle
        with torch.cuda.stream(self._in):
            for name, tensor in home.items():
                state[name].copy_(tensor, non_blocking=True)
            self._fetched[slot].record()

    def wait_fetched(self, slot: int) -> None:
        self._updates.wait_event(self._fetched[slot])

    def fetch_weights(self, slot: int, home: State, weights: State) -> None:
        """Into a slot of streamed_weights.py, after the kernels launched so far, which may use what it holds, and the
        write-backs issued so far, which may be of these weights."""
        if self._weights is None:
            self._weights = torch.cuda.Stream(self._device)
        self._weights.wait_stream(torch.cuda.current_stream())
        self._weights.wait_stream(self._out)
        with torch.cuda.stream(self._weights):
            for name, tensor in home.items():
                weights[name].copy_(tensor, non_blocking=True)
            self._brought.setdefault(slot, torch.cuda.Event()).record()

    def wait_weights(self, slot: int) -> None:
        torch.cuda.current_stream().wait_event(self._brought[slot])

    def leave(self, slot: Hashable, tensor: Tensor, home: Tensor) -> None:
        """To RAM, after the kernels launched so far, which make it or use what came to the device from there before."""
        if self._leaving is None:
            self._leaving = torch.cuda.Stream(self._device)
        self._leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._leaving):
            home.copy_(tensor, non_blocking=True)
            self._left.setdefault(slot, torch.cuda.Event()).record()

    def wait_left(self, slot: Hashable) -> None:
        torch.cuda.current_stream().wait_event(self._left[slot])

    def fetch_what_left(self) -> None:
        """Fetches from now on find in RAM what has left so far."""
        if self._leaving is not None:
            self._in.wait_stream(self._leaving)

    def come_back(self, slot: int, home: Tensor, tensor: Tensor) -> None:
        """Into memory that kernels launched so far may have used; `wait_left` has been called for what is in `home`."""
        if self._coming is None:
            self._coming = torch.cuda.Stream(self._device)
        self._coming.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._coming):
            tensor.copy_(home, non_blocking=True)
            self._back.setdefault(slot, torch.cuda.Event()).record()

    def wait_back(self, slot: int) -> None:
        torch.cuda.current_stream().wait_event(self._back[slot])

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Kernels that are launched inside the block go to the stream of the updates."""
        with torch.cuda.stream(self._updates):
            yield
            self._updated.record()

    def wait_for_compute(self) -> None:
        """Makes the stream of the updates wait for the kernels that the compute stream has been given so far."""
        self._updates.wait_stream(torch.cuda.current_stream())

    def hold_compute(self) -> None:
        """Makes the compute stream wait for the updates made so far: later kernels may read their weights and use the
        memory that they freed. An event marks them, since the stream of the updates waits for the next piece by now."""
        torch.cuda.current_stream().wait_event(self._updated)

    def write_back(self, slot: int, state: State, home: State, on_disk: Sequence[str] = ()) -> None:
        if on_disk:
            home = home | self._buffers.owe(slot, {name: home[name] for name in on_disk})
        self._out.wait_stream(self._updates)
        with torch.cuda.stream(self._out):
            for name, tensor in home.items():
                tensor.copy_(state[name], non_blocking=True)
            self._written[slot].record()

    def synchronize(self) -> None:
        self._in.synchronize()
        self._out.synchronize()
        for stream in (self._leaving, self._coming):
            if stream is not None:
                stream.synchronize()
        self._buffers.settle_all()
