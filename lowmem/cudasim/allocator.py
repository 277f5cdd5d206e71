"""A model of PyTorch's CUDA caching allocator: which bytes a run of allocations and frees takes from the GPU.

A step that fits on paper can still run out of memory: the allocator rounds, splits and caches, and what it has taken
from the driver (*reserved*) is more than what tensors occupy (*allocated*). "Fits under a cap" therefore means that
the run completes here, block by block, under that cap. The rules, those of c10/cuda/CUDACachingAllocator.cpp with its
default settings:

- A request is rounded up to 512 B. Up to 1 MiB it belongs to the small pool, else to the large one. Pools never share
  memory, nor do streams.
- Best fit: the smallest free block that is large enough, the lowest address among equals. Its rest stays free if it is
  at least 512 B (small pool, expandable segments) or more than 1 MiB (large pool): a 25 MiB tensor occupies 26 MiB.
- On a miss a new segment is taken: 2 MiB for the small pool, 20 MiB for requests below 10 MiB, else the request rounded
  up to 2 MiB. A freed block merges with its free neighbours at once; its segment stays reserved.
- ``expandable_segments``: one segment per pool and stream, whose address range is endless and backed by pages of 2 MiB
  (small) or 20 MiB (large). A miss maps the missing pages behind the lowest free space that can grow enough. A block
  with room to grow counts as that much larger in the best fit.
- The cap is tested on a miss, against reserved + the segment that the *default* mode would take, whatever is really
  mapped. So expandable segments can be refused although only a page is missing, and, as 20 MiB pages are larger than
  that segment may be, can end less than 20 MiB **above** the cap: compare the reserved peak with the cap too.
- At the cap every wholly free segment (every wholly free page) goes back to the driver, as in ``empty_cache``, and the
  allocation is tried once more.

Left out: settings that device.py refuses (max_split_size, roundup_power2_divisions, large_segment_size,
garbage_collection_threshold), private pools of CUDA graphs, and a driver that has less memory than the cap. New
segments get rising addresses; the driver's own choice can differ, which matters only between free blocks of one size.

Cost: 1 to 2 microseconds per operation, a few hundred bytes per block.
"""

from bisect import bisect_left, insort

from lowmem.errors import LowmemError
from lowmem.units import MIB, format_size

ROUNDING = 512
SMALL_LARGEST = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_OF_ITS_OWN = 10 * MIB  # from here on a request gets a segment of its own size
SEGMENT_ROUNDING = 2 * MIB
LARGE_WASTE = 1 * MIB  # the large pool splits only a rest larger than this
ADDRESS_SPACE = LARGE_SEGMENT << 20  # of one expandable segment: more than any GPU has, a multiple of both page sizes

FREE, USED, UNMAPPED = range(3)


class SimulatedOutOfMemory(LowmemError):
    """The allocation failed under the cap, also after every cached segment was released."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int):
        super().__init__(
            f"out of GPU memory in the simulation: {format_size(requested_bytes)} more does not fit, with "
            f"{format_size(allocated_bytes)} allocated and {format_size(reserved_bytes)} reserved of "
            f"{format_size(limit_bytes)}"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes


class _Block:
    """A stretch of one segment; ``previous`` and ``next`` are its neighbours there."""

    __slots__ = ("address", "size", "arena", "state", "previous", "next")

    def __init__(self, address: int, size: int, arena: "_Arena", state: int):
        self.address = address
        self.size = size
        self.arena = arena
        self.state = state
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int, state: int) -> "_Block":
        """Keep the first ``size`` bytes; the rest becomes a new block behind, returned."""
        rest = _Block(self.address + size, self.size - size, self.arena, state)
        self.size = size
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        return rest

    def absorb_neighbours(self) -> None:
        """Merge with the neighbours of the same state (free or unmapped), taking them out of the arena's lists."""
        previous, following = self.previous, self.next
        if previous is not None and previous.state == self.state:
            self.arena.unlist(previous)
            self.address = previous.address
            self.size += previous.size
            self.previous = previous.previous
            if self.previous is not None:
                self.previous.next = self
        if following is not None and following.state == self.state:
            self.arena.unlist(following)
            self.size += following.size
            self.next = following.next
            if self.next is not None:
                self.next.previous = self

    def size_when_grown(self) -> int:
        """Bytes of this block together with unmapped space right behind it."""
        following = self.next
        return self.size + following.size if following is not None and following.state == UNMAPPED else self.size


