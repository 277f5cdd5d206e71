"""Short runs of the two programs that try at random: sigkill.py and fuzz.py. Long ones are typed by hand."""

import json
import subprocess
import sys

import pytest
from runs import ROOT

FUZZED = {
    *("command", "plan-command", "txt", "py", "jsonl", "json", "csv", "config", "plan-config", "weights"),
    *("checkpoint", "settings"),
}


def rows(*arguments: str) -> list[dict]:
    """What a program prints; it must end with exit code 0."""
    run = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_run_that_is_killed_at_random_moments_loses_nothing():
    (row,) = rows("tests.faults.sigkill", "--kills", "5", "--real", "1", "--steps", "6")
    assert row["kills"] == 5 and row["runs"] >= 1 and row["of_the_script_itself"] == 1
    assert (row["lost"], row["wrong_exits"], row["different_runs"]) == (0, 0, 0)


@pytest.mark.timeout(600)
def test_nothing_that_is_typed_or_read_ends_in_a_traceback():
    found = rows("tests.faults.fuzz", "--examples", "4")
    assert {row["kind"] for row in found} - {"parquet"} == FUZZED  # pyarrow is optional
    assert all(row["failed"] == 0 and row["examples"] > 0 for row in found)
