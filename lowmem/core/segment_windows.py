"""Weights, boundaries and gradients of segments of blocks that wait in RAM and visit the device (window.py).

Weights: for models whose 16-bit weights do not fit next to the rest. While one segment computes, the next one's weights
arrive in the other slot. They come once for forward and once for backward, for all micro-batches of a group, so a step
of G groups moves 2 G times the streamed weights. Updated weights travel with their state.

Boundaries: a group keeps the inputs of all its segments and micro-batches until their backward, 19 GiB for GPT-2-XL at
64 x 1,024. With segments of one block a boundary takes longer to compute than to copy, so it can wait in RAM.

Gradients: with clipping, none can be used before the norm of all is known, and they take 4 bytes per parameter. With
the whole batch as one group, a segment's are final when it has run backward. They leave while the segment below runs.
The embeddings' stay on the device: they are final last and used first.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowmem.core.decoder import Decoder
from lowmem.core.parameters import Part, Store
from lowmem.core.recompute import ALL, SavedSegment, Segment
from lowmem.core.transfers import Lane, Transfers
from lowmem.core.window import Slot, Window

WEIGHT_SLOTS = 2
LEAVING = 2
_ALIGNMENT = 256  # elements, of a boundary in RAM


class WeightWindow:
    """Brings the blocks of `decoder` whose weights in `store` are in RAM; does nothing if there are none.

    The parameters of a block are views of a slot while its weights are there, and NaN otherwise, so that a use of
    absent weights shows at once. Blocks that run without `bring`, as in an evaluation, come one by one.
    """

    def __init__(self, transfers: Transfers, decoder: Decoder, store: Store, segments: Sequence[range]):
        self._decoder, self._device = decoder, store.device
        self._window = Window(transfers, into=Lane.WEIGHTS_IN)
        self._parts: dict[int, Part] = {part.unit - 1: part for part in store.parts if part.weights_streamed}
        self._bound: tuple[range, Slot] | None = None  # blocks whose parameters are views of a slot, and that slot
        self.fit(segments)
        decoder.before_blocks(self._parts, self._called)

    def fit(self, segments: Sequence[range]) -> None:
        """Makes slots for the largest of `segments`, which are the most that is brought at once."""
        if not self._parts:
            return
        several = [self._parts_of(blocks) for blocks in segments] + [[part] for part in self._parts.values()]
        size = max(sum(part.working.numel() for part in parts) for parts in several)
        sizes = {"weights": (size, several[-1][0].working.dtype)}
        if sizes != self._window.sizes:
            self._bind(None)
        self._window.fit(WEIGHT_SLOTS, sizes, self._device)

    @property
    def any(self) -> bool:
        """Whether there are blocks in RAM."""
        return bool(self._parts)

    def any_of(self, blocks: range) -> bool:
        """Whether some of `blocks` are in RAM."""
        return bool(self._parts_of(blocks))

    def bring(self, blocks: range, following: range | None = None) -> None:
        """Makes the parameters of `blocks` their weights, for kernels launched from now on, and starts to fetch those
        of the `following` blocks. All of them have been updated."""
        slot = None
        if self.any_of(blocks):
            slot = self._fetch(blocks, other_than=None if self._bound is None else self._bound[1])
            if self._bound is None or self._bound[0] != blocks or self._bound[1] is not slot:
                self._bind((blocks, slot))
            self._window.use(slot)
        if following is not None and self.any_of(following):
            self._fetch(following, other_than=slot)

    def _fetch(self, blocks: range, other_than: Slot | None) -> Slot:
        """Returns the slot of the weights of `blocks`, which are there or on their way."""
        content, slots = self._content_of(blocks), self._window.slots
        for slot in slots:
            if slot.inside == content:
                return slot
        slot = next(slot for slot in slots if slot is not other_than)
        if self._bound is not None and self._bound[1] is slot:
            self._bind(None)
        slot.inside = None  # until all of it is on its way
        pairs, mark = [(flat, part.working) for part, flat in self._flat(blocks, slot)], self._window.transfers.mark
        # Kernels launched so far may use what the slot holds; copies out may be of these weights.
        self._window.fetch(slot, pairs, mark(Lane.COMPUTE), mark(Lane.STATES_OUT))
        slot.inside = content
        return slot

    def _content_of(self, blocks: range) -> tuple:
        """Names the weights: which blocks, after how many updates of each."""
        return blocks, *(part.updates for part in self._parts_of(blocks))

    def _flat(self, blocks: range, slot: Slot) -> Iterable[tuple[Part, Tensor]]:
        """Returns each part and its place in the slot."""
        parts = self._parts_of(blocks)
        sizes = [part.working.numel() for part in parts]
        return zip(parts, slot.tensors["weights"][: sum(sizes)].split(sizes), strict=True)

    def _bind(self, bound: tuple[range, Slot] | None) -> None:
        """Makes the parameters of these blocks views of this slot, and no others."""
        if self._bound is not None:
            for parameter, absent, _ in self._views(*self._bound):
                parameter.data = absent
        self._bound = bound
        if bound is not None:
            for parameter, _, weights in self._views(*bound):
                parameter.data = weights

    def _views(self, blocks: range, slot: Slot) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns each parameter, its placeholder and its weights in the slot; made once, like those of states."""
        if blocks not in slot.views:
            slot.views[blocks] = [
                (self._decoder.units[part.unit].parameters[name], part.placeholder(name), part.view(flat, name))
                for part, flat in self._flat(blocks, slot)
                for name in part.names()
            ]
        return slot.views[blocks]

    def _called(self, index: int) -> None:
        """A block is about to run. If it comes by itself, the next one is likely to follow."""
        here = self._bound is not None and index in self._bound[0]
        if not here or self._bound[1].inside != self._content_of(self._bound[0]):
            self.bring(range(index, index + 1), range(index + 1, index + 2))

    def _parts_of(self, blocks: range) -> list[Part]:
        return [self._parts[index] for index in blocks if index in self._parts]


