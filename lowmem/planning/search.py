"""The fastest layout of a step that fits: which are tried, in which order, and what rules the others out.

A layout is a micro-batch size, how many micro-batches form a group, how many blocks a
segment, what each block keeps for its backward, and how many units have their optimizer state on the device. Everything
that is asked of a layout is simulated (simulated_step.py), and none of it depends on the caps: its seconds, the bytes
that it streams, and `smallest_cap_bytes`, the cap of the GPU from which on it is taken to fit. The caps only select,
and the answer is the fastest of what they let through. So a larger cap never gives a slower plan, and a cap that was
named as the smallest is planned when it is given: it is a layout's own, and that layout is among those that are tried.

What blocks keep is one number, `kept`: from 0, where each runs again from its input, one block after the other comes to
keep its products, and from L on, the number of blocks, one after the other to keep everything, up to 2 L. A block's
products are worth more time per byte than the rest, so no other mixture is tried. A group is one micro-batch or the
whole batch.

The search is best-first (branch and bound): a heap of single layouts and of sets of layouts, each with the seconds
that nothing in it can go below. The lowest is taken off; a set is cut up, and the first layout that fits is the
answer. A set's bound is the time of a layout that dominates all of it, whether or not that one fits. Dominance rests on
these, which tests hold to exhaustive runs over small grids:

  * more resident units take more memory, by their states exactly (with all of them resident there is no staging ring),
    and never more time, since there is less to wait for;
  * more kept takes more memory, and along each half of `kept` time goes one way (it falls, unless the host is what is
    slow);
  * at the same `kept` and residency, longer segments and larger groups compute no less. Longer segments save at
    most the inputs that they do not keep;
  * more sequences in a micro-batch never take less memory.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, pairwise

from lowmem.core.layout import Fate, Layout
from lowmem.cudasim.tape import Memory
from lowmem.planning.columns import Choices, Column, Columns, Family, MemoryLimits, within
from lowmem.planning.simulated_step import Recording
from lowmem.planning.simulations import Simulations

SEGMENTS = (1, 2, 3, 4)  # blocks per segment that are tried
_TRIES = 3  # of keeping less, where what was estimated to fit does not
_NEAR = 0.01  # to the best bound: sets that are worth a recording more for a better one of their own


@dataclass(frozen=True)
class Found:
    """A layout that fits, and what its simulation says of it."""

    layout: Layout
    recording: Recording
    memory: Memory


@dataclass(frozen=True)
class _Part:
    """Of a column the layouts with `kept` from `least` to `most`, and from `fewest` to `all` resident units, all of
    these being places in the choices' lists; none keeps more than `most` and fits."""

    column: Column
    least: int
    most: int
    fewest: int
    all: int


@dataclass(frozen=True)
class _Candidate:
    """A layout to be tried. `kept`, `resident`: places in the choices' lists. `part`: with this layout found not to
    fit, what else it has stood for there."""

    column: Column
    kept: int
    resident: int
    part: _Part | None = None


_Bounded = Iterator[tuple[float, Family | _Part | _Candidate]]  # with the seconds that nothing in it goes below


def fastest(
    simulations: Simulations, choices: Choices, room: MemoryLimits, below_seconds: float = math.inf
) -> Found | None:
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
        seconds, _, node = heappop(heap)
        match node:
            case Family():
                push(search.parts_of(node))
            case _Part():
                push(search.cut(node, seconds))
            case _Candidate():
                found = search.found(node)
                if found is not None:
                    return found
                push(search.next_to(node))
    return None


