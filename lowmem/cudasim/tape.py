"""Lists what code allocates and frees, in order (a `Tape`), and computes how much GPU memory this takes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lowmem.cudasim.allocator import Block, CachingAllocator
from lowmem.device import expandable_segments as environment_expands

FREED = -1  # stands in the place of a size
Operation = tuple[int, int, str]  # (storage, bytes or FREED, name)


@dataclass(frozen=True)
class Chunk:
    """Holds a part of a tape (a list of allocations and frees). All replays of a recorded region share one list
    `operations`. It numbers storages from 0, and `number` converts these numbers to those of the tape."""

    operations: list[Operation]
    base: int  # the number of storage 0
    earlier_base: int  # the number of storage -1, which an earlier region allocated
    seconds: float  # the GPU's clock at the start

    def number(self, storage: int) -> int:
        # -1 - n is a storage that was allocated earlier: `earlier_base` + n
        return self.base + storage if storage >= 0 else self.earlier_base - 1 - storage


@dataclass
class Tape:
    """Lists allocations and frees of GPU memory in order. Iterating yields (storage, bytes, name) for an allocation,
    and (storage, FREED, "") for a free. `storage` is a unique number."""

    chunks: list[Chunk] = field(default_factory=list)

    def __iter__(self) -> Iterator[Operation]:
        for chunk in self.chunks:
            for storage, size, name in chunk.operations:
                yield chunk.number(storage), size, name

    def peak_bytes(self, rounding: int = 1, summaries: dict | None = None) -> int:
        """Returns the most bytes that are allocated at once, each size rounded up to a multiple of `rounding`.
        `summaries`: None, or a dict in which calls with equal `rounding` cache totals of replayed parts of tapes."""
        sizes: dict[int, int] = {}  # of the storages that are alive between two chunks
        summaries = {} if summaries is None else summaries
        now = peak = 0
        for chunk in self.chunks:
            if not chunk.base:  # not a replay
                summary = _summary(chunk, sizes, rounding)
            elif (summary := summaries.get(id(chunk.operations))) is None:
                summary = summaries[id(chunk.operations)] = (*_summary(chunk, sizes, rounding), chunk.operations)
            change, highest, left, ended, *_ = summary  # *_: the list of operations, kept so that no other gets its id
            peak = max(peak, now + highest)
            now += change
            for storage, size in left:
                sizes[chunk.base + storage] = size
            for storage in ended:
                del sizes[chunk.number(storage)]
        return peak


def _summary(chunk: Chunk, sizes: dict[int, int], rounding: int) -> tuple[int, int, list[tuple[int, int]], list[int]]:
    """Sums up `chunk`, a part of a tape (list of allocations). Returns (bytes at its end, bytes at its peak, [(storage,
    bytes)] still allocated, storages of earlier chunks that it frees). The first two are relative to the chunk's start.
    Sizes are rounded up to multiples of `rounding`. `sizes`: {number: bytes} of earlier storages."""
    own: dict[int, int] = {}
    ended = []
    now = highest = 0
    for storage, size, _ in chunk.operations:
        if size != FREED:
            own[storage] = -(-size // rounding) * rounding
            now += own[storage]
            highest = max(highest, now)
        elif storage in own:
            now -= own.pop(storage)
        else:
            ended.append(storage)
            now -= sizes[chunk.number(storage)]
    return now, highest, list(own.items()), ended


@dataclass(frozen=True)
class Memory:
    """Holds how much GPU memory a tape (a list of allocations and frees, cut into chunks) takes in the model of the
    caching allocator."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    wanted_peak_bytes: int  # any cap of at least this many bytes gives the same replay; see CachingAllocator
    timeline: list[tuple[float, int, int]]  # per chunk: (start in seconds, most bytes allocated, most bytes reserved)
    to_peak: Tape = field(repr=False)  # the replayed tape to the end of the chunk with the peak of allocated bytes

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Returns {name of storages: bytes} at the peak of allocated bytes. The entry "rounding" is the peak minus the
        bytes of all storages, so the values add up to the peak."""
        return named_at_peak(self.to_peak, self.allocated_peak_bytes)


def under_cap(
    tape: Tape, limit_bytes: int | None = None, *, expandable_segments: bool | None = None,
    streams: Mapping[str, int] | None = None,
) -> Memory:  # fmt: skip
    """Replays `tape`, a list of allocations and frees, in a model of the caching allocator. Returns the memory taken.
    Raises SimulatedOutOfMemory if the replay fails under `limit_bytes` (None: no cap). `expandable_segments`: the
    allocator's setting; None: that of training. `streams`: {name of storages: CUDA stream}; others are on stream 0."""
    expands = environment_expands() if expandable_segments is None else expandable_segments
    allocator = CachingAllocator(expandable_segments=expands, limit_bytes=limit_bytes)
    allocate, free = allocator.allocate, allocator.free
    handles: dict[int, Block | None] = {}
    timeline = []
    for chunk in tape.chunks:
        allocator.reset_peaks()
        base, before_base = chunk.base, chunk.earlier_base - 1
        for storage, size, name in chunk.operations:
            number = base + storage if storage >= 0 else before_base - storage  # chunk.number, but this loop is hot
            if size == FREED:
                free(handles.pop(number))
            elif streams:
                handles[number] = allocate(size, streams.get(name, 0))
            else:
                handles[number] = allocate(size)
        timeline.append((chunk.seconds, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    peaks = [allocated for _, allocated, _ in timeline] or [0]
    highest = max(peaks)
    to_peak = Tape(tape.chunks[: peaks.index(highest) + 1])
    reserved = max((reserved for *_, reserved in timeline), default=0)
    return Memory(highest, reserved, allocator.wanted_peak_bytes, timeline, to_peak)


def named_at_peak(tape: Tape, peak_bytes: int | None = None) -> dict[str, int]:
    """Returns {name: bytes}, largest first, at the moment when storages take the most bytes. `peak_bytes`: the peak in
    a model of the allocator, or None. The entry "rounding" is `peak_bytes` minus the bytes of all storages."""
    live: dict[int, tuple[int, str]] = {}
    by_name: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    now = most = 0
    for storage, size, name in tape:
        if size == FREED:
            size, name = live.pop(storage)
            size = -size
        else:
            live[storage] = (size, name)
        by_name[name] = by_name.get(name, 0) + size
        now += size
        if now > most:
            most, at_peak = now, dict(by_name)
    at_peak["rounding"] = 0 if peak_bytes is None else peak_bytes - most
    return {name: size for name, size in sorted(at_peak.items(), key=lambda item: -item[1]) if size}


def most_bytes(tape: Tape, name: str, below_bytes: float = math.inf) -> int:
    """Returns the most bytes that storages with this `name` take at once. Counts only storages of less than
    `below_bytes`."""
    live: dict[int, int] = {}
    now = most = 0
    for storage, size, called in tape:
        if size == FREED:
            now -= live.pop(storage, 0)
        elif called == name and size < below_bytes:
            live[storage] = size
            now += size
            most = max(most, now)
    return most
