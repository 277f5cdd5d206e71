"""Losses and gradients that are not numbers: no update, a line in the log, and an end after ten in a row."""

import json
import math
import re
from functools import partial

import pytest
from safetensors.torch import load_file

import lowmem.core.operations
import lowmem.run.prepare
from lowmem.core.precision import LossScale
from lowmem.data.batches import Batches
from lowmem.run.metrics import read_metrics
from runs import content, last_line, simulated, weights, write_rows


def spoil(patch: pytest.MonkeyPatch, micro_batches: range) -> None:
    """Makes the training loss and its gradient NaN in these micro-batches (counted from 0 over the run)."""
    real, calls = lowmem.core.operations.linear_cross_entropy, iter(range(1000))

    def spoilt(*arguments, **keywords):
        loss, gradient = real(*arguments, **keywords)
        if simulated() or keywords.get("weight_gradient") is None or next(calls) not in micro_batches:
            return loss, gradient
        return loss * math.nan, gradient * math.nan

    patch.setattr(lowmem.core.operations, "linear_cross_entropy", spoilt)


def test_ten_steps_in_a_row_without_a_finite_gradient_stop_the_run_with_the_weights_intact(
    train, tmp_path, capsys, monkeypatch
):
    spoil(monkeypatch, range(2 * 2, 1000))  # from the third step on
    out = tmp_path / "out"
    assert train(out, "--steps", "30", "--save-every", "1", "--keep-last", "30") == 1
    assert "10 steps in a row had no finite gradient; stopped at step 12" in last_line(capsys)
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl") if math.isnan(row["loss"])] == list(range(3, 13))
    assert "step 3: the gradient norm is nan, so no update was made" in (out / "log.txt").read_text()
    good, last = (content(out / f"checkpoints/step-{step:08d}") for step in (2, 11))
    states = [name for name in good if name.endswith(".safetensors")]
    assert states and all(good[name] == last[name] for name in states)


def test_one_bad_step_is_skipped_and_the_schedule_waits_for_it(train, tmp_path, monkeypatch):
    spoil(monkeypatch, range(2, 3))  # the first micro-batch of the second step
    assert train(tmp_path / "out", "--steps", "4") == 0
    rows = read_metrics(tmp_path / "out/metrics.jsonl")
    assert [math.isnan(row["loss"]) for row in rows] == [False, True, False, False]
    assert rows[2]["learning_rate"] == rows[1]["learning_rate"] > rows[3]["learning_rate"]
    assert rows[3]["loss"] < rows[0]["loss"]
    for tensor in load_file(tmp_path / "out/model/model.safetensors").values():
        assert tensor.isfinite().all()


def test_a_loss_scale_that_was_too_large_is_said_without_blaming_the_batch(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lowmem.run.prepare, "LossScale", partial(LossScale, scale=2.0**22))
    assert train(tmp_path / "out", "--precision", "fp16") == 0
    said = capsys.readouterr().err
    assert "step 1: gradients were beyond the range of fp16, so no update was made; the loss scale is now 2.09" in said
    assert "its batch" not in said


def test_where_the_texts_of_a_bad_batch_were_read_is_said(train, text, tmp_path, capsys, monkeypatch):
    rows = [{"prompt": "?", "completion": f"answer {number}"} for number in range(60)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    spoil(monkeypatch, range(1, 2))  # four rows as short as these are one micro-batch
    seen = []

    def at_the_second_step(batches, step, real=Batches.where):
        seen.append((step, real(batches, step)))
        return seen[-1][1]

    monkeypatch.setattr(Batches, "where", at_the_second_step)
    assert train(tmp_path / "out", "--data", data) == 0
    ((step, texts),) = seen
    assert step == 1 and len(texts) == 4 and all(re.fullmatch(rf"{data}:\d+", text) for text in texts)
    said = "step 2: the gradient norm is nan, so no update was made; its batch: "
    assert f"{said}{', '.join(texts[:3])}, ... (all in log.txt)\n" in capsys.readouterr().err
    assert f"{said}{', '.join(texts)}\n" in (tmp_path / "out/log.txt").read_text()


def test_a_run_that_gave_up_does_not_end_well_when_it_is_started_again(train, tmp_path, capsys):
    options = ["--lr", "1e30", "--schedule", "constant", "--steps", "14"]
    for _ in range(2):
        assert train(tmp_path / "out", *options) == 1
        assert "10 steps in a row had no finite gradient; stopped at step" in last_line(capsys)
        assert not (tmp_path / "out/model").exists() and not (tmp_path / "out/report.json").exists()


def test_a_run_whose_last_loss_is_nan_exports_its_best_with_keep_best(train, tmp_path, held_out, monkeypatch):
    options = ["--schedule", "constant", "--eval-every", "1"]
    assert train(tmp_path / "one", *options, "--steps", "1") == 0
    spoil(monkeypatch, range(2, 1000))  # from the second step on
    held_out(5.0, 4.0, math.nan, math.nan)
    assert train(tmp_path / "out", *options, "--steps", "3", "--keep-best", "--sample-prompt", "one") == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "one")
    steps = [row["step"] for row in map(json.loads, (tmp_path / "out/samples.jsonl").read_text().splitlines())]
    assert steps == [0, 1]  # the last sample is written by the exported weights


def test_a_run_whose_last_loss_is_nan_exports_nothing(train, tmp_path, capsys):
    for _ in range(2):
        assert train(tmp_path / "out", "--lr", "1e30", "--schedule", "constant", "--steps", "4") == 1
        assert "nothing was exported" in last_line(capsys)
        assert not (tmp_path / "out/model").exists()
