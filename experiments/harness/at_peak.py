"""Lists the tensors that exist at the memory peak, measured and simulated, to explain a wrong prediction.

Sizes are multiples of 512 bytes. Names of measured tensors are Python frames, and empty on the CPU.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from lowmem.cudasim.allocator import ROUNDING
from lowmem.cudasim.tape import FREED, Chunk, Tape, under_cap
from lowmem.device import collect_garbage

LARGEST = 12  # groups of blocks that a row names
_TORCH = str(Path(torch.__file__).parent)
Returned = TypeVar("Returned")


def tape_of(changes: Sequence[tuple[int, int, str]]) -> Tape:
    """Returns a tape (list of allocations and frees) with the `changes`, each (address, bytes, name). Negative bytes
    free the address. Frees of an address that `changes` did not allocate are left out."""
    living: dict[int, int] = {}
    operations = []
    for number, (address, size, name) in enumerate(changes):
        if size >= 0:
            living[address] = number
            operations.append((number, size, name))
        elif address in living:
            operations.append((living.pop(address), FREED, ""))
    return Tape([Chunk(operations, 0, 0, 0.0)])


def tape_of_cpu(work: Callable[[], Returned]) -> tuple[Tape, Returned]:
    """Calls `work`. Returns the tape (list of allocations and frees) of the CPU's memory, and the result of `work`."""
    enabled = gc.isenabled()
    collect_garbage()
    # The cycle collector would free at arbitrary moments.
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            returned = work()
    finally:
        if enabled:
            gc.enable()
    events = _allocations(profiler.profiler.kineto_results.experimental_event_tree())
    events = sorted(events, key=lambda event: event.start_time_ns)
    tape = tape_of([(event.extra_fields.ptr, event.extra_fields.alloc_size, "") for event in events])
    return tape, returned


def _allocations(events: Sequence) -> Iterator:
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def tape_of_history(entries: Sequence[dict]) -> Tape:
    """Returns the tape (list of allocations and frees) of one GPU. `entries`: its trace in
    `torch.cuda.memory._snapshot()`, recorded since the allocator was empty."""
    signs = {"alloc": 1, "free_requested": -1}  # what is free, but waits for another stream, is not allocated
    return tape_of(
        [
            (entry["addr"], signs[entry["action"]] * entry["size"], _where(entry.get("frames", ())))
            for entry in entries
            if entry["action"] in signs
        ]
    )


def _where(frames: Sequence[dict]) -> str:
    for frame in frames:
        if frame["filename"].endswith(".py") and not frame["filename"].startswith(_TORCH):
            return f"{frame['name']} ({Path(frame['filename']).name}:{frame['line']})"
    return "no Python frame"  # such as all of backward, which runs on a thread of C++


def live_at_peak(tape: Tape) -> Counter[tuple[int, str]]:
    """Counts the live blocks of each (size, name) at the peak of allocated bytes."""
    now = peak = last = 0
    sizes: dict[int, int] = {}
    for index, (storage, size, _) in enumerate(tape):
        if size == FREED:
            now -= sizes.pop(storage)
            continue
        sizes[storage] = -(-size // ROUNDING) * ROUNDING
        now += sizes[storage]
        if now > peak:
            peak, last = now, index
    living: dict[int, tuple[int, str]] = {}
    for index, (storage, size, name) in enumerate(tape):
        if index > last:
            break
        if size == FREED:
            del living[storage]
        else:
            living[storage] = -(-size // ROUNDING) * ROUNDING, name
    return Counter(living.values())


def differences(measured: Tape, simulated: Tape) -> dict:
    """Compares two tapes (lists of allocations and frees) at their peaks. Returns fields of a row: `at_measured_peak`
    and `at_simulated_peak`, the largest groups of tensors as [bytes, count, bytes of each, name]; `sizes_that_differ`,
    [bytes, measured count, simulated count]; `replayed_...`, peaks of `measured` in a model of the allocator."""
    found, expected = live_at_peak(measured), live_at_peak(simulated)
    counts = [Counter(), Counter()]
    for count, groups in zip(counts, (found, expected), strict=True):
        for (size, _), number in groups.items():
            count[size] += number
    sizes = [size for size in counts[0] | counts[1] if counts[0][size] != counts[1][size]]
    sizes.sort(key=lambda size: -size * abs(counts[0][size] - counts[1][size]))
    # If the replay reserves as much as the GPU did, the tracer missed a tensor. If not, the model of the allocator is
    # wrong.
    replayed = under_cap(measured)
    return {
        "at_measured_peak": _largest(found),
        "at_simulated_peak": _largest(expected),
        "sizes_that_differ": [[size, counts[0][size], counts[1][size]] for size in sizes[:LARGEST]],
        "replayed_allocated_bytes": replayed.allocated_peak_bytes,
        "replayed_reserved_bytes": replayed.reserved_peak_bytes,
    }


def _largest(groups: Counter[tuple[int, str]]) -> list[list]:
    largest = sorted(((size * count, count, size, name) for (size, name), count in groups.items()), reverse=True)
    return [list(group) for group in largest[:LARGEST]]
