"""Copies weights of segments from RAM to the GPU, saved inputs of segments to RAM and back, and gradients to RAM.

A segment is a range of blocks that are recomputed together. A segment's boundary is its saved input (docs/step.md). For
each group of micro-batches that are computed together, a step copies each weight in RAM to the GPU twice: for forward
and for backward. Updates copy weights, too, together with optimizer states (window.py). A group's boundaries take 19
GiB for GPT-2-XL with 64 rows of 1,024 tokens. Boundaries are copied while other micro-batches or segments are computed.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowmem.core.decoder import Decoder
from lowmem.core.parameters import Part, Store
from lowmem.core.recompute import ALL, SavedSegment, Segment
from lowmem.core.transfers import Lane, Transfers
from lowmem.core.window import Slot, Window
from lowmem.units import round_up

WEIGHT_SLOTS = 2  # number of segments whose weights are on the device at a time
LEAVING = 2  # most boundaries that are being copied to RAM at a time
_ALIGNMENT = 256  # each boundary in RAM begins at a multiple of this number of elements


class WeightWindow:
    """Copies the weights of blocks from RAM to the device before the blocks run. Does nothing if no weights in `store`
    are in RAM.

    A slot is a buffer on the device for the weights of one segment (consecutive blocks). The parameters of a block are
    views of a slot while the block's weights are there. Otherwise the parameters are NaN, so that a use of absent
    weights shows at once. A training step calls `bring` before a block runs. An evaluation does not, so a hook copies
    the weights (`_called`).
    """

    def __init__(self, transfers: Transfers, decoder: Decoder, store: Store, segments: Sequence[range]):
        self._decoder, self._device = decoder, store.device
        self._window = Window(transfers, into=Lane.WEIGHTS_IN)
        self._parts: dict[int, Part] = {part.unit - 1: part for part in store.parts if part.weights_streamed}
        self._bound: tuple[range, Slot] | None = None  # blocks whose parameters are views of a slot, and that slot
        self.fit(segments)
        decoder.before_blocks(self._parts, self._called)

    def fit(self, segments: Sequence[range]) -> None:
        """Allocates slots (buffers on the device), each with room for the weights of any of `segments` (ranges of
        blocks)."""
        if not self._parts:
            return
        several = [self._parts_of(blocks) for blocks in segments] + [[part] for part in self._parts.values()]
        size = max(sum(part.working.numel() for part in parts) for parts in several)
        sizes = {"weights": (size, several[-1][0].working.dtype)}
        if sizes != self._window.sizes:
            self._bind(None)
        self._window.fit(WEIGHT_SLOTS, sizes, self._device)

    @property
    def fetches(self) -> bool:
        """Returns True if some blocks have weights in RAM, which must be copied."""
        return bool(self._parts)

    def fetches_any_of(self, blocks: range) -> bool:
        """Returns True if some of `blocks` have weights in RAM, which must be copied."""
        return bool(self._parts_of(blocks))

    def bring(self, blocks: range, following: range | None = None) -> None:
        """Makes the weights of `blocks` available on the device, for kernels launched from now on. Also queues copies
        of the weights of `following`, the blocks that run next; None for no blocks. No update of `blocks` or
        `following` may be pending (deferred_updates.py)."""
        slot = None
        if self.fetches_any_of(blocks):
            slot = self._fetch(blocks, other_than=None if self._bound is None else self._bound[1])
            if self._bound is None or self._bound[0] != blocks or self._bound[1] is not slot:
                self._bind((blocks, slot))
            self._window.use(slot)
        if following is not None and self.fetches_any_of(following):
            self._fetch(following, other_than=slot)

    def _fetch(self, blocks: range, other_than: Slot | None) -> Slot:
        """Returns the buffer on the device (slot) that holds the weights of `blocks`. If none does, starts to copy them
        into a slot other than `other_than`."""
        content, slots = self._content_of(blocks), self._window.slots
        for slot in slots:
            if slot.inside == content:
                return slot
        slot = next(slot for slot in slots if slot is not other_than)
        if self._bound is not None and self._bound[1] is slot:
            self._bind(None)
        slot.inside = None  # until all copies into it are queued
        pairs, mark = [(flat, part.working) for part, flat in self._flat(blocks, slot)], self._window.transfers.mark
        # The copy waits for kernels launched so far, which may use the slot's old weights. It also waits for copies of
        # updated weights to RAM.
        self._window.fetch(slot, pairs, mark(Lane.COMPUTE), mark(Lane.STATES_OUT))
        slot.inside = content
        return slot

    def _content_of(self, blocks: range) -> tuple:
        """Returns a key for the current weights of `blocks`: the blocks, and a number for each that its updates
        change."""
        return blocks, *(part.version for part in self._parts_of(blocks))

    def _flat(self, blocks: range, slot: Slot) -> Iterable[tuple[Part, Tensor]]:
        """Returns (part, view of `slot` for that part's weights) for each part of `blocks` whose weights are in RAM. A
        part is a block's matrices or vectors. `slot`: a buffer on the device."""
        parts = self._parts_of(blocks)
        sizes = [part.working.numel() for part in parts]
        return zip(parts, slot.tensors["weights"][: sum(sizes)].split(sizes), strict=True)

    def _bind(self, bound: tuple[range, Slot] | None) -> None:
        """Makes the parameters of some blocks views of a slot (a buffer on the device). `bound`: (these blocks, the
        slot); None for no blocks. Parameters that were views of a slot before become NaN."""
        if self._bound is not None:
            for parameter, absent, _ in self._views(*self._bound):
                parameter.data = absent
        self._bound = bound
        if bound is not None:
            for parameter, _, weights in self._views(*bound):
                parameter.data = weights

    def _views(self, blocks: range, slot: Slot) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns (parameter, placeholder of NaN, weights in the slot) for each parameter of `blocks`. The first call
        for `blocks` makes these tensors for all slots (buffers on the device) and stores them, so that later steps make
        none."""
        for each in () if blocks in slot.views else self._window.slots:
            each.views[blocks] = [
                (self._decoder.units[part.unit].parameters[name], part.placeholder(name), part.view(flat, name))
                for part, flat in self._flat(blocks, each)
                for name in part.names()
            ]
        return slot.views[blocks]

    def _called(self, index: int) -> None:
        """Runs as a hook before each forward of block `index` (Decoder.before_blocks). Does nothing if the block's
        newest weights are on the device. In a training step they are, because the step has called `bring`. In an
        evaluation they are not. Then this function calls `bring` for this block and the next one."""
        here = self._bound is not None and index in self._bound[0]
        if not here or self._bound[1].inside != self._content_of(self._bound[0]):
            self.bring(range(index, index + 1), range(index + 1, index + 2))

    def _parts_of(self, blocks: range) -> list[Part]:
        return [self._parts[index] for index in blocks if index in self._parts]


class BoundaryWindow:
    """Copies boundaries (saved inputs of segments, that is, of consecutive blocks) to RAM and back. One buffer in RAM
    holds all boundaries of the micro-batches that are computed together; a later step that needs more allocates a
    larger one. At any time, at most LEAVING boundaries are being copied to RAM, and one is being copied back."""

    def __init__(self, transfers: Transfers, store: Store):
        self._store, self._window = store, Window(transfers, Lane.BOUNDARIES_IN, Lane.RAM_OUT)
        self._buffer: Tensor | None = None
        self._used = 0
        self._coming: dict[int, Slot] = {}  # {id of a SavedSegment: slot into which its boundary is being copied}

    @property
    def buffer_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def forget(self) -> None:
        """Forgets the boundaries (saved inputs of segments) of the last group of micro-batches, and frees their memory
        on the device. Keeps the buffer in RAM for the next group."""
        self._window.use(*self._coming.values())  # copies must be done before kernels reuse this memory
        self._window.release()
        self._coming, self._used = {}, 0

    def begin(self, hidden: Sequence[Tensor], segments: Sequence[Segment]) -> None:
        """Begins a group of micro-batches that are computed together. Makes the buffer in RAM large enough for the
        group's boundaries (saved inputs of segments). `hidden`: the first block's input [B, T, D] of each micro-batch.
        `segments`: all segments of the model."""
        self.forget()
        needed = sum(segment.keep != ALL for segment in segments) * sum(map(_padded, hidden))
        if needed > (0 if self._buffer is None else self._buffer.numel()):
            self._window.transfers.synchronize()
            self._buffer = None  # frees the old one first
            self._buffer = self._store.host_buffer(needed, hidden[0].dtype)

    def leave(self, segment: Segment, saved: SavedSegment) -> None:
        """Queues a copy to RAM of the input that `segment` saved in forward. Replaces `saved.boundary` by the tensor in
        RAM. Does nothing if the input is not contiguous, or if the segment saves its whole graph, which holds the input
        anyway."""
        tensor = saved.boundary
        if segment.keep == ALL or not tensor.is_contiguous():
            return
        saved.boundary = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        saved.in_ram = True
        self._used += _padded(tensor)
        self._window.release(LEAVING - 1)
        self._window.send_away(tensor, saved.boundary)

    def bring(self, saved: Sequence[list[SavedSegment]], index: int) -> None:
        """Makes a boundary (saved input of a segment) available on the device, for kernels launched from now on. It is
        the boundary of the last segment in `saved[index]`. `saved[i]`: the segments that micro-batch i still has to run
        backward. Also queues a copy of the boundary that is needed next. This is the next micro-batch's for the same
        segment. After the last micro-batch, it is the first micro-batch's for the segment before."""
        here = saved[index][-1]
        if here.in_ram:
            self._fetch(here)
            slot = self._coming.pop(id(here))
            self._window.use(slot)
            here.boundary, here.in_ram = slot.tensors["boundary"], False
        if index + 1 < len(saved):
            following = saved[index + 1]
        else:  # micro-batch 0 has run this segment and removed it from its list, unless it is the only micro-batch
            following = saved[0] if index else saved[0][:-1]
        if following and following[-1].in_ram:
            self._fetch(following[-1])

    def _fetch(self, saved: SavedSegment) -> None:
        if id(saved) in self._coming:
            return
        self._window.release()  # the copy below waits for COMPUTE, which then waits for the copies to RAM
        home = saved.boundary
        slot = self._window.slot({"boundary": torch.empty(home.shape, dtype=home.dtype, device=self._store.device)})
        self._window.fetch(slot, [(slot.tensors["boundary"], home)])
        self._coming[id(saved)] = slot


class GradientWindow:
    """Copies final (fully accumulated) gradients to RAM, where the gradients wait for updates. StateWindow (window.py)
    copies them back, together with optimizer states."""

    def __init__(self, transfers: Transfers):
        self._window = Window(transfers, out=Lane.RAM_OUT)

    def leave(self, parts: Iterable[Part]) -> None:
        """Queues copies of the gradients of `parts` (units' matrices or vectors) to RAM, and returns at once. Each part
        must have a `gradient_home`, a tensor in RAM. Frees the device memory of the gradients of earlier calls."""
        self.release()
        for part in parts:
            self._window.send_away(part.gradient, part.gradient_home)
            part.gradient, part.gradient_in_ram = None, True

    def release(self) -> None:
        """Frees the device memory of gradients that were copied to RAM, for kernels launched from now on. Later copies
        back to the device wait until the gradients are in RAM."""
        self._window.release(0, Lane.STATES_IN)


def _padded(tensor: Tensor) -> int:
    """Returns the number of elements that `tensor` takes in the RAM buffer: its size, rounded up to a multiple of
    _ALIGNMENT."""
    return round_up(tensor.numel(), _ALIGNMENT)
