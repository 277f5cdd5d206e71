"""Signals in every phase, and resumed runs: the bits of a run that was never stopped, or a refusal that says why."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

import lowmem.core.operations
import lowmem.run.prepare
import lowmem.run.saver
import lowmem.run.train
from lowmem.core.step import TrainingStep
from lowmem.run.signals import StopRequest
from runs import (
    ROOT,
    SMALL,
    assert_same_run,
    at_call,
    content,
    last_line,
    loss_rows,
    stopped_in_step,
    stored,
    weights,
)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("owner", "name", "call", "number", "done"),
    [
        (lowmem.run.prepare, "load_data", 1, signal.SIGTERM, 0),
        (TrainingStep, "evaluate", 1, signal.SIGINT, 0),  # before the first step
        (TrainingStep, "__call__", 2, signal.SIGTERM, 2),
        (lowmem.core.operations, "linear_cross_entropy", 6, signal.SIGINT, 2),  # 2 in the evaluation, 2 per step
        (lowmem.run.saver, "save_checkpoint", 1, signal.SIGTERM, 2),
        (TrainingStep, "evaluate", 3, signal.SIGINT, 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_signal_at_any_moment_is_answered_at_the_end_of_the_step_and_costs_no_bit(
    finished, train, tmp_path, capsys, monkeypatch, owner, name, call, number, done
):
    options = [
        *(["--save-every", "2"] if name == "save_checkpoint" else []),
        *(["--eval-every", "1"] if call == 3 else []),
    ]
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, lambda: os.kill(os.getpid(), number), call)
        code = train(tmp_path / "out", *options)
    sentence = last_line(capsys)
    rows = loss_rows(tmp_path / "out")
    assert (code, len(rows)) == (75, done)
    assert f"stopped by {signal.Signals(number).name} after step {done}" in sentence
    assert not (tmp_path / "out/model").exists()
    assert train(tmp_path / "out", *options) == 0
    assert f"{done} of 3 steps are done" in capsys.readouterr().err
    assert weights(tmp_path / "out") == weights(finished)
    assert [row["loss"] for row in loss_rows(tmp_path / "out")] == [row["loss"] for row in loss_rows(finished)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("owner", "name", "call", "done", "said"),
    [
        (lowmem.core.operations.Operations, "segment_backward", 12, 1, "finishing step 2"),  # 8 to a step
        (TrainingStep, "_evaluate", 3, 2, "finishing the evaluation after step 2"),
        (TrainingStep, "_evaluate", 4, 3, "finishing the last evaluation"),
        (lowmem.run.saver, "save_checkpoint", 1, 1, "finishing the save of step 1"),
    ],
    ids=["step", "evaluation", "last evaluation", "save"],
)
def test_two_signals_in_a_hurry_lose_no_more_than_what_is_under_way(
    finished, train, tmp_path, capfd, monkeypatch, owner, name, call, done, said
):
    """A step in which they come is not made. An evaluation is skipped, except the last, and made when training goes on.
    A save is finished."""
    options = ["--eval-every", "1", "--save-every", "1"]
    counted, real = [], StopRequest._note
    monkeypatch.setattr(StopRequest, "_note", lambda *arguments: (real(*arguments), counted.append(True)))

    def twice():
        for number in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            while len(counted) < number:
                time.sleep(0.001)

    with monkeypatch.context() as patch:
        at_call(patch, owner, name, twice, call)
        code = train(tmp_path / "out", *options)
    errors = capfd.readouterr().err
    assert f"SIGINT: {said}" in errors and "SIGINT: the second signal " in errors
    rows = loss_rows(tmp_path / "out")
    assert (code, len(rows)) == (0 if done == 3 else 75, done)
    if name == "_evaluate":
        assert ("eval_loss" in rows[-1]) == (done == 3)
    assert train(tmp_path / "out", *options) == 0
    assert weights(tmp_path / "out") == weights(finished)
    assert all("eval_loss" in row for row in loss_rows(tmp_path / "out"))
    if name == "_evaluate" and done < 3:
        assert train(tmp_path / "whole", *options) == 0
        assert loss_rows(tmp_path / "out") == loss_rows(tmp_path / "whole")


@pytest.mark.exhaustive
def test_a_process_that_is_told_to_stop_saves_and_the_same_command_goes_on_bitwise(text, train, tmp_path):
    """With wandb, offline, which starts processes and catches signals."""
    options = ["--steps", "30", "--out", str(tmp_path / "out")]
    command = [sys.executable, "train_gpt2_large.py", *SMALL, "--data", str(text), *options]
    offline = {"env": os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, "cwd": ROOT, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **offline) as process:
        for line in process.stderr:
            if line.startswith("step 4/"):
                process.terminate()
                break
        errors = process.stderr.read()
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM after step" in errors.splitlines()[-1] and "Traceback" not in errors
    assert not (tmp_path / "out/model").exists()

    result = subprocess.run(command, capture_output=True, **offline)
    assert result.returncode == 0, result.stderr
    first = result.stderr.splitlines()[0]
    assert re.search(r"^going on from .*: \d+ of 30 steps are done; Fits: .* RAM, the \d+ steps left", first)
    assert train(tmp_path / "whole", "--steps", "30") == 0
    assert_same_run(tmp_path / "whole", tmp_path / "out")

    readme = (tmp_path / "out/model/README.md").read_text()
    assert f"\n\n    {shlex.join(command[1:])}\n\n" in readme
    assert "859,008 parameters" in readme and "after 30 steps" in readme
    wandb_runs = list((tmp_path / "out").glob("wandb/offline-run-*/*.wandb"))
    assert len(wandb_runs) == 2 or "wandb could not start" in errors  # the package is optional


@pytest.mark.exhaustive
def test_an_interrupt_that_ends_the_program_behind_a_pipe_too_loses_nothing(text, tmp_path):
    """`train ... 2>&1 | tee log`: a terminal sends the signal to both, and output goes nowhere then."""
    out = tmp_path / "out"
    command = [sys.executable, "train_gpt2_large.py", *SMALL, "--data", str(text), "--steps", "40", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, text=True) as process:
        while not process.stdout.readline().startswith("step 3/"):
            pass
        process.stdout.close()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 75
    rows = loss_rows(out)
    assert (out / f"checkpoints/step-{rows[-1]['step']:08d}/manifest.json").exists() and rows[-1]["step"] < 40


def test_an_interrupt_while_pytorch_is_imported_ends_the_script_without_a_word(tmp_path):
    command = [sys.executable, "train_gpt2_large.py", "--demo", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        maps = f"/proc/{process.pid}/maps"
        while "libtorch" not in open(maps).read():  # noqa: SIM115
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)
    assert (process.returncode, *said) == (-signal.SIGINT, b"", b"")  # 130 to a shell
    assert not (tmp_path / "out").exists()


def test_resume_never_starts_anew(finished, train, tmp_path):
    out = tmp_path / "out"
    assert train(out, "--steps", "1") == 0
    assert train(out, "--resume", "never") == 0
    assert_same_run(finished, out)
    assert "not used, and replaced once this run saves: step-00000001" in (out / "log.txt").read_text()


def of_another_run(text: str) -> str:
    rows = [json.loads(line) for line in text.splitlines()]
    return "".join(json.dumps(row | {"loss": row["loss"] + 1, "eval_loss": 0.5}) + "\n" for row in rows)


def evaluated_later(text: str) -> str:
    rows = [json.loads(line) for line in text.splitlines()]
    return "".join(json.dumps(row | {"eval_loss": 0.5}) + "\n" for row in rows)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        (of_another_run, 2),  # which was told --resume never, and killed before it saved
        (lambda text: text.splitlines(keepends=True)[0], 1),  # the power failed, and the file was not on the disk
        (lambda text: "{}\n" + text, 2),
        (lambda text: "12\n" + text, 2),
        (lambda text: None, 2),
        (evaluated_later, 0),
    ],
)
def test_a_run_goes_on_with_the_rows_of_its_checkpoint(change, unknown, train, tmp_path, capsys):
    """Seen to fail: rows of another run chose the best checkpoint, and after a damaged line all rows were lost."""
    out = tmp_path / "out"
    options = ["--save-every", "1", "--eval-every", "1", "--keep-last", "2"]
    assert train(out, *options) == 0
    rows, loss, last = loss_rows(out), stored(out / "report.json")["loss"], weights(out)
    shutil.rmtree(out / "checkpoints/step-00000003")  # as if it had been killed before
    file = out / "metrics.jsonl"
    changed = change("".join(file.read_text().splitlines(keepends=True)[:2]))
    file.unlink() if changed is None else file.write_text(changed)
    (out / "samples.jsonl").write_text(json.dumps({"step": 0, "prompt": "", "text": "sample: of whom?"}) + "\n")
    assert train(out, *options) == 0
    assert (loss_rows(out), stored(out / "report.json")["loss"], weights(out)) == (rows, loss, last)
    said = f"times and memory of {unknown} earlier step{'s' * (unknown > 1)} are not in {file}"
    assert (said in capsys.readouterr().err) == (unknown > 0)
    assert (out / "samples.jsonl").exists() == (change is not of_another_run)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--steps", "2"], "--steps 3 -> 2"),
        (["--steps", "5"], "the cosine schedule of that run was made for 3 steps"),
        (["--precision", "bf16"], "--precision fp32 -> bf16"),
        (["--micro-batch", "4"], "--micro-batch 2 -> 4"),
        (["--data", "python-stdlib"], "the data, their weights or the tokenizer have changed"),
        (["--eval-fraction", "0.7"], "--eval-fraction 0.01 -> 0.7"),
    ],
    ids=" ".join,
)
def test_what_would_change_the_bits_is_refused_on_resume_and_the_difference_shown(
    finished, train, capsys, options, difference
):
    before = content(finished)
    assert train(finished, *options) == 2
    assert difference in last_line(capsys)
    assert content(finished) == before


def test_a_refusal_to_go_on_needs_neither_data_nor_a_plan(finished, train, monkeypatch, capsys):
    monkeypatch.setattr(lowmem.run.prepare, "load_data", lambda *_: pytest.fail("data were read"))
    for options, said in (
        (["--lr", "1e-4"], "--lr 0.001 -> 0.0001"),
        (["--steps", "5"], "made for 3 steps"),
        (["--resume", "nowhere"], "no such folder"),
        (["--clip-norm", "0", "--document-mask"], "--document-mask off -> on; --clip-norm 1.0 -> 0."),
    ):
        assert train(finished, *options) == 2
        assert said in last_line(capsys)


def test_a_run_is_made_longer(train, tmp_path, capsys):
    """At a constant rate, it has the bits of a run that was that long from the beginning, warm-up in steps."""
    options = ["--schedule", "constant", "--warmup-steps", "1"]
    assert train(tmp_path / "whole", *options, "--steps", "5") == 0
    out = tmp_path / "out"
    assert train(out, *options, "--steps", "3") == 0
    capsys.readouterr()
    assert train(out, *options, "--steps", "5") == 0
    assert "this run was to end after 3 steps and is extended to 5: its learning rate, 0.001" in capsys.readouterr().err
    assert weights(out) == weights(tmp_path / "whole")
    whole = loss_rows(tmp_path / "whole")
    assert [row["loss"] for row in loss_rows(out)] == [row["loss"] for row in whole]
    # Falling to the end from there; stopped on the way, it falls on.
    assert train(out, "--schedule", "linear", "--warmup-steps", "1", "--steps", "9") == 0
    rates = [row["learning_rate"] for row in loss_rows(out)[5:]]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.exhaustive
def test_a_longer_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(train, tmp_path, capsys):
    options, out = ["--schedule", "constant", "--warmup-steps", "1"], tmp_path / "out"
    assert train(out, *options, "--steps", "3") == 0
    assert train(out, *options, "--steps", "5") == 0
    whole = weights(out)
    part = next((out / "checkpoints/step-00000005").glob("block*"))
    part.write_bytes(part.read_bytes()[::-1])
    assert train(out, *options, "--steps", "5") == 0
    assert "3 of 5 steps are done" in capsys.readouterr().err and weights(out) == whole


@pytest.mark.exhaustive
def test_a_cosine_that_had_ended_goes_on_at_a_constant_rate_where_that_is_asked_for(train, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(out) == 0
    assert train(out, "--schedule", "constant", "--lr", "1e-4", "--steps", "5") == 0
    assert [row["learning_rate"] for row in loss_rows(out)[3:]] == [1e-4, 1e-4]
    last = loss_rows(out)[2]["learning_rate"]
    assert f"its learning rate, {last:.3g} so far, is 0.0001 from here and stays there" in capsys.readouterr().err


def test_a_config_that_was_edited_meanwhile_is_refused_and_the_field_named(train, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    options = ["--model", str(model), "--steps", "1"]
    (model / "config.json").write_text(json.dumps(fields | {"bos_token_id": 256, "eos_token_id": 256}))
    assert train(out, *options) == 0
    before = content(out)
    edited = fields | {"bos_token_id": 256, "eos_token_id": 256, "n_head": 4, "resid_pdrop": 0.0}  # of the same shapes
    (model / "config.json").write_text(json.dumps(edited))
    assert train(out, *options) == 2
    assert "config.json's n_head 2 -> 4; config.json's resid_pdrop 0.1 -> 0.0" in last_line(capsys)
    assert content(out) == before
    (model / "config.json").write_text(json.dumps(edited | {"n_head": 2, "resid_pdrop": 0.1, "use_cache": False}))
    assert train(out, *options) == 0  # what no training step reads may change


def test_a_run_can_go_on_in_another_folder(finished, train, tmp_path):
    assert train(tmp_path / "first", "--save-every", "2") == 0
    start = tmp_path / "first/checkpoints/step-00000002"
    assert train(tmp_path / "second", "--resume", str(start)) == 0
    assert_same_run(finished, tmp_path / "second")


def test_the_same_command_goes_on_in_the_other_folder_from_what_it_saved(finished, train, tmp_path, capsys):
    """Seen to fail: a run said "saved" when it was stopped before its first step, and had saved nothing. After a second
    stop, the same command started at DIR again."""
    assert train(tmp_path / "first", "--save-every", "1", "--keep-last", "3") == 0
    start, out = tmp_path / "first/checkpoints/step-00000001", tmp_path / "second"
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, lowmem.run.prepare, "load_data", lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(out, "--resume", str(start)) == 75
    assert content(out / "checkpoints/step-00000001").keys() == content(start).keys()
    with stopped_in_step(1):
        assert train(out, "--resume", str(start)) == 75
    shutil.rmtree(start.parent)  # it is not needed any more
    assert train(out, "--resume", f"{start.parent}/./{start.name}/") == 0
    assert "step-00000002: 2 of 3 steps are done" in (out / "log.txt").read_text()
    assert_same_run(finished, out)
    for again in ([], ["--resume", str(start)]):
        assert train(out, *again) == 0
        assert "already finished" in last_line(capsys)


def test_a_best_checkpoint_is_found_behind_a_link_and_another_runs_is_not_taken(train, tmp_path, monkeypatch):
    """Seen to fail: checkpoints were compared with the folder that a link leads to; all older ones in --out counted."""
    options = ["--keep-best", "--eval-every", "1", "--save-every", "1", "--keep-last", "4"]
    assert train(tmp_path / "first", *options, "--schedule", "constant") == 0
    assert train(tmp_path / "out", *options, "--steps", "1", "--lr", "1e-5") == 0
    start = tmp_path / "first/checkpoints/step-00000002"
    sessions = []
    monkeypatch.setattr(lowmem.run.train, "train", lambda session, stop: sessions.append(session))
    renamed = start.with_name("mine")
    shutil.copytree(start, renamed)
    for out, resume in (("out", start), ("first", start), ("first", "auto"), ("first", renamed)):
        assert train(tmp_path / out, *options, "--schedule", "constant", "--resume", str(resume)) == 0
    shutil.rmtree(renamed)
    assert [session.saved for session in sessions] == [set(), {2}, {1, 2, 3}, set()]
    (tmp_path / "moved").mkdir()
    for path in list(start.parent.iterdir()):
        path.rename(tmp_path / "moved" / path.name)
        path.symlink_to(tmp_path / "moved" / path.name)
    assert train(tmp_path / "first", *options, "--schedule", "constant") == 0
    assert sessions[-1].saved == {1, 2, 3}


def test_a_finished_run_that_is_elsewhere_is_finished_again(finished, train, tmp_path):
    """Seen to fail: the report had no rows, or its first loss was that of its own first step."""
    assert train(tmp_path / "out", "--resume", str(finished)) == 0
    assert weights(tmp_path / "out") == weights(finished) and loss_rows(tmp_path / "out") == loss_rows(finished)
    assert stored(tmp_path / "out/report.json")["loss"] == stored(finished / "report.json")["loss"]
