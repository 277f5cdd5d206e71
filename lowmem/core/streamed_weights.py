"""Working weights that live in RAM and pass through the device, a segment of blocks at a time.

For models whose 16-bit weights do not fit beside the rest. There are SLOTS slots on the device, each as large as the
weights of the largest segment: while one segment computes, the next one's weights arrive in the other slot. A segment
comes for its forward and again for its backward, each time for all micro-batches of a group, so that a step of G groups
moves 2 G times the streamed weights to the device. Nothing goes back: weights that are updated come with their state
(offload.py) and return with it. Nothing of this changes a bit of the result.

The parameters of a block are views of a slot while its segment is there. Else they are NaN, so that what computes with
weights that are not there shows at once.
"""

from collections.abc import Sequence

import torch

from lowmem.core.decoder import Decoder
from lowmem.core.offload import StagingRing
from lowmem.core.parameters import Part, Store

SLOTS = 2


class StreamedWeights:
    """Brings the blocks of `decoder` whose weights in `store` are in RAM; where all are on the device, nothing.

    Blocks that run without having been brought, as in an evaluation or while a text is written, come one by one.
    """

    def __init__(self, decoder: Decoder, store: Store, segments: Sequence[range], ring: StagingRing):
        """`segments`: what is brought at once, at most; `ring`: its copies take updated weights home."""
        self._decoder, self._ring = decoder, ring
        self._parts: dict[int, Part] = {part.unit - 1: part for part in store.parts if part.weights_streamed}
        self._slots: list[torch.Tensor] = []
        self._content: list[tuple] = [()] * SLOTS  # of each slot, see _content_of
        self._bound: tuple[range, int] | None = None  # blocks whose parameters are views of a slot, and that slot
        self.fit(segments)
        decoder.before_blocks(self._parts, self._called)

    def fit(self, segments: Sequence[range]) -> None:
        """Makes the slots as large as `segments` need them, anew where they are not."""
        if not self._parts:
            return
        parts = [self._parts_of(blocks) for blocks in segments] + [[part] for part in self._parts.values()]
        largest = max(sum(part.working.numel() for part in several) for several in parts)
        if self._slots and self._slots[0].numel() == largest:
            return
        self._bind(None)
        for slot, content in enumerate(self._content):
            if content:
                self._ring.copies.wait_weights(slot)  # what takes this memory next must not meet the copy
        self._slots, self._content = [], [()] * SLOTS  # the old ones' memory is free from here on
        dtype, device = parts[-1][0].working.dtype, parts[-1][0].device
        self._slots = [torch.empty(largest, dtype=dtype, device=device) for _ in range(SLOTS)]

    @property
    def any(self) -> bool:
        """Whether any blocks are in RAM."""
        return bool(self._parts)

    def any_of(self, blocks: range) -> bool:
        """Whether any of them is in RAM."""
        return bool(self._parts_of(blocks))

    def bring(self, blocks: range, following: range | None = None) -> None:
        """The parameters of `blocks` become their weights, for kernels that are launched from now on; those of the
        `following` blocks, whose updates have been made too, are on their way."""
        slot = None
        if self._parts_of(blocks):
            slot = self._fetch(blocks, beside=None if self._bound is None else self._bound[1])
            if self._bound != (blocks, slot):
                self._bind((blocks, slot))
            self._ring.copies.wait_weights(slot)
        if following is not None and self._parts_of(following):
            self._fetch(following, beside=slot)

    def _fetch(self, blocks: range, beside: int | None) -> int:
        """The slot in which the weights of `blocks` are or will be; if they are in none yet, not in `beside`."""
        parts, content = self._parts_of(blocks), self._content_of(blocks)
        if content in self._content:
            return self._content.index(content)
        slot = next(number for number in range(SLOTS) if number != beside)
        if self._bound is not None and self._bound[1] == slot:
            self._bind(None)
        self._content[slot] = ()  # until all of it is on its way
        self._ring.copies.fetch_weights(slot, {part.name: part.working for part in parts}, self._views(blocks, slot))
        self._content[slot] = content
        return slot

    def _content_of(self, blocks: range) -> tuple:
        """What a slot with their weights holds: which blocks, after how many updates of each."""
        return blocks, *(part.updates for part in self._parts_of(blocks))

    def _views(self, blocks: range, slot: int) -> dict[str, torch.Tensor]:
        """Where the weights of each part lie in the slot, flat, by the part's name."""
        parts = self._parts_of(blocks)
        sizes = [part.working.numel() for part in parts]
        return dict(zip((part.name for part in parts), self._slots[slot][: sum(sizes)].split(sizes), strict=True))

    def _bind(self, bound: tuple[range, int] | None) -> None:
        """Those parameters are views of that slot, and no others are."""
        if self._bound is not None:
            for part in self._parts_of(self._bound[0]):
                for name, parameter in self._parameters(part):
                    parameter.data = part.placeholder(name)
        self._bound = bound
        if bound is not None:
            views = self._views(*bound)
            for part in self._parts_of(bound[0]):
                for name, parameter in self._parameters(part):
                    parameter.data = part.view(views[part.name], name)

    def _called(self, index: int) -> None:
        """A block is about to run. Where it comes by itself, the next one is likely to follow."""
        here = self._bound is not None and index in self._bound[0]
        if not here or self._content[self._bound[1]] != self._content_of(self._bound[0]):
            self.bring(range(index, index + 1), range(index + 1, index + 2))

    def _parts_of(self, blocks: range) -> list[Part]:
        return [self._parts[index] for index in blocks if index in self._parts]

    def _parameters(self, part: Part):
        parameters = self._decoder.units[part.unit].parameters
        return [(name, parameters[name]) for name in part.names()]
