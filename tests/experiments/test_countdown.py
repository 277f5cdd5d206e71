"""A command of many cases says how far it is."""

import pytest

from experiments.harness import countdown
from experiments.harness.countdown import Countdown, span


def test_durations_are_said_in_the_unit_that_suits_them():
    assert [span(seconds) for seconds in (0, 89, 150, 5399, 14_040)] == ["0 s", "89 s", "2.5 min", "90.0 min", "3.9 h"]


def test_the_rest_is_told_by_the_pace_of_what_is_done(monkeypatch, capsys):
    clock = iter([0.0, 20.0, 20.0, 60.0])  # the first case takes twice as long as expected
    monkeypatch.setattr(countdown.time, "perf_counter", lambda: next(clock))
    told = Countdown({"one": 10, "two": 30}, every_seconds=100)
    told.announce()
    for name in ("one", "two"):
        with told.case(name):
            pass
    assert capsys.readouterr().err.splitlines() == [
        "2 to do, about 40 s", "1 of 2: one, about 40 s left", "2 of 2: two, about 60 s left",
    ]  # fmt: skip


def test_where_nobody_knows_how_long_cases_take_no_rest_is_told(capsys):
    """Seen to fail: "about 0 s left" for ten minutes."""
    told = Countdown({"one": 0.0, "two": 0.0}, every_seconds=100)
    with told.case("one"):
        pass
    with told.case("two"):
        pass
    assert capsys.readouterr().err.splitlines() == ["1 of 2: one", "2 of 2: two"]


def test_a_case_that_runs_on_is_told_again_and_one_that_fails_leaves_no_thread(capsys):
    told = Countdown({"one": 10}, every_seconds=0.001)
    with pytest.raises(ValueError), told.case("one"):
        while "so far" not in capsys.readouterr().err:
            pass
        raise ValueError
    capsys.readouterr()
    assert not any("repeat" in thread.name for thread in countdown.threading.enumerate())
