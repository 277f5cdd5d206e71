"""The plans for 1 to 64 cards: their table is that of the rows; a rank that is killed."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import pytest

from experiments.harness.planned_rows import planned
from experiments.harness.rows import read
from experiments.several_gpus import killed, scaling
from experiments.several_gpus.scaling import ROWS, Case


@dataclass(frozen=True)
class Interrupted:
    """A case whose process gets a Ctrl-C while it is planned."""

    name: str = "interrupted"

    def plan(self) -> dict:
        os.kill(os.getpid(), signal.SIGINT)
        return {}


def test_ctrl_c_ends_the_processes_that_plan():
    """Seen to fail: each went on with the next of 54 plans, and the command did not end."""
    with pytest.raises(BrokenProcessPool):
        list(ROWS._planned([Interrupted()], jobs=2))


def computing_seconds(row: dict) -> float:
    return row["predicted"]["step_seconds"] - row["seconds_waiting_for_copies"]


def sent_per_parameter(row: dict) -> float:
    """Weights twice, or once if they stay gathered, and gradients: (2 x 2 or 1 x 2) + 4, times (R - 1) / R. The ends of
    a model, 12% of Llama 3.2 3B, are always gathered once."""
    return (6 if row["choice"]["gathered"] else 8) * (1 - 1 / row["gpus"])


def test_each_of_more_cards_computes_for_a_shorter_time_and_sends_a_larger_share_of_the_model():
    """More cards may still be slower: all of them send through one machine's RAM."""
    rows = {row["name"]: row for row in ROWS.committed() if not row["error"] and row["batch"] == scaling.BATCH}
    assert len(rows) >= 20
    for row in rows.values():
        fewer = rows.get(Case(*row["name"].split(", ")[:1], row["card"], row["gpus"] // 2).name)
        if fewer is None:
            continue
        assert computing_seconds(row) < 0.7 * computing_seconds(fewer), row["name"]
        if fewer["gpus"] > 1:
            grown = sent_per_parameter(row) / sent_per_parameter(fewer)
            assert row["sent_bytes"] == pytest.approx(grown * fewer["sent_bytes"], rel=0.05)


@pytest.mark.exhaustive
def test_a_plan_that_does_not_fit_says_why_and_its_cell_says_no(monkeypatch):
    monkeypatch.setattr(scaling, "RAM_LIMIT", "1GiB")
    row = planned(Case("GPT-2-XL", "rtx3060", 2))
    assert "does not fit" in row["error"] and scaling._cell({"name": ""} | row, None) == "no"


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_at_a_drawn_moment_costs_no_bit(tmp_path):
    assert killed.main(["--kills", "1", "--seed", "4", "--rows", str(tmp_path / "rows.jsonl")]) == 0
    (row,) = read(tmp_path / "rows.jsonl")
    assert row["equal"] and row["killed"] and row["exit_code"] == 0
