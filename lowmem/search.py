"""The fastest layout of a step that fits: which are tried, in which order, and what rules the others out.

A layout is a micro-batch size, how many micro-batches form a group, how many blocks a segment, what each block keeps
for its backward, and how many units have their optimizer state on the device. It fits if the simulated run completes
under the GPU's cap and the streamed states fit under RAM's. Everything here is simulated time and memory (simulate.py).

What blocks keep is one number, `kept`: from 0, where each runs again from its input, one block after the other comes to
keep its products, and from L on, the number of blocks, one after the other to keep everything, up to 2 L. A block's
products are worth more time per byte than the rest, so no other mixture is tried.

Not every layout is simulated. What is left out is not, or by very little, the answer:

  * memory grows with `kept` and time falls, both nearly in proportion, so the most that fits is found by interpolation;
  * a state on the GPU costs its own bytes, so one recording tells how many there is room for. What a block keeps is
    used for every micro-batch and a resident state once per step, so room is given to blocks first, and the other way
    round only where copies are waited for;
  * sizes of micro-batches are tried in the order of what they reach at once, with as much kept as fits, until that is
    so much longer than the best found that nothing else makes up for it;
  * more sequences in a micro-batch never take less memory: sizes go up until one does not fit;
  * longer segments and larger groups are tried where an estimate from what is known says that they could win. A larger
    group only hides copies, or, if it is the whole batch, saves accumulators. A larger first group is tried for the
    layouts that are the fastest without one, as far as they wait for copies.

A test holds the outcome to the best of an exhaustive run over a small grid.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from lowmem.allocator import ROUNDING, SimulatedOutOfMemory
from lowmem.blocks import Decoder
from lowmem.simulate import Memory, Recording, StepCase, Target, record_step, under_cap
from lowmem.step import Schedule
from lowmem.units import MIB

SEGMENTS = (1, 2, 3, 4)  # blocks per segment that are tried
_NO_WAIT = 5e-3  # the share of a step from which waiting for copies is worth doing something about
_GAIN = 0.05  # what longer segments, larger groups and resident states make of a micro-batch size's first layout
_FEW = 16  # micro-batches: with more, the inputs kept for a group of the whole batch outweigh the accumulators


@dataclass(frozen=True)
class Room:
    """What there is to fit into, in bytes, None for no limit: `gpu` for the allocator, `ram` for streamed states."""

    gpu: int | None
    ram: int | None


@dataclass(frozen=True)
class Found:
    """A layout that fits, and what its simulation says under the cap."""

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
        count = batch // micro_batch
        if self.norm_first:
            return [count] if self.groups is None or count in self.groups else []
        return [group for group in self.groups or range(1, count + 1) if count % group == 0]


@dataclass(frozen=True)
class _Layout:
    """`kept`, `resident`: places in the choices' lists; `first_group`: as in Schedule."""

    micro_batch: int
    group: int
    segment: int
    kept: int
    resident: int
    first_group: int = 0


def fastest(simulations: Simulations, choices: Choices, room: Room) -> Found | None:
    """The fastest layout that fits; None where none does."""
    search = _Search(simulations, choices, room)
    if search.fewest_resident is None:
        return None
    best: Found | None = None
    waiting: list[tuple[float, _Layout]] = []  # with the seconds that would be left if nothing were waited for
    for first_seconds, micro_batch in search.in_order_of_promise():
        if best is not None and first_seconds > (1 + _GAIN) * best.recording.seconds:
            break
        for group in search.groups_worth_trying(micro_batch):
            found, layout = search.fastest_of(search.candidates(micro_batch, group))
            if found is None:
                continue
            waiting.append((found.recording.seconds - found.recording.waiting_seconds, layout))
            best = found if best is None else min(best, found, key=_seconds)
    for seconds, layout in sorted(waiting, key=lambda pair: pair[0]):
        if seconds > (1 - _NO_WAIT) * _seconds(best):
            break
        found, _ = search.fastest_of(search.with_larger_first_groups(layout))
        best = best if found is None else min(best, found, key=_seconds)
    return best


