"""The learning rate's end points, written out."""

import math

import pytest

from lowmem.run.learning_rate import learning_rate, warmup_updates


def rates(schedule: str, updates: int, warmup: int) -> list[float]:
    return [
        learning_rate(update, peak=8.0, updates=updates, warmup_updates=warmup, schedule=schedule)
        for update in range(updates)
    ]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_in_equal_steps_to_the_peak_and_starts_above_zero(schedule):
    assert rates(schedule, 12, 4)[:5] == [2, 4, 6, 8, 8]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_without_warm_up_the_first_update_has_the_peak_rate(schedule):
    assert rates(schedule, 10, 0)[0] == 8


def test_linear_falls_in_equal_steps_and_its_last_update_still_moves():
    assert rates("linear", 6, 2) == [4, 8, 8, 6, 4, 2]


def test_cosine_passes_half_the_peak_midway_and_its_last_update_still_moves():
    after = rates("cosine", 10, 2)[2:]
    assert after[0] == 8
    assert after[4] == pytest.approx(4)
    assert after[2] == pytest.approx(4 * (1 + math.sqrt(0.5)))
    assert after[-1] == pytest.approx(4 * (1 + math.cos(math.pi * 7 / 8))) and after[-1] > 0
    assert after == sorted(after, reverse=True)


def test_constant_stays_at_the_peak():
    assert rates("constant", 5, 2) == [4, 8, 8, 8, 8]


@pytest.mark.parametrize(("schedule", "end"), [("cosine", 0), ("linear", 0), ("constant", 8)])
def test_beyond_the_last_update_the_rate_stays_at_its_end(schedule, end):
    for update in (10, 11, 1000):
        rate = learning_rate(update, peak=8.0, updates=10, warmup_updates=2, schedule=schedule)
        assert rate == pytest.approx(end, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warm_up_as_long_as_the_run_or_longer_only_rises(schedule):
    assert rates(schedule, 4, 4) == [2, 4, 6, 8]
    assert rates(schedule, 2, 4) == [2, 4]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_of_one_update_has_the_peak_rate(schedule):
    assert rates(schedule, 1, 0) == rates(schedule, 1, 1) == [8]


@pytest.mark.parametrize(
    ("warmup", "updates", "expected"),
    [(0, 100, 0), (0.1, 100, 10), (0.05, 30, 2), (0.001, 100, 1), (1, 100, 1), (250, 100, 250)],
)
def test_a_warm_up_below_1_is_a_share_of_all_updates_rounded_up(warmup, updates, expected):
    assert warmup_updates(warmup, updates) == expected
