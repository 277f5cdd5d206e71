"""Boundaries that wait in RAM for their backward.

A step whose whole batch is one group keeps the inputs of all segments of all micro-batches until their backward: 19 GiB
for GPT-2-XL at 64 x 1,024. With segments of one block a boundary takes longer to compute than to copy, so that it can
wait in RAM: it leaves when its segment has run forward, and comes back while the micro-batch before it runs backward.
Nothing of this changes a bit of the result.

One buffer in RAM is for the boundaries of one group, one behind the other. It is made by the first step and grows where
a later one needs more. On the device, beside what computes, are at most LEAVING boundaries that are on their way out
and one that is on its way in.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lowmem.core.offload import StagingRing
from lowmem.core.parameters import Store
from lowmem.core.recompute import ALL, SavedSegment, Segment

LEAVING = 2
_SLOTS = 2  # of arrivals: the one that is used, and the one behind it
_ALIGNMENT = 256  # elements


class StreamedBoundaries:
    """Takes boundaries to RAM and back by the copies of `ring`."""

    def __init__(self, store: Store, ring: StagingRing):
        self._store, self._ring = store, ring
        self._buffer: Tensor | None = None
        self._used = self._number = 0
        self._leaving: deque[tuple[int, Tensor]] = deque()  # with the slot of each copy
        self._coming: dict[int, tuple[int, Tensor]] = {}  # by the SavedSegment
        self.begin()

    @property
    def buffer_bytes(self) -> int:
        """What it has of RAM."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.itemsize

    def begin(self, hidden: Sequence[Tensor] = (), segments: Sequence[Segment] = ()) -> None:
        """Before the first segment of a group, whose inputs are `hidden`, [B, T, D] each; what was there is dropped."""
        for slot, _ in self._coming.values():
            self._ring.copies.wait_back(slot)
        while self._leaving:
            self._let_go()
        self._coming, self._used, self._number = {}, 0, 0
        leaving = sum(segment.keep != ALL for segment in segments)
        needed = leaving * sum(map(_room, hidden))
        if needed > (0 if self._buffer is None else self._buffer.numel()):
            self._ring.synchronize()
            self._buffer = None  # before there is a larger one
            self._buffer = self._store.host_buffer(needed, hidden[0].dtype)

    def leave(self, segment: Segment, saved: SavedSegment) -> None:
        """The boundary of a segment that has run forward goes to RAM, unless autograd's graph holds it anyway."""
        tensor = saved.boundary
        if segment.keep == ALL or not tensor.is_contiguous():
            return
        saved.boundary = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        saved.in_ram = True
        self._used += _room(tensor)
        slot, self._number = self._number % LEAVING, self._number + 1
        if len(self._leaving) == LEAVING:
            self._let_go()
        self._ring.copies.leave(slot, tensor, saved.boundary)
        self._leaving.append((slot, tensor))

    def bring(self, saved: SavedSegment, following: SavedSegment | None) -> None:
        """The boundary of a segment that is about to run backward is on the device, for kernels that are launched from
        now on; the one of `following` is on its way."""
        if saved.in_ram:
            self._fetch(saved)
            slot, tensor = self._coming.pop(id(saved))
            self._ring.copies.wait_back(slot)
            saved.boundary, saved.in_ram = tensor, False
        if following is not None and following.in_ram:
            self._fetch(following)

    def _fetch(self, saved: SavedSegment) -> None:
        if id(saved) in self._coming:
            return
        while self._leaving:
            self._let_go()
        home = saved.boundary
        tensor = torch.empty(home.shape, dtype=home.dtype, device=self._store.device)
        slot, self._number = self._number % _SLOTS, self._number + 1
        self._ring.copies.come_back(slot, home, tensor)
        self._coming[id(saved)] = slot, tensor

    def _let_go(self) -> None:
        """The memory of what left first is free for kernels that are launched from now on."""
        slot, _ = self._leaving.popleft()
        self._ring.copies.wait_left(slot)


def _room(tensor: Tensor) -> int:
    """Elements of the buffer that it takes."""
    return math.ceil(tensor.numel() / _ALIGNMENT) * _ALIGNMENT
