"""The clocks against numbers worked out by hand, and one operation at a time."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.cudasim.clock import NOTHING, SYNCHRONIZE, Clock, Span

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


def test_the_lead_of_nothing_is_never_reached():
    assert NOTHING.lead == -math.inf
    clock = clock_at(1e9, 0)
    clock.advance(NOTHING)
    assert (clock.host, clock.gpu) == (1e9, 0)
