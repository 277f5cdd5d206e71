"""Committed rows: no command of a README writes over them, unless --rows or --out names their place. The code predicts
a cheap cell of each table as its row says, and rows that are older than their sources are found.
"""

import argparse
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import rows
from experiments.bigger_models import plans, today
from experiments.gpu_acceptance import planned_levers, predicted
from experiments.harness import rows as row_file
from experiments.harness.models import MODELS
from experiments.harness.options import under_runs
from experiments.harness.planned_rows import planned
from experiments.harness.rows import ROOT
from experiments.memory_estimation import estimate
from experiments.memory_estimation import run as memory_estimation
from experiments.parallel_3d import measure as parallel_3d
from experiments.parallel_3d.table import by_theory
from experiments.peers import published
from experiments.several_gpus import scaling
from experiments.unified_memory import measure as unified_memory
from lowmem.cudasim.gpus import CARDS
from lowmem.run.identity import kernels_of
from lowmem.units import GIB

PAGES = [*ROOT.glob("experiments/**/README.md"), *ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "Makefile"]
# Of tables and pictures from committed rows, whose outputs are committed, too; and runs of the main scripts.
OTHERS = {"results", "table", "train_gptj", "train_t5"}
COMMANDS = sorted(
    name
    for page in PAGES
    for name in re.findall(r"-m (experiments(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    if name.rpartition(".")[2] not in OTHERS
)


class Read(Exception):
    """A command has read its options."""


@pytest.mark.parametrize("name", dict.fromkeys(COMMANDS))
def test_a_command_of_a_page_writes_under_runs(name, monkeypatch, tmp_path):
    """Seen to fail for twenty commands: who followed a README changed the rows, and `make test` failed."""
    found = {}

    def read(parser, *_, **__):
        found.update({action.dest: action.default for action in parser._actions})
        raise Read

    for method in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, read)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    main = getattr(module, "main", None) or importlib.import_module(f"{name}.__main__").main
    with pytest.raises(Read):
        main()
    for option, default in found.items():
        assert not isinstance(default, Path) or default.parts[0] == "runs", option
        assert option not in ("rows", "out") or not str(default).startswith(str(ROOT)), option


def test_rows_lie_under_runs_as_they_lie_under_experiments():
    results = ROOT / "experiments" / "peers" / "results"
    assert under_runs(results) == Path("runs/peers") and under_runs(results / "a.jsonl") == Path("runs/peers/a.jsonl")


# --- a cheap cell of each table of plans and schedules, predicted anew

WITHIN = 1e-3  # of a committed figure


def committed(path: Path, **cell) -> dict:
    """Returns the newest row of a cell."""
    return [row for row in row_file.read(path) if cell.items() <= row.items()][-1]


def as_committed(found: dict, row: dict, *names: str) -> None:
    assert {name: found[name] for name in names} == pytest.approx({name: row[name] for name in names}, rel=WITHIN)


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", ["lowmem", "fp32"])
def test_memory_estimation_predicts_what_its_row_says(method):
    config, card = MODELS["gpt2"].config(), CARDS["a100"]
    if method == "lowmem":
        found = estimate.lowmem_row(config, 512, 1, 16 * GIB, card)
    else:
        found = next(estimate.plain_rows(config, 512, method, card, 16 * GIB))
    path = memory_estimation.RESULTS / "rows.jsonl"
    row = committed(path, kind="predicted", model="gpt2", method=method, seq=512, batch=1)
    as_committed(found, row, "allocated_peak_bytes", "reserved_peak_bytes")


@pytest.mark.parametrize("program", [today, published, plans, scaling, planned_levers])
def test_every_case_has_a_committed_plan(program):
    rows = [row for row in program.ROWS.committed() if row.get("kind", "planned") == "planned"]
    assert {row["name"] for row in rows} == {case.name for case in program.CASES}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("program", "begins"), [
    (today, "GPT-2-Large, RTX 3090"), (published, ""), (plans, "gpt2, 24GiB"), (scaling, "GPT-2-XL, 4 x rtx3090"),
])  # fmt: skip
def test_a_committed_plan_is_that_of_today(program, begins):
    case = next(case for case in program.CASES if case.name.startswith(begins))
    found, row = planned(case), committed(program.ROWS.file, name=case.name)
    as_committed(found, row, *{"tokens_per_second", "sent_bytes"} & found.keys())
    as_committed(found.get("predicted", {}), row.get("predicted", {}), *row.get("predicted", {}))
    kernels = kernels_of(row["choice"]).names  # a row from when all kernels ran or none says True or False
    assert found["choice"] == row["choice"] | {"fused_kernels": kernels}


