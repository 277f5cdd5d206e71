"""The fastest layout of a step that fits: which are tried, in which order, and what rules the others out.

A layout is a micro-batch size, how many micro-batches form a group, how many blocks a segment, whether blocks are
recomputed, and how many units keep their optimizer state on the device. It fits if the simulated run completes under
the GPU's cap and the streamed states fit under RAM's. Everything here is simulated time and memory (simulate.py).

Not every layout is simulated. What is left out cannot be the answer:

  * more sequences in a micro-batch never take less memory, and more micro-batches in a group only where the group is
    the whole batch (its accumulators are not there during forward): sizes go up until one does not fit, neither with
    every state streamed nor with every state resident, which needs no staging ring;
  * a state on the GPU costs its own bytes, so one recording tells how many there is room for, and fewer resident states
    are never faster;
  * a layout with all states resident waits for no copies, so it bounds the time of every layout with its micro-batch
    and recompute from below;
  * a larger group only hides copies: where none are waited for, no larger one is tried.

A test holds the outcome to the best of an exhaustive run over a small grid.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from lowmem.allocator import ROUNDING, SimulatedOutOfMemory
from lowmem.blocks import Decoder
from lowmem.simulate import Memory, Recording, StepCase, Target, record_step, under_cap
from lowmem.step import Schedule
from lowmem.units import MIB

SEGMENTS = (1, 2, 3, 4)  # blocks per segment that are tried
_NO_WAIT = 1e-3  # the share of a step from which waiting for copies is worth a larger group


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
        self.units = len(self._decoder.units)
        self.parameters = sum(parameter.numel() for parameter in self._decoder.model.parameters())
        self._recordings: dict[tuple[Schedule, int], Recording] = {}
        self._peaks: dict[tuple[Schedule, int], int] = {}

    def record(self, schedule: Schedule, resident_units: int) -> tuple[StepCase, Recording]:
        """The recording of a layout; blocks that are made alike are run once."""
        case = replace(self.base, schedule=schedule, resident_units=resident_units)
        layout = schedule, resident_units
        if layout not in self._recordings:
            self._recordings[layout] = record_step(self._decoder, case, self._target, self._known, alike=True)
        return case, self._recordings[layout]

    def allocated_bytes(self, schedule: Schedule, resident_units: int) -> int:
        """The peak of what is allocated, before the allocator has its say."""
        layout = schedule, resident_units
        if layout not in self._peaks:
            self._peaks[layout] = self.record(*layout)[1].tape.peak_bytes(ROUNDING)
        return self._peaks[layout]


@dataclass(frozen=True)
class Choices:
    """What may be chosen from, each in ascending order."""

    micro_batches: Sequence[int]
    groups: Sequence[int] | None  # None: powers of two
    segments: Sequence[int]
    recompute: Sequence[bool]
    resident_units: Sequence[int]

    def groups_of(self, batch: int, micro_batch: int) -> list[int]:
        count = batch // micro_batch
        if self.groups is not None:
            return [group for group in self.groups if count % group == 0]
        return [2**k for k in range(count.bit_length()) if count % 2**k == 0]

    def segments_of(self, recompute: bool) -> Sequence[int]:
        """Where nothing is recomputed, the length of a segment decides nothing."""
        return self.segments if recompute else self.segments[:1]

    def smallest(self, batch: int) -> list[Schedule]:
        """The schedules among which the one that takes the least memory is."""
        micro_batch, recompute = self.micro_batches[0], True in self.recompute
        group = self.groups_of(batch, micro_batch)[0]
        return [Schedule(micro_batch, group, segment, recompute) for segment in self.segments_of(recompute)]


def fastest(simulations: Simulations, choices: Choices, room: Room) -> Found | None:
    """The fastest layout that fits; None where none does."""
    best: Found | None = None
    batch = simulations.base.batch
    for unhindered_seconds, micro_batch, recompute in _in_order_of_promise(simulations, choices, room):
        if best is not None and unhindered_seconds >= best.recording.seconds:
            break
        groups = choices.groups_of(batch, micro_batch)
        too_large = False
        for group in groups:
            if too_large and group != groups[-1]:
                continue
            schedules = [Schedule(micro_batch, group, segment, recompute) for segment in choices.segments_of(recompute)]
            found = _fastest_of(simulations, choices, room, schedules)
            if found is None:
                too_large = True
                continue
            if best is None or found.recording.seconds < best.recording.seconds:
                best = found
            if found.recording.waiting_seconds <= _NO_WAIT * found.recording.seconds:
                break
    return best


def _in_order_of_promise(simulations: Simulations, choices: Choices, room: Room) -> list[tuple[float, int, bool]]:
    """(seconds if no copy were waited for, micro-batch, recompute) of what fits with as much streamed as may be."""
    promising = []
    for recompute in choices.recompute:
        for micro_batch in choices.micro_batches:
            groups = choices.groups_of(simulations.base.batch, micro_batch)
            schedules = [
                Schedule(micro_batch, group, segment, recompute)
                for group in sorted({groups[0], groups[-1]})
                for segment in choices.segments_of(recompute)
            ]
            ends = sorted({choices.resident_units[0], choices.resident_units[-1]})
            if not any(
                _within(simulations.allocated_bytes(schedule, resident), room.gpu)
                for schedule in schedules
                for resident in ends
            ):
                break
            _, recording = simulations.record(schedules[0], simulations.units)
            promising.append((recording.seconds, micro_batch, recompute))
    return sorted(promising)


def _fastest_of(simulations: Simulations, choices: Choices, room: Room, schedules: Sequence[Schedule]) -> Found | None:
    """The fastest layout with one of `schedules`, over the number of resident units; None where none fits."""
    waiting = []  # (seconds, place in schedules, how many kinds of residency are fewer)
    for index, schedule in enumerate(schedules):
        for fewer in reversed(range(len(choices.resident_units))):
            resident = choices.resident_units[fewer]
            if _within(_allocated_bytes(simulations, choices, schedule, resident), room.gpu):
                heappush(waiting, (simulations.record(schedule, resident)[1].seconds, index, fewer))
                break
    while waiting:
        _, index, fewer = heappop(waiting)
        case, recording = simulations.record(schedules[index], choices.resident_units[fewer])
        if not _within(recording.streamed_bytes, room.ram):
            continue  # with fewer resident states still more would lie in RAM
        try:
            return Found(case, recording, under_cap(recording.tape, room.gpu))
        except SimulatedOutOfMemory:
            if fewer:
                resident = choices.resident_units[fewer - 1]
                heappush(waiting, (simulations.record(schedules[index], resident)[1].seconds, index, fewer - 1))
    return None


def _within(size_bytes: int, limit_bytes: int | None) -> bool:
    return limit_bytes is None or size_bytes <= limit_bytes


def _allocated_bytes(simulations: Simulations, choices: Choices, schedule: Schedule, resident: int) -> int:
    """Without a recording for every number of resident units: their states add up."""
    least = choices.resident_units[0]
    if resident in (least, simulations.units):  # with everything resident there is no staging ring
        return simulations.allocated_bytes(schedule, resident)
    _, recording = simulations.record(schedule, least)
    return simulations.allocated_bytes(schedule, least) + sum(recording.state_bytes[least:resident])


def smallest_room(simulations: Simulations, choices: Choices, room: Room) -> Room:
    """Caps that would do where nothing fits into `room`: if the GPU's can be kept to, the smallest for RAM beside it;
    else the smallest for the GPU, with as much streamed as RAM has room for."""
    schedules = choices.smallest(simulations.base.batch)
    found = _fastest_of(simulations, choices, Room(room.gpu, None), schedules)
    if found is not None:
        return Room(room.gpu, found.recording.streamed_bytes)
    _, recording = simulations.record(schedules[0], simulations.units)
    streamed = {resident: sum(recording.state_bytes[resident:]) for resident in choices.resident_units}
    most = choices.resident_units[-1]
    fewest = next((resident for resident in choices.resident_units if _within(streamed[resident], room.ram)), most)
    # With everything resident there is no staging ring, which takes more than the states of a very small model.
    layouts = [(schedule, resident) for schedule in schedules for resident in sorted({fewest, most})]
    best = None
    for schedule, resident in sorted(layouts, key=lambda layout: simulations.allocated_bytes(*layout)):
        if best is not None and simulations.allocated_bytes(schedule, resident) >= best.gpu:
            break
        cap = smallest_cap_bytes(simulations, schedule, resident)
        if best is None or cap < best.gpu:
            best = Room(cap, streamed[resident])
    return best


def smallest_cap_bytes(simulations: Simulations, schedule: Schedule, resident: int) -> int:
    """The smallest cap, in whole MiB, under which the run completes: between what is allocated and what an uncapped run
    reserves."""
    _, recording = simulations.record(schedule, resident)
    low = simulations.allocated_bytes(schedule, resident) // MIB
    high = -(-under_cap(recording.tape).reserved_peak_bytes // MIB)
    while low < high:
        middle = (low + high) // 2
        try:
            under_cap(recording.tape, middle * MIB)
            high = middle
        except SimulatedOutOfMemory:
            low = middle + 1
    return high * MIB
