"""What room a cap leaves, the smallest cap for a room, and the sentence of a refusal that names it."""

import math

from lowmem.settings import Settings
from lowmem.units import MIB, format_size

MARGIN_BYTES = 64 * MIB  # of the GPU's cap, at least; with pages that are mapped beyond the allocator's own (limits.py)
MARGINS_IN_A_CAP = 200  # 0.5%: a driver's addresses decide which free block serves which request


def room_under(gpu_limit: int) -> int:
    """What a layout may take, simulated, under a cap of the GPU's memory."""
    return gpu_limit - max(MARGIN_BYTES, gpu_limit // MARGINS_IN_A_CAP)


def smallest_cap(room: int) -> int:
    """The smallest cap that leaves so much room."""
    return max(room + MARGIN_BYTES, (room - 1) * MARGINS_IN_A_CAP // (MARGINS_IN_A_CAP - 1) + 1)


def refusal(settings: Settings, gpu_limit: int | None, room: int | None, ram: int) -> str:
    """`room`: what the allocator has to have (None: it has enough); `ram`: what the whole run takes of RAM then, and
    where that was measured, what the next process may hold more than this one."""
    caps = [
        f"{format_size(limit)} of {memory}"
        for memory, limit in (("GPU memory", gpu_limit), ("RAM", settings.ram_limit_bytes))
        if limit is not None
    ]
    wants = [f"--ram-limit {math.ceil(ram / MIB)}MiB"]
    if room is not None:
        wants.insert(0, f"--gpu-limit {math.ceil(smallest_cap(room) / MIB)}MiB")
    return (
        f"{what(settings)} does not fit in {' and '.join(caps)}; the smallest that would do is {' with '.join(wants)}."
    )


def what(settings: Settings) -> str:
    """What a plan is for, as refusals name it."""
    return f"{settings.model} at {settings.batch} x {settings.seq} tokens"