class _Search(Columns):
    """One question: what of these choices fits into this room?"""

    def found(self, candidate: _Candidate) -> Found | None:
        """The layout, if it fits."""
        layout = self.layout(candidate.column, candidate.kept, candidate.resident)
        runs = self.simulations.runs(layout)
        return Found(layout, self.simulations.record(layout), runs.memory) if runs.fits(self.room.gpu) else None

    # --- sets of layouts, and how they are cut up

    def families(self) -> _Bounded:
        """Micro-batch sizes with their groups, up to the first that does not fit. A family's bound is the time with as
        much kept as is best and nothing to wait for."""
        for micro_batch in self.choices.micro_batches:
            families = [Family(micro_batch, group) for group in self.groups(micro_batch)]
            if not self.choices.whole_batch and not any(self._may_fit(family) for family in families):
                return
            seconds = self._least_seconds(micro_batch)
            yield from ((seconds, family) for family in families)

    def parts_of(self, family: Family) -> _Bounded:
        """By segments, stretches of `kept` and whether there is a ring. A part's bound is taken from the column with
        the shortest segments, which computes no more, given what longer segments save."""
        if not self._may_fit(family):
            return
        shortest, longest = self.choices.segments[0], self.choices.segments[-1]
        column = Column(family, shortest)
        again = sum(kept < self.simulations.blocks for kept in self.choices.kept)  # places with blocks in segments
        for segment in self.choices.segments:
            saved = 0 if segment == shortest else self.saved_bytes(family, longest)
            limit = None if self.room.gpu is None else self.room.gpu + saved
            for least, most in self._stretches(column):
                for fewest, all in self.residencies():
                    kept = self.at_most_kept(column, fewest, limit, least, most)
                    if kept is None or (segment != shortest and least >= again):
                        continue
                    seconds = self.seconds_without_waiting(column, kept if segment == shortest else min(kept, again))
                    kept = kept if segment == shortest else min(kept, again - 1)
                    yield seconds, _Part(Column(family, segment), least, kept, fewest, all)

    def cut(self, part: _Part, bound: float) -> _Bounded:
        """The layout that keeps most, with as many resident units as fit beside that, and halves of what has more
        resident units; of a part that was given a `bound` from afar, itself with a better one."""
        column, least = part.column, part.least
        most = self.most_kept(column, part.fewest, least, part.most)
        if most is None:
            return
        if most < part.most:
            yield max(bound, self.seconds_without_waiting(column, most)), replace(part, most=most)
            return
        resident = part.all
        while not self.fits(column, most, resident):
            resident -= 1
        yield self.seconds(column, most, resident), _Candidate(column, most, resident, part)
        middle = (resident + 1 + part.all) // 2
        for fewest, all in ((resident + 1, middle), (middle + 1, part.all)):
            if fewest <= all:
                kept = self.at_most_kept(column, fewest, self.room.gpu, least, most)
                if kept is not None:
                    seconds = self.seconds_without_waiting(column, kept)
                    if seconds < bound * (1 + _NEAR):
                        seconds = self.seconds(column, kept, all)
                    yield seconds, _Part(column, least, kept, fewest, all)

    def next_to(self, candidate: _Candidate) -> _Bounded:
        """Of what the candidate, which does not fit, dominates in its part, the fastest ones: one of these dominates
        the rest."""
        part = candidate.part
        for kept, resident in ((candidate.kept, candidate.resident - 1), (candidate.kept - 1, candidate.resident)):
            if kept >= part.least and resident >= part.fewest:
                yield self.seconds(part.column, kept, resident), replace(candidate, kept=kept, resident=resident)

    def _stretches(self, column: Column) -> list[tuple[int, int]]:
        """From and to which place of `kept` more is faster, as far as two recordings say it; where the host is what is
        slow it may be otherwise, so that each turn is a stretch of its own, too."""
        falling: list[tuple[int, int]] = []
        for before, after in pairwise(self.turns()):
            falls = self.seconds(column, after, 0) < self.seconds(column, before, 0)
            falls |= self.seconds_without_waiting(column, after) < self.seconds_without_waiting(column, before)
            if falls and falling and falling[-1][1] == before:
                falling[-1] = falling[-1][0], after
            elif falls:
                falling.append((before, after))
        return falling + [(turn, turn) for turn in self.turns()]

    def _least_seconds(self, micro_batch: int) -> float:
        """What no layout with this micro-batch goes below. Where forward and backward run twice, that is half as much
        again as where they run once: what they do not double are the updates."""
        if self.choices.fate is Fate.DROPPED:
            once = _Search(self.simulations, replace(self.choices, fate=Fate.HELD), MemoryLimits(None, None))
            return 1.5 * once._least_seconds(micro_batch)
        groups = self.groups(micro_batch)
        if self.simulations.base.needs_all_gradients:
            groups = groups[:1]  # else the whole batch as one group updates during backward
        columns = [Column(Family(micro_batch, group), self.choices.segments[0]) for group in groups]
        return min(self.seconds_without_waiting(column, place) for column in columns for place in self.turns())

    def _may_fit(self, family: Family) -> bool:
        """Whether anything of the family does, for all that is known of the shortest segments."""
        column = Column(family, self.choices.segments[0])
        least = min(self.allocated_bytes(column, 0, resident) for resident, _ in self.residencies())
        return within(least - self.saved_bytes(family, self.choices.segments[-1]), self.room.gpu)

    # --- where nothing fits

    def smallest_room(self) -> MemoryLimits:
        """Caps that would do where nothing fits: if the GPU's can be kept to, the smallest for RAM beside it; else the
        smallest for the GPU, with as much streamed as RAM has room for."""
        streamed = [
            self.record(column, 0, resident).streamed_bytes
            for column in self._frugal_columns()
            for resident in [self._most_resident(column)]
            if resident is not None
        ]
        if streamed:
            return MemoryLimits(self.room.gpu, min(streamed))
        best = None
        for layout in sorted(self.frugal(), key=self.simulations.allocated_bytes):
            if best is not None and self.simulations.allocated_bytes(layout) >= best.gpu:
                break
            cap = self.simulations.smallest_cap_bytes(layout)
            if best is None or cap < best.gpu:
                best = MemoryLimits(cap, self.simulations.record(layout).streamed_bytes)
        return best

    def frugal(self) -> list[Layout]:
        """One of these takes least of the GPU."""
        fewest = self.last_resident if self.fewest_resident is None else self.fewest_resident
        residencies = sorted({fewest, self.last_resident})
        return [self.layout(column, 0, resident) for column in self._frugal_columns() for resident in residencies]

    def _frugal_columns(self) -> list[Column]:
        """Of the smallest micro-batch."""
        size = self.choices.micro_batches[0]
        families = [Family(size, group) for group in self.groups(size)]
        return [Column(family, segment) for family in families for segment in self.choices.segments]

    def _most_resident(self, column: Column) -> int | None:
        """The most units that can be resident with nothing kept, by the simulated runs; None where nothing fits."""
        for resident in range(self.last_resident, -1, -1):
            layout = self.layout(column, 0, resident)
            if self.fits(column, 0, resident) and self.simulations.runs(layout).fits(self.room.gpu):
                return resident
        return None


