"""Gradients that wait in RAM for their updates.

Where gradients are clipped none can be used before the norm of all of them is known, and 4 bytes per parameter are more
than a large model leaves of the device. With the whole batch as one group a unit's gradient is final when its segment
has run backward for all micro-batches. Then it leaves, while the segment below runs backward, and comes back with the
state of each piece when that is updated (offload.py). Nothing of this changes a bit of the result.

On the device are the gradients of the segment that runs backward, and of the one above it, which are on their way; and
the embeddings', which are final when backward ends and used when the next forward begins.
"""

from collections.abc import Iterable

from torch import Tensor

from lowmem.core.offload import StagingRing
from lowmem.core.parameters import Part


class StreamedGradients:
    """Takes gradients to RAM by the copies of `ring`, which brings them back."""

    def __init__(self, ring: StagingRing):
        self._ring = ring
        self._leaving: list[tuple[str, Tensor]] = []  # with the slot of each copy

    def leave(self, parts: Iterable[Part]) -> None:
        """The gradients of `parts` are final; those that left before have arrived for kernels launched from now on."""
        self.let_go()
        for part in parts:
            slot = f"gradient {len(self._leaving)}"
            self._ring.copies.leave(slot, part.gradient, part.gradient_home)
            self._leaving.append((slot, part.gradient))
            part.gradient, part.gradient_left = None, True

    def let_go(self) -> None:
        """The memory of what has left is free for kernels that are launched from now on."""
        for slot, _ in self._leaving:
            self._ring.copies.wait_left(slot)
        self._leaving = []
