"""Short runs of the programs that try at random, and README.md's tables of the long ones."""

import json
import os

import pytest

from experiments.harness import rows as row_file
from experiments.harness.tables import written
from runs import python
from tests.faults import table

FUZZED = {
    *("command", "plan-command", "txt", "py", "jsonl", "json", "csv", "config", "plan-config", "weights"),
    *("checkpoint", "settings"),
}


def rows(*arguments: str) -> list[dict]:
    """Returns the rows that a program prints; it must end with exit code 0."""
    run = python("-m", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.exhaustive
def test_a_run_that_is_killed_at_random_moments_loses_nothing(tmp_path):
    kept = tmp_path / "rows.jsonl"
    (row,) = rows("tests.faults.sigkill", "--kills", "3", "--real", "1", "--steps", "4", "--record", str(kept))
    assert row_file.read(kept) == [row] and {"commit", "sources", "versions", "machine", "date"} <= row.keys()
    assert row["command"] == "python -m tests.faults.sigkill --kills 3 --real 1 --steps 4"
    assert row["kills"] == 3 and row["runs"] >= 1 and row["of_the_script_itself"] == 1
    assert (row["lost"], row["wrong_exits"], row["different_runs"]) == (0, 0, 0)


@pytest.mark.exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk of its own")
def test_a_run_on_a_disk_that_fills_up_loses_nothing():
    """With a model whose checkpoints are too small to find no room."""
    (row,) = rows("tests.faults.full_disk", "--kills", "2", "--model", "gpt2-demo", "--steps", "3")
    assert row["kills"] == 2 and row["disk_filled"] >= 1
    assert (row["lost"], row["wrong_exits"], row["different_models"]) == (0, 0, 0)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_nothing_that_is_typed_or_read_ends_in_a_traceback():
    found = rows("tests.faults.fuzz", "--examples", "4")
    assert {row["kind"] for row in found} - {"parquet"} == FUZZED  # pyarrow is optional
    assert all(row["failed"] == 0 and row["examples"] > 0 for row in found)


def test_the_readme_says_what_the_rows_say():
    assert written(table.README, table.BEGIN) == table.tables(row_file.read(table.RESULTS))


def test_the_tables_show_the_last_row_of_each_program_kind_and_model():
    shared = {"machine": "2 CPU cores", "seconds": 9, "commit": "abc"}
    kill = {"kills": 7, "runs": 2, "while_saving": 3, "of_the_script_itself": 1, "lost": 0, "wrong_exits": 0}
    kill |= {"program": "sigkill", "command": "kill", "different_runs": 0, "steps_of_a_run": 6} | shared
    fuzz = {"program": "fuzz", "command": "fuzz", "kind": "csv", "examples": 5, "failed": 0} | shared
    save = {"program": "saving", "command": "save", "model": "small", "saved_bytes": 2**30, "ram_added_bytes": 2**20}
    save |= {"ram_of_training_bytes": 2**31, "share_of_ram_added": 0.0005, "save_seconds": 1, "plain_seconds": 4}
    save |= {"best_seconds": 0.8, "share_of_plain": 0.25, "share_of_best": 1.25, "each": [{}, {}]} | shared
    made = table.tables([
        kill, fuzz | {"exit_codes": {"1": 5}}, fuzz | {"kind": "txt", "exit_codes": {"2": 4, "failed": 1}, "failed": 1},
        save, fuzz | {"exit_codes": {"0": 2, "2": 3}}, kill | {"kills": 8, "lost": 1},
    ])  # fmt: skip
    assert "8 kills in 2 runs of 6 steps" in made and "1 lost" in made and "7 kills" not in made
    assert "small, 1.00 GiB a save: 1.00 MiB of RAM beside 2.00 GiB (0.050%); 1.0 s" in made
    assert "| 1 of 10 failed, commit abc |" in made
    assert "| csv | 5 | 2 | 3 | 0 |" in made and "| txt | 5 | 0 | 4 | 1 |" in made
    assert "no row yet" in table.tables([]) and "kind" not in table.tables([])
