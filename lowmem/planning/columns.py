"""Computes memory and time of all layouts in a column from a few simulated steps.

The layouts of a column differ only in how much blocks keep for backward, and in how many units (blocks, mostly) are on
the GPU. Here and in search.py `kept` and `on_gpu` are indices into the lists of these names in Choices, unless said
otherwise. One more unit on the GPU adds its own bytes to the peak. Figures for another `kept` are estimated from steps
with the smallest micro-batch. These estimates only decide which layouts are simulated.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from lowmem.core.layout import Fate, Layout
from lowmem.planning.choices import Choices
from lowmem.planning.simulated_step import SimulatedStep
from lowmem.planning.simulations import Simulations


def within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes


@dataclass(frozen=True)
class Column:
    """Defines a column: the layouts of `choices` with this `micro_batch` (in sequences), `group` (in micro-batches) and
    `segment` (in blocks)."""

    choices: Choices
    micro_batch: int
    group: int
    segment: int

    def layout(self, kept: int, on_gpu: int) -> Layout:
        chosen = self.choices.kept[kept], self.choices.on_gpu[on_gpu]
        return self.choices.layout(self.micro_batch, self.group, self.segment, *chosen)


class Columns:
    def __init__(self, simulations: Simulations):
        self.simulations = simulations
        self._recorded: dict[Column, dict[int, int]] = {}  # {column: {kept: the `on_gpu` simulated with it}}
        self._smallest_known: dict[tuple[int, int], tuple[float, float]] = {}  # by micro-batch and Layout.kept

    def frugal(self, choices: Choices) -> Column:
        """Returns the column of `choices` that needs the least RAM. It has the smallest micro-batch and group, and the
        shortest segments. If saved inputs are in RAM, it has the longest segments, which save fewer inputs."""
        micro_batch = choices.micro_batches[0]
        group = choices.groups_of(self.simulations.base.batch, micro_batch)[0]
        return Column(choices, micro_batch, group, choices.segments[-1 if choices.base.boundaries_in_ram else 0])

    def last_kept(self, column: Column) -> int:
        """Returns the largest index `kept` of this column. If its segments have several blocks, at least one block must
        keep only its input, because segments of several blocks consist of such blocks."""
        kept = column.choices.kept
        return len(kept) - 1 if column.segment == 1 else max(bisect_left(kept, self.simulations.blocks) - 1, 0)

    def first_kept(self, column: Column) -> int:
        """Returns the index `kept` from which each further block adds the same bytes to the peak. It is 0, unless the
        whole batch is one group and gradients are held. Then all blocks keep their matrix products at this index. Below
        it, kept tensors use memory that gradients take later, so they may not raise the peak."""
        rows = column.group * column.micro_batch
        if rows < self.simulations.base.batch or column.choices.base.fate is not Fate.HELD:
            return 0
        return min(bisect_left(column.choices.kept, self.simulations.blocks), self.last_kept(column))

    def streamed_bytes(self, column: Column, on_gpu: int) -> int:
        """Returns the bytes in RAM that are copied to the GPU when needed. `on_gpu`: index in `choices.on_gpu`."""
        return self.simulated(column).streamed_bytes - self._bytes_on_gpu(column, column.choices.on_gpu[on_gpu])

    def may_fit(self, column: Column, kept: int, on_gpu: int, limit_bytes: int | None) -> bool:
        """Returns False if the layout certainly exceeds `limit_bytes` of GPU memory, without simulating it. Adds the
        weights to the larger of two figures: the saved inputs of a group, and the held gradients."""
        if limit_bytes is None:
            return True
        simulations, layout = self.simulations, column.layout(kept, on_gpu)
        weights = simulations.weight_bytes
        if layout.weights_on_gpu is not None:
            weights = [*weights[: layout.weights_on_gpu], weights[-1]]
        inputs = 0
        if not layout.boundaries_in_ram:
            rows = column.group * column.micro_batch
            inputs = rows * len(layout.segments(simulations.blocks)) * simulations.input_bytes
        gradients = 4 * simulations.parameters // simulations.base.mesh.sharing if layout.fate is Fate.HELD else 0
        return sum(weights) + max(inputs, gradients) <= limit_bytes

    def may_stream(self, column: Column, on_gpu: int, limit_bytes: int) -> bool:
        """Returns False if `limit_bytes` of RAM are too few for the optimizer states that are not on the GPU and, if
        gradients are sent to RAM, for gradients. Always returns True if states may be on a disk."""
        base, simulations = column.layout(0, on_gpu), self.simulations
        if base.states_on_disk or column.choices.disk:
            return True
        needed = sum(simulations.state_bytes[base.states_on_gpu :])
        if base.fate is Fate.SENT:  # in fp32; the first unit's stay on the GPU
            sent = sum(simulations.weight_bytes[max(base.states_on_gpu, 1) :])
            needed += 4 * sent // simulations.base.dtype.itemsize
        return needed <= limit_bytes

    def least_on_disk(self, column: Column, on_gpu: int, limit_bytes: int | None) -> int | None:
        """Returns how many units must have their states on a disk to keep RAM within `limit_bytes`; None if no number
        is enough. `on_gpu`: index in `choices.on_gpu`, the numbers of units on the GPU to try."""
        layout, disk = column.layout(0, on_gpu), column.choices.disk
        streamed = 0 if limit_bytes is None else self.streamed_bytes(column, on_gpu)
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

    def disk_seconds(self, column: Column, on_gpu: int, limit_bytes: int | None) -> float:
        """Returns a lower bound for the seconds that a disk reads and writes in a step. The disk has the states of as
        few units as `limit_bytes` of RAM allow."""
        units = self.least_on_disk(column, on_gpu, limit_bytes)
        on_disk = self.simulations.bytes_on_disk(replace(column.layout(0, on_gpu), states_on_disk=units))
        return 2 * on_disk / self.simulations.target.disk

    def allocated_bytes(self, column: Column, kept: int, on_gpu: int) -> int:
        """Returns the peak of allocated GPU memory. Simulates one `on_gpu` per `kept`, and computes others from it."""
        recorded = self._recorded.setdefault(column, {}).setdefault(kept, on_gpu if kept else 0)
        size = self.simulations.allocated_bytes(column.layout(kept, recorded))
        for place, sign in ((on_gpu, 1), (recorded, -1)) if on_gpu != recorded else ():
            units = column.choices.on_gpu[place]
            ring = self.simulations.ring_bytes if units == self.simulations.units else 0
            size += sign * (self._bytes_on_gpu(column, units) - ring)
        return size

    def known_kept(self, column: Column) -> list[int]:
        """Returns each index `kept` for which `allocated_bytes` needs no further simulation."""
        return sorted(self._recorded.get(column, ()))

    def _bytes_on_gpu(self, column: Column, units: int) -> int:
        """Returns the bytes of units on the GPU: those of the first `units` units, minus those of the column's smallest
        number of units. Counts weights if these are in RAM, else optimizer states."""
        states = column.choices.base.weights_on_gpu is None
        sizes = self.simulations.state_bytes if states else self.simulations.weight_bytes
        return sum(sizes[column.choices.on_gpu[0] : units])

    def copying_seconds(self, column: Column, fewer: int, more: int) -> float:
        """Returns the seconds of copies that a step saves with `choices.on_gpu[more]` units on the GPU instead of
        `choices.on_gpu[fewer]`. Counts copies over the bus and, if states may be on a disk, to and from the disk.
        Weights in RAM are copied for the forward and the backward pass of each group."""
        target = self.simulations.target
        if target.copies is None:
            return 0.0
        places, base = column.choices.on_gpu, column.choices.base
        moved = self._bytes_on_gpu(column, places[more]) - self._bytes_on_gpu(column, places[fewer])
        # These units leave their RAM to states that were on the disk.
        disk = 2 * moved / target.disk if column.choices.disk else 0.0
        if base.weights_on_gpu is None:
            return disk + moved / target.copies
        groups = self.simulations.base.batch // (column.group * column.micro_batch)
        passes = 4 if base.fate is Fate.DROPPED else 2
        return disk + passes * groups * moved / target.copies

    def expected_kept(self, column: Column, on_gpu: int, known: int, limit_bytes: int | None) -> int:
        """Returns the largest index `kept` that is expected to fit into `limit_bytes` of GPU memory. Extrapolates from
        the simulated bytes at the index `known`."""
        last, kept = self.last_kept(column), column.choices.kept
        if limit_bytes is None or last == 0:
            return last
        smallest = Layout(column.choices.micro_batches[0])
        scale = column.group * column.micro_batch / self.simulations.rows_at_once(smallest)
        grown = [scale * self._smallest(column, kept[place])[0] for place in range(last + 1)]
        room = limit_bytes - self.allocated_bytes(column, known, on_gpu) + grown[known]
        return max((place for place in range(last + 1) if grown[place] <= room), default=0)

    def expected_seconds(self, column: Column, most: int) -> float:
        """Returns the expected seconds of a step without waits for copies, at the fastest Layout.kept up to `most`."""
        least, blocks = column.choices.kept[0], self.simulations.blocks
        turns = {least, most} | {0, blocks} & set(range(least, most))
        share = min(self._smallest(column, kept)[1] for kept in turns) / self._smallest(column, least)[1]
        return share * self.simulated(column).computing_seconds

    def least_seconds(self, choices: Choices, micro_batch: int) -> float:
        """Returns a lower bound for the step time of all layouts with this micro-batch. If forward and backward run
        twice, it is 1.5 times as high: the first run makes no updates, which take less than half of a step."""
        column = Column(replace(choices, base=Layout(1), on_gpu=(0,)), micro_batch, 1, 1)
        passes = 1.5 if choices.base.fate is Fate.DROPPED else 1
        return passes * self.expected_seconds(column, choices.kept[-1])

    def _smallest(self, column: Column, kept: int) -> tuple[float, float]:
        """Returns the allocated bytes and computing seconds of a step with the smallest micro-batch and all states in
        RAM. `kept` is a Layout.kept. Simulates at most two steps, in which all blocks keep their input, their matrix
        products or everything, and interpolates between them."""
        blocks = self.simulations.blocks
        key = column.choices.micro_batches[0], kept
        if key in self._smallest_known:
            return self._smallest_known[key]
        whole, more = divmod(kept, blocks)
        ends = (whole, whole + 1) if more else (whole,)
        layouts = [Layout(key[0], kept=end * blocks) for end in ends]
        sizes = [self.simulations.allocated_bytes(layout) for layout in layouts]
        seconds = [self.simulations.record(layout).computing_seconds for layout in layouts]
        between = (each[0] + more / blocks * (each[-1] - each[0]) for each in (sizes, seconds))
        return self._smallest_known.setdefault(key, tuple(between))

    def simulated(self, column: Column) -> SimulatedStep:
        """Returns the simulated step of the column's smallest `kept` and fewest units on the GPU."""
        return self.simulations.record(column.layout(0, 0))
