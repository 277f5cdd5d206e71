"""How a step is laid out: its micro-batches, groups and segments, what blocks keep, which states are on the device.

No layout changes a bit of the result but for how it cuts micro-batches, by `micro_batch` and `least_positions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowmem.core.recompute import ALL, INPUT, PRODUCTS, Segment

# When a unit is updated: just before the next forward pass needs it; as soon as its gradient is final; the same in a
# second pass of forward and backward, after a first one for the norm alone.
DEFERRED, IN_BACKWARD, TWO_PASS = "deferred", "in_backward", "two_pass"

# Positions of a micro-batch below which it takes hardly less time, by device. On a GPU because weights and accumulators
# are read for it (as long as 120 positions of a large model take on an RTX 3060, 260 on an H100) and kernels are
# launched (200 for GPT-2-Large on an RTX 4090, 400 for GPT-2); on the CPU, kernels alone.
LEAST_POSITIONS = {"cuda": 512, "cpu": 64}


@dataclass(frozen=True)
class Layout:
    """`micro_batch` in sequences, `group` in micro-batches, `segment_blocks` in blocks. Numbers, not lists of groups
    and segments, so that a layout can be saved, compared and made smaller; `groups` and `segments` make the lists.

    `recompute`: whether blocks run again in backward; of those that would, the last `whole_blocks` keep all that
    backward needs, and the `product_blocks` before them their products (recompute.py). The last ones, because theirs is
    the memory that is free again first. `norm_first`: whether forward and backward run twice, the first time for the
    norm alone; the whole batch is one group then.
    `first_group`: that of the first group, where it is larger. Its forward pass is what the updates hide behind, and it
    finds room: the inputs that it keeps grow as held gradients are spent, and go as new ones come to be. 0: as the
    others.
    `resident_units`: the first units, whose optimizer states are on the device. `resident_weights`: the first units
    whose working weights are there, too; with None all are. Those of the others, but for the last unit, pass through
    the device segment by segment (segment_windows.py), and nothing else can be kept of their blocks than inputs and
    products; their states are streamed. `boundaries_in_ram`: whether inputs of blocks wait there for their backward
    (segment_windows.py). `disk_units`: of how many of the units whose states are streamed the matrices' are on a
    disk (homes.py). `gradients_in_ram`: whether those of the units whose states are streamed wait there for the norm
    (segment_windows.py); the whole batch is one group then. `evaluation_rows`: sequences in a micro-batch of an
    evaluation, where that is fewer than `micro_batch`. `least_positions`: of a micro-batch, below which it takes no
    less time (batch.py).
    """

    micro_batch: int
    group: int = 1
    segment_blocks: int = 1
    recompute: bool = True
    product_blocks: int = 0
    whole_blocks: int = 0
    norm_first: bool = False
    first_group: int = 0
    resident_units: int = 0
    resident_weights: int | None = None
    boundaries_in_ram: bool = False
    disk_units: int = 0
    gradients_in_ram: bool = False
    evaluation_rows: int | None = None
    least_positions: int = 1

    def __post_init__(self):
        if self.norm_first and self.gradients_in_ram:
            raise ValueError("gradients that wait in RAM need no pass of their own for the norm")
        if self.resident_weights is None:
            return
        if self.whole_blocks or not self.recompute:
            raise ValueError("a block whose weights are streamed cannot keep its graph, which holds them")
        if self.resident_units > max(self.resident_weights, 1):
            raise ValueError("where the weights of a unit are streamed its states are, too")

    def groups(self, positions: Sequence[int], seq: int) -> list[slice]:
        """A step's micro-batches, which have so many `positions` each, cut into groups: each takes what fits into
        `group` full ones, of `micro_batch` x `seq` positions."""
        full = self.micro_batch * seq
        starts, room = [], 0
        for index, size in enumerate(positions):
            if not starts or size > room:
                room = full * (self.group if starts else self.first_group or self.group)
                starts.append(index)
            room -= size
        return [slice(*ends) for ends in pairwise([*starts, len(positions)])]

    def update(self, groups: int, clips: bool, scales_loss: bool) -> str:
        """DEFERRED, IN_BACKWARD or TWO_PASS, for a step of so many groups. A unit is updated as soon as its
        gradient is final if nothing has to be known of all gradients first: neither their norm, by which they are
        clipped, nor, where the loss is scaled, that they are finite. ValueError for several groups where there has to
        be one."""
        if self.whole_batch and groups > 1:
            raise ValueError("the norm comes first, and gradients wait in RAM, only where the whole batch is one group")
        if groups == 1 and not clips and not scales_loss:
            return IN_BACKWARD
        return TWO_PASS if self.norm_first else DEFERRED

    @property
    def whole_batch(self) -> bool:
        """Whether the whole batch has to be one group."""
        return self.norm_first or self.gradients_in_ram

    def units_on_disk(self, units: int) -> list[int]:
        """Of a model's `units` those that `disk_units` counts: evenly among the streamed ones, so that a slow disk is
        at work all through a pass."""
        streamed = range(self.resident_units, units)
        disk = min(self.disk_units, len(streamed))
        return [
            unit for index, unit in enumerate(streamed)
            if (index + 1) * disk // len(streamed) > index * disk // len(streamed)
        ]  # fmt: skip

    def segments(self, blocks: int) -> list[Segment]:
        """All of a model's `blocks`, in order."""
        if not self.recompute:
            return _cut(range(blocks), self.segment_blocks, ALL)
        whole = max(blocks - self.whole_blocks, 0)
        products = max(whole - self.product_blocks, 0)
        return [
            *_cut(range(products), self.segment_blocks, INPUT),
            *_cut(range(products, whole), 1, PRODUCTS),
            *_cut(range(whole, blocks), 1, ALL),
        ]


def _cut(blocks: range, length: int, keep: str) -> list[Segment]:
    return [
        Segment(range(start, min(start + length, blocks.stop)), keep)
        for start in range(blocks.start, blocks.stop, length)
    ]
