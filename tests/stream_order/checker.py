"""Checks that streams and events order every two accesses to the same memory that have to be ordered.

Operation A happens before B (Lamport 1978) if one stream has both in this order, if B's stream has waited for an event
recorded after A, if the host has waited for A before it launched B, or by a chain of these. Two accesses to the same
bytes are a race if one writes and neither happens before the other. Vector clocks (Mattern 1989; Fidge 1988) find this:
for every other stream, a stream counts how many operations are complete before its own next one.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = 0  # the number of the host among the streams


class Access(NamedTuple):
    """An access to the bytes `start` to `stop` (excluded) of allocation `memory`."""

    memory: int
    start: int
    stop: int
    write: bool


class Work(NamedTuple):
    """A kernel or a copy on a stream, or a computation of the host; `name`: of the operator."""

    stream: int
    name: str
    accesses: tuple[Access, ...]


class Record(NamedTuple):
    """Event number `event` is recorded on `stream`; each record has a separate number."""

    event: int
    stream: int


class Wait(NamedTuple):
    """Makes later work of `stream` come after `event`. `reading`: the host waits because it reads a number."""

    stream: int
    event: int
    reading: bool = False


class Allocate(NamedTuple):
    """`memory` comes from the pool of `stream`."""

    memory: int
    stream: int


class Free(NamedTuple):
    """`memory` may be handed out again by the pool it came from."""

    memory: int


@dataclass
class Trace:
    """The work that a program gave to streams, in the host's order; names by number, for reports."""

    operations: list[Work | Record | Wait | Allocate | Free] = field(default_factory=list)
    streams: list[str] = field(default_factory=lambda: ["host"])
    memories: list[str] = field(default_factory=list)


class _Past(NamedTuple):
    """An access by operation `number` of `stream`."""

    start: int
    stop: int
    write: bool
    stream: int
    number: int
    name: str


Clock = dict[int, int]  # by stream; 0 where there is no entry
_Latest = dict[int, _Past]  # the latest access by each stream


@dataclass
class _Memory:
    pool: int | None = None  # None: memory that no pool has handed out, the host's or older than the trace
    inherited: _Latest = field(default_factory=dict)  # from all that may have lain here before
    past: list[_Past] = field(default_factory=list)


def races(trace: Trace, reading_waits: bool) -> Counter[str]:
    """Returns every race as a sentence, and how often it was found. Without `reading_waits`, `.item()` orders nothing:
    a later change may remove such a read."""
    return _Checker(trace, reading_waits).found


class _Checker:
    def __init__(self, trace: Trace, reading_waits: bool):
        self.found: Counter[str] = Counter()
        self._trace = trace
        self._clocks: list[Clock] = [{} for _ in trace.streams]
        self._events: dict[int, Clock] = {}
        self._memories: dict[int, _Memory] = {}
        self._freed: dict[int, _Latest] = {}  # by pool
        for operation in trace.operations:
            match operation:
                case Work():
                    self._work(operation)
                case Record(event, stream):
                    self._events[event] = dict(self._launched(stream))
                case Wait(stream, event, reading):
                    if reading_waits or not reading:
                        _join(self._clocks[stream], self._events[event])
                case Allocate(memory, stream):
                    self._allocate(memory, stream)
                case Free(memory):
                    self._free(memory)

    def _launched(self, stream: int) -> Clock:
        """Returns the clock of `stream`, for work that the host gives to it now."""
        clock = self._clocks[stream]
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def _work(self, work: Work) -> None:
        clock = self._launched(work.stream)
        clock[work.stream] = number = clock.get(work.stream, 0) + 1
        for access in work.accesses:
            memory = self._memories.setdefault(access.memory, _Memory())
            now = _Past(access.start, access.stop, access.write, work.stream, number, work.name)
            for before in memory.inherited.values():
                if not _comes_before(before, clock):
                    self._report("reused while in use", before, now, access.memory)
            kept = []
            for before in memory.past:
                ordered = _comes_before(before, clock)
                overlap = before.start < now.stop and now.start < before.stop
                if overlap and (before.write or now.write) and not ordered:
                    self._report("unordered", before, now, access.memory)
                # An access is forgotten where whatever would race with it would also race with the new one.
                covered = now.start <= before.start and before.stop <= now.stop
                if not (ordered and covered and (now.write or not before.write)):
                    kept.append(before)
            memory.past = [*kept, now]

    def _allocate(self, memory: int, stream: int) -> None:
        # An allocation that finds no room returns freed blocks of every pool to the driver. With expandable segments it
        # waits only for the stream of each block's pool.
        for pool, freed in self._freed.items():
            clock = self._launched(pool)
            for before in freed.values():
                if not _comes_before(before, clock):
                    place = self._trace.memories[memory]
                    self.found[
                        f"freed while in use: {self._said(before)} may be under way at an allocation of {place}"
                    ] += 1
        # A pool hands memory out as soon as the host has freed it, while other streams may still use it. Any freed
        # memory of the pool may be taken, since the block depends on sizes and on the past.
        self._memories[memory] = _Memory(stream, dict(self._freed.get(stream, {})))

    def _free(self, number: int) -> None:
        memory = self._memories.pop(number, None)
        if memory is None or memory.pool is None:
            return
        freed = self._freed.setdefault(memory.pool, {})
        for before in memory.past:  # what it inherited is there already
            if before.stream not in freed or freed[before.stream].number < before.number:
                freed[before.stream] = before

    def _report(self, kind: str, before: _Past, now: _Past, memory: int) -> None:
        place = self._trace.memories[memory]
        self.found[f"{kind}: {self._said(before)} and {self._said(now)}, memory of {place}"] += 1

    def _said(self, past: _Past) -> str:
        return f"{'write' if past.write else 'read'} by {past.name} on {self._trace.streams[past.stream]}"


def _comes_before(past: _Past, clock: Clock) -> bool:
    return clock.get(past.stream, 0) >= past.number


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
