"""The best checkpoint, runs that end early, runs that make a model worse, and samples on the way."""

import json

import pytest
from transformers import GenerationConfig

from lowmem.errors import InputError
from lowmem.run.figures import best_evaluation
from lowmem.settings import Settings
from runs import last_line, loss_rows, stored, weights


def checkpoints(out) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_the_best_checkpoint_is_kept_and_exported(train, tmp_path, held_out, capsys):
    """And found again by who gives the same command after the end, or after a stop on the way."""
    assert train(tmp_path / "two", "--steps", "2", "--schedule", "constant") == 0
    held_out(5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 3.8)
    options = ["--steps", "6", "--schedule", "constant", "--eval-every", "1", "--keep-last", "1", "--save-every", "1"]
    out = tmp_path / "out"
    assert train(out, *options, "--keep-best") == 0
    said = capsys.readouterr().err
    assert "the best checkpoint is exported: held-out 3.0000 after step 2" in said
    assert checkpoints(out) == ["step-00000002", "step-00000006"]
    assert weights(out) == weights(tmp_path / "two")
    report = stored(out / "report.json")["loss"]
    assert (report["eval_best"], report["eval_best_step"], report["eval_last"]) == (3.0, 2, 3.8)
    assert report["diverged"] is False and "warning: this run" not in said
    assert train(out, *options, "--keep-best") == 0
    assert weights(out) == weights(tmp_path / "two") and checkpoints(out) == ["step-00000002", "step-00000006"]


@pytest.mark.exhaustive
def test_where_no_step_was_better_than_the_start_the_best_of_the_steps_is_exported(train, tmp_path, held_out, capsys):
    assert train(tmp_path / "two", "--steps", "2", "--schedule", "constant") == 0
    held_out(2.0, 4.0, 3.0, 3.5)
    options = ["--steps", "3", "--schedule", "constant", "--eval-every", "1", "--keep-last", "1", "--keep-best"]
    out = tmp_path / "out"
    assert train(out, *options) == 0
    assert weights(out) == weights(tmp_path / "two") and checkpoints(out) == ["step-00000002", "step-00000003"]
    report = stored(out / "report.json")["loss"]
    assert (report["eval_best_step"], report["exported_step"], report["eval_exported"]) == (0, 2, 3.0)
    assert report["diverged"] is True and "was 2.0000 before and is 3.0000 now" in capsys.readouterr().err
    assert " after 2 steps. Command:" in (out / "model/README.md").read_text()


def test_a_run_that_got_worse_and_exports_its_best_has_not_diverged(train, tmp_path, held_out, capsys):
    held_out(3.0, 2.5, 4.0)
    assert train(tmp_path / "out", "--steps", "2", "--eval-every", "1", "--keep-best") == 0
    report = stored(tmp_path / "out/report.json")["loss"]
    assert (report["diverged"], report["eval_last"], report["exported_step"]) == (False, 4.0, 1)
    assert "warning: this run" not in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_best_that_is_lost_leaves_the_last(train, tmp_path, held_out, capsys):
    held_out(5.0, 4.0, 3.0, 3.5)
    out = tmp_path / "out"
    options = ["--eval-every", "1", "--keep-best", "--steps", "3"]
    assert train(out, *options) == 0
    best = weights(out)
    part = next((out / "checkpoints/step-00000002").glob("block*"))
    part.write_bytes(part.read_bytes()[:-1])
    (out / "report.json").unlink()  # as if the run had been killed before its end
    assert train(out, *options) == 0
    said = capsys.readouterr().err
    assert "warning: the best checkpoint, held-out 3.0000 after step 2, is damaged, so the last one is exported" in said
    assert weights(out) != best


def test_the_best_is_one_whose_weights_were_kept(train, tmp_path, held_out, capsys):
    """Seen to fail: step 3 was not saved, because step 1 was better, whose checkpoint was gone."""
    held_out(5.0, 3.0, 3.5, 3.3, 3.4)
    out = tmp_path / "out"
    options = ["--schedule", "constant", "--eval-every", "1", "--keep-last", "1", "--save-every", "9"]
    assert train(out, *options, "--steps", "2") == 0
    assert checkpoints(out) == ["step-00000002"]
    assert train(out, *options, "--steps", "4", "--keep-best") == 0
    said = capsys.readouterr().err
    assert "warning: held-out 3.0000 after step 1 was better, but no checkpoint of it was kept" in said
    assert "the best checkpoint is exported: held-out 3.3000 after step 3" in said
    assert checkpoints(out) == ["step-00000003", "step-00000004"]


def test_the_best_is_none_of_another_run(train, tmp_path, held_out, capsys):
    """Seen to fail: step 1 was taken for kept, because the folder had another run's checkpoint of that number."""
    held_out(5.0, 3.0, 3.5, 5.0, 4.0, 3.6)
    options = ["--schedule", "constant", "--eval-every", "1", "--keep-best"]
    assert train(tmp_path / "first", *options[:-1], "--steps", "2", "--keep-last", "1") == 0
    out = tmp_path / "out"
    assert train(out, *options, "--steps", "1", "--lr", "1e-4") == 0
    go_on = [*options, "--steps", "3", "--keep-last", "2", "--resume", str(tmp_path / "first")]
    assert train(out, *go_on) == 0
    said = capsys.readouterr().err
    assert "warning: held-out 3.0000 after step 1 was better, but no checkpoint of it was kept" in said
    assert stored(out / "report.json")["loss"]["exported_step"] == 3


