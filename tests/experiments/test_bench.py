"""`make bench`: rows of one tree, or of two that take turns, and the tables of the rows. No duration is asserted."""

import json

import pytest

from experiments.bench import cases, run, table, threads
from experiments.harness import rows as row_file
from experiments.harness.options import exit_code_of


def test_no_case_lacks_a_row():
    assert {row["case"] for row in row_file.read(table.RESULTS)} == set(table.WHAT) == set(cases.CASES)
    timed = {(row["busy"], row["spin"]) for row in row_file.read(table.THREADS)}
    assert timed == {(busy, spin) for busy in threads.BUSY for spin in threads.SPIN_COUNTS}


@pytest.mark.exhaustive
def test_threads_wait_as_asked_next_to_other_processes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["--busy", "1", "--spin", "0", "lowmem", "--steps", "3", "--rounds", "1"]
    assert threads.main([*options, "--out", str(out)]) == 0
    rows = row_file.read(out)
    assert [(row["busy"], row["spin"], row["steps"]) for row in rows] == [(1, "0", 1), (1, "lowmem", 1)]
    assert all(row["step_seconds"] > 0 for row in rows) and capsys.readouterr().out.count("1 other processes") == 2


def test_two_trees_are_timed_by_turns_and_the_least_counts(tmp_path, monkeypatch, capsys):
    asked, seconds = [], iter([5.0, 4.0, 3.0, 8.0, 2.0, 1.0])

    def in_tree(case, tree):
        asked.append((case, tree))
        return {"cpu_seconds": next(seconds), "wall_seconds": 9.0}

    before = tmp_path / "tree"
    monkeypatch.setattr(run, "in_tree", in_tree)
    monkeypatch.setattr(run, "unpacked", lambda commit, folder: before)
    monkeypatch.setattr(run, "named", lambda commit: f"<{commit}>")
    out = tmp_path / "rows.jsonl"
    assert run.main(["--only", "plan large", "--before", "old", "--rounds", "2", "--out", str(out)]) == 0
    (row,) = row_file.read(out)
    assert asked == [("plan large", run.ROOT), ("plan large", before)] * 2
    assert (row["after"]["cpu_seconds"], row["before"]["cpu_seconds"]) == (3.0, 4.0)
    assert row["before_commit"] == "<old>" and row["command"].endswith(f"--out {out.name}")
    assert "| plan GPT-2-Large for an rtx3060 | 0.75 | 1.00 | <old> |" in capsys.readouterr().out
    # a tree without the case is not asked for it
    assert run.main(["--only", "load", "--before", "old", "--rounds", "2", "--out", str(out)]) == 0
    assert "before" not in row_file.read(out)[1] and asked[4:] == [("load", run.ROOT)] * 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", cases.IN_PROCESS)
def test_a_case_does_its_work_and_the_plain_work(case, tmp_path, monkeypatch, capsys):
    """On the demo's model, whose step is a matter of milliseconds."""
    monkeypatch.setattr(cases, "MODEL", "gpt2-demo")
    monkeypatch.setattr(cases, "VOCABULARY", 257)
    monkeypatch.setattr(cases.sys, "argv", ["cases", case])
    assert cases.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.keys() == {
        *("cpu_seconds", "wall_seconds", "plain_cpu_seconds", "plain_wall_seconds", "amount", "unit")
    }  # fmt: skip
    assert found["amount"] > 0 and min(value for key, value in found.items() if key.endswith("seconds")) > 0


@pytest.mark.parametrize("pack, rows", [("sorted", cases.EXAMPLES), ("packed", cases.EXAMPLES * 3 // 4)])
def test_examples_of_many_lengths_are_laid_as_asked(pack, rows, tmp_path, monkeypatch):
    """They are compared with padded rows; all have the same labels to train."""
    asked = []
    monkeypatch.setattr(cases, "_made", lambda: (lambda batch, step, rate: asked.append(batch), None))
    ours, padded, tokens, unit = cases.IN_PROCESS[pack](tmp_path)
    ours(), padded()
    laid, plain = asked
    assert len(plain.labels) == cases.EXAMPLES and plain.lengths is None
    assert cases.EXAMPLES // 8 < len(laid.labels) <= rows
    assert int(laid.lengths.sum()) == tokens < 0.8 * plain.labels.numel() and unit == "tokens"
    assert laid.trained_tokens == plain.trained_tokens > 0


def test_a_case_that_fails_is_an_error_in_a_sentence(tmp_path, monkeypatch, capsys):
    script = cases.PROCESSES["plan xl"][0]
    (tmp_path / script).write_text("raise SystemExit(3)")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    assert exit_code_of(lambda: run.main(["--only", "plan xl", "--out", str(tmp_path / "rows.jsonl")])) == 1
    sentence = capsys.readouterr().err
    assert sentence.startswith("error: Command ") and script in sentence and sentence.count("\n") == 1
    (tmp_path / script).write_text("")
    assert cases.whole_process("plan xl", tmp_path)["ram_peak_bytes"] > 2**20
