"""Copies weights, saved inputs and gradients of segments (blocks that are recomputed together) between RAM and the
GPU."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


class _Views(NamedTuple):  # of blocks in a slot, made once to save CPU time
    pairs: list[tuple[Tensor, Tensor]]  # (place in the slot, weights in RAM) of each block
    parameters: list[tuple[Tensor, Tensor, Tensor]]  # (parameter, NaNs, weights in the slot)


class WeightWindow:
    """Copies blocks' weights from RAM into slots: device buffers, each for one segment (blocks that are recomputed
    together). The parameters of the segment that runs are views of its slot. Parameters of other blocks with weights in
    RAM hold only NaNs, even if their weights have arrived in a slot."""

    def __init__(self, transfers: Transfers, decoder: Decoder, store: Store, segments: Sequence[range]):
        self._decoder, self._device = decoder, store.device
        self._window = Window(transfers, into=Lane.WEIGHTS_IN)
        self._parts: dict[int, Part] = {part.unit - 1: part for part in store.parts if part.weights_streamed}
        self._bound: tuple[range, Slot] | None = None  # blocks whose parameters are views of a slot, and that slot
        self.fit(segments)
        decoder.before_blocks(self._parts, self._called)

    def fit(self, segments: Sequence[range]) -> None:
        """Allocates slots (device buffers), each large enough for the weights of any of `segments`. Keeps slots of the
        right size."""
        if not self._parts:
            return
        several = [self._parts_of(blocks) for blocks in segments] + [[part] for part in self._parts.values()]
        size = max(sum(part.working.numel() for part in parts) for parts in several)
        sizes = {"weights": (size, several[-1][0].working.dtype)}
        if sizes != self._window.sizes:
            self._bind(None)
        self._window.fit(WEIGHT_SLOTS, sizes, self._device)

    def fetches_any_of(self, blocks: range) -> bool:
        return bool(self._parts_of(blocks))

    def bring(self, blocks: range, following: range | None = None) -> None:
        """Makes the weights of `blocks` available to kernels launched from now on. Queues copies of the weights of
        `following`, the blocks that run next. All pending updates of these blocks must be made before."""
        slot = None
        if self.fetches_any_of(blocks):
            slot = self._fetch(blocks, other_than=None if self._bound is None else self._bound[1])
            if self._bound is None or self._bound[0] != blocks or self._bound[1] is not slot:
                self._bind((blocks, slot))
            self._window.use(slot)
        if following is not None and self.fetches_any_of(following):
            self._fetch(following, other_than=slot)

    def _fetch(self, blocks: range, other_than: Slot | None) -> Slot:
        content, slots = self._content_of(blocks), self._window.slots
        for slot in slots:
            if slot.inside == content:
                return slot
        slot = next(slot for slot in slots if slot is not other_than)
        if self._bound is not None and self._bound[1] is slot:
            self._bind(None)
        slot.inside = None  # until all copies into it are queued
        pairs, mark = self._views(blocks, slot).pairs, self._window.transfers.mark
        # The copy waits for kernels launched so far, which may use the slot's old weights. It also waits for copies of
        # updated weights to RAM.
        self._window.fetch(slot, pairs, mark(Lane.COMPUTE), mark(Lane.STATES_OUT))
        slot.inside = content
        return slot

    def _content_of(self, blocks: range) -> tuple:
        # An update changes `version`, and so the key.
        return blocks, *(part.version for part in self._parts_of(blocks))

    def _bind(self, bound: tuple[range, Slot] | None) -> None:
        if self._bound is not None:
            for parameter, absent, _ in self._views(*self._bound).parameters:  # a use of absent weights shows at once
                parameter.data = absent
        self._bound = bound
        if bound is not None:
            for parameter, _, weights in self._views(*bound).parameters:
                parameter.data = weights

    def _views(self, blocks: range, slot: Slot) -> _Views:
        for each in () if blocks in slot.views else self._window.slots:
            each.views[blocks] = views = _Views([], [])
            sizes = [part.working.numel() for part in self._parts_of(blocks)]
            flats = each.tensors["weights"][: sum(sizes)].split(sizes)
            for part, flat in zip(self._parts_of(blocks), flats, strict=True):
                views.pairs.append((flat, part.working))
                parameters = self._decoder.units[part.unit].parameters
                for name in part.names():
                    views.parameters.append((parameters[name], part.placeholder(name), part.view(flat, name)))
        return slot.views[blocks]

    def _called(self, index: int) -> None:
        # A training step has called `bring`; an evaluation has not.
        here = self._bound is not None and index in self._bound[0]
        if not here or self._bound[1].inside != self._content_of(self._bound[0]):
            self.bring(range(index, index + 1), range(index + 1, index + 2))

    def _parts_of(self, blocks: range) -> list[Part]:
        return [self._parts[index] for index in blocks if index in self._parts]


class BoundaryWindow:
    """Copies boundaries (saved inputs of segments) to one RAM buffer and back."""

    def __init__(self, transfers: Transfers, store: Store):
        self._store, self._window = store, Window(transfers, Lane.BOUNDARIES_IN, Lane.RAM_OUT)
        self._buffer: Tensor | None = None  # in RAM; a later step that needs more allocates a larger one
        self._used = 0
        self._coming: dict[int, Slot] = {}  # {id of a SavedSegment: slot into which its boundary is being copied}

    @property
    def buffer_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def forget(self) -> None:
        """Forgets the saved inputs of the previous group of micro-batches, and frees their device memory."""
        self._window.use(*self._coming.values())  # copies must be done before kernels reuse this memory
        self._window.release()
        self._coming, self._used = {}, 0

    def begin(self, hidden: Sequence[Tensor], segments: Sequence[Segment]) -> None:
        """Makes room in RAM for the inputs that `segments` will save in forward, for all micro-batches of a group.
        `hidden[i]`: the first block's input [B, T, D] for micro-batch i."""
        self.forget()
        needed = sum(segment.keep != ALL for segment in segments) * sum(map(_padded, hidden))
        if needed > (0 if self._buffer is None else self._buffer.numel()):
            self._window.transfers.synchronize()
            self._buffer = None  # frees the old one first
            self._buffer = self._store.host_buffer(needed, hidden[0].dtype)

    def leave(self, segment: Segment, saved: SavedSegment) -> None:
        """Queues a copy of the segment's input to RAM, and replaces `saved.boundary` by that copy. Does nothing if the
        input is not contiguous, or if the segment saved its autograd graph, which holds the input."""
        tensor = saved.boundary
        if segment.keep == ALL or not tensor.is_contiguous():
            return
        saved.boundary = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        saved.in_ram = True
        self._used += _padded(tensor)
        self._window.release(LEAVING - 1)
        self._window.send_away(tensor, saved.boundary)

    def bring(self, saved: Sequence[list[SavedSegment]], index: int) -> None:
        """Makes the input of the segment that runs backward next, `saved[index][-1]`, available to kernels launched
        from now on. Queues a copy of the input that is needed after it. `saved[i]`: segments that micro-batch i still
        has to run backward, in forward order."""
        here = saved[index][-1]
        if here.in_ram:
            self._fetch(here)
            slot = self._coming.pop(id(here))
            self._window.use(slot)
            here.boundary, here.in_ram = slot.tensors["boundary"], False
        # The boundary needed next is that of the next micro-batch. After the last micro-batch, it is that of the first
        # one for the segment before.
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
    """Copies final (fully summed) gradients to RAM, to wait for updates. StateWindow (window.py) copies them back."""

    def __init__(self, transfers: Transfers):
        self._window = Window(transfers, out=Lane.RAM_OUT)

    def leave(self, parts: Iterable[Part]) -> None:
        """Frees the device memory of gradients sent earlier, and queues copies of the gradients of `parts` to RAM."""
        self.release()
        for part in parts:
            self._window.send_away(part.gradient, part.gradient_home)
            part.gradient, part.gradient_in_ram = None, True

    def release(self) -> None:
        """Frees the device memory of all gradients that `leave` has sent to RAM. Kernels launched later, which may
        reuse it, wait until the copies are done."""
        # Copies back to the device must wait until the gradients are in RAM.
        self._window.release(0, Lane.STATES_IN)


def _padded(tensor: Tensor) -> int:
    return round_up(tensor.numel(), _ALIGNMENT)
