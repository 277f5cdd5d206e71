"""Models PyTorch's CUDA caching allocator: which bytes it takes from the GPU for a sequence of allocations and frees.

Memory taken from the driver (*reserved*) is more than the memory of tensors (*allocated*). The rules
(docs/cuda-memory.md) are those of c10/cuda/CUDACachingAllocator.cpp.
"""

from bisect import bisect_left, insort

from lowmem.errors import LowmemError
from lowmem.units import MIB, format_size, round_up

ROUNDING = 512  # bytes; requests are rounded up to a multiple
SMALL_LARGEST = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_OF_ITS_OWN = 10 * MIB  # a request from this size on gets a segment of its size
SEGMENT_ROUNDING = 2 * MIB
LARGE_WASTE = 1 * MIB  # the large pool splits a range only if more than this is left
ADDRESS_SPACE = LARGE_SEGMENT << 20  # of one expandable segment: more than any GPU has, a multiple of both page sizes


class SimulatedOutOfMemory(LowmemError):
    """Signals that an allocation fails under the memory cap, even after all cached segments were released."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int):
        super().__init__(
            f"out of GPU memory in the simulation: {format_size(requested_bytes)} more does not fit, with "
            f"{format_size(allocated_bytes)} allocated and {format_size(reserved_bytes)} reserved of "
            f"{format_size(limit_bytes)}"
        )


class _Arena:
    """Models the memory of one pool (for small or large requests) on one CUDA stream. An address range is used, free or
    unmapped (without memory). Each kind has a dict {address: bytes}."""

    def __init__(self, small: bool, expandable: bool):
        self.page_bytes = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.largest_waste = 0 if small or expandable else LARGE_WASTE
        self.used: dict[int, int] = {}
        self.free: dict[int, int] = {}  # neighbours are merged
        self.unmapped: dict[int, int] = {}  # of an expandable segment, without pages; neighbours are merged
        self.segments: dict[int, int] = {}  # {address: bytes} of segments with a fixed size
        self.by_size: list[tuple[int, int]] = []  # (bytes, address) of free ranges, sorted
        self._starts: dict[int, int] = {}  # {end: address} of free ranges

    def best_fit(self, size: int) -> int | None:
        """Returns the index in `by_size` (sorted free ranges) of the range to take `size` bytes from; None if all are
        too small."""
        by_size, unmapped = self.by_size, self.unmapped
        place = bisect_left(by_size, (size,))
        if place == len(by_size):
            return None
        # A range counts as larger by the unmapped pages behind it. The search ends if the next range is not smaller, as
        # in the source.
        while place + 1 < len(by_size):
            own, address = by_size[place]
            more = unmapped.get(address + own)
            if more is None:  # the next one is as large, or larger
                break
            other, address = by_size[place + 1]
            if other + unmapped.get(address + other, 0) >= own + more:
                break
            place += 1
        return place

    def use(self, place: int, size: int) -> int:
        """Takes `size` bytes from the free range with index `place` in `by_size`, and returns their address. Takes the
        whole range if the rest would be too small to split off."""
        available, address = self.by_size.pop(place)
        del self.free[address]
        rest, end = available - size, address + available
        if rest > self.largest_waste:
            self.free[address + size] = rest
            self._starts[end] = address + size
            insort(self.by_size, (rest, address + size))
        else:  # takes the whole range
            del self._starts[end]
            size = available
        self.used[address] = size
        return address

    def make_free(self, address: int, size: int) -> None:
        free, by_size, end = self.free, self.by_size, address + size
        # merges the range with its free neighbours
        following = free.pop(end, None)
        if following is not None:
            del by_size[bisect_left(by_size, (following, end))]
            end += following
        before = self._starts.pop(address, None)
        if before is not None:
            del by_size[bisect_left(by_size, (address - before, before))]
            address = before
        size = end - address
        free[address] = size
        self._starts[end] = address
        insort(by_size, (size, address))

    def _remove(self, address: int) -> None:
        size = self.free.pop(address)
        del self._starts[address + size]
        del self.by_size[bisect_left(self.by_size, (size, address))]

    def map_pages(self, address: int, size: int) -> int:
        """Maps free pages for `size` bytes at the start of the unmapped range at `address`. Returns their bytes."""
        mapped, available = round_up(size, self.page_bytes), self.unmapped.pop(address)
        if mapped < available:
            self.unmapped[address + mapped] = available - mapped
        self.make_free(address, mapped)
        return mapped

    def unmap_pages(self, address: int) -> int:
        """Unmaps the whole pages in the free range at `address`, and returns the bytes unmapped."""
        last = address + self.free[address]
        begin, end = round_up(address, self.page_bytes), last // self.page_bytes * self.page_bytes
        if begin >= end:
            return 0
        self._remove(address)
        for start, stop in ((address, begin), (end, last)):
            if start < stop:
                self.make_free(start, stop - start)
        start = next((each for each, size in self.unmapped.items() if each + size == begin), begin)
        self.unmapped[start] = end + self.unmapped.pop(end, 0) - start
        return end - begin

    def place_to_grow(self, size: int) -> int:
        """Returns the lowest address from which `size` bytes are free or unmapped, some of them unmapped. An expandable
        segment grows there."""
        for address in sorted(self.unmapped):
            # An unmapped range begins here, or a free one directly before it.
            start = end = self._starts.get(address, address)
            while end - start < size and (part := self.free.get(end) or self.unmapped.get(end)):
                end += part
            if end - start >= size:
                return start
        raise AssertionError("the address space of an expandable segment has an end")

    def release_segment(self, address: int) -> int:
        size = self.free[address]
        # a part of it is in use
        if self.segments.get(address) != size:
            return 0
        self._remove(address)
        return self.segments.pop(address)


Block = tuple[_Arena, int]  # an arena, and the address of a range in use


class CachingAllocator:
    """Models PyTorch's caching allocator of one GPU, for any number of streams. `limit_bytes` caps reserved memory,
    like ``torch.cuda.set_per_process_memory_fraction``; None means no cap."""

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None):
        self.expandable_segments = expandable_segments
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.wanted_peak_bytes = 0  # largest sum of reserved bytes and a request; caps from there on change nothing
        # [operation, bytes] each time memory is taken from the driver. Operations are calls of `allocate`, `free` and
        # `empty_cache`, counted from 0.
        self.growth: list[list[int]] = []
        self._operations = 0
        self._next_address = 0
        self._arenas: dict[tuple[bool, int], _Arena] = {}

    def allocate(self, size_bytes: int, stream: int = 0) -> Block | None:
        """Returns a block of `size_bytes` on `stream`, or None for zero bytes. Raises ValueError for a negative size,
        and SimulatedOutOfMemory if the block does not fit."""
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        self._operations += 1
        if size_bytes == 0:
            return None
        size = round_up(size_bytes, ROUNDING)
        arena = self._arenas.get((size <= SMALL_LARGEST, stream)) or self._new_arena(size <= SMALL_LARGEST, stream)
        place = arena.best_fit(size)
        address = arena.use(self._grow(arena, size) if place is None else place, size)
        self.allocated_bytes += arena.used[address]
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return arena, address

    def free(self, block: Block | None) -> None:
        """Frees a block that `allocate` returned; None frees nothing. Raises ValueError if the block is not in use."""
        self._operations += 1
        if block is None:
            return
        arena, address = block
        size = arena.used.pop(address, None)
        if size is None:
            raise ValueError(f"the block at {address} is not allocated")
        self.allocated_bytes -= size
        arena.make_free(address, size)

    def empty_cache(self) -> None:
        """Returns wholly free segments to the driver, or wholly free pages if segments are expandable."""
        self._operations += 1
        self._release_cached()

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_arena(self, small: bool, stream: int) -> _Arena:
        arena = self._arenas[small, stream] = _Arena(small, self.expandable_segments)
        if self.expandable_segments:
            arena.unmapped[self._new_addresses(ADDRESS_SPACE)] = ADDRESS_SPACE
        return arena

    def _new_addresses(self, size: int) -> int:
        self._next_address += size + LARGE_SEGMENT  # a gap keeps the ranges of two segments from merging
        return self._next_address - size

    def _grow(self, arena: _Arena, size: int) -> int:
        """Takes memory from the driver, so that `arena` has a free range of at least `size` bytes. Returns the range's
        index in `arena.by_size` (sorted free ranges). Raises SimulatedOutOfMemory if the cap does not allow it."""
        # The cap is tested for a segment of the usual size, but an expandable one maps whole pages: up to 18 MiB more.
        segment_bytes = _segment_bytes(size)
        self.wanted_peak_bytes = max(self.wanted_peak_bytes, self.reserved_bytes + segment_bytes)
        if self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes:
            self._release_cached()
            if self.reserved_bytes + segment_bytes > self.limit_bytes:
                raise SimulatedOutOfMemory(size, self.allocated_bytes, self.reserved_bytes, self.limit_bytes)
        if self.expandable_segments:
            address = arena.place_to_grow(size)
            while (available := arena.free.get(address, 0)) < size:
                hole = address + available  # unmapped, because free neighbours have merged
                self._count_growth(arena.map_pages(hole, min(arena.unmapped[hole], size - available)))
        else:
            address = self._new_addresses(segment_bytes)
            arena.segments[address] = segment_bytes
            self._count_growth(segment_bytes)
            arena.make_free(address, segment_bytes)
        return bisect_left(arena.by_size, (arena.free[address], address))

    def _count_growth(self, size: int) -> None:
        self.growth.append([self._operations - 1, size])
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
        for arena in self._arenas.values():
            for _, address in arena.by_size[:]:
                release = arena.unmap_pages if self.expandable_segments else arena.release_segment
                self.reserved_bytes -= release(address)


def _segment_bytes(size: int) -> int:
    if size <= SMALL_LARGEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < SEGMENT_OF_ITS_OWN else round_up(size, SEGMENT_ROUNDING)