class _Arena:
    """One pool on one stream: its free blocks in order of (size, address), its unmapped ones in order of address."""

    def __init__(self, small: bool, stream: int, expandable: bool):
        self.stream = stream
        self.page_bytes = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.largest_waste = 0 if small or expandable else LARGE_WASTE
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def enlist(self, block: _Block) -> None:
        if block.state == FREE:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def unlist(self, block: _Block) -> None:
        if block.state == FREE:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def find(self, size: int) -> _Block | None:
        """Take the best fit from the free list, or None."""
        free = self.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.unmapped:
            # Prefer the block that can grow least; the search ends at the first that is no better, as in the source.
            last = len(free) - 1
            while index < last and free[index + 1][2].size_when_grown() < free[index][2].size_when_grown():
                index += 1
        return free.pop(index)[2]

    def map_pages(self, block: _Block, size: int) -> int:
        """Back the first ``size`` bytes of an unmapped block by pages, merge it with free neighbours; bytes mapped."""
        mapped = _round_up(size, self.page_bytes)
        self.unlist(block)
        if mapped < block.size:
            self.enlist(block.split(mapped, UNMAPPED))
        block.state = FREE
        block.absorb_neighbours()
        self.enlist(block)
        return mapped

    def unmap_pages(self, block: _Block) -> int:
        """Give back the pages that lie wholly inside a free block; bytes unmapped."""
        begin = _round_up(block.address, self.page_bytes)
        end = (block.address + block.size) // self.page_bytes * self.page_bytes
        if begin >= end:
            return 0
        self.unlist(block)
        if begin > block.address:
            before, block = block, block.split(begin - block.address, FREE)
            self.enlist(before)
        if end < block.address + block.size:
            self.enlist(block.split(end - block.address, FREE))
        block.state = UNMAPPED
        block.absorb_neighbours()
        self.enlist(block)
        return end - begin

    def place_to_grow(self, size: int) -> _Block:
        """The lowest unmapped block, or the free one before it, from which unused space of ``size`` bytes runs on."""
        for _, block in self.unmapped:
            if block.previous is not None and block.previous.state == FREE:
                block = block.previous
            room, part = 0, block
            while room < size and part is not None and part.state != USED:
                room += part.size
                part = part.next
            if room >= size:
                return block
        raise AssertionError("the address space of an expandable segment has an end")


