"""What is kept of a memory recording (cuda/digest_recording.py), on recordings written out by hand.

Addresses count from 0 in MiB; the recordings have one large segment of 20 MiB at 0 and one small of 2 MiB at 100.
"""

import json
import pickle

import pytest

from tests.cuda import digest_recording
from tests.cuda.digest_recording import (
    allocated_peak_bytes,
    describe,
    events_of,
    first_difference,
    main,
    read_recordings,
    reductions_of,
)

MIB = 2**20
REDUCTION = [{"name": "gpu_reduce_kernel<float>(...)"}, {"name": "at::_ops::max_dim::redispatch(...)"}]


def event(action: str, mib: float, size: int, frames: list[dict] | None = None) -> dict:
    return {"action": action, "addr": int(mib * MIB), "size": size, "stream": 0, "frames": frames or []}


def alloc(mib: float, size: int, frames: list[dict] | None = None) -> list[dict]:
    return [event("alloc", mib, size, frames)]


def free(mib: float, size: int) -> list[dict]:
    return [event("free_requested", mib, size), event("free_completed", mib, size)]


def segment(mib: int, total_mib: int, *blocks: tuple[float, int, bool]) -> dict:
    """`blocks`: MiB of the block, the bytes that were asked for, and whether it is in use."""
    return {
        "address": mib * MIB,
        "total_size": total_mib * MIB,
        "allocated_size": sum(int(size * MIB) for size, _, used in blocks if used),
        "blocks": [
            {"size": int(size * MIB), "requested_size": asked, "state": "active_allocated" if used else "inactive"}
            for size, asked, used in blocks
        ],
    }


def snapshot(trace: list[list[dict]], *segments: dict) -> dict:
    return {"device_traces": [[], sum(trace, [])], "segments": list(segments)}


EMPTY_LARGE, EMPTY_SMALL = segment(0, 20, (20, 0, False)), segment(100, 2, (2, 0, False))


def test_events_are_allocations_and_frees_in_their_order():
    trace = [[event("segment_alloc", 0, 20 * MIB)], alloc(0, 5), alloc(100, 7), free(0, 5)]
    assert events_of(snapshot(trace)) == [("alloc", 5), ("alloc", 7), ("free", 5)]


def test_events_of_two_devices_are_refused():
    with pytest.raises(ValueError, match="2 devices"):
        events_of({"device_traces": [alloc(0, 5), alloc(0, 5)]})


def test_a_difference_is_named_by_its_thousand():
    events = [("alloc", number) for number in range(2500)]
    expected = describe(events)
    assert (expected["allocations"], expected["frees"]) == (2500, 0)
    assert first_difference(expected, describe(list(events))) is None
    other = events[:1700] + [("free", 1700)] + events[1701:]
    assert "events 1,000 to 1,999 differ" in first_difference(expected, describe(other))
    assert "2,499 + 1" in first_difference(expected, describe(other))
    swapped = events[:5] + [events[6], events[5]] + events[7:]
    assert "events 0 to 999 differ" in first_difference(expected, describe(swapped))
    longer = [("alloc", number) for number in range(2000)]
    assert "the beginning of the other" in first_difference(describe(longer), describe(longer + [("free", 0)]))


