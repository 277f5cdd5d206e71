"""The learning rate's end points, written out."""

import math

import pytest

from lowmem.errors import InputError
from lowmem.run.learning_rate import Course, course_of, longer, warmup_updates


def rates(schedule: str, updates: int, warmup: int) -> list[float]:
    return [Course(8.0, schedule, updates, warmup, warmup).rate(update) for update in range(updates)]


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
        rate = Course(8.0, schedule, 10, 2, 2).rate(update)
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


def identity(steps: int, schedule: str, lr: float = 8.0, warmup: float = 0.2) -> dict:
    return {"steps": steps, "schedule": schedule, "lr": lr, "warmup_steps": warmup}


def saved(run: dict, updates: int) -> dict:
    return {"identity": run, "updates": updates}


def test_a_longer_run_goes_on_where_the_rate_was_and_keeps_its_warm_up():
    before = saved(identity(10, "constant"), 10)
    assert course_of(identity(1000, "constant"), before).rate(10) == 8  # 200 of 1000 steps would warm up otherwise
    falling = course_of(identity(20, "linear"), before)
    assert [falling.rate(update) for update in (9, 10, 15, 19)] == pytest.approx([8, 8, 4, 0.8])
    after = {"identity": identity(20, "linear"), "updates": 15, "course": {"warmup_updates": 2, "decay_from": 10}}
    assert course_of(identity(20, "linear"), after) == falling  # stopped and started again


def test_what_a_longer_run_may_have_otherwise():
    constant, cosine = identity(10, "constant"), identity(10, "cosine")
    assert longer(constant, identity(10, "constant", lr=4.0)) == {} == longer(constant, identity(9, "constant"))
    assert longer(constant, identity(20, "cosine", lr=4.0)) == {"steps": 10, "schedule": "constant", "lr": 8.0}
    assert longer(cosine, identity(20, "constant")) == {"steps": 10, "schedule": "cosine", "lr": 8.0}
    undecided = {name: value for name, value in cosine.items() if name != "steps"}  # as --epochs leaves it
    assert longer(cosine, undecided) == {"steps": 10, "schedule": "cosine", "lr": 8.0}
    for schedule in ("cosine", "linear"):
        with pytest.raises(InputError, match="--schedule constant"):
            longer(cosine, identity(20, schedule))
