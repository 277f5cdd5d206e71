"""Simulates PyTorch's CUDA caching allocator on a recording of allocations: ``python -m lowmem.allocator TAPE.jsonl``.

Prints, as JSON, peak and final allocated and reserved bytes, and every growth of reserved memory.
"""

import argparse
import json
import sys
from collections.abc import Iterable

from lowmem.cudasim.allocator import CachingAllocator
from lowmem.errors import InputError

OPERATIONS = 'One operation a line: ["a", id, bytes, stream] allocate, ["f", id] free, ["e"] empty_cache.'


def replay(tape: Iterable[str], tape_name: str, allocator: CachingAllocator) -> None:
    """Replays `tape`, lines of JSON (see OPERATIONS), on the simulated `allocator`. Raises InputError, which names
    `tape_name` and the line, for an invalid line."""
    blocks = {}
    for number, line in enumerate(tape, start=1):
        if not line.strip():
            continue
        try:
            operation = json.loads(line)
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            operation = None
        match operation:
            case ["a", int(name), int(size_bytes), int(stream)] if name not in blocks and size_bytes >= 0:
                blocks[name] = allocator.allocate(size_bytes, stream)
                continue
            case ["f", int(name)] if name in blocks:
                allocator.free(blocks.pop(name))
                continue
            case ["e"]:
                allocator.empty_cache()
                continue
            case ["a", int(name), int(size_bytes), int()]:
                reason = f"id {name} is allocated already" if name in blocks else f"{size_bytes} bytes is no size"
            case ["f", int(name)]:
                reason = f"id {name} is not allocated, so it cannot be freed"
            case _:
                reason = f"not an operation. {OPERATIONS.removesuffix('.')}"
        raise InputError(f"{tape_name}:{number}: {reason}.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lowmem.allocator",
        description="Replay a recording through the model of the CUDA caching allocator; figures in bytes, as JSON.",
        allow_abbrev=False,
    )
    parser.add_argument("tape", metavar="TAPE.jsonl", help=OPERATIONS)
    tape_name = parser.parse_args(arguments).tape
    allocator = CachingAllocator()
    try:
        with open(tape_name, encoding="utf-8") as tape:
            replay(tape, tape_name, allocator)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (OSError, UnicodeDecodeError) as error:
        print(f"{tape_name}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})", file=sys.stderr)
        return InputError.exit_code
    figures = {
        "peak_reserved": allocator.peak_reserved_bytes,
        "final_reserved": allocator.reserved_bytes,
        "peak_allocated": allocator.peak_allocated_bytes,
        "final_allocated": allocator.allocated_bytes,
        "growth": allocator.growth,
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
