"""Defines the layout of a step: how the batch is cut, what blocks keep for backward, and where tensors are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lowmem.core.recompute import ALL, INPUT, PRODUCTS, Segment


class Fate(StrEnum):
    """Names what happens to a final (fully summed) gradient."""

    HELD = "held"  # It stays on the GPU. The updates in the next forward pass use it.
    SENT = "sent"  # It is copied to RAM, and waits there for its update.
    DROPPED = "dropped"  # It is freed: this pass computes only the norm. A second pass computes it again.
    APPLIED = "applied"  # It updates its unit (such as a block) at once, during backward.


@dataclass(frozen=True)
class Layout:
    """Describes how a step is computed; only `micro_batch` changes the bits of its result. A unit is the embeddings,
    one block, or the final norm. "Streamed" tensors are in RAM or on a disk, and copied to the GPU for use."""

    micro_batch: int  # sequences in a micro-batch
    group: int = 1  # micro-batches of full rows that pass one segment together; of shorter rows, more (`groups`)
    segment_blocks: int = 1  # consecutive blocks that are recomputed together, a segment
    # How much the model's n blocks save for backward, from 0 to 2 n:
    #     kept <= n    the last `kept` blocks save input and matrix products; the others, only inputs of segments
    #     kept > n     the last `kept` - n blocks save their whole graph; the others save input and matrix products
    # For n = 4, with I, P and A for input, products and all:   0 IIII   2 IIPP   4 PPPP   6 PPAA   8 AAAA
    kept: int = 0
    states_on_gpu: int = 0  # number of units, from unit 0 on, whose states are on the GPU; other states are streamed
    states_on_disk: int = 0  # number of units with streamed states that have their matrices' states on a disk
    # number of units, from unit 0 on, with weights on the GPU; None: all. Those of the first and last are always there
    weights_on_gpu: int | None = None
    boundaries_in_ram: bool = False  # True: the inputs of segments are in RAM until backward
    fate: Fate = Fate.HELD  # if not HELD, the whole batch is one group; APPLIED: no update may need the norm
    gathered: int = 0  # with several ranks: last blocks whose weights stay gathered until backward; others gather twice
    evaluation_rows: int | None = None  # sequences in a micro-batch of an evaluation, if fewer than `micro_batch`

    def __post_init__(self):
        object.__setattr__(self, "fate", Fate(self.fate))  # from a file, it comes as a str
        if self.weights_on_gpu is not None and self.states_on_gpu > max(self.weights_on_gpu, 1):
            raise ValueError("if the weights of a unit are streamed, its states are too")

    @property
    def whole_batch(self) -> bool:
        """Returns True if all micro-batches of a step must be one group."""
        # Each gradient must be complete before it leaves its accumulator in backward.
        return self.fate is not Fate.HELD

    @property
    def fixed_homes(self) -> tuple:
        # A training run cannot change these settings. The second says if gradients wait in RAM.
        return self.weights_on_gpu, self.fate is Fate.SENT, self.states_on_disk

    @property
    def passes(self) -> int:
        """Returns how often a step passes through all blocks: 2, or 4 if gradients are dropped and computed again."""
        return 4 if self.fate is Fate.DROPPED else 2

    def groups(self, positions: Sequence[int], seq: int) -> list[slice]:
        """Divides micro-batches into groups, which pass each segment of blocks together. Returns each group's slice of
        the list. A group has at most as many positions as `group` micro-batches of full rows, `seq` positions in a row.
        `positions[i]`: those of micro-batch i. Raises ValueError for several groups if `whole_batch` is True."""
        starts, left = [], 0
        for index, size in enumerate(positions):
            if not starts or size > left:
                # A limit in positions, so short micro-batches make larger groups.
                left = self.micro_batch * seq * self.group
                starts.append(index)
            left -= size
        if self.whole_batch and len(starts) > 1:
            raise ValueError(f"gradients can be {self.fate} only if the whole batch is one group")
        return [slice(*ends) for ends in pairwise([*starts, len(positions)])]

    def units_on_disk(self, units: int) -> list[int]:
        """Returns the numbers of the units (embeddings, blocks, final norm) whose matrices have their optimizer states
        on a disk. `units`: number of units in the model."""
        # Spread evenly over the units with streamed states: a slow disk is busy during all updates of a step.
        streamed = range(self.states_on_gpu, units)
        disk = min(self.states_on_disk, len(streamed))
        return [
            unit for index, unit in enumerate(streamed)
            if (index + 1) * disk // len(streamed) > index * disk // len(streamed)
        ]  # fmt: skip

    def recomputes(self, blocks: int) -> bool:
        """Returns True unless all `blocks` save their whole graph."""
        return self.kept < 2 * blocks

    def segments(self, blocks: int) -> list[Segment]:
        """Divides the `blocks` blocks of a model into segments (consecutive blocks that are recomputed together), first
        to last. Raises ValueError if a block would save its whole graph although weights are in RAM."""
        if self.weights_on_gpu is not None and self.kept > blocks:
            raise ValueError("a block whose weights are streamed cannot keep its graph, which holds them")
        whole = min(max(self.kept - blocks, 0), blocks)
        products = min(self.kept, blocks) - whole
        last = blocks - whole - products  # end of the blocks that keep only inputs
        starts = range(0, last, self.segment_blocks)
        return [
            *(Segment(range(start, min(start + self.segment_blocks, last)), INPUT) for start in starts),
            *(Segment(range(block, block + 1), PRODUCTS) for block in range(last, last + products)),
            *(Segment(range(block, block + 1), ALL) for block in range(last + products, blocks)),
        ]
