"""Reads memory over time in a thread, while batches are computed."""

import threading
import time
from collections.abc import Sequence

import torch

from lowmem.limits import ram_now_bytes

EVERY_SECONDS = 0.005
POINTS = 200


class MemoryTimeline:
    """Reads the memory in use every EVERY_SECONDS, as a context: bytes allocated on a GPU, else the process's resident
    set. Afterwards `samples` has seconds and bytes."""

    def __init__(self, device: torch.device):
        self.samples: list[tuple[float, int]] = []
        self._device, self._over = device, threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "MemoryTimeline":
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        over = False
        while not over:  # once more at the end
            over = self._over.wait(EVERY_SECONDS)
            used = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else ram_now_bytes()
            self.samples.append((time.perf_counter() - self._began, used))


def thinned(samples: Sequence[tuple[float, int]], held_bytes: int, points: int = POINTS) -> list[list[float]]:
    """Returns at most `points` pairs of seconds and bytes above `held_bytes`: the highest of each stretch of time."""
    every = -(-len(samples) // points)
    stretches = [samples[first : first + every] for first in range(0, len(samples), every)] if samples else []
    highest = (max(stretch, key=lambda sample: sample[1]) for stretch in stretches)
    return [[round(seconds, 4), max(used - held_bytes, 0)] for seconds, used in highest]
