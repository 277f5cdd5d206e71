"""Models PyTorch's CUDA caching allocator: which bytes it takes from the GPU for a sequence of allocations and frees.

A step that fits on paper can still run out of memory. The allocator rounds, splits and caches, so the memory taken from
the driver (*reserved*) is more than the memory of tensors (*allocated*). Code fits under a memory cap if its sequence
completes in this model, block by block. docs/cuda-memory.md has the rules, which are those of
c10/cuda/CUDACachingAllocator.cpp. An operation costs 1 to 2 microseconds.
"""

from bisect import bisect_left, insort

from lowmem.errors import LowmemError
from lowmem.units import MIB, format_size

ROUNDING = 512
SMALL_LARGEST = 1 * MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_OF_ITS_OWN = 10 * MIB  # a request from this size on gets a segment of its size
SEGMENT_ROUNDING = 2 * MIB
LARGE_WASTE = 1 * MIB  # the large pool splits only a rest larger than this
ADDRESS_SPACE = LARGE_SEGMENT << 20  # of one expandable segment: more than any GPU has, a multiple of both page sizes

FREE, USED, UNMAPPED = range(3)


class SimulatedOutOfMemory(LowmemError):
    """Signals that an allocation fails under the memory cap, even after all cached segments were released."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int):
        super().__init__(
            f"out of GPU memory in the simulation: {format_size(requested_bytes)} more does not fit, with "
            f"{format_size(allocated_bytes)} allocated and {format_size(reserved_bytes)} reserved of "
            f"{format_size(limit_bytes)}"
        )


class Block:
    """Represents a range of addresses in one segment, with its neighbours `previous` and `next` there."""

    __slots__ = ("address", "size", "arena", "state", "previous", "next")

    def __init__(self, address: int, size: int, arena: "_Arena", state: int):
        self.address, self.size, self.arena, self.state = address, size, arena, state
        self.previous: Block | None = None
        self.next: Block | None = None

    def split(self, size: int, state: int) -> "Block":
        """Shortens this block to its first `size` bytes. Returns the rest as a new block in `state`."""
        rest = Block(self.address + size, self.size - size, self.arena, state)
        self.size = size
        _link(rest, self.next)
        _link(self, rest)
        return rest

    def absorb_neighbours(self) -> None:
        """Merges this block with neighbours of the same state, which leave the arena's lists."""
        previous, following = self.previous, self.next
        if previous is not None and previous.state == self.state:
            self.arena.unlist(previous)
            self.address = previous.address
            self.size += previous.size
            _link(previous.previous, self)
        if following is not None and following.state == self.state:
            self.arena.unlist(following)
            self.size += following.size
            _link(self, following.next)

    def make_free(self) -> None:
        self.state = FREE
        self.absorb_neighbours()
        self.arena.enlist(self)

    def size_when_grown(self) -> int:
        """Returns the size of this block and of the unmapped block behind it, if there is one."""
        following = self.next
        return self.size + following.size if following is not None and following.state == UNMAPPED else self.size


def _link(first: Block | None, second: Block | None) -> None:
    if first is not None:
        first.next = second
    if second is not None:
        second.previous = first


class _Arena:
    """Lists the blocks of one pool on one stream: free ones by (size, address), unmapped ones by address."""

    def __init__(self, small: bool, expandable: bool):
        self.page_bytes = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.largest_waste = 0 if small or expandable else LARGE_WASTE
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def enlist(self, block: Block) -> None:
        if block.state == FREE:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def unlist(self, block: Block) -> None:
        if block.state == FREE:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def find(self, size: int) -> Block | None:
        """Takes the best-fitting block from the list of free blocks, None if none is large enough."""
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

    def map_pages(self, block: Block, size: int) -> int:
        """Maps pages under the first `size` bytes of an unmapped block. Returns the number of bytes mapped."""
        mapped = _round_up(size, self.page_bytes)
        self.unlist(block)
        if mapped < block.size:
            self.enlist(block.split(mapped, UNMAPPED))
        block.make_free()
        return mapped

    def unmap_pages(self, block: Block) -> int:
        """Unmaps the pages that are wholly inside a free block. Returns the number of bytes unmapped."""
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

    def place_to_grow(self, size: int) -> Block:
        """Returns the first block, unmapped or free before an unmapped one, from whose start `size` bytes are
        unused."""
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
    """Models the caching allocator of one GPU, for any number of streams. All figures are bytes.

    `limit_bytes` caps reserved memory, like ``torch.cuda.set_per_process_memory_fraction``. `growth` lists [operation,
    bytes] each time memory is taken from the driver. An operation is a call of `allocate`, `free` or `empty_cache`,
    counted from 0.
    """

    def __init__(self, *, expandable_segments: bool = False, limit_bytes: int | None = None):
        self.expandable_segments = expandable_segments
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.growth: list[list[int]] = []
        self._operations = 0
        self._next_address = 0
        self._arenas: dict[tuple[bool, int], _Arena] = {}

    def allocate(self, size_bytes: int, stream: int = 0) -> Block | None:
        """Returns a block of `size_bytes` on `stream`, or None for zero bytes. Raises ValueError for a negative size,
        and SimulatedOutOfMemory if the block does not fit under `limit_bytes`."""
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        self._operations += 1
        if size_bytes == 0:
            return None
        size = _round_up(size_bytes, ROUNDING)
        arena = self._arenas.get((size <= SMALL_LARGEST, stream)) or self._new_arena(size <= SMALL_LARGEST, stream)
        block = arena.find(size) or self._grow(arena, size)
        if block.size - size > arena.largest_waste:
            arena.enlist(block.split(size, FREE))
        block.state = USED
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block | None) -> None:
        """Frees a block that `allocate` returned. Raises ValueError if the block is not in use."""
        self._operations += 1
        if block is None:
            return
        if block.state != USED:
            raise ValueError(f"the block at {block.address} is not allocated")
        self.allocated_bytes -= block.size
        block.make_free()

    def empty_cache(self) -> None:
        """Returns wholly free segments to the driver; with expandable segments, wholly free pages."""
        self._operations += 1
        self._release_cached()

    def reset_peaks(self) -> None:
        """Sets both peaks (allocated and reserved bytes) back to the current figures."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def _new_arena(self, small: bool, stream: int) -> _Arena:
        arena = self._arenas[small, stream] = _Arena(small, self.expandable_segments)
        if self.expandable_segments:
            arena.enlist(self._new_segment(arena, ADDRESS_SPACE, UNMAPPED))
        return arena

    def _new_segment(self, arena: _Arena, size: int, state: int) -> Block:
        self._next_address += size
        return Block(self._next_address - size, size, arena, state)

    def _grow(self, arena: _Arena, size: int) -> Block:
        """Returns a block of at least `size` bytes with newly reserved memory; the block is not in the arena's lists.
        At the cap, cached memory is released first. Raises SimulatedOutOfMemory if that is not enough."""
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
            hole = block.next  # unmapped, because free neighbours have merged
            self._count_growth(arena.map_pages(hole, min(hole.size, size - block.size)))
            block = hole  # it has absorbed the free block before it
        arena.unlist(block)
        return block

    def _count_growth(self, size: int) -> None:
        self.growth.append([self._operations - 1, size])
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
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
    """Returns the number of bytes taken from the driver for a request, whose `size` is already rounded."""
    if size <= SMALL_LARGEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < SEGMENT_OF_ITS_OWN else _round_up(size, SEGMENT_ROUNDING)
