"""Copies tensors that are stored in RAM or on a disk to the device for use, and back."""

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
    tensors: State  # {name: buffer on the device}
    left: object = None  # event: the newest copies out are done; None: nothing to wait for
    arrived: object = None  # the same for copies in
    # newest content: views of `tensors` in a StateWindow, a key in a WeightWindow, the tensor itself in `send_away`
    inside: object = None
    buffers: State = field(default_factory=dict)  # RAM through which copies between `tensors` and a disk pass
    views: dict = field(default_factory=dict)  # views of `tensors` and `buffers`, made once to save CPU time
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # pairs (tensor on a disk, buffer) not written yet


class Window:
    """Copies tensors into slots (device buffers) and back. `into`, `out`: lanes (CUDA streams) of the copies to the
    device and back; None if there are no such copies. `user`: lane of the kernels that use the slots."""

    def __init__(
        self, transfers: Transfers, into: Lane | None = None, out: Lane | None = None, user: Lane = Lane.COMPUTE
    ):
        self.transfers, self.into, self.out, self.user = transfers, into, out, user
        self.slots: list[Slot] = []
        self.sizes: dict[str, tuple[int, torch.dtype]] = {}
        self.sent: deque[Slot] = deque()  # slots of tensors that `send_away` copies and `release` has not freed yet

    def fit(self, number: int, sizes: dict[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        """Allocates `number` slots (device buffers) in the place of the old ones, unless `sizes` is unchanged. `sizes`:
        {name: (number of elements, dtype)} of a slot's tensors. If memory runs out, raises OutOfMemoryError; then there
        are no slots."""
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
        # Kernels launched so far may still use that memory.
        return Slot(tensors, left=self.transfers.mark(Lane.COMPUTE))

    def fetch(self, slot: Slot, pairs: Pairs, *after) -> None:
        """Queues copies into `slot`: pairs (destination, source). They begin when the copies out of the slot are done,
        and the events `after` have occurred."""
        slot.arrived = self.transfers.copy(self.into, pairs, slot.left, *after)

    def use(self, *slots: Slot) -> None:
        """Makes later kernels of `self.user` wait for the copies into `slots`."""
        self.transfers.wait(self.user, *(slot.arrived for slot in slots))

    def send(self, slot: Slot, pairs: Pairs) -> None:
        """Queues copies out of `slot`: pairs (destination, source). They begin after the kernels launched so far on the
        lane `user`, which may write into the slot."""
        slot.left = self.transfers.copy(self.out, pairs, self.transfers.mark(self.user))

    def send_away(self, tensor: Tensor, home: Tensor) -> None:
        """Queues a copy of `tensor` to `home` in RAM. The memory of `tensor` stays allocated until `release`."""
        self.sent.append(Slot({}, inside=tensor))
        self.send(self.sent[-1], [(home, tensor)])

    def release(self, keep: int = 0, *lanes: Lane) -> None:
        """Frees the tensors that `send_away` was given, except the `keep` newest. Later work of the lane `user` and of
        `lanes` waits until the copies of the freed tensors are done."""
        while len(self.sent) > keep:
            for lane in (self.user, *lanes):
                self.transfers.wait(lane, self.sent[0].left)
            self.sent.popleft()


class StateWindow:
    """Copies optimizer states to the device for updates, and back to RAM or a disk. Weights that are in RAM are copied
    likewise. Gradients that wait in RAM are copied to the device only."""

    def __init__(self, transfers: Transfers, device: torch.device, pieces: Sequence[Piece]):
        self._transfers, self._device = transfers, device
        self._window = Window(transfers, Lane.STATES_IN, Lane.STATES_OUT, user=Lane.UPDATES)
        self.fit(pieces)
        self.begin(())

    @property
    def fits(self) -> bool:
        return bool(self._window.slots)  # False if memory ran out in `fit`

    @property
    def buffer_bytes(self) -> int:
        """Returns the bytes of RAM buffers through which states pass between a disk and the device."""
        return sum(buffer.nbytes for slot in self._window.slots for buffer in slot.buffers.values())

    def fit(self, pieces: Sequence[Piece]) -> None:
        """Allocates slots (device buffers) that fit the states of any of `pieces`. No copy may be under way."""
        sizes: dict[str, tuple[int, torch.dtype]] = {}
        for piece in pieces:
            for name, home in piece.homes.items() if piece.streamed else ():
                sizes[name] = max(home.numel(), sizes[name][0] if name in sizes else 0), home.dtype
        self._window.fit(AHEAD + 1, sizes, self._device)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begins a pass over `pieces` (ranges of parameters). For each piece, in this order, the caller must call
        `take`, update the state, and call `give_back`. While copies of the previous pass may be under way, `pieces`
        must be those of that pass, in the same order."""
        # The stored state of a piece that is not given back stays unchanged. The order of pieces matters: a copy into a
        # slot waits until the slot is free, but not until an earlier copy of the same state to RAM is done.
        self._streamed = [piece for piece in pieces if piece.streamed]
        self._fetched = self._used = 0
        self._from_disk = iter([piece for piece in self._streamed if piece.on_disk])
        self._read_ahead(READ_AHEAD)

    def take(self, piece: Piece) -> State:
        """Returns the state of `piece` on the device, for kernels of the lane UPDATES. `piece` must be the next one of
        the pass. A second call before `give_back` returns the same tensors."""
        self.fetch_ahead()
        if not piece.streamed:
            return piece.state
        slot = self._slot(self._used)
        self._window.use(slot)
        return slot.inside

    def fetch_ahead(self) -> None:
        """Queues copies of the next states of the pass into all free slots (device buffers)."""
        while self._fetched < min(self._used + AHEAD + 1, len(self._streamed)):
            self._fetch(self._streamed[self._fetched])
            self._fetched += 1

    def give_back(self, piece: Piece) -> None:
        """Queues a copy of the updated state of `piece`, the last one taken, to the place where it is stored."""
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
        """Waits until all states given back are in RAM or on the disk."""
        self._transfers.synchronize()
        for slot in self._window.slots:
            self._settle(slot)

    def _fetch(self, piece: Piece) -> None:
        slot, places = self._slot(self._fetched), piece.homes
        slot.inside = _views(slot, slot.tensors, places)
        if piece.on_disk:
            self._transfers.wait(Lane.HOST, slot.left)  # the host is about to read and to fill the buffers
            self._settle(slot)  # the slot's old state
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
        make = self._transfers.host_buffer
        if make is None:  # the device's memory is RAM
            return {name: slot.inside[name] for name in piece.on_disk}
        slot.buffers |= {
            name: make(slot.tensors[name].numel(), slot.tensors[name].dtype)
            for name in piece.on_disk
            if name not in slot.buffers
        }
        return _views(slot, slot.buffers, {name: piece.state[name] for name in piece.on_disk})

    def _settle(self, slot: Slot) -> None:
        if slot.owed:  # copies from the device into these buffers must be done
            self._transfers.write(slot.owed)
        slot.owed = []


def _views(slot: Slot, tensors: State, places: State) -> State:
    key = id(tensors), *((name, place.numel()) for name, place in places.items())
    if key not in slot.views:
        slot.views[key] = {name: tensors[name][: place.numel()] for name, place in places.items()}
    return slot.views[key]


def _different(pairs) -> list[tuple[Tensor, Tensor]]:
    return [(destination, source) for destination, source in pairs if destination is not source]
