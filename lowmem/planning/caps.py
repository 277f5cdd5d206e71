"""Caps and the room that they leave, and the sentence of a refusal."""

import math

from lowmem.settings import Settings
from lowmem.units import MIB, format_size

# Part of a cap stays free: at least MARGIN_BYTES, or 0.5%. Growing segments may map pages beyond the allocator's own
# cap (limits.py), and the driver's addresses, which no simulation knows, decide which free block serves a request.
# Twice as much stays free if a step updates in backward: once its updates have begun it cannot be made again.
MARGIN_BYTES = 64 * MIB
MARGINS_IN_A_CAP = 200


def room_under(gpu_limit: int, margins: int = 1) -> int:
    """Bytes that a simulated layout may take under a cap of the GPU's memory."""
    return gpu_limit - max(margins * MARGIN_BYTES, margins * gpu_limit // MARGINS_IN_A_CAP)


def smallest_cap(room: int, margins: int = 1) -> int:
    """The smallest cap that leaves so much room."""
    by_share = (room - 1) * MARGINS_IN_A_CAP // (MARGINS_IN_A_CAP - margins) + 1
    return max(room + margins * MARGIN_BYTES, by_share)


def margins(needs_all_gradients: bool) -> int:
    """How often the margin stays free. `needs_all_gradients`: updates wait for the norm (StepCase)."""
    return 1 if needs_all_gradients else 2


def refusal(settings: Settings, gpu_limit: int | None, gpu_cap: int | None, ram: int) -> str:
    """The refusal's sentence. `gpu_cap`: the smallest cap that would do, None if there is none or it is enough; `ram`:
    bytes that the whole run needs."""
    caps = [
        f"{format_size(limit)} of {memory}"
        for memory, limit in (("GPU memory", gpu_limit), ("RAM", settings.ram_limit_bytes))
        if limit is not None
    ]
    wants = [f"--ram-limit {math.ceil(ram / MIB)}MiB"]
    if gpu_cap is not None:
        wants.insert(0, f"--gpu-limit {math.ceil(gpu_cap / MIB)}MiB")
    return (
        f"{what(settings)} does not fit in {' and '.join(caps)}; the smallest that would do is {' with '.join(wants)}."
    )


def what(settings: Settings) -> str:
    """The job, as refusals name it."""
    return f"{settings.model} at {settings.batch} x {settings.seq} tokens"
