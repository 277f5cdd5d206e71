"""Computes how much GPU memory a training step may take under a cap. Also writes the error message for caps that are
too small."""

import math

from lowmem.planning.question import Question
from lowmem.units import MIB, format_size

# Part of a cap stays free, for two reasons. Growing segments may map pages beyond the allocator's own cap (limits.py).
# Addresses decide which free block serves a request, and no simulation knows the addresses that the driver gives.
MARGIN_BYTES = 64 * MIB
MARGINS_IN_A_CAP = 200  # A margin is at least this part of a cap: a 200th.


def room_under(gpu_limit: int, margins: int = 1) -> int:
    """Returns how many bytes of GPU memory a training step may allocate under a cap of `gpu_limit` bytes. `margins`
    safety margins stay free, each of 64 MiB or 0.5% of the cap, whichever is more."""
    return gpu_limit - max(margins * MARGIN_BYTES, margins * gpu_limit // MARGINS_IN_A_CAP)


def smallest_cap(room: int, margins: int = 1) -> int:
    """Returns the smallest cap of GPU memory, in bytes, under which a training step may allocate `room` bytes.
    `margins` safety margins stay free, each of 64 MiB or 0.5% of the cap, whichever is more."""
    by_share = (room - 1) * MARGINS_IN_A_CAP // (MARGINS_IN_A_CAP - margins) + 1
    return max(room + margins * MARGIN_BYTES, by_share)


def margins(needs_all_gradients: bool) -> int:
    """Returns how many safety margins of GPU memory stay free: 1 if updates wait for all gradients, else 2."""
    # Otherwise backward may update weights. If memory runs out after that, the step cannot be made again.
    return 1 if needs_all_gradients else 2


def refusal(question: Question, gpu_limit: int | None, gpu_cap: int | None, ram: int) -> str:
    """Returns the error message for memory caps that are too small. `gpu_limit`: the present cap of GPU memory.
    `gpu_cap`, `ram`: the smallest caps that suffice together, `ram` for all processes of the run on this machine. All
    are bytes. None leaves out a cap."""
    caps = [
        f"{format_size(limit)} of {memory}"
        for memory, limit in (("GPU memory", gpu_limit), ("RAM", question.ram_limit_bytes))
        if limit is not None
    ]
    smallest = " with ".join(cap_options(gpu_cap, ram))
    return f"{described(question)} does not fit in {' and '.join(caps)}; the smallest that would do is {smallest}."


def cap_options(gpu_cap: int | None, ram: int) -> list[str]:
    """Returns the options for caps of `gpu_cap` and `ram` bytes, rounded up to MiB, such as ["--gpu-limit 800MiB",
    "--ram-limit 900MiB"]. None leaves out an option."""
    caps = [("--gpu-limit", gpu_cap), ("--ram-limit", ram)]
    return [f"{name} {math.ceil(size / MIB)}MiB" for name, size in caps if size is not None]


def described(question: Question) -> str:
    """Returns the model and the batch in words for messages, such as "gpt2 at 64 x 1024 tokens"."""
    settings, processes = question.settings, question.mesh.count
    each = "" if processes == 1 else f" in each of {processes} processes"
    return f"{settings.model} at {settings.batch} x {settings.seq} tokens{each}"
