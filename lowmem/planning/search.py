"""Searches for the fastest layout of a training step that fits into given GPU memory and RAM (docs/planning.md).

Figures come from simulated steps, which do not depend on memory caps. Tests compare the search with trying every
layout.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import partial

from lowmem.core.layout import Layout
from lowmem.planning.choices import Choices
from lowmem.planning.columns import Column, Columns, within
from lowmem.planning.simulated_step import SimulatedStep

_NEGLIGIBLE = 0.002  # share of a step's time that is not worth simulating
_TRIES = 5  # guesses at the largest `kept` that fits, before plain bisection


@dataclass(frozen=True)
class Room:
    """Holds two memory limits of a training step in bytes, None for no limit."""

    gpu: int | None  # of all that the step allocates on the GPU
    ram: int | None  # of tensors that are stored in RAM, and copied to the GPU when needed


@dataclass(frozen=True)
class Found:
    """Holds a layout (way to compute a step) that was found, its simulation, and its column (similar layouts)."""

    layout: Layout
    simulated: SimulatedStep
    column: Column

    @property
    def units_on_gpu(self) -> int:
        """Returns how many units (such as blocks) have their optimizer states on the GPU. For a layout with weights in
        RAM, returns instead how many units have their weights on the GPU."""
        return self.layout.states_on_gpu if self.layout.weights_on_gpu is None else self.layout.weights_on_gpu

    @property
    def seconds(self) -> float:
        return self.simulated.seconds

    @property
    def waits(self) -> bool:
        """Returns True if the GPU waits for copies or other ranks for more than 0.2% of the step."""
        return self.simulated.waiting_seconds > _NEGLIGIBLE * self.seconds


def faster(one: Found | None, other: Found | None) -> Found | None:
    """Returns the faster of two layouts, `one` if both are equally fast; ignores None. With states on a disk, times
    within 0.2% count as equal, and fewer bytes on the disk win."""
    found = [each for each in (one, other) if each is not None]
    best = min(found, key=lambda each: each.seconds, default=None)
    if best is None or not any(each.layout.states_on_disk for each in found):
        return best
    close = [each for each in found if each.seconds <= (1 + _NEGLIGIBLE) * best.seconds]
    return min(close, key=lambda each: (sum(each.simulated.disk_bytes), each.simulated.computing_seconds))


@dataclass(frozen=True)
class Search:
    """Searches for the fastest layout of a step whose allocated bytes fit into `room`. `failed`: pairs (found, kept) of
    layouts that ran out of memory in the caching allocator's model. Each pair excludes layouts of its column that save
    `kept` or more for backward, and have at least as many units (mostly blocks) on the GPU."""

    columns: Columns
    room: Room
    failed: tuple[tuple[Found, int], ...] = ()
    _fitting: dict[Column, list[int]] = field(default_factory=dict, init=False, repr=False)  # results of `fitting`

    def fastest(self, choices: Choices, best: Found | None = None) -> Found | None:
        """Returns the fastest layout of `choices`, or `best` (the fastest found before) if none is faster. Returns None
        if nothing fits and `best` is None."""
        for micro_batch in choices.micro_batches:
            if best is not None and self.columns.least_seconds(choices, micro_batch) >= best.seconds:
                continue
            if not self._fitting_ram(self.columns.smallest(choices)):
                break
            found = self._fastest_group(choices, micro_batch, best)
            if found is None:
                break  # larger micro-batches take more
            best = faster(best, found)
        return best

    def _fastest_group(self, choices: Choices, micro_batch: int, best: Found | None) -> Found | None:
        fastest: Found | None = None
        for group in choices.groups_of(self.columns.simulations.base.batch, micro_batch):
            found = self._fastest_segment(choices, micro_batch, group, faster(best, fastest))
            if found is None or faster(fastest, found) is fastest:
                break
            fastest = found
            if not found.waits:
                break  # a larger group would only shorten waits for copies
        return fastest

    def _fastest_segment(self, choices: Choices, micro_batch: int, group: int, best: Found | None) -> Found | None:
        fastest: Found | None = None
        for segment in choices.segments:
            found = self.fastest_in(Column(choices, micro_batch, group, segment), faster(best, fastest))
            if fastest is not None and (found is None or faster(fastest, found) is fastest):
                break
            fastest = found
            if found is not None and found.layout.kept >= self.columns.simulations.blocks:
                break  # no block is left for a segment
        return fastest

    def fastest_in(self, column: Column, best: Found | None = None) -> Found | None:
        """Returns the fastest layout of `column` (a set of similar layouts), or None if nothing fits. If none of them
        is expected to be faster than `best` (the fastest found before), returns any one that fits."""
        columns, fitting, least = self.columns, self.fitting(column), column.least_kept
        if not fitting:
            return None
        if best is not None:
            most = columns.expected_kept(column, fitting[0], columns.first_kept(column), self.room.gpu)
            computing = columns.expected_seconds(column, most)
            if computing >= best.seconds or self._least_disk_seconds(column) > (1 + _NEGLIGIBLE) * best.seconds:
                return self._found(column, least, fitting[0])
        fastest, some = None, fitting
        if fitting[-1] == columns.simulations.units:  # all units: no copies, and no slots
            fastest, some = self._with_most_kept(column, fitting[-1]), fitting[:-1]
        if some:
            fastest = faster(fastest, self._bisected(column, some[0], some[-1], best))
        if columns.simulated(column).computing_seconds < faster(best, fastest).seconds:  # keeping may cost more
            for units in {fitting[0], *some[-1:], fitting[-1]}:
                fastest = faster(fastest, self._found(column, least, units))
        return fastest

    def _bisected(self, column: Column, fewest: int, most: int, best: Found | None) -> Found:
        """Returns the fastest layout of `column` (similar layouts) with `fewest` to `most` units (mostly blocks) on the
        GPU. Stops early if no other is expected to be faster than those tried and `best` (the fastest found before)."""
        # With more units on the GPU, a step waits less for copies, and recomputes more. So its time first falls, until
        # no copy is waited for, and then rises (docs/planning.md).
        fastest = found = self._with_most_kept(column, fewest)
        least_waiting = 0.0  # with `most` units or fewer
        while found.units_on_gpu < most and found.waits:
            saved = partial(self.columns.copying_seconds, column, found.units_on_gpu)  # units -> the most seconds saved
            waiting, to_beat = found.simulated.waiting_seconds, (1 - _NEGLIGIBLE) * faster(best, fastest).seconds
            if found.simulated.computing_seconds + max(waiting - saved(most), least_waiting) >= to_beat:
                break
            enough = bisect_left(range(most + 1), waiting, lo=found.units_on_gpu + 1, key=saved)
            middle = enough if enough <= most else (found.units_on_gpu + most + 1) // 2
            kept = self.columns.expected_kept(column, middle, found.layout.kept, self.room.gpu)
            if self.columns.expected_seconds(column, kept) >= to_beat:  # even if it keeps all that fits and never waits
                most = middle - 1
                continue
            tried = self._with_most_kept(column, middle)
            fastest = faster(fastest, tried)
            if tried.seconds < found.seconds and tried.waits:
                found = tried
            else:
                most, least_waiting = middle - 1, tried.simulated.waiting_seconds
        return fastest

    def fitting(self, column: Column) -> list[int]:
        """Returns the numbers of units (mostly blocks) on the GPU with which some layout of `column` fits, in ascending
        order. A column is a set of similar layouts."""
        if column not in self._fitting:
            numbers = self._fitting_ram(column)
            self._fitting[column] = [units for units in numbers if self._fits(column, column.least_kept, units)]
        return self._fitting[column]

    def _least_disk_seconds(self, column: Column) -> float:
        if column.choices.units_on_disk is None or not (fitting := self.fitting(column)):
            return 0.0
        simulations = self.columns.simulations
        # The most units on the GPU have the fewest states on the disk, which reads and writes them.
        layout = self._layout(column, column.least_kept, fitting[-1])
        return 2 * simulations.bytes_on_disk(layout) / simulations.target.disk

    def _fitting_ram(self, column: Column) -> list[int]:
        numbers, limit = column.choices.units_on_gpu, self.room.ram
        # A column that certainly exceeds the GPU memory is not simulated.
        if limit is None or not self.columns.may_fit(column, column.least_kept, column.fewest_on_gpu, self.room.gpu):
            return list(numbers)
        return [units for units in numbers if self.columns.least_on_disk(column, units, limit) is not None]

    def _with_most_kept(self, column: Column, units_on_gpu: int) -> Found:
        kept, units = self._most_kept(column, units_on_gpu), units_on_gpu
        # Memory may be left for more units.
        while units < column.choices.units_on_gpu[-1] and self._fits(column, kept, units + 1):
            units += 1
        return self._found(column, kept, units)

    def _layout(self, column: Column, kept: int, units_on_gpu: int) -> Layout:
        on_disk = self.columns.least_on_disk(column, units_on_gpu, self.room.ram)
        return replace(column.layout(kept, units_on_gpu), states_on_disk=on_disk)

    def _found(self, column: Column, kept: int, units_on_gpu: int) -> Found:
        layout = self._layout(column, kept, units_on_gpu)
        return Found(layout, self.columns.simulations.record(layout), column)

    def _most_kept(self, column: Column, units_on_gpu: int) -> int:
        columns, least = self.columns, column.least_kept
        after = columns.most_kept(column) + 1
        known = columns.known_kept(column)
        # The column's smallest is known to fit.
        fits = max((kept for kept in known if self._fits(column, kept, units_on_gpu)), default=least)
        beyond = min((kept for kept in known if kept > fits), default=after)
        tried = columns.first_kept(column)
        for tries in range(after - least):
            if fits < tried < beyond:
                fits, beyond = (tried, beyond) if self._fits(column, tried, units_on_gpu) else (fits, tried)
            tried = self._between(column, units_on_gpu, fits, beyond) if tries < _TRIES else (fits + beyond) // 2
            if tried == fits:
                break
        return fits

    def _between(self, column: Column, units_on_gpu: int, fits: int, beyond: int) -> int:
        """Returns the next `kept` to try (how much blocks save for backward). `fits`: the largest value known to fit.
        `beyond`: a larger one that does not fit, or that `column` (a set of similar layouts) does not allow. Returns
        `fits` if no larger value is expected to fit. `units_on_gpu`: how many units (mostly blocks) have optimizer
        states on the GPU; weights, if other weights are in RAM."""
        columns, limit = self.columns, self.room.gpu
        if beyond not in columns.known_kept(column):
            return min(columns.expected_kept(column, units_on_gpu, fits, limit), beyond - 1)
        # The first blocks that keep more may not raise the peak. Then a straight line between the two finds too few.
        low, high = (columns.allocated_bytes(column, kept, units_on_gpu) for kept in (fits, beyond))
        line = fits + max(1, (beyond - fits) * max(limit - low, 0) // max(high - low, 1))
        return min(max(line, columns.expected_kept(column, units_on_gpu, beyond, limit)), beyond - 1)

    def _fits(self, column: Column, kept: int, units_on_gpu: int) -> bool:
        for found, failing in self.failed:
            if kept >= failing and units_on_gpu >= found.units_on_gpu and column == found.column:
                return False
        if not self.columns.may_fit(column, kept, units_on_gpu, self.room.gpu):
            return False
        return within(self.columns.allocated_bytes(column, kept, units_on_gpu), self.room.gpu)
