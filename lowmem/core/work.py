"""Holds what one rank computes in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem.core.batch import Batch
from lowmem.core.recompute import Dropout


@dataclass(frozen=True)
class Work:
    """Holds a step's micro-batches with their dropout masks. `scale` multiplies the sum of all tokens' losses before
    backward. `groups`: slices of the micro-batches. `positions`: their number in the micro-batches of all ranks."""

    micro_batches: Sequence[Batch]
    dropouts: Sequence[Dropout]
    scale: float
    groups: Sequence[slice] = ()
    positions: int = 0

    def group(self, places: slice) -> "Work":
        return Work(self.micro_batches[places], self.dropouts[places], self.scale)
