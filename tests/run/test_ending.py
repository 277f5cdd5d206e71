"""The end of a run: a failure in any step of it costs neither the weights nor the other steps."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lowmem.run.checkpoint
import lowmem.run.ending
import lowmem.run.evaluation
import lowmem.run.log
import lowmem.run.saver
from lowmem.core.parameters import Store
from lowmem.errors import CapExceeded
from lowmem.limits import Budget
from lowmem.models import description, export
from lowmem.run.checkpoint import NotSaved
from lowmem.run.trackers import Trackers
from runs import assert_same_run, at_call, content, last_line, stored, weights

# A function that fails, words of the sentence on it, and the file that model/ lacks then.
FAULTS = {
    "the last sample": (lowmem.run.evaluation, "sample", "the last sample", None),
    "samples.jsonl": (lowmem.run.log.RunLog, "sample", "the last sample", None),
    "a tracker's sample": (Trackers, "show", "the last sample", None),
    "weights": (export, "_write_shards", "the export", "model.safetensors"),
    "room": (export.shutil, "disk_usage", "the export", "model.safetensors"),
    "config.json": (description, "config_fields", "config.json could not be written", "config.json"),
    "generation config": (description, "_write_generation", "generation_config.json", "generation_config.json"),
    "tokenizer": (description, "_write_tokenizer", "the tokenizer could not", "tokenizer.json"),
    "README": (description, "_on_ties", "README.md could not be written", "README.md"),
    "report": (lowmem.run.ending, "build_report", "report.json", None),
    "report.json": (lowmem.run.ending, "write_json", "report.json", None),
    "report.html": (lowmem.run.ending, "write_page", "report.html", None),
    "loss.png": (lowmem.run.ending, "draw_loss", "loss.png", None),
    "memory.png": (lowmem.run.ending, "draw_memory", "memory.png", None),
    "a tracker's pictures": (lowmem.run.log.RunLog, "pictures", "the trackers", None),
    "the summary": (lowmem.run.ending.Ending, "_summarize", "the summary", None),
    "a tracker's end": (Trackers, "close", "closing the log and the trackers", None),
}
MADE_AT_THE_END = ("report.json", "report.html", "loss.png", "memory.png")
OPTIONS = ["--sample-prompt", "one 1", "--schedule", "constant"]


class Broken(Exception):
    pass


class Panic(BaseException):
    """As those of `tokenizers`."""


def is_path(given) -> bool:
    return isinstance(given, Path)


def fail(error: type[BaseException] = Broken):
    raise error("it broke\nfor a reason")


def after_training(patch, *fault) -> None:
    """Arranges `fault` for when training has begun, when all that is rehearsed has been."""
    at_call(patch, lowmem.run.log.RunLog, "start", lambda: at_call(patch, *fault))


@pytest.fixture(scope="module")
def expected(train, tmp_path_factory):
    out = tmp_path_factory.mktemp("ending") / "expected"
    assert train(out, *OPTIONS) == 0
    return out


@pytest.fixture
def trained(expected, tmp_path):
    """A run all of whose steps are done, and nothing of its end."""
    shutil.copytree(expected, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/model")
    for name in MADE_AT_THE_END:
        (tmp_path / "out" / name).unlink()
    return tmp_path / "out"


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_at_the_end_costs_neither_the_weights_nor_the_rest(
    fault, train, expected, trained, monkeypatch, capsys
):
    owner, name, said, missing = FAULTS[fault]
    with monkeypatch.context() as patch:
        after_training(patch, owner, name, fail)
        assert train(trained, *OPTIONS) == 1
    sentence = last_line(capsys)
    assert said in sentence and "it broke" in sentence and "for a reason" not in sentence
    if missing == "model.safetensors":
        assert f"The weights are in {trained}/checkpoints/step-00000003" in sentence
        assert not (trained / "model").exists()
    else:
        assert f"The weights are in {trained}/model" in sentence and weights(trained) == weights(expected)
        there, wanted = (set(os.listdir(folder / "model")) for folder in (trained, expected))
        assert missing in wanted - there if missing else there == wanted
    for name in MADE_AT_THE_END:
        assert (trained / name).exists() == (name != said), name
    if missing:
        assert said in stored(trained / "report.json")["failed"][0]
    if fault in ("config.json", "report.html", "memory.png"):
        assert train(trained, *OPTIONS) == 0  # the same command does the end again
        assert_same_run(trained, expected)
        assert "failed" not in stored(trained / "report.json")
        assert all((trained / name).exists() for name in MADE_AT_THE_END)


def test_a_finished_run_that_is_started_again_says_so_and_how_to_go_on(train, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(out, *OPTIONS) == 0
    before = content(out)
    assert train(out, *OPTIONS) == 0
    sentence = last_line(capsys)
    assert f"already finished: 3 steps are done, and {out}/model has the result" in sentence
    assert all(way in sentence for way in ("more --steps;", "another --out", "--resume never"))
    assert content(out) == before
    (out / "report.html").unlink()  # as if a power cut had come before it
    assert train(out, *OPTIONS) == 0 and (out / "report.html").exists()
    assert train(out, *OPTIONS, "--export-dtype", "bf16") == 0  # another command, and another end
    assert "already finished" not in last_line(capsys) and weights(out) != before["model/model.safetensors"]


def test_the_export_needs_nothing_of_the_folder_that_the_model_came_from(
    train, finished, tmp_path, monkeypatch, capsys
):
    """It may be moved, deleted or changed during training."""
    source = shutil.copytree(finished / "model", tmp_path / "source")
    (source / "generation_config.json").write_text('{"temperature": 0.9, "do_sample": false}')
    (source / "vocab.txt").write_text("as slow tokenizers have it")
    options = ["--init", "pretrained", "--model", str(source)]
    assert train(tmp_path / "expected", *options) == 0
    at_call(monkeypatch, lowmem.run.log.RunLog, "start", lambda: shutil.rmtree(source))
    assert train(tmp_path / "out", *options) == 0
    made, wanted = (content(tmp_path / name / "model") for name in ("out", "expected"))
    assert made.keys() == wanted.keys() and {name for name in made if made[name] != wanted[name]} <= {"README.md"}
    assert stored(tmp_path / "out/model/generation_config.json")["temperature"] == 0.9
    assert not (tmp_path / "out/.model.rehearsal").exists()


def test_whatever_lies_under_the_names_of_an_export_makes_way(train, trained, expected, monkeypatch):
    def put() -> None:
        shutil.rmtree(trained / ".model.rehearsal")
        (trained / ".model.partial").write_text("x")
        (trained / ".model.previous").symlink_to("nowhere")
        (trained / "model").write_text("x")

    at_call(monkeypatch, lowmem.run.log.RunLog, "start", put)
    assert train(trained, *OPTIONS) == 0 and weights(trained) == weights(expected)
    assert set(os.listdir(trained / "model")) == set(os.listdir(expected / "model"))
    assert [name for name in os.listdir(trained) if name.startswith(".model")] == []


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (lowmem.run.evaluation, "evaluated", "the last evaluation"),
        (lowmem.run.saver, "save_checkpoint", "the last save"),
    ],
    ids=["evaluation", "save"],
)
def test_a_last_step_that_is_not_evaluated_or_saved_is_exported(
    owner, name, said, train, expected, tmp_path, monkeypatch, capsys
):
    after_training(monkeypatch, owner, name, fail)
    assert train(tmp_path / "out", *OPTIONS) == 1
    assert f"{said} failed: it broke. The weights are in {tmp_path}/out/model" in last_line(capsys)
    assert weights(tmp_path / "out") == weights(expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("every", "said"),
    [
        ("2", "The weights after step 2 are in"),
        ("9", "The weights are lost; give the same"),
        ("start", "start/checkpoints/step-00000002, and later ones are lost"),
    ],
)
def test_what_was_neither_saved_nor_exported_is_said_to_be_lost(every, said, train, tmp_path, monkeypatch, capsys):
    def full(folder, store, state, **given):
        if state["step"] == 3:
            raise NotSaved("step 3", "No space left on device")
        save(folder, store, state, **given)

    options = [*OPTIONS, "--save-every", every]
    if every == "start":
        assert train(tmp_path / "start", *OPTIONS, "--save-every", "2") == 0
        options[-2:] = "--resume", str(tmp_path / "start/checkpoints/step-00000002")
    save = lowmem.run.saver.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(lowmem.run.saver, "save_checkpoint", full)
        after_training(patch, export, "_write_shards", fail)
        assert train(tmp_path / "out", *options) == 1
    assert said in last_line(capsys)
    assert train(tmp_path / "out", *options) == 0


def test_weights_beyond_the_range_of_fp16_are_exported_in_fp32(train, trained, expected, monkeypatch, capsys):
    def masters(store):
        for name, values in real(store):
            yield name, values * (1e6 if name == "transformer.wpe.weight" else 1)

    real = Store.masters
    monkeypatch.setattr(Store, "masters", masters)
    assert train(trained, *OPTIONS[2:], "--export-dtype", "fp16") == 1
    sentence = last_line(capsys)
    assert "transformer.wpe.weight holds" in sentence and "exported in fp32" in sentence
    assert f"The weights are in {trained}/model" in sentence
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    assert model.dtype == torch.float32 and model.transformer.wpe.weight.isfinite().all()


@pytest.mark.parametrize("both", [False, True])
def test_a_best_checkpoint_that_breaks_off_half_way_leaves_the_last_or_none(
    both, train, tmp_path, monkeypatch, capsys, held_out
):
    held_out(5.0, 3.0, 4.0, 5.0)

    def break_off(checkpoint, store, check):
        loads.append(checkpoint.name)
        if both or len(loads) == 1:
            store.clear()
            fail()
        return load(checkpoint, store, check)

    load, loads, out = lowmem.run.ending.load_checkpoint, [], tmp_path / "out"
    monkeypatch.setattr(lowmem.run.ending, "load_checkpoint", break_off)
    options = ["--keep-best", "--eval-every", "1", "--keep-last", "3", "--save-every", "1"]
    assert train(out, *options) == 1 and loads == ["step-00000001", "step-00000003"]
    sentence = last_line(capsys)
    assert "loading the weights after step 1 failed: it broke" in sentence
    if both:
        assert f"The weights are in {out}/checkpoints/step-00000003" in sentence and not (out / "model").exists()
    else:
        assert f"The weights are in {out}/model" in sentence
        assert stored(out / "report.json")["loss"]["exported_step"] == 3
        assert load_file(out / "model/model.safetensors")["transformer.wte.weight"].any()


@pytest.mark.parametrize("error", [KeyboardInterrupt, CapExceeded])
def test_an_interrupt_and_an_exceeded_cap_are_no_failures_of_a_step(error, train, trained, monkeypatch):
    after_training(monkeypatch, lowmem.run.evaluation, "sample", partial(fail, error))
    if error is KeyboardInterrupt:
        with pytest.raises(error):
            train(trained, *OPTIONS)
    else:
        assert train(trained, *OPTIONS) == CapExceeded.exit_code
    assert not (trained / "model").exists() and (trained / "checkpoints/step-00000003").exists()


def test_a_step_that_exceeds_a_cap_is_saved(train, tmp_path, monkeypatch):
    """Seen to fail: up to half an hour of steps was lost, though the weights were right."""

    def check(self, where: str) -> None:
        if where == "step 2":
            raise CapExceeded("step 2: RAM reached too much")

    monkeypatch.setattr(Budget, "check", check)
    assert train(tmp_path / "run", "--save-every", "100") == CapExceeded.exit_code
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]


def test_a_save_that_exceeds_the_cap_too_does_not_hide_the_first_error(train, tmp_path, monkeypatch, capsys):
    def check(self, where: str) -> None:
        if where in ("step 2", "save"):
            raise CapExceeded(f"{where}: RAM reached too much")

    monkeypatch.setattr(Budget, "check", check)
    assert train(tmp_path / "run", "--save-every", "100") == CapExceeded.exit_code
    assert "step 2: RAM reached too much" in last_line(capsys)
