"""The fastest layout of a step that fits: which are tried, in which order, and what rules the others out.

A layout is a micro-batch size, how many micro-batches form a group (and how many the first one), how many blocks a
segment, what each block keeps for its backward, and how many units have their optimizer state on the device. Everything
that is asked of a layout is simulated (simulate.py), and none of it depends on the caps: its seconds, the bytes that it
streams, and `smallest_cap_bytes`, the cap of the GPU from which on it is taken to fit. The caps only select, and the
answer is the fastest of what they let through. So a larger cap never gives a slower plan, and a cap that was named as
the smallest is planned when it is given: it is a layout's own, and that layout is among those that are tried.

What blocks keep is one number, `kept`: from 0, where each runs again from its input, one block after the other comes to
keep its products, and from L on, the number of blocks, one after the other to keep everything, up to 2 L. A block's
products are worth more time per byte than the rest, so no other mixture is tried. A group is one micro-batch or the
whole batch; between these lies a larger first group, doubled as long as copies are waited for, which hides the same
copies in less memory than larger groups throughout.

The search is best-first (branch and bound): a heap of single layouts and of sets of layouts, each with the seconds
that nothing in it can go below. The lowest is taken off; a set is cut up, and the first layout that fits is the
answer. A set's bound is the time of a layout that dominates all of it, whether or not that one fits. Dominance rests on
these, which tests hold to exhaustive runs over small grids:

  * more resident units take more memory, by their states exactly (with all of them resident there is no staging ring),
    and never more time, since there is less to wait for;
  * more kept takes more memory, and along each half of `kept` time goes one way (it falls, unless the host is what is
    slow);
  * at the same `kept` and residency, longer segments, larger groups and larger first groups compute no less. Longer
    segments save at most the inputs that they do not keep; larger first groups save no memory;
  * more sequences in a micro-batch never take less memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import count, pairwise

from lowmem.allocator import ROUNDING, SimulatedOutOfMemory
from lowmem.blocks import Decoder
from lowmem.simulate import Memory, Recording, StepCase, Target, most_bytes, record_step, under_cap
from lowmem.step import Schedule
from lowmem.units import MIB

SEGMENTS = (1, 2, 3, 4)  # blocks per segment that are tried
_NO_WAIT = 1e-3  # the share of a step from which waiting for copies is worth a larger first group
_PRECISION = 1 / 256  # of a smallest cap


@dataclass(frozen=True)
class Room:
    """What there is to fit into, in bytes, None for no limit: `gpu` for the allocator, `ram` for streamed states."""

    gpu: int | None
    ram: int | None


@dataclass(frozen=True)
class Found:
    """A layout that fits, and what its simulation says of it."""

    case: StepCase
    recording: Recording
    memory: Memory


class Simulations:
    """Recordings of one decoder for one target, made once each; layouts differ from `base` in schedule and in how many
    of the `units` are resident."""

    def __init__(self, make_decoder: Callable[[], Decoder], base: StepCase, target: Target):
        self.base = base
        self._target, self._known = target, {}
        self._decoder = make_decoder()
        self.units, self.blocks = len(self._decoder.units), len(self._decoder.blocks)
        sizes = [parameter.numel() for parameter in self._decoder.model.parameters()]
        self.parameters, self.largest_parameter = sum(sizes), max(sizes)
        self._recordings: dict[tuple[Schedule, int], Recording] = {}
        self._peaks: dict[tuple[Schedule, int], int] = {}
        self._runs: dict[tuple[Schedule, int], _Runs] = {}

    def record(self, schedule: Schedule, resident_units: int) -> tuple[StepCase, Recording]:
        """The recording of a layout; blocks that are made alike are run once."""
        case = replace(self.base, schedule=schedule, resident_units=resident_units)
        layout = schedule, resident_units
        if layout not in self._recordings:
            self._recordings[layout] = record_step(self._decoder, case, self._target, self._known, alike=True)
        return case, self._recordings[layout]

    def schedule(
        self,
        micro_batch: int,
        group: int,
        segment_blocks: int,
        kept: int,
        norm_first: bool = False,
        first_group: int = 0,
    ) -> Schedule:
        """`kept`: see the top of this file."""
        if kept == 2 * self.blocks:
            return Schedule(micro_batch, group, 1, recompute=False, norm_first=norm_first, first_group=first_group)
        whole = max(kept - self.blocks, 0)
        products = min(kept, self.blocks) - whole
        segment_blocks = segment_blocks if products + whole < self.blocks else 1  # none is recomputed from its input
        return Schedule(micro_batch, group, segment_blocks, True, products, whole, norm_first, first_group=first_group)

    def allocated_bytes(self, schedule: Schedule, resident_units: int) -> int:
        """The peak of what is allocated, before the allocator has its say."""
        layout = schedule, resident_units
        if layout not in self._peaks:
            self._peaks[layout] = self.record(*layout)[1].tape.peak_bytes(ROUNDING)
        return self._peaks[layout]

    def runs(self, schedule: Schedule, resident_units: int) -> "_Runs":
        """The layout's simulated runs under caps."""
        layout = schedule, resident_units
        if layout not in self._runs:
            self._runs[layout] = _Runs(self.record(*layout)[1], self.allocated_bytes(*layout))
        return self._runs[layout]


