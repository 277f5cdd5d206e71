"""Layouts of a step as families, columns and places in them: what each takes, as far as single recordings say it.

A family has a micro-batch and groups; its columns have segments of one length each. Within a column layouts differ in
`kept` (search.py) and in how many units are resident, which are given as places in the lists of Choices.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from lowmem.core.layout import Fate, Layout
from lowmem.cudasim.tape import most_bytes
from lowmem.planning.simulated_step import Recording
from lowmem.planning.simulations import Simulations

_FEW = 16  # micro-batches that are one group at most, where all gradients are held


@dataclass(frozen=True)
class MemoryLimits:
    """What there is to fit into, in bytes, None for no limit: `gpu` for the allocator, `ram` for streamed states and
    weights."""

    gpu: int | None
    ram: int | None


@dataclass(frozen=True)
class Choices:
    """What may be chosen from, each in ascending order; `groups` None: what divides the number of micro-batches.
    `fate`: Layout's; the whole batch
    is one group then, and with gradients in RAM no unit's states are resident.
    `weights_on_gpu`, `boundaries_in_ram`: Layout's. Where weights are streamed no unit's states are resident, and no
    block is kept whole. Where boundaries are in RAM, there is one length of segments and one of `kept`, which say how
    much that is; and the whole batch is one group. `states_on_disk`: Layout's.
    """

    micro_batches: Sequence[int]
    groups: Sequence[int] | None
    segments: Sequence[int]
    kept: Sequence[int]
    states_on_gpu: Sequence[int]
    weights_on_gpu: int | None = None
    boundaries_in_ram: bool = False
    states_on_disk: int = 0
    fate: Fate = Fate.HELD

    @property
    def whole_batch(self) -> bool:
        """Whether the whole batch is one group, for gradients that are not held on the device."""
        return self.fate is not Fate.HELD

    def groups_of(self, batch: int, micro_batch: int) -> list[int]:
        """The smallest group and the largest."""
        count = batch // micro_batch
        if self.whole_batch or self.boundaries_in_ram:
            return [count] if self.groups is None or count in self.groups else []
        possible = [group for group in self.groups or (1, count) if count % group == 0]
        return sorted({*possible[:1], *possible[-1:]})


@dataclass(frozen=True)
class Family:
    """Layouts that differ in segments, what is kept and residency."""

    micro_batch: int
    group: int


@dataclass(frozen=True)
class Column:
    """Layouts that differ in what is kept and residency alone."""

    family: Family
    segment: int


class Columns:
    """What the layouts of these choices take, with this much room."""

    def __init__(self, simulations: Simulations, choices: Choices, room: MemoryLimits):
        self.simulations, self.choices, self.room = simulations, choices, room
        self.last_kept, self.last_resident = len(choices.kept) - 1, len(choices.states_on_gpu) - 1
        self._sizes: dict[int, list[float]] = {}
        self._found_kept: dict[tuple[Family, int, int], int] = {}
        frugal = self.record(self.frugal_column(choices.micro_batches[0]), 0, 0)
        beside = frugal.streamed_weight_bytes + frugal.boundary_bytes + frugal.gradient_bytes + frugal.disk_buffer_bytes
        in_ram = [size - on_disk for size, on_disk in zip(frugal.state_bytes, frugal.disk_bytes, strict=True)]
        streamed = [sum(in_ram[units:]) + beside for units in choices.states_on_gpu]
        self.fewest_resident = next((place for place, size in enumerate(streamed) if within(size, room.ram)), None)

    def groups(self, micro_batch: int) -> list[int]:
        """Where all gradients are held, many micro-batches as one group keep more inputs than that saves elsewhere."""
        smallest, *largest = self.choices.groups_of(self.simulations.base.batch, micro_batch)
        held = self.simulations.base.needs_all_gradients and not self.choices.whole_batch
        return [smallest] if held and largest and largest[0] > _FEW else [smallest, *largest]

    def frugal_column(self, micro_batch: int) -> Column:
        """With the smallest group and the shortest segments."""
        return Column(Family(micro_batch, self.groups(micro_batch)[0]), self.choices.segments[0])

    def turns(self) -> list[int]:
        """Places of `kept` between which time and memory change evenly."""
        half = [place for place, kept in enumerate(self.choices.kept) if kept == self.simulations.blocks]
        return sorted({0, *half, self.last_kept})

    def residencies(self) -> list[tuple[int, int]]:
        """From and to which place of resident units memory grows all along: with all resident there is no ring."""
        fewest, last = self.fewest_resident, self.last_resident
        if fewest < last and self.choices.states_on_gpu[last] == self.simulations.units:
            return [(fewest, last - 1), (last, last)]
        return [(fewest, last)]

    def layout(self, column: Column, kept: int, resident: int) -> Layout:
        """What `kept` and `resident`, places in the choices' lists, stand for."""
        family, choices = column.family, self.choices
        layout = Layout(
            family.micro_batch, family.group, column.segment, states_on_gpu=choices.states_on_gpu[resident],
            weights_on_gpu=choices.weights_on_gpu, boundaries_in_ram=choices.boundaries_in_ram,
            states_on_disk=choices.states_on_disk, fate=choices.fate,
        )  # fmt: skip
        return self.simulations.keeping(layout, choices.kept[kept])

    def record(self, column: Column, kept: int, resident: int) -> Recording:
        return self.simulations.record(self.layout(column, kept, resident))

    def seconds(self, column: Column, kept: int, resident: int) -> float:
        return self.record(column, kept, resident).seconds

    def seconds_without_waiting(self, column: Column, kept: int) -> float:
        """What is left of a step's time where no copy is waited for, at least: however many units are resident."""
        return self._without_waiting(column, kept, 0) - self._most_launching_seconds

    def _without_waiting(self, column: Column, kept: int, resident: int) -> float:
        recording = self.record(column, kept, resident)
        return recording.seconds - recording.waiting_seconds

    @cached_property
    def _most_launching_seconds(self) -> float:
        """The most that launching copies, and the segments of the shortest length, adds to a step: what it adds to the
        smallest micro-batches, for which the host is most likely to be what is slow."""
        column = self.frugal_column(self.choices.micro_batches[0])
        longest = replace(column, segment=self.choices.segments[-1])
        streamed, resident = (
            [self._without_waiting(column, kept, place) for kept in self.turns()] for place in (0, self.last_resident)
        )
        of_copies = max(0.0, *map(operator.sub, streamed, resident))
        return of_copies + max(0.0, streamed[0] - self._without_waiting(longest, 0, 0))

    def allocated_bytes(self, column: Column, kept: int, resident: int) -> int:
        """Without a recording for every number of resident units: their states add up."""
        units, least = self.choices.states_on_gpu[resident], self.choices.states_on_gpu[0]
        streaming = self.layout(column, kept, 0)
        allocated = self.simulations.allocated_bytes(streaming)
        if units == least:
            return allocated
        states = sum(self.simulations.record(streaming).state_bytes[least:units])
        return allocated + states - (self._ring_bytes if units == self.simulations.units else 0)

    @cached_property
    def _ring_bytes(self) -> int:
        """What staging takes, which is not there with everything resident."""
        column = self.frugal_column(self.choices.micro_batches[0])
        streaming = self.layout(column, 0, 0)
        resident = replace(streaming, states_on_gpu=self.simulations.units)
        states = sum(self.simulations.record(streaming).state_bytes[streaming.states_on_gpu :])
        return self.simulations.allocated_bytes(streaming) + states - self.simulations.allocated_bytes(resident)

    def fits(self, column: Column, kept: int, resident: int) -> bool:
        return within(self.allocated_bytes(column, kept, resident), self.room.gpu)

    def saved_bytes(self, family: Family, segment: int) -> int:
        """The most that segments of that length save: inputs of blocks, of all micro-batches of a group."""
        sequences = family.micro_batch * family.group
        shortest = self.choices.segments[0]
        return self._input_bytes * sequences * (segment - shortest) // segment

    @cached_property
    def _input_bytes(self) -> int:
        """The inputs of all segments of the shortest length, of one sequence."""
        column = self.frugal_column(self.choices.micro_batches[0])
        sequences = column.family.micro_batch * column.family.group
        return most_bytes(self.record(column, 0, 0).tape, "boundaries") // sequences

    def most_kept(self, column: Column, resident: int, least: int, most: int) -> int | None:
        """The most that can be kept, between these; None if nothing fits. Tries the last answer for this column
        first."""
        alike = column.family, column.segment, resident
        fits, beyond, tried = least - 1, most + 1, self._found_kept.get(alike, least)
        while beyond - fits > 1:
            tried = min(max(tried, fits + 1), beyond - 1)
            if self.fits(column, tried, resident):
                fits = tried
            else:
                beyond = tried
            tried = self._estimate(column, resident, self.room.gpu, tried, most)
        if fits < least:
            return None
        self._found_kept[alike] = fits
        return fits

    def at_most_kept(self, column: Column, resident: int, limit: int | None, least: int, most: int) -> int | None:
        """As much as can be kept or more, found with fewer recordings; None where nothing fits."""
        if least > most or not within(self.allocated_bytes(column, least, resident), limit):
            return None
        kept = least
        while kept < most and within(self.allocated_bytes(column, kept, resident), limit):
            kept = min(max(self._estimate(column, resident, limit, kept, most), kept) + 1, most)
        return kept

    def _estimate(self, column: Column, resident: int, limit: int | None, known: int, most: int) -> int:
        """How much can be kept, if memory grows from what is known of one place as it does, evenly between the turns,
        in the column with the smallest group."""
        if limit is None:
            return most
        sizes = self._even_sizes(column.family.micro_batch)
        room = limit - self.allocated_bytes(column, known, resident)
        return next((place for place in range(most, -1, -1) if sizes[place] - sizes[known] <= room), 0)

    def _even_sizes(self, micro_batch: int) -> list[float]:
        """For every place of `kept` what the smallest group would allocate if it grew evenly between the turns."""
        if micro_batch not in self._sizes:
            column = self.frugal_column(micro_batch)
            sizes = [float(self.allocated_bytes(column, 0, 0))]
            for before, after in pairwise(self.turns()):
                grows = self.allocated_bytes(column, after, 0) - self.allocated_bytes(column, before, 0)
                each = grows / (after - before)
                sizes += [sizes[before] + each * step for step in range(1, after - before + 1)]
            self._sizes[micro_batch] = sizes
        return self._sizes[micro_batch]


def within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes
