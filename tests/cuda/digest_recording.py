r"""Keeps of a memory recording the numbers of allocations and frees, a digest of their sequence, and the peak.

    python -m tests.cuda.digest_recording SNAPSHOT.pickle --name NAME --repository OWNER/NAME --commit C --path P \
        --torch VERSION --context TOKENS [--autocast] [--reductions]

Reads a file of torch.cuda.memory._dump_snapshot, and writes its entry into recordings.json: the SHA-256 of lines "alloc
BYTES" and "free BYTES", whole and of each thousand. With --reductions, only the staging buffers of reductions are kept.
A pickle can run code when it is read: read none that you do not trust.
"""

import argparse
import hashlib
import json
import pickle
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).with_name("recordings.json")
THOUSAND = 1000  # events to a partial digest
_SHORT = 16  # hexadecimal digits of a partial digest; the digest of the whole is not shortened
_ACTIONS = {"alloc": "alloc", "free_completed": "free"}  # "free_requested" comes just before, on one stream
_SMALLEST_BYTES = 512  # a block's size is a multiple of it
_LARGEST_SMALL_BYTES = 2**20  # up to here a request is served from segments of 2 MiB, which are split without limit
_UNSPLIT_BYTES = 2**20  # a rest up to here stays with a large block

_REDUCTION_KERNEL = "gpu_reduce_kernel"  # in the stack of an allocation that a reduction makes for itself
_OPERATOR = re.compile(r"at::_ops::(\w+)::")

Event = tuple[str, int]


def trace_of(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the snapshot's events, oldest first. Raises ValueError unless one device has events."""
    traces = [trace for trace in snapshot["device_traces"] if trace]
    if len(traces) != 1:
        raise ValueError(f"the snapshot has events of {len(traces)} devices; it should be one")
    return traces[0]


def events_of(snapshot: dict[str, Any]) -> list[Event]:
    """Returns (action, requested bytes) of every allocation and free, in order."""
    return [(_ACTIONS[entry["action"]], entry["size"]) for entry in trace_of(snapshot) if entry["action"] in _ACTIONS]


def lines_of(events: list[Event]) -> list[str]:
    return [f"{action} {size}\n" for action, size in events]


def describe(events: list[Event]) -> dict[str, Any]:
    """Returns counts and digests of a sequence, as recordings.json has them."""

    def digest(some: list[Event]) -> str:
        return hashlib.sha256("".join(lines_of(some)).encode()).hexdigest()

    counts = Counter(action for action, _ in events)
    thousands = [events[start : start + THOUSAND] for start in range(0, len(events), THOUSAND)]
    return {
        "allocations": counts["alloc"],
        "frees": counts["free"],
        "digest": digest(events),
        "digests_of_thousands": [digest(some)[:_SHORT] for some in thousands],
    }


def first_difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """Returns the first difference of two sequences of `describe`, in words; None if they are equal."""
    if expected["digest"] == found["digest"]:
        return None
    lengths = " and ".join(f"{it['allocations']:,} + {it['frees']:,}" for it in (expected, found))
    pairs = zip(expected["digests_of_thousands"], found["digests_of_thousands"], strict=False)
    first = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return f"one sequence is the beginning of the other: allocations + frees {lengths}"
    return f"events {first * THOUSAND:,} to {(first + 1) * THOUSAND - 1:,} differ; allocations + frees {lengths}"


class _Replay:
    """Replays blocks at their recorded addresses. A recording has the requested bytes; the addresses tell how large the
    block of each request was."""

    def __init__(self, segments: dict[int, int], requests: dict[int, int]):
        """`segments`: bytes by address; `requests`: the bytes asked for by each live block, by its address."""
        self.segments, self.starts, self.blocks = dict(segments), sorted(requests), {}
        for address, request in requests.items():
            self.blocks[address] = self._block_bytes(address, request)

    def _block_bytes(self, address: int, request: int) -> int:
        """Returns the bytes of the block at `address`: the request rounded, or all up to the next block or the
        segment's end."""
        segment = max(start for start in self.segments if start <= address)
        end = segment + self.segments[segment]
        following = bisect_right(self.starts, address)
        room = min(end, self.starts[following]) - address if following < len(self.starts) else end - address
        rounded = max(_SMALLEST_BYTES, -(-request // _SMALLEST_BYTES) * _SMALLEST_BYTES)
        if rounded > room:
            raise ValueError(f"the recording contradicts itself: {request} bytes at {address:#x} have {room}")
        # In the large pool, a rest of at most 1 MiB is not worth splitting, and counts as allocated.
        unsplit = _UNSPLIT_BYTES if rounded > _LARGEST_SMALL_BYTES else _SMALLEST_BYTES - 1
        return room if room - rounded <= unsplit else rounded

    def allocate(self, address: int, request: int) -> None:
        # A request is served from the beginning of a free range, so the block before must end there.
        before = bisect_left(self.starts, address) - 1
        if before >= 0 and address not in self.segments:
            previous = self.starts[before]
            if previous + self.blocks[previous] > address:
                raise ValueError(f"the recording contradicts itself: {address:#x} lies within the block before")
        self.blocks[address] = self._block_bytes(address, request)
        insort(self.starts, address)

    def free(self, address: int) -> None:
        del self.starts[bisect_left(self.starts, address)], self.blocks[address]

    @property
    def allocated_bytes(self) -> int:
        return sum(self.blocks.values())


def allocated_peak_bytes(snapshot: dict[str, Any]) -> int:
    """Returns the most bytes that were allocated at any moment of the recording. Raises ValueError if the replay does
    not end with the blocks of the snapshot."""
    segments = {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    live = {}
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                live[address] = block["requested_size"]
            address += block["size"]
    trace = trace_of(snapshot)
    # The state at the end is known, so the events are undone from the last to the first, and then replayed.
    for entry in reversed(trace):
        match entry["action"]:
            case "alloc":
                del live[entry["addr"]]
            case "free_completed":
                live[entry["addr"]] = entry["size"]
            case "segment_alloc":
                del segments[entry["addr"]]
            case "segment_free":
                segments[entry["addr"]] = entry["size"]

    replay = _Replay(segments, live)
    peak = now = replay.allocated_bytes
    for entry in trace:
        address = entry["addr"]
        match entry["action"]:
            case "alloc":
                replay.allocate(address, entry["size"])
                now += replay.blocks[address]
                peak = max(peak, now)
            case "free_completed":
                now -= replay.blocks[address]
                replay.free(address)
            case "segment_alloc":
                replay.segments[address] = entry["size"]
            case "segment_free":
                del replay.segments[address]
    at_the_end = sum(segment["allocated_size"] for segment in snapshot["segments"])
    if now != at_the_end:
        raise ValueError(f"the replay ends with {now:,} bytes allocated, the snapshot with {at_the_end:,}")
    return peak


def reductions_of(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the staging buffers of reductions: operator, bytes of buffer and of its semaphores, how many times. The
    recording must have stacks."""
    found = []
    for entry in trace_of(snapshot):
        names = [frame["name"] for frame in entry.get("frames", ())]
        if entry["action"] == "alloc" and any(_REDUCTION_KERNEL in name for name in names):
            operator = next(match[1] for name in names if (match := _OPERATOR.search(name)))
            found.append((operator, entry["size"]))
    pairs = Counter(zip(found[::2], found[1::2], strict=True))
    return [
        {"operator": operator, "buffer_bytes": buffer, "semaphore_bytes": semaphores, "times": times}
        for ((operator, buffer), (_, semaphores)), times in sorted(pairs.items())
    ]


def read_recordings() -> dict[str, dict[str, Any]]:
    """Returns the entries of recordings.json by name."""
    return json.loads(RECORDINGS.read_text())


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    with open(options.snapshot, "rb") as file:
        snapshot = pickle.load(file)
    entry = {name: getattr(options, name) for name in ("repository", "commit", "path", "torch", "context", "autocast")}
    if options.reductions:
        entry["reductions"] = reductions_of(snapshot)
    else:
        entry |= describe(events_of(snapshot))
        entry["allocated_peak_bytes"] = allocated_peak_bytes(snapshot)
        entry["reserved_bytes"] = sum(segment["total_size"] for segment in snapshot["segments"])
    recordings = read_recordings() if RECORDINGS.exists() else {}
    recordings[options.name] = entry
    RECORDINGS.write_text(_to_json(recordings))
    return 0


def _to_json(recordings: dict[str, dict[str, Any]]) -> str:
    """Returns JSON with one line for each field of each recording."""
    entries = []
    for name, entry in sorted(recordings.items()):
        fields = ",\n".join(f"  {json.dumps(field)}: {json.dumps(value)}" for field, value in entry.items())
        entries.append(f" {json.dumps(name)}: {{\n{fields}\n }}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.digest_recording", allow_abbrev=False)
    parser.add_argument("snapshot", type=Path, help="a file of torch.cuda.memory._dump_snapshot")
    parser.add_argument("--name", required=True, help="of the entry in recordings.json")
    parser.add_argument("--repository", required=True, help="on GitHub, owner/name")
    parser.add_argument("--commit", required=True, help="of the repository, that has the recording")
    parser.add_argument("--path", required=True, help="of the recording in the repository")
    parser.add_argument("--torch", required=True, help="the version that the repository pins")
    parser.add_argument("--context", required=True, type=int, help="tokens of a sequence")
    parser.add_argument("--autocast", action="store_true", help="the forward ran under bf16 autocast")
    parser.add_argument("--reductions", action="store_true", help="keep the staging buffers of reductions only")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
