"""What a piece of code allocates and frees, as a `Tape`, and what a GPU makes of that.

`under_cap` gives the tape to the model of CUDA's allocator (allocator.py): the code fits if, and only if, that run
completes. `named_at_peak` and `most_bytes` count the bytes that were asked for, without an allocator.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from lowmem import device
from lowmem.cudasim.allocator import CachingAllocator

FREED = -1  # in the place of a size
Operation = tuple[int, int, str]  # storage, bytes or FREED, name


@dataclass(frozen=True)
class Chunk:
    """Operations on storages numbered from `base`; -1 - n is the n-th storage from `earlier_base`, which belongs to
    another region (to a forward, for a backward). `seconds`: the GPU's clock when the chunk began."""

    operations: list[Operation]
    base: int
    earlier_base: int
    seconds: float


@dataclass
class Tape:
    """A record in chunks; iterating gives (storage, bytes or FREED, name), each storage a number of its own."""

    chunks: list[Chunk] = field(default_factory=list)

    def __iter__(self) -> Iterator[Operation]:
        for chunk in self.chunks:
            base, earlier = chunk.base, chunk.earlier_base
            for storage, size, name in chunk.operations:
                yield (base + storage if storage >= 0 else earlier - 1 - storage), size, name

    def peak_bytes(self, rounding: int = 1) -> int:
        """The most that lived at once, every size rounded up to a multiple of `rounding`. Operations that stand on the
        tape many times are looked at once."""
        sizes: dict[int, int] = {}  # of what is alive between two chunks
        summaries: dict[tuple[int, bool], tuple[int, int, list]] = {}
        now = peak = 0
        for chunk in self.chunks:
            key = id(chunk.operations), bool(chunk.base)
            if not chunk.base or key not in summaries:
                summaries[key] = _summary(chunk, sizes, rounding)
            change, highest, survivors, spent = summaries[key]
            peak = max(peak, now + highest)
            now += change
            for storage, size in survivors:
                sizes[chunk.base + storage] = size
            for storage in spent:
                del sizes[chunk.base + storage if storage >= 0 else chunk.earlier_base - 1 - storage]
        return peak


def _summary(chunk: Chunk, sizes: dict[int, int], rounding: int) -> tuple[int, int, list[tuple[int, int]], list[int]]:
    """Of a chunk: bytes at its end and at its highest point, above those at its beginning; which storages, with their
    sizes, it leaves behind; and which of those that were there it frees."""
    own: dict[int, int] = {}
    spent = []
    now = highest = 0
    for storage, size, _ in chunk.operations:
        if size != FREED:
            own[storage] = -(-size // rounding) * rounding
            now += own[storage]
            highest = max(highest, now)
        elif storage in own:
            now -= own.pop(storage)
        else:
            spent.append(storage)
            now -= sizes[chunk.base + storage if storage >= 0 else chunk.earlier_base - 1 - storage]
    return now, highest, list(own.items()), spent


@dataclass(frozen=True)
class Memory:
    """What a tape takes of a GPU. `at_peak`: bytes by name at the peak of what is allocated, which they add up to;
    `timeline`: (seconds, allocated, reserved), the most of every stretch of the tape."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    at_peak: dict[str, int]
    timeline: list[tuple[float, int, int]]


def under_cap(tape: Tape, limit_bytes: int | None = None, *, expandable_segments: bool | None = None) -> Memory:
    """What `tape` takes of a GPU whose allocator is capped; SimulatedOutOfMemory where it does not complete.
    `expandable_segments`: None for what the environment says."""
    grow = device.expandable_segments() if expandable_segments is None else expandable_segments
    allocator = CachingAllocator(expandable_segments=grow, limit_bytes=limit_bytes)
    allocate, free = allocator.allocate, allocator.free
    handles: dict[int, int] = {}
    peak = reserved_peak = peak_chunk = 0
    timeline = []
    for index, chunk in enumerate(tape.chunks):
        allocator.reset_peaks()
        base, before_base = chunk.base, chunk.earlier_base - 1
        for storage, size, _ in chunk.operations:
            number = base + storage if storage >= 0 else before_base - storage
            if size == FREED:
                free(handles.pop(number))
            else:
                handles[number] = allocate(size)
        if allocator.peak_allocated_bytes > peak:
            peak, peak_chunk = allocator.peak_allocated_bytes, index
        reserved_peak = max(reserved_peak, allocator.peak_reserved_bytes)
        timeline.append((chunk.seconds, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
    return Memory(peak, reserved_peak, _by_name(tape, peak_chunk, peak), timeline)


def named_at_peak(tape: Tape) -> dict[str, int]:
    """Bytes by name, largest first, at the tape's peak; sizes as asked for."""
    return _by_name(tape, len(tape.chunks), tape.peak_bytes())


def most_bytes(tape: Tape, name: str, below_bytes: float = math.inf) -> int:
    """The most that storages of this name, each of fewer than `below_bytes`, ever take together; sizes as asked for."""
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


def _by_name(tape: Tape, peak_chunk: int, peak_bytes: int) -> dict[str, int]:
    """Bytes by name, largest first, at the tape's peak; what blocks are larger than tensors is "rounding"."""
    live: dict[int, tuple[int, str]] = {}
    by_name: dict[str, int] = {}
    now = most = 0
    for storage, size, name in Tape(tape.chunks[: peak_chunk + 1]):
        if size == FREED:
            size, name = live.pop(storage)
            size = -size
        else:
            live[storage] = (size, name)
        by_name[name] = by_name.get(name, 0) + size
        now += size
        if now > most:
            most, at_peak = now, dict(by_name)
    at_peak["rounding"] = peak_bytes - most
    return {name: size for name, size in sorted(at_peak.items(), key=lambda item: -item[1]) if size}
