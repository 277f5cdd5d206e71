"""Checks that streams and events order every two accesses to the same memory that have to be ordered.

A GPU runs what one stream is given in order, and what several streams are given in any order that events allow. An
order that nothing enforces is a mistake even if it is kept nearly always: a copy that is late once in a million steps
leaves wrong weights. Further runs of a program do not show that it is right. This module proves it for the operations
of one recorded run, without a GPU.

**Happens before** (Lamport, 1978, "Time, clocks, and the ordering of events in a distributed system"). Operation A
comes before B in three cases, and by any chain of them: both are in one stream, and A was given first; the stream of B
has waited for an event recorded after A; the host has waited for A before it launched B. Two accesses to the same bytes
are a **race** if one writes and neither comes before the other.

**Vector clocks** (Mattern, 1989; Fidge, 1988) decide that without a search. Every stream counts its operations. For
every other stream it stores how many of that stream's operations are complete before its own next one. Recording an
event copies the clock of its stream; waiting for the event takes, number by number, the larger of both. Operation n of
stream s comes before whatever is given to a stream whose clock has n or more at s. The host is one more "stream": what
it launches comes after all it has waited for.

PyTorch's own checker for CUDA (torch/cuda/_sanitizer.py, TORCH_CUDA_SANITIZER=1) does the same on a GPU, by whole
tensors. Three things are stricter here:

* **Bytes.** Accesses are ranges of bytes of an allocation, so views of one tensor are distinguished.
* **Reuse.** PyTorch's caching allocator has a pool per stream, and hands memory out again as soon as it is freed on the
  host, while other streams may still be at work on it. The block of a later allocation depends on sizes and on the
  past. So here an allocation may get any memory that was freed into its pool. Its uses must come after every access to
  that memory. (A race may need other sizes to happen. If none is found, none can happen.)
* **Unmapping.** An allocation that finds no room returns freed blocks of every pool to the driver. With expandable
  segments it waits only for the stream of each block's pool. So at every allocation, accesses to freed memory must come
  before the next work on that pool's stream.

Not seen: memory that a kernel touches beyond its operator's schema, and temporaries inside operators, which are
allocated and freed on one stream.

**Reading a number** (`.item()`) copies it to the host and waits for the stream. Some orders hold only because the host
reads a loss or a norm at the right moment, which a later change may well remove. `reading_waits=False` says what holds
without that.
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
    """A kernel or a copy on a stream, or what the host itself computes; `name`: of the operator."""

    stream: int
    name: str
    accesses: tuple[Access, ...]


class Record(NamedTuple):
    """Event number `event` is recorded on `stream`; each record has a number of its own."""

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
    """An access that was made: by operation `number` of `stream`."""

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
    """Returns every race as a sentence, and how often it was found; empty where everything is ordered."""
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
        """Returns the clock of `stream`, for something that the host gives to it now."""
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
        for pool, freed in self._freed.items():
            clock = self._launched(pool)
            for before in freed.values():
                if not _comes_before(before, clock):
                    place = self._trace.memories[memory]
                    self.found[
                        f"freed while in use: {self._said(before)} may be under way at an allocation of {place}"
                    ] += 1
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
    """Takes the larger of both, number by number."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