def test_the_peak_counts_whole_blocks():
    # Rounded to 512 bytes, and with a rest of 1 MiB: 19 MiB take all of the 20.
    trace = [alloc(100, 513), alloc(0, 19 * MIB), free(0, 19 * MIB), free(100, 513)]
    assert allocated_peak_bytes(snapshot(trace, EMPTY_LARGE, EMPTY_SMALL)) == 20 * MIB + 1024
    # A rest of 1.5 MiB is split off.
    trace = [alloc(0, 18 * MIB + MIB // 2), free(0, 18 * MIB + MIB // 2)]
    assert allocated_peak_bytes(snapshot(trace, EMPTY_LARGE)) == 18 * MIB + MIB // 2
    # So is a rest of 1 MiB among small blocks.
    assert allocated_peak_bytes(snapshot([alloc(100, MIB), free(100, MIB)], EMPTY_SMALL)) == MIB


def test_the_peak_knows_what_was_there_before_and_what_stays():
    # At the start 4..8 is in use. It is freed, 0..4 comes, and 4..20 is one free block again.
    trace = [alloc(0, 4 * MIB), free(4, 4 * MIB), alloc(4, 12 * MIB)]
    at_the_end = segment(0, 20, (4, 4 * MIB, True), (12, 12 * MIB, True), (4, 0, False))
    assert allocated_peak_bytes(snapshot(trace, at_the_end)) == 16 * MIB
    # The block that is there at the start and at the end has a rest: 9.5 in 10, since 10..20 is in use.
    trace = [free(10, 10 * MIB)]
    at_the_end = segment(0, 20, (10, int(9.5 * MIB), True), (10, 0, False))
    assert allocated_peak_bytes(snapshot(trace, at_the_end)) == 20 * MIB


def test_the_peak_follows_segments_that_come_and_go():
    come_and_go = [event("segment_alloc", 200, 30 * MIB)], [event("segment_free", 200, 30 * MIB)]
    trace = [alloc(100, 512), come_and_go[0], alloc(200, 30 * MIB), free(200, 30 * MIB), come_and_go[1], free(100, 512)]
    assert allocated_peak_bytes(snapshot(trace, EMPTY_SMALL)) == 30 * MIB + 512


def test_a_recording_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="lies within the block before"):
        allocated_peak_bytes(
            snapshot([alloc(0, 8 * MIB), alloc(4, MIB * 2), free(4, MIB * 2), free(0, 8 * MIB)], EMPTY_LARGE)
        )
    with pytest.raises(ValueError, match="bytes at 0x0 have"):
        allocated_peak_bytes(snapshot([alloc(0, 21 * MIB), free(0, 21 * MIB)], EMPTY_LARGE))
    with pytest.raises(ValueError, match="the replay ends with"):
        allocated_peak_bytes(snapshot([alloc(0, 4 * MIB)], segment(0, 20, (5, 4 * MIB, True), (15, 0, False))))


def test_reductions_are_found_by_the_stacks():
    one = [alloc(0, 2048, REDUCTION), alloc(100, 16, REDUCTION), free(100, 16), free(0, 2048)]
    assert reductions_of(snapshot([*one, alloc(0, 5), *one])) == [
        {"operator": "max_dim", "buffer_bytes": 2048, "semaphore_bytes": 16, "times": 2}
    ]


def test_the_command_puts_the_entry_in_place_of_the_one_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setattr(digest_recording, "RECORDINGS", tmp_path / "recordings.json")
    trace = [alloc(0, 4 * MIB, REDUCTION), alloc(100, 16, REDUCTION), free(100, 16), free(0, 4 * MIB)]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(trace, EMPTY_LARGE, EMPTY_SMALL)))
    source = ["--repository", "o/n", "--commit", "c", "--path", "p", "--torch", "2.11.0", "--context", "128"]
    for name in ("second", "first", "second"):
        assert main([str(path), "--name", name, *source, "--autocast"]) == 0
    assert main([str(path), "--name", "third", *source, "--reductions"]) == 0
    recordings = read_recordings()
    assert list(recordings) == ["first", "second", "third"]
    entry = recordings["second"]
    assert (entry["repository"], entry["context"], entry["autocast"], entry["torch"]) == ("o/n", 128, True, "2.11.0")
    assert (entry["allocations"], entry["frees"]) == (2, 2)
    assert (entry["allocated_peak_bytes"], entry["reserved_bytes"]) == (4 * MIB + 512, 22 * MIB)
    assert recordings["third"]["reductions"][0]["buffer_bytes"] == 4 * MIB
    assert "digest" not in recordings["third"]
    json.loads((tmp_path / "recordings.json").read_text())