def test_held_out_losses_of_other_batches_are_warned_of(train, tmp_path, capsys):
    options = ["--schedule", "constant", "--steps"]
    assert train(tmp_path / "out", *options, "1") == 0
    assert train(tmp_path / "out", *options, "2", "--eval-batches", "3") == 0
    assert "--eval-batches was 1, so held-out losses until now are of other texts" in capsys.readouterr().err


def test_a_run_ends_when_the_held_out_loss_no_longer_falls(train, tmp_path, held_out, capsys):
    held_out(5.0, 4.0, 4.5, 4.4, 3.0, 3.1, 3.2)
    out = tmp_path / "out"
    options = ["--steps", "6", "--schedule", "constant", "--eval-every", "1"]
    assert train(out, *options, "--patience", "2") == 0
    said = capsys.readouterr().err
    assert "ended early, after 3 of 6 steps: the last 2 held-out losses are not below 4.0000 after step 1" in said
    assert len(loss_rows(out)) == 3 and checkpoints(out) == ["step-00000003"] and (out / "model").exists()
    assert train(out, *options, "--patience", "2") == 0  # nothing is computed anew
    assert len(loss_rows(out)) == 3
    assert train(out, *options, "--patience", "3") == 0  # more patience goes on
    assert len(loss_rows(out)) == 6


def test_a_run_that_makes_the_model_worse_says_so(train, tmp_path, held_out, capsys):
    held_out(2.0, 9.0)
    assert train(tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "made the model worse: its held-out loss was 2.0000 before and is 9.0000 now" in said
    assert stored(tmp_path / "out/report.json")["loss"]["diverged"] is True


def test_the_best_of_evaluations():
    rows = [{"step": 1}, {"step": 2, "eval_loss": 3.0}, {"step": 3, "eval_loss": float("nan")}]
    best = best_evaluation(rows, 4.0)
    assert (best.step, best.loss, best.since) == (2, 3.0, 1)
    assert best_evaluation(rows, 3.0).step == 0  # the first of equals
    assert best_evaluation([], None).step == 0


@pytest.mark.parametrize("option", [{"keep_best": True}, {"patience": 2}, {"sample_every": 1}])
def test_what_would_have_nothing_to_do_is_refused(option):
    with pytest.raises(InputError, match="--sample-prompt" if "sample_every" in option else "--eval-every"):
        Settings(**option)


def test_nothing_held_out_is_no_best(train, tmp_path, capsys):
    data = tmp_path / "a.txt"
    data.write_text("too short to hold anything out\n")
    assert train(tmp_path / "out", "--data", str(data), "--keep-best", "--eval-every", "1", "--seq", "16") == 2
    assert "nothing is held out" in last_line(capsys) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("every", "said"), [("2", False), ("3", True), ("99", True)])
def test_a_best_of_the_last_step_alone_is_said_to_be_none(train, tmp_path, capsys, every, said):
    """Seen to fail: it was not said."""
    assert train(tmp_path / "out", "--keep-best", "--patience", "5", "--eval-every", every) == 0
    line = f"only the last step is evaluated, because --eval-every is {every} and the run has 3 steps"
    assert (f"--keep-best and --patience: {line}" in capsys.readouterr().err.splitlines()) == said


@pytest.mark.exhaustive
def test_samples_change_no_bit_and_are_kept_over_a_stop(train, tmp_path, capsys):
    options = ["--steps", "4", "--schedule", "constant", "--optimizer", "adamw"]
    assert train(tmp_path / "without", *options) == 0
    out = tmp_path / "out"
    samples = ["--sample-prompt", "one 1", "--sample-every", "1"]
    assert train(out, *options[2:], "--steps", "2", *samples) == 0
    assert train(out, *options, *samples) == 0
    assert weights(out) == weights(tmp_path / "without")
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    said = capsys.readouterr().err
    assert said.count(f"before training, {rows[0]['text']}".splitlines()[0]) == 3  # and above the last one of each run
    assert train(out, "--resume", "never", "--steps", "1") == 0
    assert not (out / "samples.jsonl").exists()  # they were another run's


def test_a_model_s_own_way_to_generate_is_kept(train, finished, tmp_path):
    model = tmp_path / "own"
    model.mkdir()
    for path in (finished / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=256).save_pretrained(model)
    assert train(tmp_path / "out", "--model", str(model), "--init", "pretrained", "--steps", "1") == 0
    kept = GenerationConfig.from_pretrained(tmp_path / "out/model")
    assert (kept.do_sample, kept.temperature, kept.top_p) == (True, 0.6, 0.9)
