"""The learning rate's end points, written out."""

import math

import pytest

from lowmem.errors import InputError
from lowmem.run.learning_rate import Course, course_of, longer, warmup_updates


def rates(schedule: str, updates: int, warmup: int) -> list[float]:
    return [Course(8.0, schedule, updates, warmup, warmup).rate(update) for update in range(updates)]


COSINE = [4 * (1 + math.cos(math.pi * eighths / 8)) for eighths in range(8)]  # its last update still moves
STARTS = [  # of every schedule: updates, warm-up, the first rates
    (12, 4, [2, 4, 6, 8, 8]),  # in equal steps to the peak, from above zero
    (10, 0, [8]),
    (4, 4, [2, 4, 6, 8]),
    (2, 4, [2, 4]),  # a warm-up longer than the run only rises
    *[(1, 0, [8]), (1, 1, [8])],
]


@pytest.mark.parametrize(("schedule", "updates", "warmup", "expected"), [
    ("linear", 6, 2, [4, 8, 8, 6, 4, 2]), ("cosine", 10, 2, [4, 8, *COSINE]), ("constant", 5, 2, [4, 8, 8, 8, 8]),
    *[(schedule, *start) for schedule in ("linear", "cosine", "constant") for start in STARTS],
])  # fmt: skip
def test_the_rate_rises_to_the_peak_and_then_follows_the_schedule(schedule, updates, warmup, expected):
    assert rates(schedule, updates, warmup)[: len(expected)] == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "end"), [("cosine", 0), ("linear", 0), ("constant", 8)])
def test_beyond_the_last_update_the_rate_stays_at_its_end(schedule, end):
    for update in (10, 11, 1000):
        rate = Course(8.0, schedule, 10, 2, 2).rate(update)
        assert rate == pytest.approx(end, abs=1e-12)


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
