"""Simulates a training step's copies between RAM, GPU and disk: moves simulated clocks instead of data.

Each direction of the bus, and the disk, makes one transfer after the other. An event is a point in simulated time. The
host's time to issue a copy (tens of microseconds) is not simulated. Nor are copies of memory that is not page-locked,
which do not overlap with computation.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from lowmem.core.transfers import Lane, MakeTensor, Pairs, Transfers
from lowmem.cudasim.clock import Clock

PAGE_CACHE_BYTES_PER_SECOND = 4e9  # copied by one thread
IN, OUT = "in", "out"  # the engines
ENGINES = dict.fromkeys((Lane.STATES_IN, Lane.WEIGHTS_IN, Lane.BOUNDARIES_IN), IN)
ENGINES |= dict.fromkeys((Lane.STATES_OUT, Lane.RAM_OUT), OUT)


class SimulatedTransfers(Transfers):
    """Simulates the time of copies between GPU, RAM and disk, without copying. `concurrent`: whether optimizer updates
    have their own CUDA stream. `host_buffer`: a function that allocates a buffer in RAM between disk and GPU; None: no
    disk."""

    def __init__(
        self, clock: Clock, in_bytes_per_second: float, out_bytes_per_second: float, *, concurrent: bool = False,
        disk_bytes_per_second: float = math.inf, host_buffer: MakeTensor | None = None,
    ):  # fmt: skip
        self.host_buffer = host_buffer
        self.exposed_seconds = 0.0  # in which the GPU was idle only because of copies
        self.busy_seconds = {IN: 0.0, OUT: 0.0}  # in which this direction of the bus copied
        self._clock, self._concurrent = clock, concurrent
        # of a bus that is busy in both directions (gpus.py), because states go in and out together nearly always
        self._rates = {IN: in_bytes_per_second, OUT: out_bytes_per_second}
        self._free = {IN: 0.0, OUT: 0.0}  # when each engine will have made the copies so far
        self._ready = dict.fromkeys(Lane, 0.0)  # when the events that each lane waits for have happened
        self._disk_rate, self._disk_free = disk_bytes_per_second, 0.0
        self._read: dict[int, float] = {}  # {id of a tensor: when it will be in the page cache}

    def copy(self, lane, pairs, *after):
        self.wait(lane, *after)
        engine = ENGINES[lane]
        seconds = _bytes_of(pairs) / self._rates[engine]
        # starts when the engine is free, the host has issued it, and all events that its lane waits for have happened
        self._free[engine] = max(self._free[engine], self._ready[lane], self._clock.host) + seconds
        self.busy_seconds[engine] += seconds
        return self._free[engine]

    def mark(self, lane):
        if lane in ENGINES:
            return self._free[ENGINES[lane]]
        return self._ready[lane] if self._is_own(lane) else self._clock.gpu

    def wait(self, lane, *events):
        until = max((event for event in events if event is not None), default=0.0)
        if lane in ENGINES or self._is_own(lane):
            self._ready[lane] = max(self._ready[lane], until)
            return
        idle_from = max(self._clock.gpu, self._clock.host)  # before that the GPU is busy, or waits for the host
        self.exposed_seconds += max(0.0, until - idle_from)
        if lane is Lane.HOST:
            self._clock.host = max(self._clock.host, until)
        else:
            self._clock.wait(until)

    @contextmanager
    def updating(self) -> Iterator[None]:
        launched, free = self._clock.host, max(self._clock.gpu, self._clock.host)
        yield
        # Concurrent updates still delay other kernels by all of their time, because they have moved the GPU's clock.
        self._ready[Lane.UPDATES] = max(self._ready[Lane.UPDATES], launched) + self._clock.gpu - free

    def synchronize(self):
        self._clock.host = max(self._clock.host, *self._free.values())

    def read_ahead(self, places):
        places = list(places)
        self._read[id(places[0])] = self._use_disk(sum(place.nbytes for place in places))

    def read(self, pairs):
        # The host waits for pages that were read ahead, and copies them from the page cache.
        self.wait(Lane.HOST, self._read.pop(id(pairs[0][1]), 0.0))
        self._copy_pages(pairs)

    def write(self, pairs):
        self._copy_pages(pairs)
        self._use_disk(_bytes_of(pairs))

    def _is_own(self, lane: Lane) -> bool:
        # Without a stream of their own, updates run on the lane COMPUTE.
        return lane is Lane.UPDATES and self._concurrent

    def _copy_pages(self, pairs: Pairs) -> None:
        self.wait(Lane.HOST, self._clock.host + _bytes_of(pairs) / PAGE_CACHE_BYTES_PER_SECOND)

    def _use_disk(self, size_bytes: int) -> float:
        self._disk_free = max(self._disk_free, self._clock.host) + size_bytes / self._disk_rate
        return self._disk_free


def _bytes_of(pairs: Pairs) -> int:
    return sum(destination.nbytes for destination, _ in pairs)
