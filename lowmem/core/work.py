"""Holds the micro-batches that one rank computes in a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem.core.batch import Batch
from lowmem.core.recompute import Dropout


@dataclass(frozen=True)
class Work:
    """Holds one rank's micro-batches of a step. `dropouts[i]` seeds the dropout masks of `micro_batches[i]`. `scale`
    multiplies the sum of all tokens' losses before backward. `groups`: slices of `micro_batches`. All micro-batches of
    one slice run through a segment of blocks before the next segment runs. `positions`: number of positions in the
    micro-batches of all ranks, with padding."""

    micro_batches: Sequence[Batch]
    dropouts: Sequence[Dropout]
    scale: float
    groups: Sequence[slice] = ()
    positions: int = 0

    def group(self, places: slice) -> "Work":
        """Returns a Work with the micro-batches of one group. `places`: the group's slice of `micro_batches`."""
        return Work(self.micro_batches[places], self.dropouts[places], self.scale)