class _Runs:
    """Simulated runs of one layout, of which the smallest cap is looked for: bisection between what is allocated and
    what a run without a cap reserves, which no cap above it changes. It stops when a question is answered; the caps
    that are tried do not depend on the questions, and so the answers agree.

    Under a cap between the two the run gives cached memory back to the driver. Holes in it need not shrink as the cap
    grows, so a run may complete under one cap and not under the next; but a layout that completes under a cap can
    be run under that one. (The allocator looks at the cap before it maps whole pages, so that a little less than is
    allocated may do; nobody calls that a cap.)"""

    def __init__(self, recording: Recording, allocated_bytes: int):
        self._recording, self._low = recording, allocated_bytes
        self._high: int | None = None  # under which the run has completed
        self.memory: Memory | None = None  # of that run

    def smallest_cap_bytes(self) -> int:
        """In whole MiB, to a few thousandths."""
        while not self._settled():
            self._try_one_more()
        return -(-self._high // MIB) * MIB

    def fits(self, limit_bytes: int | None) -> bool:
        """Whether the smallest cap is within the limit."""
        if limit_bytes is None:
            limit_bytes = 2**62
        while True:
            if self._low > limit_bytes:
                return False
            if self._high is not None and -(-self._high // MIB) * MIB <= limit_bytes:
                return True
            if self._settled():
                return False
            self._try_one_more()

    def _settled(self) -> bool:
        return self._high is not None and self._high - self._low <= self._low * _PRECISION

    def _try_one_more(self) -> None:
        cap = None if self._high is None else (self._low + self._high) // 2
        try:
            self.memory = under_cap(self._recording.tape, cap)
            self._high = self.memory.reserved_peak_bytes if cap is None else cap
        except SimulatedOutOfMemory:
            self._low = cap


@dataclass(frozen=True)
class Choices:
    """What may be chosen from, each in ascending order; `groups` None: what divides the number of micro-batches.
    `norm_first`: whether forward and backward run twice (step.py); the whole batch is one group then."""

    micro_batches: Sequence[int]
    groups: Sequence[int] | None
    segments: Sequence[int]
    kept: Sequence[int]
    resident_units: Sequence[int]
    norm_first: bool = False

    def groups_of(self, batch: int, micro_batch: int) -> list[int]:
        """The smallest group and the largest."""
        count = batch // micro_batch
        if self.norm_first:
            return [count] if self.groups is None or count in self.groups else []
        possible = [group for group in self.groups or (1, count) if count % group == 0]
        return sorted({*possible[:1], *possible[-1:]})


@dataclass(frozen=True)
class _Family:
    """Layouts that differ in segments, what is kept and residency."""

    micro_batch: int
    group: int
    first_group: int = 0


@dataclass(frozen=True)
class _Column:
    """Layouts that differ in what is kept and residency alone."""

    family: _Family
    segment: int


@dataclass(frozen=True)
class _Part:
    """Of a column the layouts with `kept` from `least` to `most`, and from `fewest` to `all` resident units, all of
    these being places in the choices' lists; none keeps more than `most` and fits."""

    column: _Column
    least: int
    most: int
    fewest: int
    all: int


@dataclass(frozen=True)
class _Layout:
    """`kept`, `resident`: places in the choices' lists. `part`: with this layout found not to fit, what else it has
    stood for there."""

    column: _Column
    kept: int
    resident: int
    part: _Part | None = None


_Bounded = Iterator[tuple[float, _Family | _Part | _Layout]]  # with the seconds that nothing in it goes below


def fastest(simulations: Simulations, choices: Choices, room: Room, below_seconds: float = math.inf) -> Found | None:
    """The fastest layout that fits, if it takes less than `below_seconds`."""
    search = _Search(simulations, choices, room)
    if search.fewest_resident is None:
        return None
    heap: list = []
    order = count()
    seen = set()

    def push(nodes: _Bounded) -> None:
        for seconds, node in nodes:
            if seconds < below_seconds and node not in seen:
                seen.add(node)
                heappush(heap, (seconds, next(order), node))

    push(search.families())
    while heap:
        _, _, node = heappop(heap)
        match node:
            case _Family():
                push(search.parts_of(node))
            case _Part():
                push(search.cut(node))
            case _Layout():
                found = search.found(node)
                if found is not None:
                    return found
                push(search.next_to(node))
    return None


class _Search:
    """One question: what of these choices fits into this room?"""

    def __init__(self, simulations: Simulations, choices: Choices, room: Room):
        self.simulations, self.choices, self.room = simulations, choices, room
        self._last_kept, self._last_resident = len(choices.kept) - 1, len(choices.resident_units) - 1
        smallest = choices.micro_batches[0]
        column = _Column(_Family(smallest, self._groups(smallest)[0]), choices.segments[0])
        states = self._record(_Layout(column, 0, 0)).state_bytes
        streamed = [sum(states[resident:]) for resident in choices.resident_units]
        self.fewest_resident = next((place for place, size in enumerate(streamed) if _within(size, room.ram)), None)

    # --- what a layout takes

    def _arguments(self, layout: _Layout) -> tuple[Schedule, int]:
        family, choices = layout.column.family, self.choices
        schedule = self.simulations.schedule(
            family.micro_batch, family.group, layout.column.segment, choices.kept[layout.kept], choices.norm_first,
            family.first_group,
        )  # fmt: skip
        return schedule, choices.resident_units[layout.resident]

    def _record(self, layout: _Layout) -> Recording:
        return self.simulations.record(*self._arguments(layout))[1]

    def _seconds(self, column: _Column, kept: int, resident: int) -> float:
        return self._record(_Layout(column, kept, resident)).seconds

    def _seconds_without_waiting(self, column: _Column, kept: int) -> float:
        """What is left of a step's time where no copy is waited for, at least."""
        recording = self._record(_Layout(column, kept, 0))
        return recording.seconds - recording.waiting_seconds

    def _least_seconds(self, micro_batch: int) -> float:
        """What no layout with this micro-batch goes below. Where forward and backward run twice, that is half as much
        again as where they run once: what they do not double are the updates."""
        if self.choices.norm_first:
            once = _Search(self.simulations, replace(self.choices, norm_first=False), Room(None, None))
            return 1.5 * once._least_seconds(micro_batch)
        column = _Column(_Family(micro_batch, self._groups(micro_batch)[0]), self.choices.segments[0])
        return min(self._seconds_without_waiting(column, place) for place in self._turns())

    def _allocated_bytes(self, column: _Column, kept: int, resident: int) -> int:
        """Without a recording for every number of resident units: their states add up."""
        units, least = self.choices.resident_units[resident], self.choices.resident_units[0]
        schedule, _ = self._arguments(_Layout(column, kept, 0))
        allocated = self.simulations.allocated_bytes(schedule, least)
        if units == least:
            return allocated
        states = sum(self.simulations.record(schedule, least)[1].state_bytes[least:units])
        return allocated + states - (self._ring_bytes() if units == self.simulations.units else 0)

    @cache  # noqa: B019
    def _ring_bytes(self) -> int:
        """What staging takes, which is not there with everything resident."""
        micro_batch = self.choices.micro_batches[0]
        layout = _Layout(_Column(_Family(micro_batch, self._groups(micro_batch)[0]), self.choices.segments[0]), 0, 0)
        (schedule, least), units = self._arguments(layout), self.simulations.units
        states = sum(self._record(layout).state_bytes[least:])
        return (
            self.simulations.allocated_bytes(schedule, least)
            + states
            - self.simulations.allocated_bytes(schedule, units)
        )

    def found(self, layout: _Layout) -> Found | None:
        """The layout, if it fits."""
        arguments = self._arguments(layout)
        if not self.simulations.runs(*arguments).fits(self.room.gpu):
            return None
        return Found(*self.simulations.record(*arguments), self.simulations.runs(*arguments).memory)

    # --- sets of layouts, and how they are cut up

    def families(self) -> _Bounded:
        """Micro-batch sizes with their groups, up to the first that does not fit. A family's bound is the time with as
        much kept as is best and nothing to wait for."""
        for micro_batch in self.choices.micro_batches:
            families = [_Family(micro_batch, group) for group in self._groups(micro_batch)]
            seconds = self._least_seconds(micro_batch)
            if self.choices.norm_first:
                yield from ((seconds, family) for family in families)
            elif any(self._may_fit(family) for family in families):
                yield from ((seconds, family) for family in families)
            else:
                return

    def parts_of(self, family: _Family) -> _Bounded:
        """By segments, stretches of `kept` and whether there is a ring; then the family with a first group twice as
        large. A part's bound is taken from the column without a larger first group and with the shortest segments,
        which computes no more, given what longer segments save."""
        if not self._may_fit(family):
            return
        shortest, longest = self.choices.segments[0], self.choices.segments[-1]
        column = _Column(replace(family, first_group=0), shortest)
        again = sum(kept < self.simulations.blocks for kept in self.choices.kept)  # places with blocks in segments
        lowest = math.inf
        for segment in self.choices.segments:
            saved = 0 if segment == shortest else self._saved_bytes(family, longest)
            limit = None if self.room.gpu is None else self.room.gpu + saved
            for least, most in self._stretches(column):
                for fewest, all in self._residencies():
                    kept = self._at_most_kept(column, fewest, limit, least, most)
                    if kept is None or (segment != shortest and least >= again):
                        continue
                    seconds = self._seconds_without_waiting(column, kept if segment == shortest else min(kept, again))
                    lowest = min(lowest, seconds)
                    kept = kept if segment == shortest else min(kept, again - 1)
                    yield seconds, _Part(_Column(family, segment), least, kept, fewest, all)
        first_group = 2 * (family.first_group or family.group)
        micro_batches = self.simulations.base.batch // family.micro_batch
        if lowest < math.inf and self.choices.groups is None and first_group < micro_batches:
            recording = self._record(_Layout(_Column(family, shortest), 0, 0))
            if recording.waiting_seconds > _NO_WAIT * recording.seconds:
                yield lowest, replace(family, first_group=first_group)

    def cut(self, part: _Part) -> _Bounded:
        """The layout that keeps most, with as many resident units as fit beside that, and halves of what has more
        resident units; of a part that keeps less than was thought, itself with a better bound."""
        column, least = part.column, part.least
        most = self._most_kept(column, part.fewest, least, part.most)
        if most is None:
            return
        if most < part.most:
            yield self._seconds(column, most, part.all), replace(part, most=most)
            return
        resident = part.all
        while not self._fits(column, most, resident):
            resident -= 1
        yield self._seconds(column, most, resident), _Layout(column, most, resident, part)
        middle = (resident + 1 + part.all) // 2
        for fewest, all in ((resident + 1, middle), (middle + 1, part.all)):
            if fewest <= all:
                kept = self._most_kept(column, fewest, least, most)
                if kept is not None:
                    yield self._seconds(column, kept, all), _Part(column, least, kept, fewest, all)

    def next_to(self, layout: _Layout) -> _Bounded:
        """Of what the layout, which does not fit, dominates in its part, the fastest ones: one of these dominates the
        rest."""
        for kept, resident in ((layout.kept, layout.resident - 1), (layout.kept - 1, layout.resident)):
            if kept >= layout.part.least and resident >= layout.part.fewest:
                yield self._seconds(layout.column, kept, resident), replace(layout, kept=kept, resident=resident)

    def _groups(self, micro_batch: int) -> list[int]:
        return self.choices.groups_of(self.simulations.base.batch, micro_batch)

    def _turns(self) -> list[int]:
        """Places of `kept` between which time and memory change evenly."""
        half = [place for place, kept in enumerate(self.choices.kept) if kept == self.simulations.blocks]
        return sorted({0, *half, self._last_kept})

    def _stretches(self, column: _Column) -> list[tuple[int, int]]:
        """From and to which place of `kept` more is faster, as far as two recordings say it; where the host is what is
        slow it may be otherwise, so that each turn is a stretch of its own, too."""
        falling: list[tuple[int, int]] = []
        for before, after in pairwise(self._turns()):
            falls = self._seconds(column, after, 0) < self._seconds(column, before, 0)
            falls |= self._seconds_without_waiting(column, after) < self._seconds_without_waiting(column, before)
            if falls and falling and falling[-1][1] == before:
                falling[-1] = falling[-1][0], after
            elif falls:
                falling.append((before, after))
        return falling + [(turn, turn) for turn in self._turns()]

    def _residencies(self) -> list[tuple[int, int]]:
        """From and to which place of resident units memory grows all along: with all resident there is no ring."""
        fewest, last = self.fewest_resident, self._last_resident
        if fewest < last and self.choices.resident_units[last] == self.simulations.units:
            return [(fewest, last - 1), (last, last)]
        return [(fewest, last)]

    # --- what fits, as far as what is allocated says it

    def _fits(self, column: _Column, kept: int, resident: int) -> bool:
        return _within(self._allocated_bytes(column, kept, resident), self.room.gpu)

    def _may_fit(self, family: _Family) -> bool:
        """Whether anything of the family does, for all that is known of the shortest segments."""
        column = _Column(family, self.choices.segments[0])
        least = min(self._allocated_bytes(column, 0, resident) for resident, _ in self._residencies())
        return _within(least - self._saved_bytes(family, self.choices.segments[-1]), self.room.gpu)

    def _saved_bytes(self, family: _Family, segment: int) -> int:
        """The most that segments of that length save: inputs of blocks, of all micro-batches of a group."""
        sequences = family.micro_batch * (family.first_group or family.group)
        shortest = self.choices.segments[0]
        return self._input_bytes() * sequences * (segment - shortest) // segment

    @cache  # noqa: B019
    def _input_bytes(self) -> int:
        """The inputs of all segments of the shortest length, of one sequence."""
        micro_batch = self.choices.micro_batches[0]
        family = _Family(micro_batch, self._groups(micro_batch)[0])
        tape = self._record(_Layout(_Column(family, self.choices.segments[0]), 0, 0)).tape
        return most_bytes(tape, "boundaries") // (micro_batch * family.group)

    def _most_kept(self, column: _Column, resident: int, least: int, most: int) -> int | None:
        """The most that can be kept, between these; None where nothing fits."""
        if least > most or not self._fits(column, least, resident):
            return None
        fits, beyond, tried = least, most + 1, least
        while beyond - fits > 1:
            tried = min(max(self._estimate(column, resident, self.room.gpu, tried, most), fits + 1), beyond - 1)
            if self._fits(column, tried, resident):
                fits = tried
            else:
                beyond = tried
        return fits

    def _at_most_kept(self, column: _Column, resident: int, limit: int | None, least: int, most: int) -> int | None:
        """As much as can be kept or more, found with fewer recordings; None where nothing fits."""
        if least > most or not _within(self._allocated_bytes(column, least, resident), limit):
            return None
        kept = least
        while kept < most and _within(self._allocated_bytes(column, kept, resident), limit):
            kept = min(max(self._estimate(column, resident, limit, kept, most), kept) + 1, most)
        return kept

    def _estimate(self, column: _Column, resident: int, limit: int | None, known: int, most: int) -> int:
        """How much can be kept, if memory grows from what is known of one place as it does, evenly between the turns,
        in the column with the smallest group."""
        if limit is None:
            return most
        sizes = self._even_sizes(column.family.micro_batch)
        room = limit - self._allocated_bytes(column, known, resident)
        return next((place for place in range(most, -1, -1) if sizes[place] - sizes[known] <= room), 0)

    @cache  # noqa: B019
    def _even_sizes(self, micro_batch: int) -> list[float]:
        """For every place of `kept` what the smallest group would allocate if it grew evenly between the turns."""
        column = _Column(_Family(micro_batch, self._groups(micro_batch)[0]), self.choices.segments[0])
        sizes = [float(self._allocated_bytes(column, 0, 0))]
        for before, after in pairwise(self._turns()):
            grows = self._allocated_bytes(column, after, 0) - self._allocated_bytes(column, before, 0)
            sizes += [
                sizes[before] + grows * (place - before) / (after - before) for place in range(before + 1, after + 1)
            ]
        return sizes

    # --- where nothing fits

    def smallest_room(self) -> Room:
        """Caps that would do where nothing fits: if the GPU's can be kept to, the smallest for RAM beside it; else the
        smallest for the GPU, with as much streamed as RAM has room for. They are those of the layouts that keep
        nothing, of the smallest micro-batch."""
        families = [
            _Family(self.choices.micro_batches[0], group) for group in self._groups(self.choices.micro_batches[0])
        ]
        columns = [_Column(family, segment) for family in families for segment in self.choices.segments]
        streamed = [
            self._record(_Layout(column, 0, resident)).streamed_bytes
            for column in columns
            for resident in [self._most_resident(column)]
            if resident is not None
        ]
        if streamed:
            return Room(self.room.gpu, min(streamed))
        fewest = self._last_resident if self.fewest_resident is None else self.fewest_resident
        layouts = [
            _Layout(column, 0, resident) for column in columns for resident in sorted({fewest, self._last_resident})
        ]
        best = None
        for layout in sorted(layouts, key=lambda layout: self._allocated_bytes(layout.column, 0, layout.resident)):
            if best is not None and self._allocated_bytes(layout.column, 0, layout.resident) >= best.gpu:
                break
            cap = self.simulations.runs(*self._arguments(layout)).smallest_cap_bytes()
            if best is None or cap < best.gpu:
                best = Room(cap, self._record(layout).streamed_bytes)
        return best

    def _most_resident(self, column: _Column) -> int | None:
        """The most units that can be resident with nothing kept, by the simulated runs; None where nothing fits."""
        for resident in range(self._last_resident, -1, -1):
            arguments = self._arguments(_Layout(column, 0, resident))
            if self._fits(column, 0, resident) and self.simulations.runs(*arguments).fits(self.room.gpu):
                return resident
        return None


def smallest_room(simulations: Simulations, choices: Choices, room: Room) -> Room:
    """Caps that would do where nothing fits into `room`."""
    return _Search(simulations, choices, room).smallest_room()


def smallest_cap_bytes(simulations: Simulations, schedule: Schedule, resident: int) -> int:
    """The smallest cap under which the layout's run completes, in whole MiB and to a few thousandths."""
    return simulations.runs(schedule, resident).smallest_cap_bytes()


def _within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes
