"""The clocks of a simulated step's copies against numbers worked out by hand, and a simulation written another way."""

import random

import pytest
import torch

from lowmem.core.transfers import Lane
from lowmem.core.window import AHEAD, Window
from lowmem.cudasim.clock import Clock, Span
from lowmem.planning.simulated_transfers import IN, OUT, SimulatedTransfers


def pairs_of(size_bytes: int):
    halves = size_bytes - size_bytes // 2, size_bytes // 2
    return [(torch.empty(size, dtype=torch.uint8, device="meta"),) * 2 for size in halves]


class Ring(Window):
    """Three slots of states, by number."""

    def __init__(self, clock: Clock, *rates: float, concurrent: bool = False):
        super().__init__(
            SimulatedTransfers(clock, *rates, concurrent=concurrent), Lane.STATES_IN, Lane.STATES_OUT, user=Lane.UPDATES
        )
        self.slots = [self.slot({}) for _ in range(AHEAD + 1)]

    def fetch(self, slot: int, size_bytes: int) -> None:
        super().fetch(self.slots[slot], pairs_of(size_bytes))

    def use(self, slot: int) -> None:
        super().use(self.slots[slot])

    def send(self, slot: int, size_bytes: int) -> None:
        super().send(self.slots[slot], pairs_of(size_bytes))

    def hold_compute(self) -> None:
        self.transfers.wait(Lane.COMPUTE, self.transfers.mark(Lane.UPDATES))


def test_a_ring_by_hand():
    clock = Clock()
    ring = Ring(clock, 10, 5)
    piece = 20  # 2 s in, 4 s out
    for slot in range(3):
        ring.fetch(slot, piece)  # in: 0..2, 2..4, 4..6
    ring.use(0)
    assert (clock.host, clock.gpu, ring.transfers.exposed_seconds) == (0, 2, 2)
    clock.advance(Span.of_operation(1, 3))  # GPU 2..5
    ring.send(0, piece)  # out: 5..9
    ring.fetch(0, piece)  # in: 9..11, though free from 6
    ring.use(1)  # there since 4
    assert (clock.gpu, ring.transfers.exposed_seconds) == (5, 2)
    clock.advance(Span.of_operation(1, 3))  # GPU 5..8
    ring.send(1, piece)  # out: 9..13, queued behind the first
    ring.use(2)
    clock.advance(Span.of_operation(1, 0.5))  # GPU 8..8.5
    ring.use(0)  # 11
    assert (clock.host, clock.gpu, ring.transfers.exposed_seconds) == (3, 11, 4.5)
    assert (ring.transfers.busy_seconds[IN], ring.transfers.busy_seconds[OUT]) == (8, 8)
    ring.transfers.synchronize()
    assert (clock.host, clock.gpu) == (13, 11)


def test_updates_beside_what_computes_free_their_slots_early_and_still_take_their_time_of_the_gpu():
    piece, ends = 10, {}
    for beside in (False, True):
        clock = Clock()
        ring = Ring(clock, 10, 10, concurrent=beside)  # 1 s each way
        ring.transfers.wait(Lane.UPDATES, ring.transfers.mark(Lane.COMPUTE))
        ring.fetch(0, piece)  # in: 0..1
        ring.fetch(1, piece)  # in: 1..2
        clock.advance(Span.of_operation(0, 5))  # a forward pass that needs no update, GPU 0..5
        ring.use(0)
        with ring.transfers.updating():
            clock.advance(Span.of_operation(0, 0.5))  # beside: 1..1.5; else 5..5.5
        ring.send(0, piece)  # beside: 1.5..2.5; else 5.5..6.5
        ring.fetch(0, piece)  # beside: 2.5..3.5; else 6.5..7.5
        ring.hold_compute()
        assert (clock.gpu, ring.transfers.exposed_seconds) == (5.5, 0)
        ring.use(0)
        ring.hold_compute()
        ends[beside] = clock.gpu, ring.transfers.exposed_seconds
    assert ends == {False: (7.5, 2), True: (5.5, 0)}


def test_an_update_beside_what_computes_is_waited_for_where_its_weights_are_needed():
    clock = Clock()
    ring = Ring(clock, 10, 10, concurrent=True)
    ring.fetch(0, 30)  # 0..3
    ring.use(0)
    with ring.transfers.updating():
        clock.advance(Span.of_operation(0, 0.5))
    ring.hold_compute()
    assert (clock.gpu, ring.transfers.exposed_seconds) == (3.5, 3)