class BoundaryWindow:
    """Takes boundaries to RAM and back. One buffer holds those of a group; it grows if a later step needs more. On the
    device are at most LEAVING boundaries on their way out, and one on its way in."""

    def __init__(self, transfers: Transfers, store: Store):
        self._store, self._window = store, Window(transfers, Lane.BOUNDARIES_IN, Lane.RAM_OUT)
        self._buffer: Tensor | None = None
        self._used = 0
        self._coming: dict[int, Slot] = {}  # by the id of the SavedSegment

    @property
    def buffer_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def begin(self, hidden: Sequence[Tensor] = (), segments: Sequence[Segment] = ()) -> None:
        """Drops the group before and makes room for one whose first segment has the inputs `hidden`, [B, T, D] each."""
        self._window.use(*self._coming.values())  # the next owner of this memory must not meet a copy under way
        self._window.release()
        self._coming, self._used = {}, 0
        needed = sum(segment.keep != ALL for segment in segments) * sum(map(_room, hidden))
        if needed > (0 if self._buffer is None else self._buffer.numel()):
            self._window.transfers.synchronize()
            self._buffer = None  # frees the old one first
            self._buffer = self._store.host_buffer(needed, hidden[0].dtype)

    def leave(self, segment: Segment, saved: SavedSegment) -> None:
        """Sends the boundary of a segment that has run forward to RAM, unless autograd's graph holds it anyway."""
        tensor = saved.boundary
        if segment.keep == ALL or not tensor.is_contiguous():
            return
        saved.boundary = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        saved.in_ram = True
        self._used += _room(tensor)
        self._window.release(LEAVING - 1)
        self._window.send_away(tensor, saved.boundary)

    def bring(self, saved: Sequence[list[SavedSegment]], index: int) -> None:
        """Puts the last boundary of micro-batch `index`, which is about to run backward, on the device, for kernels
        launched from now on. Starts to fetch the one after it: of the next micro-batch or, after the last micro-batch,
        of the first one in the segment below."""
        here = saved[index][-1]
        if here.in_ram:
            self._fetch(here)
            slot = self._coming.pop(id(here))
            self._window.use(slot)
            here.boundary, here.in_ram = slot.tensors["boundary"], False
        if index + 1 < len(saved):
            following = saved[index + 1]
        else:  # the first one has run already, unless it is the only one
            following = saved[0] if index else saved[0][:-1]
        if following and following[-1].in_ram:
            self._fetch(following[-1])

    def _fetch(self, saved: SavedSegment) -> None:
        if id(saved) in self._coming:
            return
        self._window.release()  # the copy below waits for COMPUTE, and so finds it in RAM
        home = saved.boundary
        slot = self._window.slot({"boundary": torch.empty(home.shape, dtype=home.dtype, device=self._store.device)})
        self._window.fetch(slot, [(slot.tensors["boundary"], home)])
        self._coming[id(saved)] = slot


class GradientWindow:
    """Takes final gradients to RAM; they come back with the states."""

    def __init__(self, transfers: Transfers):
        self._window = Window(transfers, out=Lane.RAM_OUT)

    def leave(self, parts: Iterable[Part]) -> None:
        """Sends the gradients of `parts`, and releases those that were sent before."""
        self.release()
        for part in parts:
            self._window.send_away(part.gradient, part.gradient_home)
            part.gradient, part.gradient_left = None, True

    def release(self) -> None:
        """Frees the memory of what was sent, for kernels launched from now on; fetches find it in RAM."""
        self._window.release(0, Lane.STATES_IN)


def _room(tensor: Tensor) -> int:
    """Returns the elements of the buffer that `tensor` takes."""
    return math.ceil(tensor.numel() / _ALIGNMENT) * _ALIGNMENT
