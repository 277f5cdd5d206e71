"""Caps and the room that they leave, and the sentence of a refusal."""

import math

from lowmem.settings import Settings
from lowmem.units import MIB, format_size

# Part of a cap stays free: at least MARGIN_BYTES, or 0.5%. Growing segments may map pages beyond the allocator's own
# cap (limits.py), and the driver's addresses, which no simulation knows, decide which free block serves a request.
MARGIN_BYTES = 64 * MIB
MARGINS_IN_A_CAP = 200


def room_under(gpu_limit: int) -> int:
    """Bytes that a simulated layout may take under a cap of the GPU's memory."""
    return gpu_limit - max(MARGIN_BYTES, gpu_limit // MARGINS_IN_A_CAP)


def smallest_cap(room: int) -> int:
    """The smallest cap that leaves so much room."""
    return max(room + MARGIN_BYTES, (room - 1) * MARGINS_IN_A_CAP // (MARGINS_IN_A_CAP - 1) + 1)


def refusal(settings: Settings, gpu_limit: int | None, room: int | None, ram: int) -> str:
    """The refusal's sentence. `room`: bytes that the allocator needs, None if its cap is enough; `ram`: bytes that the
    whole run needs."""
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
    """The job, as refusals name it."""
    return f"{settings.model} at {settings.batch} x {settings.seq} tokens"