def test_gpu_acceptance_predicts_what_its_row_says():
    found = predicted.planned("gpt2-large", CARDS["rtx3060"], batch=1)
    row = committed(predicted.RESULTS / predicted.NAME, card="rtx3060", model="gpt2-large", batch=1)
    names = ("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "ram_peak_bytes", "step_seconds")
    as_committed(found.to_dict()["predicted"], row, *names)


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", ["without any", "all", "without norms", "without sums", "without rotary"])
def test_without_a_change_a_step_takes_what_its_row_says(way):
    """A step without a change takes longer than with all. If patching one had no effect, it would not."""
    rows = {row["name"]: row for row in planned_levers.ROWS.committed()}
    cases = {case.way: case for case in planned_levers.CASES if case.name.startswith("meta-llama/Llama-3.2-1B, h100")}
    found, with_all = planned(cases[way]), rows[cases["all"].name]["step_seconds"]
    as_committed(found, rows[cases[way].name], "step_seconds", "limit_seconds")
    assert way == "all" or found["step_seconds"] > 1.01 * with_all


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_mesh_holds_and_sends_what_theory_says_today(model):
    """What was measured, by the config and the mesh in the row's command line."""
    words = next(words for words in parallel_3d.CASES["mesh"] if f"{model} --pp 2 --dp 2 --tp 2" in words)
    row = committed(parallel_3d.ROWS, section="mesh", options=words)
    theory = by_theory(row)
    for name in ("parameters", "gradients", "moments"):
        assert row[f"{name}_bytes"] == max(getattr(one, name) for one in theory)
    assert row["sent_bytes"] == {axis: max(one.sent[axis] for one in theory) for axis in row["sent_bytes"]}
    job = parallel_3d.run.planned(parallel_3d.run.parser().parse_args(words.split()))
    assert (
        row["bubble_planned"] == job.checked().bubble == pytest.approx(1 / 5)
    )  # (stages - 1) / (micro-batches + that)


def test_unified_memory_schedules_what_its_row_says():
    for case in ("gpt2-small", "gpt2-small --backward"):
        found, row = unified_memory.planned(case), committed(unified_memory.ROWS, section="traffic", case=case)
        assert found == {name: row[name] for name in found}


# --- rows that are stale


@pytest.mark.parametrize(
    "changed, is_older",
    [
        ('"""Other words\nin two lines."""\n\n\ndef f(x):\n    return x  # is it\n', False),
        ('def f(x):\n    """Returns x."""\n    # As it is.\n    return x\n', False),
        ('def f(x):\n    return x + "# 1"\n', True),
        ('def f(x):\n    return x\n\n\nclass A:\n    """Nothing."""\n', True),
    ],
)
def test_words_about_code_make_no_row_older(tmp_path, monkeypatch, changed, is_older):
    monkeypatch.setattr(row_file, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text('"""Words."""\n\n\ndef f(x):\n    return x\n')
    before = row_file.digest("*.py")
    (tmp_path / "a.py").write_text(changed)
    assert (row_file.digest("*.py") != before) == is_older


def test_other_files_than_code_count_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(row_file, "ROOT", tmp_path)
    (tmp_path / "a.csv").write_text("1, 2\n")
    before = row_file.digest("*.csv")
    (tmp_path / "a.csv").write_text("1, 2\n\n")
    assert row_file.digest("*.csv") != before


def test_what_is_stale_and_cheap_is_made_again(tmp_path, monkeypatch, capsys):
    """By the digest in each row; what takes longer than --minutes is named, and left."""
    monkeypatch.setattr(row_file, "ROOT", tmp_path)
    begun = []
    monkeypatch.setattr(
        rows.subprocess, "run", lambda command, **_: begun.append(command) or SimpleNamespace(returncode=0)
    )
    path = tmp_path / "rows.jsonl"
    row_file.write(path, [{"sources": "old", "kind": "a"}, {"sources": "new", "kind": "a"}, {"kind": "b"}])
    made = [
        rows.Made("program", ("--out", "x"), path, minutes, lambda now=now: now, lambda row: row["kind"] == "a")
        for minutes, now in ((5, "new"), (99, "new"), (5, "newest"))
    ]
    assert [each.stale() for each in made] == [(1, 2), (1, 2), (2, 2)]
    monkeypatch.setattr(rows, "everything", lambda: made)
    assert rows.main(["--list"]) == 0 and not begun
    assert rows.main([]) == 0 and [command[1:] for command in begun] == [["-m", "program", "--out", "x"]] * 2
    assert "rows.jsonl: 1 of 2 rows are older than their sources; 99 minutes" in capsys.readouterr().out
