"""Holds the micro-batches that one rank computes in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem.core.batch import Batch
from lowmem.core.recompute import Dropout


@dataclass(frozen=True)
class Work:
    """Holds one rank's micro-batches of a step, with a seed for each one's dropout masks. `scale` multiplies the sum of
    all tokens' losses before backward. `groups`: slices of `micro_batches`, each for those that pass a segment of
    blocks together. `positions`: number of positions in the micro-batches of all ranks, with padding."""

    micro_batches: Sequence[Batch]
    dropouts: Sequence[Dropout]
    scale: float
    groups: Sequence[slice] = ()
    positions: int = 0

    def group(self, places: slice) -> "Work":
        return Work(self.micro_batches[places], self.dropouts[places], self.scale)
