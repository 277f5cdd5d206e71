"""Optimizer states that live in RAM: exact-size buffers, and the ring through which they visit the GPU.

A pass over the pieces of the model brings each piece's state to the device `AHEAD` pieces before it is needed, hands
it out, and writes it back after use; copies in, copies out and the updates have a stream each, so that on a GPU both
directions of the bus and the compute stream work at once. Were the updates on the compute stream, a slot would only be
free again when the forward pass before its update is done, and no more than the ring would ever be copied behind that.
The ring is a fixed set of slots, each as large as the largest piece.

Buffers in RAM are anonymous mappings of exactly the size asked for, registered with CUDA: PyTorch's own page-locked
allocator rounds sizes up to powers of two (2.25 GiB take 4 GiB).

On the CPU the same ring works synchronously: states are copied into a slot and back, and everything that does not say
`cuda` is tested there; the rest on the stand-in (tests/cuda), in every order of streams that events allow.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

State = dict[str, Tensor]
AHEAD = 2


class Piece(Protocol):
    """What the ring needs to know of a piece: its state, and whether that lies in RAM or on the device already."""

    state: State
    streamed: bool


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
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        mapping = _mappings[tensor.data_ptr()]
        mapping.locked_address = tensor.data_ptr()
        mapping.madvise(mmap.MADV_DONTFORK)
        return True
    with suppress(RuntimeError):  # the refusal would be reported by the next kernel's check, so let this be the next
        torch.zeros(1, device="cuda")
    return False


class Ring:
    """AHEAD + 1 slots on `device` through which streamed states pass."""

    def __init__(self, device: torch.device, pieces: Sequence[Piece], beside: bool = False):
        """The slots are made to hold the largest streamed piece; none are made where nothing is streamed. `beside`:
        whether updates run beside what computes, for which they must not allocate."""
        largest: dict[str, tuple[int, torch.dtype]] = {}
        for piece in pieces:
            for name, tensor in piece.state.items() if piece.streamed else ():
                largest[name] = (max(tensor.numel(), largest.get(name, (0,))[0]), tensor.dtype)
        self._slots = [
            {name: torch.empty(entries, dtype=dtype, device=device) for name, (entries, dtype) in largest.items()}
            for _ in range(AHEAD + 1)
        ]
        self._views: dict[tuple[int, int], State] = {}  # by slot and piece
        self.copies = copies_for(device, beside)

    @property
    def slot_bytes(self) -> int:
        return sum(tensor.nbytes for slot in self._slots for tensor in slot.values())

    def pass_over(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, State]]:
        """Each piece in turn with its state on the device; what the caller does to that state before it asks for the
        next piece is kept. To stop early is to leave the rest untouched.

        One pass at a time, and always the same pieces in the same order: a fetch waits for its slot, not for its home.
        """
        streamed = [piece for piece in pieces if piece.streamed]
        fetched = 0
        used = 0
        for piece in pieces:
            while fetched < min(used + AHEAD + 1, len(streamed)):
                self.copies.fetch(fetched % len(self._slots), streamed[fetched].state, self._slot(fetched, streamed))
                fetched += 1
            if not piece.streamed:
                yield piece, piece.state
                continue
            slot = used % len(self._slots)
            state = self._slot(used, streamed)
            self.copies.wait_fetched(slot)
            yield piece, state
            self.copies.write_back(slot, state, piece.state)
            used += 1

    def _slot(self, index: int, streamed: list[Piece]) -> State:
        number = index % len(self._slots)
        views = self._views.get((number, id(streamed[index])))
        if views is None:
            slot = self._slots[number]
            views = {name: slot[name][: home.numel()] for name, home in streamed[index].state.items()}
            self._views[number, id(streamed[index])] = views
        return views

    def synchronize(self) -> None:
        """Returns when everything written back has arrived in RAM."""
        self.copies.synchronize()


def copies_for(device: torch.device, beside: bool) -> "_CudaCopies | _SynchronousCopies":
    """What carries states to and from `device`. Tests give the CUDA transfers imitated streams here."""
    return _CudaCopies(device, beside) if device.type == "cuda" else _SynchronousCopies()


class _SynchronousCopies:
    """The CPU's transfers: done when the call returns."""

    def fetch(self, slot: int, home: State, state: State) -> None:
        for name, tensor in home.items():
            state[name].copy_(tensor)

    def wait_fetched(self, slot: int) -> None:
        pass

    def updating(self) -> AbstractContextManager:
        return nullcontext()

    def wait_for_compute(self) -> None:
        pass

    def hold_compute(self) -> None:
        pass

    def write_back(self, slot: int, state: State, home: State) -> None:
        for name, tensor in home.items():
            tensor.copy_(state[name])

    def synchronize(self) -> None:
        pass


class _CudaCopies:
    """Transfers on two side streams, updates on a third or, if not `beside`, on the one that computes; a slot is
    refilled only after its write-back."""

    def __init__(self, device: torch.device, beside: bool):
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._updates = torch.cuda.Stream(device) if beside else torch.cuda.current_stream(device)
        self._in.wait_stream(torch.cuda.current_stream())  # kernels issued before may still use the slots' memory
        self._fetched = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        self._written = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        self._updated = torch.cuda.Event()

    def fetch(self, slot: int, home: State, state: State) -> None:
        self._in.wait_event(self._written[slot])  # an event never recorded is no obstacle
        with torch.cuda.stream(self._in):
            for name, tensor in home.items():
                state[name].copy_(tensor, non_blocking=True)
            self._fetched[slot].record()

    def wait_fetched(self, slot: int) -> None:
        self._updates.wait_event(self._fetched[slot])

    @contextmanager
    def updating(self) -> Iterator[None]:
        """What is launched in here is an update."""
        with torch.cuda.stream(self._updates):
            yield
            self._updated.record()

    def wait_for_compute(self) -> None:
        """Updates from here on come after all that the compute stream has been given."""
        self._updates.wait_stream(torch.cuda.current_stream())

    def hold_compute(self) -> None:
        """What the compute stream is given from here on comes after all updates so far, and may use their memory."""
        torch.cuda.current_stream().wait_event(self._updated)  # not for the stream, which awaits the next piece by now

    def write_back(self, slot: int, state: State, home: State) -> None:
        self._out.wait_stream(self._updates)
        with torch.cuda.stream(self._out):
            for name, tensor in home.items():
                tensor.copy_(state[name], non_blocking=True)
            self._written[slot].record()

    def synchronize(self) -> None:
        self._in.synchronize()
        self._out.synchronize()
