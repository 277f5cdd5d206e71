"""Shapes have their published counts, the recipe trains a slice, plans and refusals become rows, rows become tables."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration

from experiments.bigger_models import measure, on_card, plans, recipe, shapes, table, today, train_gptj, train_t5
from experiments.bigger_models.shapes import SHAPES
from experiments.harness import rows as row_file
from experiments.harness import whole_runs
from experiments.harness.planned_rows import PlannedRows, planned
from lowmem.errors import InputError, LowmemError
from lowmem.run.cli import parse_plan
from lowmem.units import GIB

TINY = {"n_embd": 32, "n_head": 2, "rotary_dim": 8, "vocab_size": 257, "n_positions": 128, "n_layer": 3}
TINY |= {"bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture
def tiny(monkeypatch):
    """GPT-J's shape with three narrow blocks, under its name."""
    shape = SHAPES["gpt-j-6b"]
    small = replace(shape, fields=shape.fields | TINY)
    monkeypatch.setitem(SHAPES, "gpt-j-6b", small)
    monkeypatch.setattr(measure, "GPTJ", small)
    return small


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_parameters_as_the_model(name):
    config = SHAPES[name].config()
    with torch.device("meta"):
        model = (
            T5ForConditionalGeneration(config)
            if config.is_encoder_decoder
            else AutoModelForCausalLM.from_config(config)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == SHAPES[name].parameters


def test_published_counts():
    counts = {"gpt-j-6b": 6_050_882_784, "llama-7b": 6_738_415_616, "t5-11b": 11_307_321_344}
    assert {name: SHAPES[name].parameters for name in counts} == counts
    found = [shape.parameters for shape in SHAPES.values()]
    assert found == sorted(found) and found[0] < 125e6


def test_a_slice_has_fewer_blocks_of_the_same_widths(tmp_path, capsys):
    assert shapes.main(["t5-11b", str(tmp_path), "--blocks", "2"]) == 0
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["num_layers"] == found["num_decoder_layers"] == 2 and found["d_ff"] == 65536
    assert SHAPES["gpt-j-6b"].config(3).n_layer == 3 and SHAPES["gpt-j-6b"].config(3).n_embd == 4096
    assert shapes.main(["t5-11b", str(tmp_path), "--blocks", "25"]) == 2 and "24 blocks" in capsys.readouterr().err


# --- the recipe


def test_help_says_how_a_recipe_is_run_and_lists_blocks_and_the_scripts_own_options(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/some/place/train_gptj.py"])
    with pytest.raises(SystemExit) as ended:
        recipe.main("gpt-j-6b", train_gptj.SETTINGS, ["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--blocks N" in said and "--states-folder" in said and "24.0 GiB" in said
    assert said.startswith("usage: python -m experiments.bigger_models.train_gptj [--blocks N] [options]\n\nTrain")
    assert said.count("usage:") == 1 and said.index("Exit codes") < said.index("slices:")


@pytest.mark.parametrize("of_another_process", [False, True])
def test_a_slice_that_is_refused_leaves_nothing(tmp_path, monkeypatch, of_another_process):
    def refused(settings, words):
        if of_another_process:
            Path(settings.model, "config.json").unlink()
        return train(settings, words)

    train = recipe.train
    monkeypatch.setattr(recipe, "train", refused)
    monkeypatch.chdir(tmp_path)
    assert recipe.main("t5-11b", train_t5.SETTINGS, ["--blocks", "1", "--data", "nowhere.jsonl"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_slice_is_trained_with_its_states_on_a_disk(tiny, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("All parameters of a model are trained. " * 200)
    words = ["--blocks", "1", "--seq", "16", "--batch", "2", "--steps", "2", "--device", "cpu", "--data", str(text)]
    words += ["--states", "disk", "--states-folder", str(tmp_path / "states"), "--out", str(tmp_path / "run")]
    assert recipe.main("gpt-j-6b", train_gptj.SETTINGS, words) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["warmup_steps"] == recipe.SLICE_WARMUP > train_gptj.SETTINGS.warmup_steps
    assert report["steps"] == 2 and report["plan"]["disk"]["states"] > 0
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["n_layer"], config["n_embd"], config["model_type"]) == (1, 32, "gptj")


# --- plans


@pytest.mark.exhaustive
def test_a_slice_of_t5_is_trained_by_its_recipe(tmp_path, monkeypatch):
    shape = SHAPES["t5-11b"]
    narrow = {"d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "vocab_size": 257, "num_layers": 2}
    monkeypatch.setitem(SHAPES, "t5-11b", replace(shape, fields=shape.fields | narrow | {"num_decoder_layers": 2}))
    words = ["--blocks", "1", "--seq", "32", "--target-tokens", "8", "--batch", "2", "--steps", "1", "--device", "cpu"]
    assert recipe.main("t5-11b", train_t5.SETTINGS, [*words, "--out", str(tmp_path / "run")]) == 0
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "run" / "model")
    assert model.config.num_layers == model.config.num_decoder_layers == 1
    assert train_t5.SETTINGS.target_tokens == 512


@pytest.mark.exhaustive
def test_plans_and_refusals_become_rows_and_are_not_made_again(tiny, tmp_path, monkeypatch, capsys):
    cases = [
        plans.Case("gpt-j-6b", "600MiB", "none", "rtx3090", seq=32, batch=1),
        plans.Case("gpt-j-6b", plans.SMALLEST, "none", "rtx3090", seq=32, batch=1),
        plans.Case("gpt-j-6b", "600MiB", "1MiB", "rtx3090", seq=32, batch=1),
        plans.Case("gpt-j-6b", "600MiB", "8GiB", "rtx0", seq=32, batch=1),
    ]
    monkeypatch.setattr(PlannedRows, "sources", lambda rows: "these")
    rows = replace(plans.ROWS, cases=cases)
    for _ in range(2):
        assert rows.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert said.startswith("4 to do, about ") and f"4 of 4: {cases[3].name}, about " in said
    assert said.endswith("\n0 to do, about 0 s\n")
    planned, smallest, no_ram, no_card = found = row_file.read(tmp_path / rows.file.name)
    assert planned["error"] is None and planned["tokens_per_second"] > 0
    reserved = [row["predicted"]["gpu_reserved_peak_bytes"] for row in (planned, smallest)]
    assert reserved[1] <= smallest["limits"]["gpu_bytes"] < 600 * 2**20 and reserved[1] <= reserved[0]
    assert no_ram["error"].startswith("gpt-j-6b at 1 x 32 tokens does not fit") and "rtx0" in no_card["error"]
    assert not any(str(tmp_path.parent) in json.dumps(row) for row in found)
    assert rows.main(["--list", "--only", "smallest"]) == 0 and capsys.readouterr().out.endswith(f"{cases[1].name}\n")


def test_a_case_without_a_row_is_expected_to_take_the_usual_time():
    new = replace(plans.CASES[0], card="another")
    known = sorted(plans.ROWS.expected_seconds(plans.CASES).values())
    assert known[0] < plans.ROWS.expected_seconds([new])[new.name] < known[-1]


# --- what is measured


def test_the_largest_slice_is_found_and_what_bounds_it(tiny, monkeypatch):
    assert measure.too_large(1, "14GiB", 56 * GIB) is None
    assert measure.too_large(1, "64MiB", 56 * GIB) == "RAM" and measure.too_large(1, "14GiB", 1) == "disk"
    for fitting, found in ((3, (3, None)), (2, (2, "disk")), (1, (1, "disk"))):
        monkeypatch.setattr(measure, "too_large", lambda blocks, *_, most=fitting: "disk" if blocks > most else None)
        assert measure.largest_slice("14GiB", 1) == found
    monkeypatch.setattr(measure, "too_large", lambda *_: "RAM")
    with pytest.raises(InputError, match="one block is too large for this RAM"):
        measure.largest_slice("64MiB", 1)


def report(seconds: float = 2.0) -> dict:
    choice = {"fate": "dropped"}
    disk = {"checkpoints": GIB, "one_being_written": GIB, "export": GIB, "states": 3 * GIB}
    peaks = {"gpu_allocated_peak_bytes": GIB, "gpu_reserved_peak_bytes": GIB}
    plan = {"parameters": 2**30, "choice": choice, "predicted": {"ram_peak_bytes": 102 * GIB // 100} | peaks}
    measured = {"ram_peak_bytes": GIB, "step_seconds": seconds} | peaks
    return {
        "plan": plan | {"disk": disk, "ram_breakdown": {}}, "measured": measured, "steps": 2, "device": "the CPU",
        "ram_phases": {}, "loss": {"first": 3.0, "last": 2.5}, "out_of_memory": [],
    }  # fmt: skip


def test_slices_become_rows(tiny, tmp_path, monkeypatch, capsys):
    commands = []

    def report_of(command, out, name):
        commands.append(command)
        return report()

    monkeypatch.setattr(measure, "report_of", report_of)
    monkeypatch.setattr(measure, "too_large", lambda *_: None)
    monkeypatch.setattr(measure, "sources", lambda: "these")
    for _ in range(2):
        assert measure.main(["--only", "gpt-j", "largest", "--ram-limit", "8GiB", "--out", str(tmp_path)]) == 0
    two, three, largest = row_file.read(tmp_path / measure.NAME)
    assert [row["blocks"] for row in (two, three, largest)] == [2, 3, 3] and len(commands) == 3
    assert all(two["checks"].values()) and largest["one_block_more_is_too_large_for"] is None
    assert "--states disk" in " ".join(commands[0]) and str(tmp_path) not in json.dumps(two)
    assert "+2.0%" in table.tables([two]) and "2 slices" not in table.verdict([two])
    assert "ok" in capsys.readouterr().out


def test_a_slice_that_learns_becomes_a_row_and_one_that_does_not_fails(tiny, tmp_path, monkeypatch, capsys):
    def report_of(command, out, name):
        assert command.count("--fixed-batch") == 1 and "--steps 20" in " ".join(command)
        out.mkdir(parents=True)
        losses = falling if command[command.index("--warmup-steps") + 1] == "0.5" else (5.0, 9.0, 7.0)
        rows = ({"loss": loss, "grad_norm": 1.0} for loss in losses)
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return report()

    monkeypatch.setattr(measure, "report_of", report_of)
    assert measure.LEARNING.fields["n_embd"] == 4096
    for falling, code in (((5.0, 6.0, 3.0), 0), ((5.0, 4.0, 5.5), 1)):
        out = tmp_path / str(code)
        assert measure.main(["--only", "learns", "--out", str(out)]) == code
        rows = row_file.read(out / measure.NAME)
        assert [row["losses"][-1] for row in rows] == [falling[-1], 7.0] and str(tmp_path) not in json.dumps(rows)
    assert "loss 5.00 to 5.50  FAILED (the loss falls)" in capsys.readouterr().out
    said = table.tables(rows)
    assert "| 0.5 | 5.00, 5.50, 5.50 |" in said and "| 0 | 5.00, 9.00, 7.00 |" in said


def test_the_committed_slice_learns():
    (row,) = [row for row in table.committed_rows() if row["kind"] == measure.LEARNED and row["warmup_steps"]]
    assert len(row["losses"]) == 20 and row["losses"][-1] < row["losses"][0] and all(row["checks"].values())


def test_a_run_that_fails_and_a_size_that_is_none_are_said(tiny, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise LowmemError("the run of 2 blocks ended")

    monkeypatch.setattr(measure, "report_of", fails)
    assert measure.main(["--only", "2 blocks of gpt-j", "--out", str(tmp_path)]) == 1
    assert "the run of 2 blocks ended" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measure.main(["--ram-limit", "much"])


def test_runs_on_a_card_become_rows(tmp_path, monkeypatch):
    def report_of(command, out, name):
        out.mkdir(parents=True)
        loss = 2.0 if "none" in command else 2.5
        (out / "metrics.jsonl").write_text(json.dumps({"loss": loss, "grad_norm": 1.0}) + "\n")
        return report()

    monkeypatch.setattr(measure, "report_of", report_of)
    monkeypatch.setattr(measure.row_file, "on_stand_in", lambda: True)
    monkeypatch.setattr(measure.row_file, "made_by", lambda *_: {"command": "c", "stand_in": True})
    assert measure.main(["--out", str(tmp_path)]) == 1
    *large, narrow = row_file.read(tmp_path / measure.NAME)
    assert not narrow["checks"]["losses and norms are those without a cap"] and narrow["computed"]
    assert len(large) == 2 and not any(row["computed"] for row in large)
    assert "NOT the losses" in table.tables([narrow]) and "+0.0%" in table.verdict(large)


def test_what_is_not_on_the_card_is_left_out(tmp_path):
    from lowmem.run import ending, prepare, saver

    before = saver.save_checkpoint, ending.export_model
    with whole_runs.memory_alone():
        assert list(prepare.random_weights(None, 0)) == [] and saver.save_checkpoint is not before[0]
    assert (saver.save_checkpoint, ending.export_model) == before
    assert on_card.main is recipe.main


# --- will it fit?


def test_every_cell_has_a_committed_row_and_a_row_says_how_it_was_made():
    rows = {row["name"]: row for row in today.ROWS.committed()}
    assert rows.keys() == {case.name for case in today.CASES}
    for row in rows.values():
        assert row["commit"] and row["versions"]["torch"] and row["machine"] and row["command"].startswith("python -m")
        assert row["plan_command"].startswith(f"python -m lowmem.plan --model {row['model']} ")
        assert row["error"] or row["predicted"]["ram_peak_bytes"] <= plans.parse_size(row["ram_limit"])
    cells = today.table(list(rows.values())).splitlines()
    assert len(cells) == 2 + len(today.MODELS) and all("| |" not in line for line in cells[2:])


def test_a_case_is_planned_as_its_command_says_and_a_refusal_is_a_row(tmp_path, monkeypatch, capsys):
    case = today.Case("GPT-2-Large", today.Machine("a small one", "rtx3060", "1GiB"))
    words = case.command.split()[3:]
    typed, _ = parse_plan(words, {"prog": "plan"})
    assert typed == case.settings()

    def refuse(settings):
        raise InputError("it does not fit")

    monkeypatch.setattr(today.lowmem, "plan", refuse)
    refused = planned(case)
    assert refused["error"] == "it does not fit" and refused["planning_seconds"] >= 0
    assert "| no |" in today.table([refused | {"name": today.CASES[0].name}])
    assert today.ROWS.main(["--only", "nothing of this name"]) == 2 and "no case" in capsys.readouterr().err