def _seconds(found: Found) -> float:
    return found.recording.seconds


class _Search:
    """One question: what of these choices fits into this room?"""

    def __init__(self, simulations: Simulations, choices: Choices, room: Room):
        self.simulations, self.choices, self.room = simulations, choices, room
        self._all_kept, self._all_resident = len(choices.kept) - 1, len(choices.resident_units) - 1
        smallest = choices.micro_batches[0]
        self.fewest_resident: int | None = 0
        states = self.record(_Layout(smallest, self._groups(smallest)[0], choices.segments[0], 0, 0)).state_bytes
        streamed = [sum(states[resident:]) for resident in choices.resident_units]
        self.fewest_resident = next((place for place, size in enumerate(streamed) if _within(size, room.ram)), None)

    # --- what a layout takes

    def record(self, layout: _Layout) -> Recording:
        return self.simulations.record(*self._arguments(layout))[1]

    def _arguments(self, layout: _Layout) -> tuple[Schedule, int]:
        kept = self.choices.kept[layout.kept]
        schedule = self.simulations.schedule(
            layout.micro_batch, layout.group, layout.segment, kept, self.choices.norm_first, layout.first_group
        )
        return schedule, self.choices.resident_units[layout.resident]

    def allocated_bytes(self, layout: _Layout) -> int:
        """Without a recording for every number of resident units: their states add up."""
        schedule, resident = self._arguments(layout)
        least = self.choices.resident_units[0]
        if resident in (least, self.simulations.units):  # with everything resident there is no staging ring
            return self.simulations.allocated_bytes(schedule, resident)
        _, recording = self.simulations.record(schedule, least)
        return self.simulations.allocated_bytes(schedule, least) + sum(recording.state_bytes[least:resident])

    def _fits(self, layout: _Layout) -> bool:
        """Whether what is allocated does; the allocator has not been asked."""
        return _within(self.allocated_bytes(layout), self.room.gpu)

    def _groups(self, micro_batch: int) -> list[int]:
        return self.choices.groups_of(self.simulations.base.batch, micro_batch)

    # --- which layouts are tried

    def in_order_of_promise(self) -> list[tuple[float, int]]:
        """(seconds with as much kept as fits, micro-batch) of the sizes that fit: with the first group and the first
        length of segments that do."""
        promising = []
        for micro_batch in self.choices.micro_batches:
            groups = self._groups(micro_batch)
            least = self._least_that_fits(micro_batch, groups[0]) or self._least_that_fits(micro_batch, groups[-1])
            if least is None:
                break
            first = replace(least, kept=self._most_kept(least))
            promising.append((self.record(self._most_resident(first)).seconds, micro_batch))
        return sorted(promising)

    def _least_that_fits(self, micro_batch: int, group: int) -> _Layout | None:
        """With least kept, the shortest segments that fit, states streamed where that does."""
        for segment in self.choices.segments:
            for resident in sorted({self.fewest_resident, self._all_resident}):
                layout = _Layout(micro_batch, group, segment, 0, resident)
                if self._fits(layout):
                    return layout
        return None

    def groups_worth_trying(self, micro_batch: int) -> Iterator[int]:
        smallest, *larger = self._groups(micro_batch)
        least = self._least_that_fits(micro_batch, smallest)
        if least is not None:
            yield smallest
        if larger and (least is None or self._saves_memory(replace(least, group=larger[-1]), least)):
            yield larger[-1]
        if least is None:
            return
        before = self.record(least)
        for group in larger:
            if before.waiting_seconds <= _NO_WAIT * before.seconds:
                break
            recording = self.record(replace(least, group=group))
            if before.seconds - recording.seconds <= _NO_WAIT * before.seconds:
                break
            yield group
            before = recording

    def _saves_memory(self, whole: _Layout, least: _Layout) -> bool:
        """Whether the batch as one group, which keeps the inputs of all and accumulators of few, leaves more room."""
        if self._fits(replace(least, kept=self._all_kept, resident=self._all_resident)) or whole.group > _FEW:
            return False
        return self.allocated_bytes(whole) < self.allocated_bytes(least)

    def candidates(self, micro_batch: int, group: int) -> Iterator[_Layout]:
        """Layouts one of which is the fastest, as far as what is allocated decides."""
        first: _Layout | None = None
        for segment in self.choices.segments:
            least = _Layout(micro_batch, group, segment, 0, self.fewest_resident)
            if first is not None and not self._may_win(least, first):
                continue
            for resident in self._residencies(least):
                most = self._most_kept(replace(least, resident=resident))
                if most is None:
                    continue
                for kept in {most, min(most, self._all_kept // 2), 0}:  # where the host is what is slow, little is best
                    yield self._most_resident(replace(least, kept=kept, resident=resident))
                first = first or self._most_resident(replace(least, kept=most, resident=resident))

    def _may_win(self, least: _Layout, first: _Layout) -> bool:
        """Whether longer segments, which compute more again and keep fewer inputs, could be faster than `first`. Their
        length matters to blocks alone that run again from their input: with products kept of all, it is the same."""
        products = self._all_kept // 2
        if first.kept >= products:
            return False
        if first.kept == 0:
            return True
        first_least = replace(least, segment=first.segment)
        before, after = self.record(first_least), self.record(replace(first, resident=least.resident))
        seconds = (before.seconds - after.seconds) / first.kept
        room = self.allocated_bytes(replace(first, resident=least.resident)) - self.allocated_bytes(first_least)
        more = (self.allocated_bytes(first_least) - self.allocated_bytes(least)) * first.kept / max(room, 1) + 1
        recording = self.record(least)
        share = min(first.kept + more, products) / products
        shortest = recording.seconds - share * (recording.seconds - before.seconds + seconds * products)
        return shortest < after.seconds

    def _residencies(self, least: _Layout) -> list[int]:
        """How many states to have on the device before blocks are given room."""
        recording = self.record(least)
        if recording.waiting_seconds <= _NO_WAIT * recording.seconds and self._fits(least):
            return [least.resident]
        return sorted({least.resident, self._most_resident(least).resident, self._all_resident})

    def _most_resident(self, layout: _Layout) -> _Layout:
        """With as many more states on the device as there is room for."""
        more = (replace(layout, resident=place) for place in range(self._all_resident, layout.resident, -1))
        return next(filter(self._fits, more), layout)

    def _most_kept(self, layout: _Layout) -> int | None:
        """The most that can be kept; None where nothing fits."""

        def size(kept: int) -> int:
            return self.allocated_bytes(replace(layout, kept=kept))

        fits, too_much = 0, self._all_kept
        if not _within(size(fits), self.room.gpu):
            return None
        if _within(size(too_much), self.room.gpu):
            return too_much
        guess = too_much // 2  # where the price of one more changes
        while too_much - fits > 1:
            if fits < guess < too_much:
                if _within(size(guess), self.room.gpu):
                    fits = guess
                else:
                    too_much = guess
            share = (self.room.gpu - size(fits)) / max(size(too_much) - size(fits), 1)
            guess = min(max(fits + int(share * (too_much - fits)), fits + 1), too_much - 1)
        return fits

    def with_larger_first_groups(self, layout: _Layout) -> Iterator[_Layout]:
        """For each length of segments the first group that hides all copies, by what a doubled one hides, or else the
        largest that fits; room for it is taken from resident states."""
        count = self.simulations.base.batch // layout.micro_batch
        if self.choices.groups is not None or self.choices.norm_first or 2 * layout.group >= count:
            return
        before, doubled = self.record(layout), self.record(replace(layout, first_group=2 * layout.group))
        hidden = before.waiting_seconds - doubled.waiting_seconds
        if hidden <= _NO_WAIT * before.seconds / count:
            return
        most = (count // layout.group - 1).bit_length() - 1
        enough = min((math.ceil(before.waiting_seconds / hidden)).bit_length(), most)
        for segment in self.choices.segments:
            for power in range(enough, 0, -1):
                first_group = layout.group * 2**power
                least = replace(layout, segment=segment, first_group=first_group, resident=self.fewest_resident)
                if self._fits(least):
                    yield self._most_resident(least)
                    break
            else:
                continue
            if power == enough:
                return

    def fastest_of(self, candidates: Iterator[_Layout]) -> tuple[Found | None, _Layout | None]:
        """The fastest that completes under the cap, of these and of those that take a little less; and which it is."""
        tried = list(dict.fromkeys(candidates))
        waiting = [(self.record(layout).seconds, index) for index, layout in enumerate(tried)]
        heapify(waiting)
        while waiting:
            layout = tried[heappop(waiting)[1]]
            case, recording = self.simulations.record(*self._arguments(layout))
            try:
                return Found(case, recording, under_cap(recording.tape, self.room.gpu)), layout
            except SimulatedOutOfMemory:
                fewer = (replace(layout, resident=n) for n in range(layout.resident - 1, self.fewest_resident - 1, -1))
                less = (replace(layout, kept=n) for n in range(layout.kept - 1, -1, -1))
                for other in (next(filter(self._fits, fewer), None), next(filter(self._fits, less), None)):
                    if other is not None and other not in tried:
                        heappush(waiting, (self.record(other).seconds, len(tried)))
                        tried.append(other)
        return None, None

    def smallest_room(self) -> Room:
        """Caps that would do where nothing fits: if the GPU's can be kept to, the smallest for RAM beside it; else the
        smallest for the GPU, with as much streamed as RAM has room for."""
        micro_batch = self.choices.micro_batches[0]
        groups = self._groups(micro_batch)
        layouts = [
            _Layout(micro_batch, group, segment, 0, 0)
            for group in sorted({groups[0], groups[-1]})
            for segment in self.choices.segments
        ]
        streaming = _Search(self.simulations, self.choices, Room(self.room.gpu, None))
        found, _ = streaming.fastest_of(
            streaming._most_resident(layout) for layout in layouts if streaming._fits(layout)
        )
        if found is not None:
            return Room(self.room.gpu, found.recording.streamed_bytes)
        most = self._all_resident
        fewest = most if self.fewest_resident is None else self.fewest_resident
        # With everything resident there is no staging ring, which takes more than the states of a very small model.
        layouts = [replace(layout, resident=resident) for layout in layouts for resident in sorted({fewest, most})]
        best = None
        for layout in sorted(layouts, key=self.allocated_bytes):
            if best is not None and self.allocated_bytes(layout) >= best.gpu:
                break
            cap = smallest_cap_bytes(self.simulations, *self._arguments(layout))
            if best is None or cap < best.gpu:
                best = Room(cap, self.record(layout).streamed_bytes)
        return best


def smallest_room(simulations: Simulations, choices: Choices, room: Room) -> Room:
    """Caps that would do where nothing fits into `room`."""
    return _Search(simulations, choices, room).smallest_room()


def _within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes


def smallest_cap_bytes(simulations: Simulations, schedule: Schedule, resident: int) -> int:
    """The smallest cap, in whole MiB and to a thousandth, under which the run completes: between what is allocated and
    what an uncapped run reserves. (The allocator looks at the cap before it maps whole pages, so that a little less
    than is allocated may do; nobody calls that a cap.)"""
    _, recording = simulations.record(schedule, resident)
    low = -(-simulations.allocated_bytes(schedule, resident) // MIB)
    high = -(-under_cap(recording.tape).reserved_peak_bytes // MIB)
    while high - low > low // 1024:
        middle = (low + high) // 2
        try:
            under_cap(recording.tape, middle * MIB)
            high = middle
        except SimulatedOutOfMemory:
            low = middle + 1
    return high * MIB
