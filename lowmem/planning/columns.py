"""Computes memory and time of many layouts of a training step from a few simulated steps.

A column is a set of layouts that differ in only two numbers. `kept` is how much blocks save for backward
(`Layout.kept`). `units_on_gpu` is the number of units (blocks, mostly) whose weights are stored on the GPU, if the
column has weights in RAM. Otherwise it is the number of units whose optimizer states are there. One more unit on the
GPU adds its own bytes to the peak. Some values of `kept` have names:

    least_kept      the smallest that the column allows
    first_kept      the first to simulate: from here on, each block that keeps more adds equally many bytes
    known_kept      all that have been simulated
    expected_kept   an estimate of the largest that fits under a cap
    most_kept       the largest that the column allows

Estimates come from steps with the smallest micro-batch. They only decide which layouts are simulated.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from lowmem.core.layout import Fate, Layout
from lowmem.planning.choices import Choices, only
from lowmem.planning.simulated_step import SimulatedStep
from lowmem.planning.simulations import Simulations


def within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes


@dataclass(frozen=True)
class Column:
    """Represents the layouts of `choices` with this `micro_batch` (in sequences), `group` (micro-batches that pass each
    block together) and `segment` (blocks that are recomputed together). These layouts differ in only two numbers: how
    much blocks save for backward, and how many units (such as blocks) are stored on the GPU."""

    choices: Choices
    micro_batch: int
    group: int
    segment: int

    @property
    def least_kept(self) -> int:
        return self.choices.kept[0]

    @property
    def fewest_on_gpu(self) -> int:
        return self.choices.units_on_gpu[0]

    def layout(self, kept: int, units_on_gpu: int) -> Layout:
        return self.choices.layout(self.micro_batch, self.group, self.segment, kept, units_on_gpu)


class Columns:
    """Computes memory and time of many layouts of a training step from a few simulated steps. A column is a set of
    layouts that differ in only two numbers. `kept`: how much blocks save for backward (Layout.kept). `units_on_gpu`:
    how many units (such as blocks) have their weights or optimizer states on the GPU."""

    def __init__(self, simulations: Simulations):
        self.simulations = simulations
        self._recorded: dict[Column, dict[int, int]] = {}  # {column: {kept: the units_on_gpu simulated}}
        self._estimates: dict[tuple[int, int], tuple[float, float]] = {}  # {(micro-batch, kept): _estimate}

    def smallest(self, choices: Choices) -> Column:
        """Returns the column (a set of similar step layouts) of `choices` that needs the least RAM. It has the smallest
        micro-batch and group, and the shortest segments (blocks that are recomputed together). If the inputs of
        segments are saved in RAM, it has the longest segments instead, because these have fewer inputs."""
        micro_batch = choices.micro_batches[0]
        group = choices.groups_of(self.simulations.base.batch, micro_batch)[0]
        return Column(choices, micro_batch, group, choices.segments[-1 if choices.base.boundaries_in_ram else 0])

    def most_kept(self, column: Column) -> int:
        """Returns the largest `kept` (how much blocks save for backward) of the layouts in `column`. If a segment has
        several blocks, at least one block must save only its input, because only such blocks are recomputed
        together."""
        kept = column.choices.kept[-1]
        return kept if column.segment == 1 else max(min(kept, self.simulations.blocks - 1), column.least_kept)

    def first_kept(self, column: Column) -> int:
        """Returns the smallest `kept` (how much blocks save for backward) above which each block that saves more adds
        equally many bytes to the peak. Usually this is the column's smallest `kept`. It is larger if all micro-batches
        pass each block together and gradients are held on the GPU. Then small values may not raise the peak, because
        gradients take the same memory later. The result is then the number of blocks (all save their matmul outputs),
        or the nearest value that the column allows."""
        rows = column.group * column.micro_batch
        if rows < self.simulations.base.batch or column.choices.base.fate is not Fate.HELD:
            return column.least_kept
        return min(max(self.simulations.blocks, column.least_kept), self.most_kept(column))

    def streamed_bytes(self, column: Column, units_on_gpu: int) -> int:
        """Returns the bytes that a step stores in RAM and copies to the GPU when needed. The step has a layout of
        `column` with `units_on_gpu` units (such as blocks) stored on the GPU."""
        return self.simulated(column).streamed_bytes - self._bytes_on_gpu(column, units_on_gpu)

    def may_fit(self, column: Column, kept: int, units_on_gpu: int, limit_bytes: int | None) -> bool:
        """Returns False if a layout of `column` certainly exceeds `limit_bytes` of GPU memory. Returns True if it may
        fit, or if `limit_bytes` is None. Does not simulate the layout. Adds the weights on the GPU to the larger of two
        figures: the saved inputs of a group of micro-batches, and the gradients held on the GPU."""
        if limit_bytes is None:
            return True
        simulations, layout = self.simulations, column.layout(kept, units_on_gpu)
        weights = simulations.weight_bytes
        if layout.weights_on_gpu is not None:
            weights = [*weights[: layout.weights_on_gpu], weights[-1]]
        inputs = 0
        if not layout.boundaries_in_ram:
            rows = column.group * column.micro_batch
            inputs = rows * len(layout.segments(simulations.blocks)) * simulations.input_bytes
        gradients = 4 * simulations.parameters // simulations.base.mesh.sharing if layout.fate is Fate.HELD else 0
        return sum(weights) + max(inputs, gradients) <= limit_bytes

    def least_on_disk(self, column: Column, units_on_gpu: int, limit_bytes: int | None) -> int | None:
        """Returns the smallest number of units (such as blocks) whose optimizer states must be on a disk if RAM has
        `limit_bytes` (None: no limit). RAM has to store all else that a step copies to the GPU. Returns None if no
        number that the column allows is enough. Without a disk, the column allows only
        `choices.base.states_on_disk`."""
        layout, disk = column.layout(column.least_kept, units_on_gpu), column.choices.disk
        streamed = 0 if limit_bytes is None else self.streamed_bytes(column, units_on_gpu)
        if not disk:
            return layout.states_on_disk if within(streamed, limit_bytes) else None
        if disk == 1 and within(streamed, limit_bytes):
            return 0  # RAM has room for all states

        def enough(units: int) -> bool:
            on_disk = self.simulations.bytes_on_disk(replace(layout, states_on_disk=units))
            return within(streamed - on_disk, limit_bytes)

        counts = range(disk, self.simulations.units + 1)
        place = bisect_left(counts, True, key=enough)
        return counts[place] if place < len(counts) else None

    def allocated_bytes(self, column: Column, kept: int, units_on_gpu: int) -> int:
        """Returns the peak of allocated GPU memory of one step layout, in bytes. The layout saves `kept` for backward,
        and stores `units_on_gpu` units (such as blocks) on the GPU. Simulates one layout of `column` for each `kept`.
        Computes the peaks with other numbers of units on the GPU from that layout's peak."""
        first = column.fewest_on_gpu if kept == column.least_kept else units_on_gpu
        recorded = self._recorded.setdefault(column, {}).setdefault(kept, first)
        size = self.simulations.allocated_bytes(column.layout(kept, recorded))
        if units_on_gpu == recorded:
            return size
        return size + self._added_bytes(column, units_on_gpu) - self._added_bytes(column, recorded)

    def known_kept(self, column: Column) -> list[int]:
        """Returns each `kept` (how much blocks save for backward) for which `allocated_bytes` needs no further
        simulation, in ascending order."""
        return sorted(self._recorded.get(column, ()))

    def _added_bytes(self, column: Column, units: int) -> int:
        """Returns how many bytes the peak grows if the first `units` units (such as blocks) are stored on the GPU,
        instead of the column's smallest number. If all are there, subtracts the slots: buffers for optimizer states
        from RAM."""
        slots = self.simulations.slots_bytes if units == self.simulations.units else 0
        return self._bytes_on_gpu(column, units) - slots

    def _bytes_on_gpu(self, column: Column, units: int) -> int:
        """Returns how many more bytes the GPU stores with `units` units (such as blocks) there than with the column's
        smallest number. Counts the units' weights if the column's Choices have weights in RAM, else their optimizer
        states."""
        states = column.choices.base.weights_on_gpu is None
        sizes = self.simulations.state_bytes if states else self.simulations.weight_bytes
        return sum(sizes[column.fewest_on_gpu : units])

    def copying_seconds(self, column: Column, fewer: int, more: int) -> float:
        """Returns the seconds of copies that a step saves if the GPU stores `more` units (such as blocks) instead of
        `fewer`. Counts copies over the bus and, if states may be on a disk, reads and writes of the disk. Weights in
        RAM are copied in each forward and each backward pass of each group of micro-batches. Returns 0 if the device
        needs no copies."""
        target = self.simulations.target
        if target.copies is None:
            return 0.0
        base = column.choices.base
        moved = self._bytes_on_gpu(column, more) - self._bytes_on_gpu(column, fewer)
        # The RAM that these units leave has room for states that were read from the disk and written to it.
        disk = 2 * moved / target.disk if column.choices.disk else 0.0
        if base.weights_on_gpu is None:
            return disk + moved / target.copies
        groups = self.simulations.base.batch // (column.group * column.micro_batch)
        return disk + base.passes * groups * moved / target.copies

    def expected_kept(self, column: Column, units_on_gpu: int, known: int, limit_bytes: int | None) -> int:
        """Returns the largest `kept` (how much blocks save for backward) with which a step is expected to fit into
        `limit_bytes` of GPU memory. Extrapolates from the bytes of the step with the value `known`, and simulates that
        step if necessary. Returns the column's largest `kept` if `limit_bytes` is None, and its smallest if none is
        expected to fit."""
        least, most = column.least_kept, self.most_kept(column)
        if limit_bytes is None or most == least:
            return most
        smallest = Layout(column.choices.micro_batches[0])
        scale = column.group * column.micro_batch / self.simulations.rows_at_once(smallest)
        grown = {kept: scale * self._estimate(column, kept)[0] for kept in range(least, most + 1)}
        room = limit_bytes - self.allocated_bytes(column, known, units_on_gpu) + grown[known]
        return max((kept for kept, size in grown.items() if size <= room), default=least)

    def expected_seconds(self, column: Column, most: int) -> float:
        """Returns the expected seconds of a step in `column` (a set of similar step layouts), without waits for copies.
        `most`: the largest `kept` (how much blocks save for backward) that fits. Keeping more is not always faster. So
        compares `most`, the column's smallest `kept`, and 0 and the number of blocks if they are between. Assumes the
        fastest of these."""
        least, blocks = column.least_kept, self.simulations.blocks
        turns = {least, most} | {0, blocks} & set(range(least, most))
        share = min(self._estimate(column, kept)[1] for kept in turns) / self._estimate(column, least)[1]
        return share * self.simulated(column).computing_seconds

    def least_seconds(self, choices: Choices, micro_batch: int) -> float:
        """Returns an estimated lower bound for the seconds of a step in any layout of `choices` with this micro-batch.
        The bound is 1.5 times as high if forward and backward run twice (Fate.DROPPED). It is not twice as high because
        updates run only once, and take less than half of a step."""
        column = Column(replace(choices, base=Layout(1), units_on_gpu=only(0)), micro_batch, 1, 1)
        passes = 1.5 if choices.base.fate is Fate.DROPPED else 1
        return passes * self.expected_seconds(column, choices.kept[-1])

    def _estimate(self, column: Column, kept: int) -> tuple[float, float]:
        """Returns (allocated bytes, seconds without waits) of a step with the column's smallest micro-batch and all
        optimizer states in RAM. Simulates steps in which all blocks save the same for backward: their input, their
        matmul outputs or their whole graph. For a `kept` in between, interpolates between the two nearest of these
        steps."""
        blocks = self.simulations.blocks
        key = column.choices.micro_batches[0], kept
        if key in self._estimates:
            return self._estimates[key]
        whole, more = divmod(kept, blocks)
        ends = (whole, whole + 1) if more else (whole,)
        layouts = [Layout(key[0], kept=end * blocks) for end in ends]
        sizes = [self.simulations.allocated_bytes(layout) for layout in layouts]
        seconds = [self.simulations.record(layout).computing_seconds for layout in layouts]
        between = (each[0] + more / blocks * (each[-1] - each[0]) for each in (sizes, seconds))
        return self._estimates.setdefault(key, tuple(between))

    def simulated(self, column: Column) -> SimulatedStep:
        """Returns the simulated step of the layout in `column` that takes the least GPU memory. It has the smallest
        `kept` (how much blocks save for backward) and the fewest units (such as blocks) on the GPU."""
        return self.simulations.record(column.layout(column.least_kept, column.fewest_on_gpu))
