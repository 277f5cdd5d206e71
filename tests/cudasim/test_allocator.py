"""The allocator model against recordings of real GPUs, sequences worked out by hand from the source, and invariants.

In the sequences a number in a comment is in MiB, and ``a 0..4`` is block a at these addresses of its segment.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.allocator import main
from lowmem.cudasim.allocator import CachingAllocator, SimulatedOutOfMemory
from lowmem.units import MIB

ROOT = Path(__file__).resolve().parents[2]
TAPES_FOLDER = ROOT.parent / "shared" / "allocator_tapes"
TAPES = sorted(TAPES_FOLDER.glob("*.jsonl"))


def mib(*figures: int) -> list[float]:
    return [figure / MIB for figure in figures]


# --- recordings ---


@pytest.mark.parametrize("tape", TAPES or ["none"], ids=lambda tape: getattr(tape, "stem", tape))
def test_a_recording_of_a_real_run_is_reproduced_exactly(tape, capsys):
    if not TAPES:
        pytest.skip(f"no recordings at {TAPES_FOLDER}")
    operations = [json.loads(line) for line in tape.read_text().splitlines()]
    truth = json.loads(tape.with_suffix(".truth.json").read_text())
    allocator, handles = CachingAllocator(), {}
    for index, operation in enumerate(operations):
        if index == truth["prologue_ops"]:
            assert allocator.reserved_bytes == truth["reserved_after_prologue"]
            assert allocator.allocated_bytes == truth["allocated_after_prologue"]
            allocator.reset_peaks()
        match operation:
            case ["a", name, size, stream]:
                handles[name] = allocator.allocate(size, stream)
            case ["f", name]:
                allocator.free(handles.pop(name))
            case ["e"]:
                allocator.empty_cache()
    growth = [entry for entry in allocator.growth if entry[0] >= truth["prologue_ops"]]
    assert growth == truth["growth"]
    assert allocator.peak_reserved_bytes == truth["peak_reserved"]
    assert allocator.reserved_bytes == truth["final_reserved"]
    assert allocator.allocated_bytes == truth["final_allocated"]
    assert allocator.peak_allocated_bytes == truth["peak_allocated_of_the_reference_model"]
    assert len(handles) == truth["final_live"]

    # The command reads the tape alone, so its growth has the prologue's too. A prologue only ever takes memory: it ends
    # with the most it had reserved, and the peak is the same with it and without.
    assert main([str(tape)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["growth"] == allocator.growth
    assert printed["peak_reserved"] == truth["peak_reserved"]
    assert printed["final_reserved"] == truth["final_reserved"]
    assert printed["final_allocated"] == truth["final_allocated"]
    assert printed["peak_allocated"] >= truth["peak_allocated_of_the_reference_model"]


# --- default mode: sizes ---


@pytest.mark.parametrize(
    ("request_bytes", "allocated_bytes", "segment_mib"),
    [
        (0, 0, 0),
        (1, 512, 2),
        (512, 512, 2),
        (513, 1024, 2),
        (MIB - 1, MIB, 2),  # rounds to 1: still small
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),  # rounds past 1: large, packed in 20
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB - 1, 10 * MIB, 10),  # rounds to 10: a segment of its own
        (10 * MIB, 10 * MIB, 10),
        (10 * MIB + 1, 10 * MIB + 512, 12),  # rest 2 - 512 B > 1: split
        (11 * MIB, 12 * MIB, 12),  # rest exactly 1: not split, counts as allocated
        (11 * MIB - 512, 11 * MIB - 512, 12),  # rest 1 + 512 B: split
        (19 * MIB, 20 * MIB, 20),
        (25 * MIB, 26 * MIB, 26),
        (2_000_000_000, 2_000_683_008, 2_000_683_008 / MIB),  # 953.67 x 2 MiB -> 954 x 2 MiB; rest 0.65 stays
    ],
)
def test_sizes_of_the_first_block_and_its_segment(request_bytes, allocated_bytes, segment_mib):
    allocator = CachingAllocator()
    handle = allocator.allocate(request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, segment_mib * MIB)
    assert allocator.growth == ([[0, segment_mib * MIB]] if segment_mib else [])
    allocator.free(handle)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, segment_mib * MIB)


def test_large_rest_of_more_than_1_mib_serves_the_next_request():
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB - 512)  # segment 12, rest 1 + 512 B
    allocator.allocate(MIB + 512)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 12 * MIB


def test_small_pool_splits_down_to_512_bytes():
    allocator = CachingAllocator()
    for size in (MIB, MIB - 512, 512):  # 1 + (1 - 512 B) + 512 B = 2
        allocator.allocate(size)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


# --- default mode: which block ---


def test_best_fit_and_not_first_fit():
    allocator = CachingAllocator()
    first, second = allocator.allocate(30 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(20 * MIB)  # takes the second's 20; the first fit would cut the 30 and the next would not fit
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 50 * MIB


def test_equal_sizes_go_to_the_lowest_address():
    # One segment of 20: a 0..4, b 4..6, c 6..10, d 10..12, e 12..20.
    allocator = CachingAllocator()
    a, _, c, d, _ = (allocator.allocate(size * MIB) for size in (4, 2, 4, 2, 8))
    allocator.free(c)
    allocator.free(a)
    allocator.allocate(4 * MIB)  # a's place, though c was freed first
    allocator.free(d)  # merges with c to 6..12; had c's place been taken, only 2 would be free here
    allocator.allocate(6 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("expandable", [False, True])
def test_neighbours_merge_in_every_order_of_freeing(order, expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    blocks = [allocator.allocate(4 * MIB) for _ in range(3)]  # 0..4, 4..8, 8..12
    allocator.allocate(8 * MIB)  # 12..20: the segment is full
    for index in order:
        allocator.free(blocks[index])
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 20 * MIB


def test_segments_never_merge():
    allocator = CachingAllocator()
    for handle in [allocator.allocate(10 * MIB), allocator.allocate(10 * MIB)]:
        allocator.free(handle)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_pools_do_not_share():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(4 * MIB))  # 20 cached in the large pool
    allocator.allocate(MIB)  # small all the same: 2 more
    allocator.free(allocator.allocate(MIB // 2))
    allocator.allocate(MIB + 1)  # from the 20
    assert allocator.reserved_bytes == 22 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_streams_do_not_share(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.free(allocator.allocate(20 * MIB, stream=0))
    other = allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(other)
    allocator.allocate(20 * MIB, stream=0)
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_block_in_use_by_another_stream_waits_for_its_event():
    allocator = CachingAllocator()
    block = allocator.allocate(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert allocator.allocated_bytes == 0  # not counted any more, yet not usable
    block = allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.record_stream(block, 0)  # its own stream: no wait
    allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.events_done()
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


# --- default mode: release and cap ---


def test_empty_cache_returns_wholly_free_segments_only():
    allocator = CachingAllocator()
    kept, gone = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)  # both in one 20
    others = [allocator.allocate(30 * MIB), allocator.allocate(512), allocator.allocate(30 * MIB, stream=1)]
    for handle in (gone, *others):
        allocator.free(handle)
    assert allocator.reserved_bytes == 82 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (0, 82 * MIB)
    assert [size / MIB for _, size in allocator.growth] == [20, 30, 2, 30]


def test_empty_cache_waits_for_other_streams():
    allocator = CachingAllocator()
    block = allocator.allocate(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_at_the_cap_cached_segments_of_every_pool_and_stream_are_released_then_the_allocation_is_retried():
    allocator = CachingAllocator(limit_bytes=42 * MIB)
    allocator.allocate(18 * MIB)
    for handle in (allocator.allocate(20 * MIB, stream=1), allocator.allocate(512)):
        allocator.free(handle)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(24 * MIB)  # 40 + 24 > 42; without what is cached (20 + 2) 18 + 24 = 42 just fits
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (42 * MIB, 42 * MIB)
    assert allocator.growth[-1] == [5, 24 * MIB]  # operation 5: three allocations and two frees came before


def test_at_the_cap_a_segment_in_use_stays_and_the_error_says_all():
    allocator = CachingAllocator(limit_bytes=42 * MIB)
    live, cached = allocator.allocate(2 * MIB), allocator.allocate(12 * MIB)  # both in one segment of 20
    allocator.free(cached)
    assert allocator.reserved_bytes == 20 * MIB
    with pytest.raises(SimulatedOutOfMemory) as raised:
        allocator.allocate(22 * MIB + 1)  # rounds to a segment of 24: 20 + 24 = 44 > 42
    error = raised.value
    assert error.requested_bytes == 22 * MIB + 512
    assert mib(error.allocated_bytes, error.reserved_bytes, error.limit_bytes) == [2, 20, 42]
    assert "22.0 MiB" in str(error) and "42.0 MiB" in str(error)
    allocator.allocate(22 * MIB)  # 20 + 22 = 42: the allocator goes on after the error
    allocator.free(live)
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [22, 42]


def test_a_failed_allocation_has_emptied_the_cache():
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(42 * MIB)
    assert allocator.reserved_bytes == 0


def test_what_fits_exactly_under_the_cap_releases_nothing():
    allocator = CachingAllocator(limit_bytes=42 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(22 * MIB)  # 20 + 22 = 42
    assert allocator.reserved_bytes == 42 * MIB


@pytest.mark.parametrize(("size", "segment_mib"), [(512, 2), (2 * MIB, 20), (11 * MIB, 12)])
def test_the_cap_counts_the_segment_and_not_the_request(size, segment_mib):
    with pytest.raises(SimulatedOutOfMemory):
        CachingAllocator(limit_bytes=segment_mib * MIB - 1).allocate(size)
    CachingAllocator(limit_bytes=segment_mib * MIB).allocate(size)


def test_a_free_block_needs_no_room_under_the_cap():
    allocator = CachingAllocator(limit_bytes=20 * MIB)
    allocator.allocate(2 * MIB)
    allocator.allocate(18 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


# --- expandable segments ---


def test_expandable_maps_whole_pages_and_counts_the_block_exactly():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(25 * MIB)  # two pages of 20; the rest of 15 is free
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [25, 40]
    allocator.allocate(15 * MIB - 512)
    allocator.allocate(2 * MIB)  # of the rest, 512 B, plus one page of 20
    assert mib(allocator.reserved_bytes) == [60]
    allocator.allocate(512)  # the small pool has its own segment, in pages of 2
    assert mib(allocator.reserved_bytes) == [62]
    assert allocator.growth == [[0, 40 * MIB], [2, 20 * MIB], [3, 2 * MIB]]


def test_expandable_splits_a_large_block_down_to_512_bytes():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(20 * MIB - 512)  # default mode would give the whole 20
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_expandable_maps_only_the_pages_that_are_missing():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(25 * MIB)  # 0..25 of 40, 15 free at the end
    allocator.allocate(30 * MIB)  # 25..55: 15 free + 15 missing = one page, 5 free at the end
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [55, 60]
    allocator.allocate(5 * MIB)
    assert mib(allocator.reserved_bytes) == [60]


def test_expandable_small_pool_grows_by_2_mib():
    allocator = CachingAllocator(expandable_segments=True)
    for _ in range(5):
        allocator.allocate(MIB)  # 5 in pages of 2
    assert mib(allocator.reserved_bytes) == [6]


def test_expandable_release_unmaps_whole_free_pages_and_the_hole_is_filled_first():
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(25 * MIB)  # 0..25
    allocator.allocate(10 * MIB)  # 25..35, then 5 free up to 40
    allocator.free(first)
    allocator.empty_cache()  # of 0..25 only page 0..20 is wholly free: 20..25 stays
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [10, 20]
    allocator.allocate(18 * MIB)  # fits neither 5; page 0..20 is mapped again, 0..25 is one block, 7 is left
    allocator.allocate(7 * MIB)
    allocator.allocate(5 * MIB)
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [40, 40]


def _with_a_hole() -> CachingAllocator:
    """a 0..10 used, 10..20 free, 20..40 unmapped, 40..50 free, c 50..60 used, then unmapped; 40 are reserved."""
    allocator = CachingAllocator(expandable_segments=True)
    _, b, _ = (allocator.allocate(size * MIB) for size in (10, 40, 10))
    allocator.free(b)
    allocator.empty_cache()
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [20, 40]
    return allocator


def test_expandable_joins_free_unmapped_free():
    allocator = _with_a_hole()
    allocator.allocate(35 * MIB)  # 10 free + 20 to map + 5 of the 10 behind
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [55, 60]
    assert allocator.growth[-1] == [5, 20 * MIB]  # operation 5: three allocations, a free and an empty_cache before
    allocator.allocate(5 * MIB)
    assert mib(allocator.reserved_bytes) == [60]


def test_expandable_passes_over_a_hole_that_is_too_small():
    allocator = _with_a_hole()
    allocator.allocate(45 * MIB)  # 10 + 20 + 10 < 45: three pages at the end
    assert mib(allocator.allocated_bytes, allocator.reserved_bytes) == [65, 100]
    allocator.allocate(35 * MIB)  # the hole is still there
    assert mib(allocator.reserved_bytes) == [120]


def test_expandable_with_everything_free_returns_everything_and_starts_again():
    allocator = CachingAllocator(expandable_segments=True)
    for handle in [allocator.allocate(size) for size in (25 * MIB, 512, 45 * MIB, MIB)]:
        allocator.free(handle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    allocator.allocate(25 * MIB)
    assert mib(allocator.reserved_bytes) == [40]


def test_expandable_best_fit_spares_the_block_that_can_grow():
    allocator = CachingAllocator(expandable_segments=True)
    a, _ = allocator.allocate(8 * MIB), allocator.allocate(27 * MIB)  # 0..8, 8..35; 5 free at the growing end
    allocator.free(a)
    allocator.allocate(4 * MIB)  # 5 would be the best fit, but it can grow: a's 8 is taken
    allocator.allocate(25 * MIB)  # 5 + one page; had the 5 been cut to 1, 24 were missing: two pages
    assert mib(allocator.reserved_bytes) == [60]


def test_expandable_best_fit_stops_at_the_first_block_that_is_no_better():
    # a 0..16, b 16..40, c 40..46, d 46..55, 5 free at the growing end of 60.
    allocator = CachingAllocator(expandable_segments=True)
    _, b, c, _ = (allocator.allocate(size * MIB) for size in (16, 24, 6, 9))
    allocator.free(b)
    allocator.empty_cache()  # page 20..40 goes; 16..20 stays
    allocator.free(c)
    # Free, by size: 4 (grows by the hole to 24), 5 (grows without end), 6 (cannot grow).
    allocator.allocate(3 * MIB)  # 5 is no better than 4, so 6 is never looked at
    allocator.allocate(6 * MIB)
    assert mib(allocator.reserved_bytes) == [40]


def test_expandable_cap_asks_for_the_segment_of_the_default_mode():
    allocator = CachingAllocator(expandable_segments=True, limit_bytes=50 * MIB)
    allocator.allocate(35 * MIB)  # 36 <= 50; two pages, 5 free
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(6 * MIB)  # a request below 10 asks for 20: 40 + 20 > 50
    assert mib(allocator.reserved_bytes) == [40]
    allocator.allocate(5 * MIB)
    assert mib(allocator.reserved_bytes) == [40]


def test_expandable_cap_can_refuse_what_one_page_would_serve():
    allocator = CachingAllocator(expandable_segments=True, limit_bytes=60 * MIB)
    allocator.allocate(25 * MIB)  # two pages, 15 free
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(30 * MIB)  # one page is missing and 40 + 20 = 60, but the test is 40 + 30 > 60
    assert mib(allocator.reserved_bytes) == [40]


def test_expandable_pages_can_end_above_the_cap():
    allocator = CachingAllocator(expandable_segments=True, limit_bytes=12 * MIB)
    allocator.allocate(12 * MIB)  # 12 <= 12, then a page of 20
    assert mib(allocator.reserved_bytes) == [20]


def test_expandable_cap_unmaps_free_pages_and_retries():
    allocator = CachingAllocator(expandable_segments=True, limit_bytes=60 * MIB)
    allocator.free(allocator.allocate(30 * MIB))  # two pages, free
    allocator.free(allocator.allocate(MIB, stream=1))  # and one of 2
    allocator.allocate(50 * MIB)  # 42 + 50 > 60; all is unmapped; 0 + 50 <= 60: three pages
    assert mib(allocator.reserved_bytes, allocator.peak_reserved_bytes) == [60, 60]


# --- handles, peaks ---


def test_a_handle_is_freed_once():
    allocator = CachingAllocator()
    handle = allocator.allocate(1)
    allocator.free(handle)
    for call in (lambda: allocator.free(handle), lambda: allocator.record_stream(handle, 1)):
        with pytest.raises(ValueError, match="not allocated"):
            call()
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.allocate(-1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 2 * MIB)


def test_peaks_start_again_from_what_is_held():
    allocator = CachingAllocator()
    kept, gone = allocator.allocate(10 * MIB), allocator.allocate(30 * MIB)
    allocator.free(gone)
    allocator.empty_cache()
    assert mib(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == [40, 40]
    allocator.reset_peaks()
    allocator.free(kept)
    assert mib(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == [10, 10]


# --- invariants ---

FREE, USED, UNMAPPED = range(3)


def _segments(allocator: CachingAllocator) -> list[list]:
    """Every segment as its blocks from the first to the last."""
    reachable = [block for block in allocator._live.values() if block is not None] + allocator._awaiting_events
    for arena in allocator._arenas.values():
        reachable += [entry[-1] for entry in arena.free + arena.unmapped]
    segments = {}
    for block in reachable:
        while block.previous is not None:
            block = block.previous
        if block.address not in segments:
            blocks = segments[block.address] = [block]
            while blocks[-1].next is not None:
                blocks.append(blocks[-1].next)
    return [segments[address] for address in sorted(segments)]


def _check_invariants(allocator: CachingAllocator) -> None:
    mapped_bytes, end_of_last = 0, 0
    in_use = {id(block) for block in [*allocator._live.values(), *allocator._awaiting_events] if block is not None}
    in_lists = {id(entry[-1]) for arena in allocator._arenas.values() for entry in arena.free + arena.unmapped}
    for blocks in _segments(allocator):
        assert blocks[0].address >= end_of_last  # segments do not overlap
        for block, following in zip(blocks, blocks[1:], strict=False):
            assert block.address + block.size == following.address and following.previous is block  # tiled
            assert block.arena is following.arena
            assert block.state == USED or block.state != following.state  # merged
        for block in blocks:
            assert block.size > 0 and block.size % 512 == 0
            assert (block.state == USED) == (id(block) in in_use) and (block.state != USED) == (id(block) in in_lists)
            if block.state == UNMAPPED:
                assert block.address % block.arena.page_bytes == 0 == block.size % block.arena.page_bytes
            else:
                mapped_bytes += block.size
        end_of_last = blocks[-1].address + blocks[-1].size
    for arena in allocator._arenas.values():
        assert arena.free == sorted(arena.free) and arena.unmapped == sorted(arena.unmapped)
        assert all((size, address) == (block.size, block.address) for size, address, block in arena.free)
    assert mapped_bytes == allocator.reserved_bytes
    assert sum(block.size for block in allocator._live.values() if block is not None) == allocator.allocated_bytes
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes


SIZES = st.one_of(
    st.integers(0, 3 * MIB),
    st.integers(0, 60).map(lambda count: count * MIB),
    st.builds(lambda base, off: base * MIB + off, st.sampled_from([1, 2, 10, 11, 20]), st.sampled_from([-512, -1, 1])),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 1)),
        st.tuples(st.sampled_from(["free", "record_stream"]), st.integers(0, 1000)),
        st.tuples(st.sampled_from(["free", "events_done", "empty_cache"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, expandable=st.booleans(), limit_mib=st.sampled_from([None, 40, 100]))
def test_blocks_tile_their_segments_and_everything_can_be_returned(operations, expandable, limit_mib):
    allocator = CachingAllocator(
        expandable_segments=expandable, limit_bytes=None if limit_mib is None else limit_mib * MIB
    )
    live = []
    for name, *arguments in operations:
        if name == "allocate":
            try:
                live.append(allocator.allocate(*arguments))
            except SimulatedOutOfMemory as error:
                assert error.reserved_bytes == allocator.reserved_bytes <= error.limit_bytes + 20 * MIB
        elif name in ("free", "record_stream"):
            if live:
                index = arguments[0] % len(live)
                allocator.free(live.pop(index)) if name == "free" else allocator.record_stream(live[index], 7)
        else:
            getattr(allocator, name)()
        _check_invariants(allocator)
        if limit_mib is not None:
            page_bytes = 20 * MIB if expandable else 1
            assert allocator.peak_reserved_bytes < limit_mib * MIB + page_bytes
    for handle in live:
        allocator.free(handle)
    allocator.empty_cache()
    _check_invariants(allocator)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    for blocks in _segments(allocator):  # only the address space of expandable segments is left
        assert [block.state for block in blocks] == [UNMAPPED]


# --- the command ---


def test_the_command_prints_one_json_object(tmp_path):
    tape = tmp_path / "tape.jsonl"
    tape.write_text('["a", 7, 26214400, 0]\n["a", 8, 1, 3]\n\n["f", 7]\n["e"]\n["a", 7, 512, 3]\n')
    # 25 takes 26 (operation 0), 1 B takes 2 (operation 1), 26 goes back, the last lies in the 2 of stream 3.
    done = subprocess.run(
        [sys.executable, "-m", "lowmem.allocator", str(tape)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "peak_reserved": 28 * MIB,
        "final_reserved": 2 * MIB,
        "peak_allocated": 26 * MIB + 512,
        "final_allocated": 1024,
        "growth": [[0, 26 * MIB], [1, 2 * MIB]],
    }
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        (["{"], 1, "not an operation"),
        (["[" * 100_000], 1, "not an operation"),
        (['["e"]', "", '["x", 1]'], 3, "not an operation"),
        (['["a", 1, 5]'], 1, "not an operation"),
        (['["a", 1, 5.5, 0]'], 1, "not an operation"),
        (['["a", "1", 5, 0]'], 1, "not an operation"),
        (['{"a": 1}'], 1, "not an operation"),
        (['["a", 1, -5, 0]'], 1, "-5 bytes"),
        (['["a", 1, 5, 0]', '["a", 1, 5, 0]'], 2, "id 1 is allocated already"),
        (['["f", 9]'], 1, "id 9 is not allocated"),
        (['["a", 1, 5, 0]', '["f", 1]', '["f", 1]'], 3, "id 1 is not allocated"),
    ],
)
def test_bad_lines_are_named_with_file_and_line(lines, where, what, tmp_path, capsys):
    tape = tmp_path / "tape.jsonl"
    tape.write_text("\n".join(lines))
    assert main([str(tape)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"{tape}:{where}: ") and what in printed.err
    assert printed.err.count("\n") == 1


def test_a_tape_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    for name, what in (("missing.jsonl", "No such file"), (".", "directory"), ("binary.jsonl", "UTF-8")):
        assert main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / name) in error and what in error and error.count("\n") == 1


def test_bad_usage_exits_with_2(capsys):
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 2 and "TAPE.jsonl" in capsys.readouterr().err
