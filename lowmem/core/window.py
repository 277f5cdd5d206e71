"""Copies tensors that are stored in RAM or on a disk to the device when they are used, and back.

             fetch                      use                     send
    home ------------> slot on device ------> kernels, slot ------------> home
          event "arrived"                                   event "left"

A home is the place where a tensor is stored. A slot is a buffer on the device; a window has several (docs/step.md). A
slot is filled again when its old content has been sent. No home and no order of copies changes a bit of the result.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from lowmem.core.optimizers import State
from lowmem.core.parameters import Piece
from lowmem.core.transfers import Lane, Pairs, Transfers

AHEAD = 2  # number of pieces whose states are copied to the device in advance
READ_AHEAD = 8  # number of pieces whose states the operating system is asked to read in advance


@dataclass(eq=False)
class Slot:
    """Holds one buffer on the device. Tensors that are stored in RAM or on a disk are copied into its `tensors`, {name:
    tensor}.

    `inside`: the newest content: views of `tensors` in a StateWindow, a key in a WeightWindow. `arrived`, `left`:
    events that occur when the newest copies into the slot, and out of it, are done; None for nothing to wait for.
    `buffers`: RAM through which copies between the slot and a disk pass. `owed`: pairs (tensor on a disk, host buffer)
    still to be written to the disk.
    """

    tensors: State
    left: object = None
    arrived: object = None
    inside: object = None
    buffers: State = field(default_factory=dict)
    views: dict = field(default_factory=dict)  # views of `tensors` and `buffers`, made once
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Window:
    """Copies tensors from RAM or a disk into slots (buffers on the device), and back. `into`, `out`: lanes (CUDA
    streams) of copies in and out. `user`: lane of the kernels that use the slots."""

    def __init__(
        self, transfers: Transfers, into: Lane | None = None, out: Lane | None = None, user: Lane = Lane.COMPUTE
    ):
        self.transfers, self.into, self.out, self.user = transfers, into, out, user
        self.slots: list[Slot] = []
        self.sizes: dict[str, tuple[int, torch.dtype]] = {}
        self.sent: deque[Slot] = deque()  # slots of tensors that `send_away` copies and `release` has not freed yet

    def fit(self, number: int, sizes: dict[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        """Allocates `number` slots (buffers on the device). `sizes`: {name: (entries, dtype)} of the tensors in each
        slot. Does nothing if the slots have these sizes already. If memory runs out, no slots are left."""
        if self.slots and sizes == self.sizes:
            return
        self.use(*self.slots)  # copies into the old slots must be done before kernels reuse their memory
        self.slots, self.sizes = [], sizes
        made = [
            {name: torch.empty(entries, dtype=dtype, device=device) for name, (entries, dtype) in sizes.items()}
            for _ in range(number)
        ]
        self.slots = [self.slot(tensors) for tensors in made]

    def slot(self, tensors: State) -> Slot:
        """Returns a Slot with the buffers `tensors`. Copies into the slot will wait for all kernels launched so far,
        which may still use that memory."""
        return Slot(tensors, left=self.transfers.mark(Lane.COMPUTE))

    def fetch(self, slot: Slot, pairs: Pairs, *after) -> None:
        """Queues copies into `slot`, a buffer on the device, and returns at once. The copies start when the slot's old
        content has been copied out and the events `after` have occurred. `pairs`: (destination, source)."""
        slot.arrived = self.transfers.copy(self.into, pairs, slot.left, *after)

    def use(self, *slots: Slot) -> None:
        """Makes kernels launched from now on wait until the copies into `slots` (buffers on the device) are done."""
        self.transfers.wait(self.user, *(slot.arrived for slot in slots))

    def send(self, slot: Slot, pairs: Pairs) -> None:
        """Queues copies out of `slot`, a buffer on the device, and returns at once. The copies start when all kernels
        launched so far on the lane (CUDA stream) `user` are done. `pairs`: (destination, source)."""
        slot.left = self.transfers.copy(self.out, pairs, self.transfers.mark(self.user))

    def send_away(self, tensor: Tensor, home: Tensor) -> None:
        """Queues a copy of `tensor` to `home`, a tensor in RAM, and returns at once. The memory of `tensor` stays
        allocated until `release`."""
        self.sent.append(Slot({}, inside=tensor))
        self.send(self.sent[-1], [(home, tensor)])

    def release(self, keep: int = 0, *lanes: Lane) -> None:
        """Frees all tensors passed to `send_away` except the `keep` newest. Kernels launched from now on, and later
        work of `lanes` (CUDA streams), wait until the copies of the freed tensors are done."""
        while len(self.sent) > keep:
            for lane in (self.user, *lanes):
                self.transfers.wait(lane, self.sent[0].left)
            self.sent.popleft()


class StateWindow:
    """Copies optimizer states that are in RAM or on a disk to the device for updates, and back. Has AHEAD + 1 slots
    (buffers on the device). Each slot fits the largest state of a piece (a range of elements that is updated at once).

    A pass over the pieces copies each state in before its update, and back after it. So copies in both directions and
    kernels run at the same time. Each slot has host buffers for states on a disk. The host reads a state into these
    buffers when it is fetched, and writes it to the disk before the slot is used again.
    """

    def __init__(self, transfers: Transfers, device: torch.device, pieces: Sequence[Piece]):
        self._transfers, self._device = transfers, device
        self._window = Window(transfers, Lane.STATES_IN, Lane.STATES_OUT, user=Lane.UPDATES)
        self.fit(pieces)
        self.begin(())

    @property
    def fits(self) -> bool:
        """Returns True if the slots (buffers on the device) are allocated, False if memory ran out in `fit`."""
        return bool(self._window.slots)

    @property
    def buffer_bytes(self) -> int:
        """Returns the size in bytes of the host buffers (RAM) between slots on the device and a disk."""
        return sum(buffer.nbytes for slot in self._window.slots for buffer in slot.buffers.values())

    def fit(self, pieces: Sequence[Piece]) -> None:
        """Allocates the slots (buffers on the device) that the states of `pieces` (ranges of elements) need. No copy
        may be under way."""
        sizes: dict[str, tuple[int, torch.dtype]] = {}
        for piece in pieces:
            for name, home in piece.homes.items() if piece.streamed else ():
                sizes[name] = max(home.numel(), sizes[name][0] if name in sizes else 0), home.dtype
        self._window.fit(AHEAD + 1, sizes, self._device)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begins a pass of updates over `pieces` (ranges of elements that are updated at once). The caller then takes
        each piece's state, updates it and gives it back, in this order.

        If copies of the previous pass may be under way, `pieces` must be those of that pass, in the same order. A copy
        into a slot waits until the slot is free, but not until an earlier copy of the same state to RAM is done. The
        stored state of a piece that is not given back stays unchanged.
        """
        self._streamed = [piece for piece in pieces if piece.streamed]
        self._fetched = self._used = 0
        self._from_disk = iter([piece for piece in self._streamed if piece.on_disk])
        self._read_ahead(READ_AHEAD)

    def take(self, piece: Piece) -> State:
        """Returns the optimizer state of `piece` (a range of elements) on the device, for kernels of the lane (CUDA
        stream) UPDATES. `piece` must be the next one of the pass that `begin` has begun. Also queues copies of the
        following pieces' states. A second call before `give_back` returns the same state."""
        self.fetch_ahead()
        if not piece.streamed:
            return piece.state
        slot = self._slot(self._used)
        self._window.use(slot)
        return slot.inside

    def fetch_ahead(self) -> None:
        """Queues copies to the device of the states of the next AHEAD + 1 pieces (ranges of elements) of the pass,
        unless that is done already."""
        while self._fetched < min(self._used + AHEAD + 1, len(self._streamed)):
            self._fetch(self._streamed[self._fetched])
            self._fetched += 1

    def give_back(self, piece: Piece) -> None:
        """Starts to copy the updated state of `piece` (a range of elements) back to where it is stored. `piece` must be
        the one that the last call of `take` was for."""
        if not piece.streamed:
            return
        slot, places = self._slot(self._used), piece.state
        if piece.on_disk:
            places = places | self._buffers(slot, piece)
            slot.owed = [(piece.state[name], places[name]) for name in piece.on_disk]
        self._window.send(slot, _different((place, slot.inside[name]) for name, place in places.items()))
        if self._transfers.host_buffer is None:
            self._settle(slot)
        self._used += 1

    def synchronize(self) -> None:
        """Waits until all states that were given back have arrived in RAM or on the disk."""
        self._transfers.synchronize()
        for slot in self._window.slots:
            self._settle(slot)

    def _fetch(self, piece: Piece) -> None:
        slot, places = self._slot(self._fetched), piece.homes
        slot.inside = _views(slot, slot.tensors, places)
        if piece.on_disk:
            self._transfers.wait(Lane.HOST, slot.left)  # the host is about to read and to fill the buffers
            self._settle(slot)
            places = places | self._buffers(slot, piece)
            self._transfers.read([(places[name], piece.state[name]) for name in piece.on_disk])
        self._window.fetch(slot, _different((slot.inside[name], place) for name, place in places.items()))
        if piece.on_disk:
            self._read_ahead(1)

    def _slot(self, index: int) -> Slot:
        return self._window.slots[index % len(self._window.slots)]

    def _read_ahead(self, pieces: int) -> None:
        for piece in islice(self._from_disk, pieces):
            self._transfers.read_ahead([piece.state[name] for name in piece.on_disk])

    def _buffers(self, slot: Slot, piece: Piece) -> State:
        """Returns {name: buffer in RAM} for the tensors of `piece` (a range of elements) that are on a disk. If the
        device's memory is RAM (`host_buffer` is None), the buffers are the tensors of `slot`."""
        make = self._transfers.host_buffer
        if make is None:
            return {name: slot.inside[name] for name in piece.on_disk}
        slot.buffers |= {
            name: make(slot.tensors[name].numel(), slot.tensors[name].dtype)
            for name in piece.on_disk
            if name not in slot.buffers
        }
        return _views(slot, slot.buffers, {name: piece.state[name] for name in piece.on_disk})

    def _settle(self, slot: Slot) -> None:
        """Writes the states in the host buffers of `slot` (a buffer on the device) to the disk, if that is still to be
        done. Copies from the device into the host buffers must be done."""
        if slot.owed:
            self._transfers.write(slot.owed)
        slot.owed = []


def _views(slot: Slot, tensors: State, places: State) -> State:
    """Returns {name: view of `tensors[name]`}. Each view is as long as the tensor `places[name]`. `tensors` are buffers
    of `slot`. Stores the views in the slot, because making views takes CPU time."""
    key = id(tensors), *((name, place.numel()) for name, place in places.items())
    if key not in slot.views:
        slot.views[key] = {name: tensors[name][: place.numel()] for name, place in places.items()}
    return slot.views[key]


def _different(pairs) -> list[tuple[Tensor, Tensor]]:
    return [(destination, source) for destination, source in pairs if destination is not source]