def streaming_more(simulations: Simulations, choices: Choices, room: MemoryLimits, found: Found) -> Found | None:
    """A layout that fits, with the micro-batches, groups and segments of `found`, which streams as much as RAM has room
    for, and keeps what the GPU then has room for beside as much as the allocator wastes for `found`. None where there
    is none, or where a few that keep less do not fit either. It takes a few recordings, where a search takes many."""
    search, layout = _Search(simulations, choices, room), found.layout
    resident = search.fewest_resident
    if resident is None:
        return None
    column = Column(Family(layout.micro_batch, layout.group), layout.segment_blocks)
    wasted = found.memory.reserved_peak_bytes - found.memory.allocated_peak_bytes
    smaller = MemoryLimits(None if room.gpu is None else room.gpu - wasted, room.ram)
    most = _Search(simulations, choices, smaller).most_kept(column, resident, 0, search.last_kept)
    tried = () if most is None else range(most, max(most - _TRIES, -1), -1)
    return next(filter(None, (search.found(_Candidate(column, kept, resident)) for kept in tried)), None)


def smallest_room(simulations: Simulations, choices: Choices, room: MemoryLimits) -> MemoryLimits:
    """Caps that would do where nothing fits into `room`."""
    return _Search(simulations, choices, room).smallest_room()


def frugal(simulations: Simulations, choices: Choices, room: MemoryLimits) -> list[Layout]:
    """Layouts, one of which takes least of the GPU beside this room's RAM: they keep
    nothing, have the smallest micro-batch, and stream as much as they may or nothing, which needs no ring."""
    return _Search(simulations, choices, room).frugal()
