"""The clocks against numbers worked out by hand, and one operation at a time."""

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


def test_three_operations_by_hand():
    # launched at 2, 3, 6; the first two run 2..7 and 7..8, the third waits for its launch and runs 8..13, or from an
    # idle GPU: 2..7, 7..8, 8..13. With a GPU busy until 20: 20..25..26..31.
    span = composed([(2, 5), (1, 1), (3, 5)])
    assert span == Span(6, 11, 13)
    clock = clock_at(0, 20)
    clock.advance(span)
    assert (clock.host, clock.gpu) == (6, 31)


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
