"""Simulated time: the host's clock and the GPU's.

PyTorch launches a kernel and goes on. So an operation that costs the host c seconds and then the GPU t > 0 seconds
moves the host's clock h, and the GPU's clock g when all launched work is done, to

    h' = h + c
    g' = max(g, h') + t                        the kernel waits for its launch and for the kernels before it

An operation without a kernel (a view) moves h alone. Reading a number back makes the host wait: h' = max(h, g). Such
maps are linear over (max, +), so they compose. The effect of a region of operations on both clocks is four numbers:

    h' = max(h + host, g + wait)
    g' = max(h + lead, g + gpu)                lead: when an idle GPU would be done, from the region's start on the host

A region is therefore recorded once and replayed in constant time (Baccelli et al., Synchronization and Linearity,
1992). Left out: several compute streams, and a full launch queue. CUDA holds about 1,024 launches; the host is ahead by
then.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

State = dict[str, Tensor]
PAGE_CACHE_BYTES_PER_SECOND = 4e9  # what one thread copies to it or from it


@dataclass(frozen=True)
class Span:
    """A region's effect on the clocks, in seconds: see the module's docstring."""

    host: float
    gpu: float
    lead: float
    wait: float = -math.inf

    @staticmethod
    def of_operation(host: float, gpu: float) -> "Span":
        """`host` seconds on the host, then `gpu` seconds on the GPU; `gpu` 0 means that no kernel is launched."""
        return Span(host, gpu, host + gpu if gpu > 0 else -math.inf)

    def then(self, other: "Span") -> "Span":
        """This region followed by `other`."""
        return Span(
            host=max(self.host + other.host, self.lead + other.wait),
            gpu=max(self.gpu + other.gpu, self.wait + other.lead),
            lead=max(self.lead + other.gpu, self.host + other.lead),
            wait=max(self.wait + other.host, self.gpu + other.wait),
        )


NOTHING = Span(0.0, 0.0, -math.inf)
SYNCHRONIZE = Span(0.0, 0.0, -math.inf, wait=0.0)  # the host waits for the GPU, as `.item()` makes it do


class Clock:
    """`host`: now; `gpu`: when everything launched on the compute stream so far will be done. Seconds."""

    def __init__(self):
        self.host = 0.0
        self.gpu = 0.0

    def advance(self, span: Span) -> None:
        """Runs a region."""
        self.host, self.gpu = (
            max(self.host + span.host, self.gpu + span.wait),
            max(self.gpu + span.gpu, self.host + span.lead),
        )

    def wait(self, until: float) -> None:
        """The compute stream waits until a point in time; the host does not."""
        self.gpu = max(self.gpu, until)


class SimulatedCopies:
    """Takes the place of the transfers of offload.py's ring: moves clocks, no data.

    Two streams, one per direction, each a queue that is worked off in order, and a third for updates if these run
    `beside` what computes. What a copy waits for is what the streams and events of `_CudaCopies` make it wait for: its
    stream's earlier copies, its own issue by the host, and

        fetch        the last write-back of its slot, and what had left when its pass began
        weights      all that was launched on the compute stream so far, and all write-backs so far
        boundaries   all that was launched on the compute stream so far; gradients on their way to RAM, too
        write_back   all updates launched so far; on the compute stream also what was launched there before them

    An update beside what computes takes its time of the GPU from that all the same.

    What is on a disk passes through RAM (disk.py), which holds up the host: for what is read ahead to have arrived, for
    the slot's copies and updates to be done, and for copying to and from the page cache. The disk does one thing after
    the other, reading what was asked for and writing what was left to it.

    The rates are those reached while both directions are at work (gpus.py): the ring reads and writes the same bytes,
    so they are at work together nearly always. Left out: what issuing a copy costs the host (tens of microseconds
    beside milliseconds of copying), and memory that is not page-locked, whose copies do not overlap.

    `exposed_seconds`: how long the compute stream stood still for copies and for nothing else; `in_busy_seconds` and
    `out_busy_seconds`: how long each engine copied.
    """

    def __init__(
        self, clock: Clock, in_bytes_per_second: float, out_bytes_per_second: float, beside: bool = False,
        disk_bytes_per_second: float = math.inf,
    ):  # fmt: skip
        self._clock, self._beside = clock, beside
        self._stream_free = self._updated = 0.0  # the updates' stream, if they run beside; when the last one is done
        self._in_rate, self._out_rate = in_bytes_per_second, out_bytes_per_second
        self._in_free, self._out_free = clock.gpu, 0.0  # the slots' memory may still be in use by kernels issued before
        self._fetched: dict[int, float] = {}  # by slot: when its last copy in is done
        self._written: dict[int, float] = {}  # by slot: when its last copy out is done
        self._brought: dict[int, float] = {}  # by slot of weights: when its last copy in is done
        self._left: dict[Hashable, float] = {}  # boundaries and gradients, by slot: when the last one is in RAM
        self._last_left = 0.0
        self._back: dict[int, float] = {}  # boundaries, by slot: when the last one has come back
        self._disk_rate, self._disk_free = disk_bytes_per_second, 0.0
        self._read: dict[int, float] = {}  # by what is on a disk: when it is in the page cache
        self._owed: dict[int, int] = {}  # by slot: bytes in its buffers that belong on the disk
        self.exposed_seconds = 0.0
        self.in_busy_seconds = 0.0
        self.out_busy_seconds = 0.0

    def read_ahead(self, home: State) -> None:
        self._read[_name_of(home)] = self._use_disk(_bytes_of(home))

    def fetch(self, slot: int, home: State, state: State, on_disk: Sequence[str] = ()) -> None:
        if on_disk:
            there = {name: home[name] for name in on_disk}
            self._hold_host(max(self._fetched.get(slot, 0.0), self._written.get(slot, 0.0)))
            owed = self._owed.pop(slot, 0)
            self._hold_host(self._clock.host + owed / PAGE_CACHE_BYTES_PER_SECOND)
            self._use_disk(owed)
            self._hold_host(self._read.pop(_name_of(there), 0.0))
            self._hold_host(self._clock.host + _bytes_of(there) / PAGE_CACHE_BYTES_PER_SECOND)
        seconds = _bytes_of(home) / self._in_rate
        start = max(self._in_free, self._written.get(slot, 0.0), self._clock.host)
        self._in_free = self._fetched[slot] = start + seconds
        self.in_busy_seconds += seconds

    def wait_fetched(self, slot: int) -> None:
        arrival = self._fetched.get(slot, 0.0)
        if self._beside:
            self._stream_free = max(self._stream_free, arrival)
        else:
            self._hold_until(arrival)

    def fetch_weights(self, slot: int, home: State, weights: State) -> None:
        seconds = _bytes_of(home) / self._in_rate
        start = max(self._in_free, self._out_free, self._clock.gpu, self._clock.host)
        self._in_free = self._brought[slot] = start + seconds
        self.in_busy_seconds += seconds

    def wait_weights(self, slot: int) -> None:
        self._hold_until(self._brought[slot])

    def leave(self, slot: Hashable, tensor: Tensor, home: Tensor) -> None:
        seconds = tensor.nbytes / self._out_rate
        start = max(self._out_free, self._clock.gpu, self._clock.host)
        self._out_free = self._last_left = self._left[slot] = start + seconds
        self.out_busy_seconds += seconds

    def wait_left(self, slot: Hashable) -> None:
        self._hold_until(self._left[slot])

    def fetch_what_left(self) -> None:
        self._in_free = max(self._in_free, self._last_left)

    def come_back(self, slot: int, home: Tensor, tensor: Tensor) -> None:
        seconds = tensor.nbytes / self._in_rate
        start = max(self._in_free, self._clock.gpu, self._clock.host)
        self._in_free = self._back[slot] = start + seconds
        self.in_busy_seconds += seconds

    def wait_back(self, slot: int) -> None:
        self._hold_until(self._back[slot])

    @contextmanager
    def updating(self) -> Iterator[None]:
        launched, free = self._clock.host, max(self._clock.gpu, self._clock.host)
        yield
        self._updated = self._stream_free = max(self._stream_free, launched) + self._clock.gpu - free

    def wait_for_compute(self) -> None:
        self._stream_free = max(self._stream_free, self._clock.gpu)

    def hold_compute(self) -> None:
        if self._beside:
            self._hold_until(self._updated)

    def _hold_until(self, arrival: float) -> None:
        idle_from = max(self._clock.gpu, self._clock.host)  # before that the GPU is busy, or waits for the host
        self.exposed_seconds += max(0.0, arrival - idle_from)
        self._clock.wait(arrival)

    def write_back(self, slot: int, state: State, home: State, on_disk: Sequence[str] = ()) -> None:
        if on_disk:
            self._owed[slot] = _bytes_of({name: home[name] for name in on_disk})
        seconds = _bytes_of(home) / self._out_rate
        start = max(self._out_free, self._stream_free if self._beside else self._clock.gpu, self._clock.host)
        self._out_free = self._written[slot] = start + seconds
        self.out_busy_seconds += seconds

    def synchronize(self) -> None:
        """The host waits for both streams, and writes what belongs on the disk to the page cache."""
        self._clock.host = max(self._clock.host, self._in_free, self._out_free)
        owed = sum(self._owed.values())
        self._clock.host += owed / PAGE_CACHE_BYTES_PER_SECOND
        self._use_disk(owed)
        self._owed.clear()

    def _hold_host(self, until: float) -> None:
        """The host waits, and then the GPU for the host, if it has nothing else to do."""
        idle_from = max(self._clock.gpu, self._clock.host)
        self.exposed_seconds += max(0.0, until - idle_from)
        self._clock.host = max(self._clock.host, until)

    def _use_disk(self, size_bytes: int) -> float:
        """When the disk will have read or written that much more."""
        self._disk_free = max(self._disk_free, self._clock.host) + size_bytes / self._disk_rate
        return self._disk_free


def _name_of(home: State) -> int:
    """Of what is on a disk: its first tensor's place, which no other has."""
    return id(next(iter(home.values())))


def _bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