class CachingAllocator:
    """The allocator of one GPU, for any number of streams.

    ``limit_bytes`` caps the reserved bytes as ``torch.cuda.set_per_process_memory_fraction`` does.
    ``growth`` lists [operation index, bytes] for every segment taken or run of pages mapped, where the operations are
    the calls of ``allocate``, ``free`` and ``empty_cache``, counted from 0. All figures are bytes.
    """

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None):
        self.expandable_segments = expandable_segments
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.growth: list[list[int]] = []
        self._operations = 0
        self._handles = 0
        self._next_address = 0
        self._arenas: dict[tuple[bool, int], _Arena] = {}
        self._live: dict[int, _Block | None] = {}
        self._used_elsewhere: set[int] = set()  # handles given to record_stream
        self._awaiting_events: list[_Block] = []

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """A handle for ``size_bytes`` on ``stream``; zero bytes take nothing.

        Raises ValueError for a negative size and SimulatedOutOfMemory at the cap.
        """
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        self._operations += 1
        self._handles += 1
        if size_bytes == 0:
            self._live[self._handles] = None
            return self._handles
        size = _round_up(size_bytes, ROUNDING)
        arena = self._arenas.get((size <= SMALL_LARGEST, stream)) or self._new_arena(size <= SMALL_LARGEST, stream)
        block = arena.find(size) or self._grow(arena, size)
        if block.size - size > arena.largest_waste:
            arena.enlist(block.split(size, FREE))
        block.state = USED
        self._live[self._handles] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return self._handles

    def free(self, handle: int) -> None:
        """Give a block back (after ``record_stream``: at the next ``events_done``); ValueError if not allocated."""
        if handle not in self._live:
            raise ValueError(f"handle {handle} is not allocated")
        self._operations += 1
        block = self._live.pop(handle)
        if block is None:
            return
        self.allocated_bytes -= block.size
        if handle in self._used_elsewhere:
            self._used_elsewhere.remove(handle)
            self._awaiting_events.append(block)
        else:
            _make_free(block)

    def record_stream(self, handle: int, stream: int) -> None:
        """Note that ``stream`` uses the block too, as ``Tensor.record_stream``; ValueError if it is not allocated."""
        if handle not in self._live:
            raise ValueError(f"handle {handle} is not allocated")
        block = self._live[handle]
        if block is not None and stream != block.arena.stream:
            self._used_elsewhere.add(handle)

    def events_done(self) -> None:
        """The other streams have caught up: blocks freed under ``record_stream`` become usable."""
        for block in self._awaiting_events:
            _make_free(block)
        self._awaiting_events.clear()

    def empty_cache(self) -> None:
        """Wait for all streams, then return wholly free segments (pages) to the driver."""
        self._operations += 1
        self._release_cached()

    def reset_peaks(self) -> None:
        """Let both peaks start again from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_arena(self, small: bool, stream: int) -> _Arena:
        arena = self._arenas[small, stream] = _Arena(small, stream, self.expandable_segments)
        if self.expandable_segments:
            arena.enlist(self._new_segment(arena, ADDRESS_SPACE, UNMAPPED))
        return arena

    def _new_segment(self, arena: _Arena, size: int, state: int) -> _Block:
        self._next_address += size
        return _Block(self._next_address - size, size, arena, state)

    def _grow(self, arena: _Arena, size: int) -> _Block:
        """A block of at least ``size`` bytes from new memory, in no list; cached memory is released at the cap."""
        segment_bytes = _segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes:
            self._release_cached()
            if self.reserved_bytes + segment_bytes > self.limit_bytes:
                raise SimulatedOutOfMemory(size, self.allocated_bytes, self.reserved_bytes, self.limit_bytes)
        if not self.expandable_segments:
            self._count_growth(segment_bytes)
            return self._new_segment(arena, segment_bytes, FREE)
        block = arena.place_to_grow(size)
        if block.state == UNMAPPED:
            self._count_growth(arena.map_pages(block, min(block.size, size)))
        while block.size < size:
            hole = block.next  # unmapped: free blocks never adjoin
            self._count_growth(arena.map_pages(hole, min(hole.size, size - block.size)))
            block = hole  # which absorbed the free block before it
        arena.unlist(block)
        return block

    def _count_growth(self, size: int) -> None:
        self.growth.append([self._operations - 1, size])
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
        self.events_done()
        for arena in self._arenas.values():
            for _, _, block in arena.free[:]:
                if self.expandable_segments:
                    self.reserved_bytes -= arena.unmap_pages(block)
                elif block.previous is None and block.next is None:
                    arena.unlist(block)
                    self.reserved_bytes -= block.size


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _segment_bytes(size: int) -> int:
    """What a miss of a rounded request takes from the driver."""
    if size <= SMALL_LARGEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < SEGMENT_OF_ITS_OWN else _round_up(size, SEGMENT_ROUNDING)


def _make_free(block: _Block) -> None:
    block.state = FREE
    block.absorb_neighbours()
    block.arena.enlist(block)
