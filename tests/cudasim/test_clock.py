"""The clocks against numbers worked out by hand, one operation at a time, and a simulation written another way."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.core.offload import AHEAD
from lowmem.cudasim.clock import NOTHING, SYNCHRONIZE, Clock, SimulatedCopies, Span

SECONDS = st.one_of(st.just(0.0), st.floats(0.0, 10.0, allow_subnormal=False))
OPERATIONS = st.lists(st.one_of(st.tuples(SECONDS, SECONDS), st.none()), max_size=12)  # None: the host waits
SOME_TESTS = settings(max_examples=200, deadline=None, derandomize=True)


def clock_at(host: float, gpu: float) -> Clock:
    clock = Clock()
    clock.host, clock.gpu = host, gpu
    return clock


def composed(operations) -> Span:
    span = NOTHING
    for operation in operations:
        span = span.then(SYNCHRONIZE if operation is None else Span.of_operation(*operation))
    return span


def approximately(span: Span):
    return pytest.approx((span.host, span.gpu, span.lead, span.wait), abs=1e-9)


# --- spans ---


def test_a_gpu_that_lags_hides_the_launch_and_one_that_waits_shows_it():
    lagging, waiting = clock_at(0, 10), clock_at(0, 0)
    for clock in (lagging, waiting):
        clock.advance(Span.of_operation(1, 4))
    assert (lagging.host, lagging.gpu) == (1, 14)
    assert (waiting.host, waiting.gpu) == (1, 5)


def test_three_operations_by_hand():
    # launched at 2, 3, 6; the first two run 2..7 and 7..8, the third waits for its launch and runs 8..13, or from an
    # idle GPU: 2..7, 7..8, 8..13. With a GPU busy until 20: 20..25..26..31.
    span = composed([(2, 5), (1, 1), (3, 5)])
    assert span == Span(6, 11, 13)
    clock = clock_at(0, 20)
    clock.advance(span)
    assert (clock.host, clock.gpu) == (6, 31)


def test_slow_launches_leave_gaps_on_the_gpu():
    assert composed([(3, 1), (3, 1)]) == Span(6, 2, 7)  # kernels 3..4 and 6..7


def test_views_do_not_make_the_gpu_wait_for_the_host():
    clock = clock_at(5, 1)
    clock.advance(composed([(2, 0), (3, 0)]))
    assert (clock.host, clock.gpu) == (10, 1)
    assert composed([(2, 0), (1, 4), (7, 0)]) == Span(10, 4, 7)  # the kernel runs 3..7, the last view delays nothing


def test_synchronize_moves_the_host_only_forward():
    clock = clock_at(3, 8)
    clock.advance(SYNCHRONIZE)
    assert (clock.host, clock.gpu) == (8, 8)
    clock = clock_at(9, 8)
    clock.advance(SYNCHRONIZE)
    assert (clock.host, clock.gpu) == (9, 8)


def test_wait_moves_the_gpu_only_forward():
    clock = clock_at(0, 8)
    clock.wait(5)
    assert (clock.host, clock.gpu) == (0, 8)
    clock.wait(11)
    assert (clock.host, clock.gpu) == (0, 11)


@SOME_TESTS
@given(SECONDS, SECONDS, OPERATIONS)
def test_a_composed_span_moves_the_clocks_as_its_operations_one_by_one(host, gpu, operations):
    clock = clock_at(host, gpu)
    clock.advance(composed(operations))
    for operation in operations:  # the module's first equations
        if operation is None:
            host = max(host, gpu)
            continue
        launch, kernel = operation
        host = host + launch
        if kernel > 0:
            gpu = max(gpu, host) + kernel
    assert (clock.host, clock.gpu) == pytest.approx((host, gpu), abs=1e-9)


@SOME_TESTS
@given(OPERATIONS, OPERATIONS, OPERATIONS)
def test_composition_is_associative_and_nothing_is_its_identity(first, second, third):
    a, b, c = composed(first), composed(second), composed(third)
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert (left.host, left.gpu, left.lead, left.wait) == approximately(right)
    assert NOTHING.then(a) == a == a.then(NOTHING)


# --- copies ---


def state_of(size_bytes: int):
    return {"m": torch.empty(size_bytes - size_bytes // 2, dtype=torch.uint8, device="meta")} | {
        "v": torch.empty(size_bytes // 2, dtype=torch.uint8, device="meta")
    }


def test_a_ring_by_hand():
    clock = Clock()
    copies = SimulatedCopies(clock, in_bytes_per_second=10, out_bytes_per_second=5)
    piece = state_of(20)  # 2 s in, 4 s out
    for slot in range(3):
        copies.fetch(slot, piece, piece)  # in: 0..2, 2..4, 4..6
    copies.wait_fetched(0)
    assert (clock.host, clock.gpu, copies.exposed_seconds) == (0, 2, 2)
    clock.advance(Span.of_operation(1, 3))  # GPU 2..5
    copies.write_back(0, piece, piece)  # out: 5..9
    copies.fetch(0, piece, piece)  # in: 9..11, though free from 6
    copies.wait_fetched(1)  # there since 4
    assert (clock.gpu, copies.exposed_seconds) == (5, 2)
    clock.advance(Span.of_operation(1, 3))  # GPU 5..8
    copies.write_back(1, piece, piece)  # out: 9..13, queued behind the first
    copies.wait_fetched(2)
    clock.advance(Span.of_operation(1, 0.5))  # GPU 8..8.5
    copies.wait_fetched(0)  # 11
    assert (clock.host, clock.gpu, copies.exposed_seconds) == (3, 11, 4.5)
    assert (copies.in_busy_seconds, copies.out_busy_seconds) == (8, 8)
    copies.synchronize()
    assert (clock.host, clock.gpu) == (13, 11)


def test_updates_beside_what_computes_free_their_slots_early_and_still_take_their_time_of_the_gpu():
    piece, ends = state_of(10), {}
    for beside in (False, True):
        clock = Clock()
        copies = SimulatedCopies(clock, 10, 10, beside)  # 1 s each way
        copies.wait_for_compute()
        copies.fetch(0, piece, piece)  # in: 0..1
        copies.fetch(1, piece, piece)  # in: 1..2
        clock.advance(Span.of_operation(0, 5))  # a forward pass that needs no update, GPU 0..5
        copies.wait_fetched(0)
        with copies.updating():
            clock.advance(Span.of_operation(0, 0.5))  # beside: 1..1.5; else 5..5.5
        copies.write_back(0, piece, piece)  # beside: 1.5..2.5; else 5.5..6.5
        copies.fetch(0, piece, piece)  # beside: 2.5..3.5; else 6.5..7.5
        copies.hold_compute()
        assert (clock.gpu, copies.exposed_seconds) == (5.5, 0)
        copies.wait_fetched(0)
        copies.hold_compute()
        ends[beside] = clock.gpu, copies.exposed_seconds
    assert ends == {False: (7.5, 2), True: (5.5, 0)}


def test_an_update_beside_what_computes_is_waited_for_where_its_weights_are_needed():
    clock = Clock()
    copies = SimulatedCopies(clock, 10, 10, True)
    copies.fetch(0, state_of(30), {})  # 0..3
    copies.wait_fetched(0)
    with copies.updating():
        clock.advance(Span.of_operation(0, 0.5))
    copies.hold_compute()
    assert (clock.gpu, copies.exposed_seconds) == (3.5, 3)


def test_no_copy_starts_before_it_is_issued():
    clock = clock_at(7, 1)
    copies = SimulatedCopies(clock, 10, 10)
    piece = state_of(10)
    copies.fetch(0, piece, piece)  # 7..8
    copies.wait_fetched(0)
    assert (clock.gpu, copies.exposed_seconds) == (8, 1)  # 1..7 the GPU had waited for the host
    clock.host = 20
    copies.write_back(0, piece, piece)  # 20..21
    copies.synchronize()
    assert clock.host == 21


def test_the_first_fetch_waits_for_kernels_that_may_still_use_the_slots():
    clock = clock_at(0, 6)
    copies = SimulatedCopies(clock, 10, 10)
    copies.fetch(0, state_of(10), {})
    copies.wait_fetched(0)
    assert clock.gpu == 7


def test_a_slot_never_fetched_is_no_obstacle():
    clock = clock_at(1, 2)
    SimulatedCopies(clock, 10, 10).wait_fetched(2)
    assert clock.gpu == 2


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


@pytest.mark.parametrize("seed", range(40))
def test_a_pass_over_pieces_takes_as_long_as_streams_and_events_run_tick_by_tick(seed):
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
    copies = SimulatedCopies(clock, 60 / in_seconds, 60 / out_seconds)
    streams.command("compute", int(clock.host), event="before")
    streams.command("in", int(clock.host), after=["before"])
    fetched: dict[int, str] = {}
    issued = 0
    for used, size in enumerate(sizes):
        while issued < min(used + slots, len(sizes)):  # as StagingRing.pass_over does
            slot = issued % slots
            copies.fetch(slot, state_of(sizes[issued]), {})
            fetched[slot] = event()
            after = [written[slot]] if slot in written else []
            streams.command("in", int(clock.host), sizes[issued] // 60 * in_seconds, after)
            streams.command("in", int(clock.host), event=fetched[slot])
            issued += 1
        slot = used % slots
        copies.wait_fetched(slot)
        streams.command("compute", int(clock.host), after=[fetched[slot]])
        for _ in range(draw.randint(1, 3)):
            kernel(draw.randint(0, 4), draw.randint(1, 6))
        computed, written[slot] = event(), event()
        streams.command("compute", int(clock.host), event=computed)
        copies.write_back(slot, {}, state_of(size))
        streams.command("out", int(clock.host), size // 60 * out_seconds, [computed])
        streams.command("out", int(clock.host), event=written[slot])
    streams.command("compute", int(clock.host), event="the end")
    streams.run()

    assert max(clock.gpu, clock.host) == pytest.approx(streams.done["the end"])
    before = clock.host
    copies.synchronize()
    arrived = max(streams.done[name] for name in (*fetched.values(), *written.values()))
    assert clock.host == pytest.approx(max(before, arrived))
    assert copies.in_busy_seconds == pytest.approx(streams.busy["in"])
    assert copies.out_busy_seconds == pytest.approx(streams.busy["out"])
    assert 0 <= copies.exposed_seconds <= streams.done["the end"] - streams.busy["compute"]


def test_copies_in_the_shade_of_computation_are_not_exposed():
    clock = Clock()
    copies = SimulatedCopies(clock, 10, 10)
    for used in range(10):
        copies.fetch(used % 3, state_of(10), {})
        clock.advance(Span.of_operation(0.1, 2))
        copies.wait_fetched(used % 3)
        clock.advance(Span.of_operation(0.1, 1))
        copies.write_back(used % 3, {}, state_of(10))
    assert copies.exposed_seconds == 0
    assert clock.gpu == pytest.approx(30.1)


def test_the_lead_of_nothing_is_never_reached():
    assert NOTHING.lead == -math.inf
    clock = clock_at(1e9, 0)
    clock.advance(NOTHING)
    assert (clock.host, clock.gpu) == (1e9, 0)