def test_a_disk_reads_ahead_and_writes_late_one_after_the_other():
    """The disk makes 1 GB/s, and the host 4 GB/s between page cache and buffer. The host does not wait for writes."""
    clock, gb = Clock(), 10**9
    transfers = SimulatedTransfers(clock, 1e9, 1e9, disk_bytes_per_second=1e9)
    places = [place(size * gb) for size in (4, 8, 4)]
    transfers.read_ahead(places[:1])  # 0..4
    transfers.read_ahead(places[1:2])  # 4..12
    transfers.read([(place(4 * gb), places[0])])
    assert (clock.host, transfers.exposed_seconds) == (5, 4 + 1)  # there at 4, and copied
    clock.host = 20
    transfers.read([(place(8 * gb), places[1])])
    assert clock.host == 22  # there since 12, only copied
    transfers.write([(places[0], place(4 * gb))])
    assert clock.host == 23  # copied; the disk writes 23..27
    transfers.read_ahead(places[2:])  # 27..31
    transfers.read([(place(4 * gb), places[2])])
    assert clock.host == 32


def test_several_events_are_all_waited_for():
    clock = Clock()
    transfers = SimulatedTransfers(clock, 10, 10)
    transfers.wait(Lane.COMPUTE, 3.0, None, 7.0, 5.0)
    assert clock.gpu == 7
    transfers.wait(Lane.HOST, 2.0)
    transfers.wait(Lane.HOST, 6.0, 1.0)
    transfers.wait(Lane.HOST, 4.0)  # long ago
    assert clock.host == 6


def place(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="meta")


class Streams:
    """The same thing the way CUDA does it: streams as queues of commands, tick by tick, events that fire when reached.

    Whole seconds throughout, so that every tick is exact.
    """

    def __init__(self):
        self.queues = {"compute": [], "in": [], "out": []}
        self.done: dict[str, int] = {}  # event -> the tick at which it fired
        self.busy: dict[str, int] = dict.fromkeys(self.queues, 0)

    def command(self, stream: str, issued: int, seconds: int = 0, after=(), event: str | None = None):
        self.queues[stream].append([issued, seconds, tuple(after), event])

    def run(self) -> None:
        now = 0
        while any(self.queues.values()):
            progress = True
            while progress:  # everything that takes no time happens within the tick
                progress = False
                for queue in self.queues.values():
                    if queue and queue[0][0] <= now and all(name in self.done for name in queue[0][2]):
                        if queue[0][1] == 0:
                            name = queue.pop(0)[3]
                            if name is not None:
                                self.done[name] = now
                            progress = True
            for stream, queue in self.queues.items():
                if queue and queue[0][0] <= now and all(name in self.done for name in queue[0][2]):
                    queue[0][1] -= 1
                    self.busy[stream] += 1
            now += 1


@pytest.mark.quick(10)
@pytest.mark.parametrize("seed", range(40))
def test_a_pass_over_pieces_takes_as_long_as_streams_run_tick_by_tick(seed):
    draw = random.Random(seed)
    slots, clock, streams = AHEAD + 1, Clock(), Streams()
    in_seconds, out_seconds = draw.randint(1, 4), draw.randint(1, 4)
    sizes = [60 * draw.randint(1, 3) for _ in range(draw.randint(1, 9))]
    written: dict[int, str] = {}
    number = 0

    def kernel(launch: int, seconds: int):
        clock.advance(Span.of_operation(launch, seconds))
        streams.command("compute", int(clock.host), seconds)

    def event() -> str:
        nonlocal number
        number += 1
        return f"event {number}"

    kernel(draw.randint(0, 3), draw.randint(1, 9))
    ring = Ring(clock, 60 / in_seconds, 60 / out_seconds)
    streams.command("compute", int(clock.host), event="before")
    streams.command("in", int(clock.host), after=["before"])
    fetched: dict[int, str] = {}
    issued = 0
    for used, size in enumerate(sizes):
        while issued < min(used + slots, len(sizes)):  # as StateWindow.take does
            slot = issued % slots
            ring.fetch(slot, sizes[issued])
            fetched[slot] = event()
            after = [written[slot]] if slot in written else []
            streams.command("in", int(clock.host), sizes[issued] // 60 * in_seconds, after)
            streams.command("in", int(clock.host), event=fetched[slot])
            issued += 1
        slot = used % slots
        ring.use(slot)
        streams.command("compute", int(clock.host), after=[fetched[slot]])
        for _ in range(draw.randint(1, 3)):
            kernel(draw.randint(0, 4), draw.randint(1, 6))
        computed, written[slot] = event(), event()
        streams.command("compute", int(clock.host), event=computed)
        ring.send(slot, size)
        streams.command("out", int(clock.host), size // 60 * out_seconds, [computed])
        streams.command("out", int(clock.host), event=written[slot])
    streams.command("compute", int(clock.host), event="the end")
    streams.run()

    assert max(clock.gpu, clock.host) == pytest.approx(streams.done["the end"])
    before = clock.host
    ring.transfers.synchronize()
    arrived = max(streams.done[name] for name in (*fetched.values(), *written.values()))
    assert clock.host == pytest.approx(max(before, arrived))
    assert ring.transfers.busy_seconds[IN] == pytest.approx(streams.busy["in"])
    assert ring.transfers.busy_seconds[OUT] == pytest.approx(streams.busy["out"])
    assert 0 <= ring.transfers.exposed_seconds <= streams.done["the end"] - streams.busy["compute"]
