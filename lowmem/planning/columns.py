"""Predicts memory and time of many layouts of a training step from a few simulated steps.

A column is a set of layouts that differ in only two numbers (docs/planning.md). `kept` is how much blocks save for
backward (`Layout.kept`). `units_on_gpu` is how many units (mostly blocks) have their optimizer states on the GPU; in
columns with weights in RAM, how many have their weights there. Estimates decide only which layouts are simulated.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from lowmem.core.layout import Fate, Layout
from lowmem.core.recompute import ALL, INPUT, PRODUCTS
from lowmem.planning.choices import Choices, only
from lowmem.planning.simulated_step import SimulatedStep
from lowmem.planning.simulations import Simulations


def within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes


@dataclass(frozen=True)
class Column:
    """Describes layouts (ways to compute a training step) that differ in only two numbers: how much blocks save for
    backward, and how many units (mostly blocks) have states on the GPU, or weights if `choices` has those in RAM."""

    choices: Choices
    micro_batch: int  # sequences
    group: int  # micro-batches that pass each block together
    segment: int  # blocks that are recomputed together

    @property
    def least_kept(self) -> int:
        return self.choices.kept[0]

    @property
    def fewest_on_gpu(self) -> int:
        return self.choices.units_on_gpu[0]

    def layout(self, kept: int, units_on_gpu: int) -> Layout:
        return self.choices.layout(self.micro_batch, self.group, self.segment, kept, units_on_gpu)


class Columns:
    """Predicts memory and time of the layouts in a Column (a set of similar layouts) from a few simulated steps."""

    def __init__(self, simulations: Simulations):
        self.simulations = simulations
        self._recorded: dict[Column, dict[int, int]] = {}  # {column: {kept: the units_on_gpu simulated}}
        self._estimates: dict[tuple[int, int], tuple[float, float]] = {}  # {(micro-batch, kept): _estimate}

    def smallest(self, choices: Choices) -> Column:
        """Returns the column of `choices` that needs the least RAM. A column is a set of similar layouts."""
        micro_batch = choices.micro_batches[0]
        group = choices.groups_of(self.simulations.base.batch, micro_batch)[0]
        # Inputs of segments that are saved in RAM are fewer if segments are long.
        return Column(choices, micro_batch, group, choices.segments[-1 if choices.base.boundaries_in_ram else 0])

    def most_kept(self, column: Column) -> int:
        # In longer segments at least one block must save only its input, because only such blocks are recomputed
        # together.
        kept = column.choices.kept[-1]
        return kept if column.segment == 1 else max(min(kept, self.simulations.blocks - 1), column.least_kept)

    def first_kept(self, column: Column) -> int:
        """Returns a value of `kept` (how much blocks save for backward) for `column`, a set of similar layouts. Above
        it, each block that saves more is expected to add to the peak of GPU memory. Below it, some may add nothing."""
        rows = column.group * column.micro_batch
        if rows < self.simulations.base.batch or column.choices.base.fate is not Fate.HELD:
            return column.least_kept
        # Small values may not raise the peak here, because the held gradients take the same memory later. From this
        # value on, all blocks save their matmul outputs.
        return min(max(self.simulations.blocks, column.least_kept), self.most_kept(column))

    def streamed_bytes(self, column: Column, units_on_gpu: int) -> int:
        """Returns how many bytes of weights, optimizer states, gradients and saved inputs a step stores in RAM.
        `column`: a set of similar layouts. `units_on_gpu`: how many units (mostly blocks) have optimizer states on the
        GPU, or weights if `column` has those in RAM."""
        return self.simulated(column).streamed_bytes - self._bytes_on_gpu(column, units_on_gpu)

    def may_fit(self, column: Column, kept: int, units_on_gpu: int, limit_bytes: int | None) -> bool:
        """Returns False if a layout in `column` (similar layouts) certainly takes more than `limit_bytes` of GPU memory
        (None: no limit). Does not simulate it. `kept`: how much blocks save for backward. `units_on_gpu`: how many
        units (mostly blocks) have optimizer states on the GPU, or weights if `column` has those in RAM."""
        if limit_bytes is None:
            return True
        simulations, layout = self.simulations, column.layout(kept, units_on_gpu)
        weights = simulations.weight_bytes
        if layout.weights_on_gpu is not None:
            weights = [*weights[: layout.weights_on_gpu], weights[-1]]
        # A graph that is kept holds the input of its segment.
        inputs = 0 if layout.boundaries_in_ram else self._saved_inputs_bytes(layout, INPUT, PRODUCTS, ALL)
        gradients = 4 * simulations.parameters // simulations.base.mesh.sharing if layout.fate is Fate.HELD else 0
        # Saved inputs and all gradients need not exist at the same time.
        return sum(weights) + max(inputs, gradients) <= limit_bytes

    def least_on_disk(self, column: Column, units_on_gpu: int, limit_bytes: int | None) -> int | None:
        """Returns how many units (mostly blocks) must have their optimizer states on a disk. Then a step stores at most
        `limit_bytes` in RAM (None: no limit). Returns None if no number that `column` (similar layouts) allows is
        enough. `units_on_gpu`: how many units have optimizer states on the GPU, or weights if `column` has
        those in RAM."""
        layout, counts = column.layout(column.least_kept, units_on_gpu), column.choices.units_on_disk
        if counts is None and not layout.states_on_disk and not within(self._least_ram_bytes(layout), limit_bytes):
            return None  # certainly, so without a simulation
        streamed = 0 if limit_bytes is None else self.streamed_bytes(column, units_on_gpu)
        if counts is None:
            return layout.states_on_disk if within(streamed, limit_bytes) else None
        if 0 in counts and within(streamed, limit_bytes):
            return 0  # RAM has room for all states

        def enough(units: int) -> bool:
            on_disk = self.simulations.bytes_on_disk(replace(layout, states_on_disk=units))
            return within(streamed - on_disk, limit_bytes)

        place = bisect_left(counts, True, key=enough)
        return counts[place] if place < len(counts) else None

    def _least_ram_bytes(self, layout: Layout) -> int:
        # a lower bound for all that a step stores there
        weights = self.simulations.weight_bytes
        size = sum(self.simulations.state_bytes[layout.states_on_gpu :])
        if layout.weights_on_gpu is not None:
            size += sum(weights[layout.weights_on_gpu : -1])
        if layout.boundaries_in_ram:
            size += self._saved_inputs_bytes(layout, INPUT, PRODUCTS)
        if layout.fate is Fate.SENT:  # gradients in fp32; the first unit's stay on the GPU
            size += 4 * sum(weights[max(layout.states_on_gpu, 1) :]) // self.simulations.base.dtype.itemsize
        return size

    def _saved_inputs_bytes(self, layout: Layout, *keeps: str) -> int:
        # A lower bound for the inputs that a group of micro-batches saves for backward. Counts segments that keep one
        # of `keeps`.
        segments = sum(segment.keep in keeps for segment in layout.segments(self.simulations.blocks))
        return layout.group * layout.micro_batch * segments * self.simulations.input_bytes

    def allocated_bytes(self, column: Column, kept: int, units_on_gpu: int) -> int:
        """Returns the peak of allocated GPU memory of a layout in `column` (similar layouts), in bytes. Simulates one
        layout for each `kept` (how much blocks save for backward), and adds or subtracts bytes of units on the GPU.
        `units_on_gpu`: how many units (mostly blocks) have optimizer states there, or weights if `column` has those in
        RAM."""
        first = column.fewest_on_gpu if kept == column.least_kept else units_on_gpu
        # One layout is simulated for each `kept`. Units on the GPU add their own bytes to its peak.
        recorded = self._recorded.setdefault(column, {}).setdefault(kept, first)
        size = self.simulations.allocated_bytes(column.layout(kept, recorded))
        if units_on_gpu == recorded:
            return size
        return size + self._added_bytes(column, units_on_gpu) - self._added_bytes(column, recorded)

    def known_kept(self, column: Column) -> list[int]:
        return sorted(self._recorded.get(column, ()))

    def _added_bytes(self, column: Column, units: int) -> int:
        # Without states in RAM, the GPU needs no slots (buffers for them).
        slots = self.simulations.slots_bytes if units == self.simulations.units else 0
        return self._bytes_on_gpu(column, units) - slots

    def _bytes_on_gpu(self, column: Column, units: int) -> int:
        # relative to the fewest units that the column allows
        states = column.choices.base.weights_on_gpu is None
        sizes = self.simulations.state_bytes if states else self.simulations.weight_bytes
        return sum(sizes[column.fewest_on_gpu : units])

    def copying_seconds(self, column: Column, fewer: int, more: int) -> float:
        """Returns the seconds of copies that a step saves with `more` units (mostly blocks) on the GPU instead of
        `fewer`. Adds the reads and writes of a disk if states may be there. `column`: a set of similar layouts."""
        target = self.simulations.target
        if target.copies is None:
            return 0.0
        base = column.choices.base
        moved = self._bytes_on_gpu(column, more) - self._bytes_on_gpu(column, fewer)
        # The RAM that these units leave has room for states that were read from the disk and written to it.
        disk = 0.0 if column.choices.units_on_disk is None else 2 * moved / target.disk
        if base.weights_on_gpu is None:
            return disk + moved / target.copies
        # Weights in RAM are copied in each pass of each group of micro-batches.
        groups = self.simulations.base.batch // (column.group * column.micro_batch)
        return disk + base.passes * groups * moved / target.copies

    def expected_kept(self, column: Column, units_on_gpu: int, known: int, limit_bytes: int | None) -> int:
        """Returns the largest `kept` (how much blocks save for backward) that is expected to fit into `limit_bytes` of
        GPU memory, else the smallest. Extrapolates from the peak of the layout with the value `known`. `column`: a set
        of similar layouts. `units_on_gpu`: how many units (mostly blocks) have optimizer states on the GPU, or weights
        if `column` has those in RAM."""
        least, most = column.least_kept, self.most_kept(column)
        if limit_bytes is None or most == least:
            return most
        smallest = Layout(column.choices.micro_batches[0])
        scale = column.group * column.micro_batch / self.simulations.rows_at_once(smallest)
        grown = {kept: scale * self._estimate(column, kept)[0] for kept in range(least, most + 1)}
        room = limit_bytes - self.allocated_bytes(column, known, units_on_gpu) + grown[known]
        return max((kept for kept, size in grown.items() if size <= room), default=least)

    def expected_seconds(self, column: Column, most: int) -> float:
        """Returns the expected seconds of a step, without waits for copies, in the fastest layout whose `kept` (how
        much blocks save for backward) is at most `most`. `column`: the similar layouts to choose from."""
        least, blocks = column.least_kept, self.simulations.blocks
        # Keeping more is not always faster. So the fastest of these counts.
        turns = {least, most} | {0, blocks} & set(range(least, most))
        share = min(self._estimate(column, kept)[1] for kept in turns) / self._estimate(column, least)[1]
        return share * self.simulated(column).computing_seconds

    def least_seconds(self, choices: Choices, micro_batch: int) -> float:
        """Returns an estimated lower bound for the seconds of a step in any layout of `choices` with this
        micro-batch."""
        column = Column(replace(choices, base=Layout(1), units_on_gpu=only(0)), micro_batch, 1, 1)
        # Not twice: updates run only once, and take less than half of a step.
        passes = 1.5 if choices.base.fate is Fate.DROPPED else 1
        return passes * self.expected_seconds(column, choices.kept[-1])

    def _estimate(self, column: Column, kept: int) -> tuple[float, float]:
        """Estimates (peak of allocated GPU bytes, seconds without waits for copies) of a step. Assumes the smallest
        micro-batch of `column` (similar layouts), and all optimizer states in RAM. `kept`: how much blocks save for
        backward."""
        blocks = self.simulations.blocks
        key = column.choices.micro_batches[0], kept
        if key in self._estimates:
            return self._estimates[key]
        # Interpolates between steps in which all blocks save the same: their input, their matmul outputs or their whole
        # graph.
        whole, more = divmod(kept, blocks)
        ends = (whole, whole + 1) if more else (whole,)
        layouts = [Layout(key[0], kept=end * blocks) for end in ends]
        sizes = [self.simulations.allocated_bytes(layout) for layout in layouts]
        seconds = [self.simulations.record(layout).computing_seconds for layout in layouts]
        between = (each[0] + more / blocks * (each[-1] - each[0]) for each in (sizes, seconds))
        return self._estimates.setdefault(key, tuple(between))

    def simulated(self, column: Column) -> SimulatedStep:
        # the layout of the column that takes the least GPU memory
        return self.simulations.record(column.layout(column.least_kept, column.fewest_on_gpu))
