"""`import lowmem` and `python -m lowmem`: what a program of one's own can call."""

import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lowmem
from lowmem.__main__ import main as command
from lowmem.cudasim.gpus import card_named
from lowmem.data.dataset import load_data
from lowmem.run import recovery
from lowmem.run.folder import lock_run
from lowmem.run.learning_rate import Course
from lowmem.units import GIB
from runs import ROOT, python, remembering, stored, write_rows

TINY = lowmem.Settings(
    model="gpt2-demo", init="random", seq=16, batch=4, steps=3, lr=1e-3, device="cpu", eval_batches=1
)
MOST_LINES = 20


@pytest.fixture(autouse=True)
def planned_once(monkeypatch):
    for module in ("api", "prepare"):
        monkeypatch.setattr(f"lowmem.run.{module}.process_aside", remembering)


def loop_batch(number: int) -> dict:
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens.clone()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_importing_lowmem_imports_nothing_heavy():
    program = (
        "import sys, lowmem; lowmem.Settings; lowmem.InputError; print({'torch', 'transformers'} & {*sys.modules})"
    )
    assert python("-c", program).stdout == "set()\n"


def test_every_name_is_there_and_plan_is_a_function_also_after_its_program_was_run():
    assert set(lowmem.__all__) == set(lowmem._HOMES)
    for name in lowmem.__all__:
        assert getattr(lowmem, name).__name__ == name
        assert name in dir(lowmem)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lowmem.trian  # noqa: B018
    from lowmem.run import plan_command  # noqa: F401

    with pytest.raises(lowmem.InputError, match=r"\?"):
        lowmem.plan(lowmem.Settings(gpu="?"))


@pytest.mark.exhaustive
def test_plan_is_a_function_in_a_process_that_has_only_imported_its_program():
    program = "import lowmem; from lowmem.run import plan_command; lowmem.plan(lowmem.Settings(gpu='?'))"
    done = python("-c", program)
    assert "InputError" in done.stderr and "?" in done.stderr


@pytest.mark.exhaustive
def test_what_a_notebook_took_before_a_run_does_not_count_against_its_cap(tmp_path):
    settings = replace(TINY, steps=1, out=str(tmp_path / "out"), ram_limit_bytes=GIB)
    program = (
        f"import lowmem, torch\ntorch.ones({GIB}).sum()  # 4 GiB, and freed again\nlowmem.train(lowmem.{settings!r})\n"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert 0 < stored(tmp_path / "out/report.json")["measured"]["ram_peak_bytes"] < GIB


@pytest.mark.parametrize("change", ["freeze", "add"])
def test_a_parameter_that_is_frozen_or_added_after_loading_is_refused(change):
    """Else weight decay would change frozen weights, and added ones would stay as they are."""
    model = lowmem.load(TINY)
    batch = loop_batch(0)
    model.step(batch, 0, learning_rate=1e-3)
    block = model.decoder.blocks[1]
    if change == "freeze":
        block.requires_grad_(False)
    else:
        block.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    for _ in range(2):
        with pytest.raises(lowmem.InputError, match="a parameter of the model was added, or its requires_grad"):
            model.step(batch, 1, learning_rate=1e-3)
    block.requires_grad_(True)
    block._parameters.pop("scale", None)
    assert model.step(batch, 1, learning_rate=1e-3).updated


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.double, lambda m: replaced(m.lm_head)])
def test_weights_in_other_memory_than_when_loaded_are_refused(change):
    """Else steps change the memory that was loaded, and the model computes the same loss for ever."""
    model = lowmem.load(TINY)
    batch = loop_batch(0)
    model.decoder.model.float()
    model.step(batch, 0, learning_rate=1e-3)
    change(model.decoder.model)
    with pytest.raises(lowmem.InputError, match="a parameter of the model has other memory than when it was loaded"):
        model.step(batch, 1, learning_rate=1e-3)


def replaced(module: torch.nn.Module) -> None:
    module.weight.data = module.weight.data.clone()


def test_a_loaded_model_is_neither_copied_nor_pickled():
    """A copy's weights and its updates would lie in different memory."""
    model = lowmem.load(TINY)
    for whole in (model, model.step):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(lowmem.InputError, match="cannot be copied or pickled: save it"):
                copied(whole)
    copy.deepcopy(model.decoder.model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_and_the_next_one_works(mode):
    model = lowmem.load(TINY)
    batch = loop_batch(0)
    with mode(), pytest.raises(lowmem.InputError, match="a step needs gradients"):
        model.step(batch, 0, learning_rate=1e-3)
    assert model.step(batch, 0, learning_rate=1e-3).updated


@pytest.mark.exhaustive
def test_the_loop_in_docs_runs_as_it_stands(tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) <= MOST_LINES
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert weights(tmp_path / "model")


def test_a_loop_of_one_s_own_gives_the_bits_of_a_run(tmp_path, text):
    settings = replace(TINY, data=str(text), out=str(tmp_path / "run"))
    report = lowmem.train(settings)
    assert report["steps"] == 3
    model = lowmem.load(settings)
    data = load_data(settings, model.tokenizer, model.config.vocab_size)
    for number in range(3):
        result = model.step(data.train.batch(number), number, Course(1e-3, "cosine", 3, 1, 1).rate(number))
    assert result.loss == report["loss"]["last"]
    lowmem.export(model, tmp_path / "model")
    ours, run = weights(tmp_path / "model"), weights(tmp_path / "run" / "model")
    assert ours.keys() == run.keys() and all(torch.equal(ours[name], run[name]) for name in run)


def test_a_loop_of_one_s_own_that_is_saved_and_resumed_has_the_same_bits(tmp_path):
    with pytest.warns(UserWarning, match="mine'?.*: no checkpoint is there, so this begins with the first weights"):
        whole = lowmem.load(TINY, resume=tmp_path / "mine")
    assert whole.done == 0
    first = whole.evaluate([loop_batch(9), loop_batch(10)])
    for number in range(4):
        if number == 2:
            assert whole.save(tmp_path / "mine", 2) == tmp_path / "mine/checkpoints/step-00000002"
        whole.step(loop_batch(number), number, learning_rate=1e-3)
    lowmem.export(whole, tmp_path / "whole")
    assert whole.evaluate([loop_batch(0)]) < first
    newest = tmp_path / "mine/checkpoints/step-00000002"
    newest.rename(newest.with_name(".old-step-00000002"))  # as a save leaves it that is killed
    for place in (tmp_path / "mine/checkpoints", tmp_path / "mine", str(tmp_path / "mine/checkpoints/step-00000002")):
        resumed = lowmem.load(replace(TINY, lr=5e-5, eval_fraction=0.2, out="elsewhere"), resume=place)
        assert resumed.done == 2
        for number in range(resumed.done, 4):
            resumed.step(loop_batch(number), number, learning_rate=1e-3)
    lowmem.export(resumed, tmp_path / "resumed")
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(lowmem.InputError, match="refused to go on .*--optimizer adamw -> sgd"):
        lowmem.load(replace(TINY, optimizer="sgd"), resume=tmp_path / "mine")
    with pytest.raises(lowmem.InputError, match="refused to go on .*--micro-batch 4 -> 3"):
        lowmem.load(replace(TINY, batch=3, micro_batch=None), resume=tmp_path / "mine")
    for done in (-1, 2.0, "2"):
        with pytest.raises(lowmem.InputError, match=f"{done!r} steps: give a whole number, at least 0"):
            resumed.save(tmp_path / "mine", done)
    with pytest.raises(lowmem.InputError, match="step-00000002 has more steps than 1: load"):
        resumed.save(tmp_path / "mine", 1)
    with pytest.raises(lowmem.InputError, match="keep_last=0: give a whole number, at least 1"):
        resumed.save(tmp_path / "mine", 4, keep_last=0)
    with pytest.raises(lowmem.InputError, match="no token with a label to evaluate on"):
        resumed.evaluate([])
    without = loop_batch(1) | {"labels": torch.full_like(loop_batch(1)["labels"], -100)}
    with pytest.raises(lowmem.InputError, match="no token with a label to evaluate on"):
        resumed.evaluate([without])
    assert resumed.evaluate([loop_batch(0), without]) == resumed.evaluate([loop_batch(0)])
    with pytest.raises(lowmem.InputError, match="step number 1.5: give a whole number"):
        resumed.step(loop_batch(1), 1.5, learning_rate=1e-3)
    with pytest.raises(lowmem.InputError, match=r"step number of 64 bits: give a whole number below 2\*\*63"):
        resumed.step(loop_batch(1), 2**63, learning_rate=1e-3)


def test_a_loop_s_saves_keep_as_many_checkpoints_as_the_settings_say(tmp_path):
    """Seen to fail: two were kept, whatever the settings said."""
    model = lowmem.load(replace(TINY, keep_last=3))
    for number in range(4):
        model.save(tmp_path / "mine", number)
    assert sorted(path.name[-1] for path in (tmp_path / "mine/checkpoints").iterdir()) == ["1", "2", "3"]
    model.save(tmp_path / "mine", 4, keep_last=1)
    assert [path.name[-1] for path in (tmp_path / "mine/checkpoints").iterdir()] == ["4"]


@pytest.mark.parametrize(
    ("values", "said"),
    [({"resume": "mine"}, "resume='mine'"), ({"plan_only": True}, "lowmem.plan"), ({"preview": 2}, "train nothing")],
    ids=str,
)
def test_settings_of_a_run_that_a_loop_would_not_follow_are_refused(values, said):
    """Seen to fail: a model with its first weights was loaded, and nothing was said."""
    with pytest.raises(lowmem.InputError, match=said):
        lowmem.load(replace(TINY, **values))


def test_a_loop_of_one_s_own_goes_on_from_a_run_of_the_scripts_and_does_not_write_there(finished, monkeypatch):
    settings = lowmem.Settings(**json.loads((finished / "settings.json").read_text()))
    model = lowmem.load(settings, resume=finished)
    assert model.done == 3
    lowmem_weights = dict(model.step.store.masters())
    assert all(torch.equal(tensor, lowmem_weights[name]) for name, tensor in weights(finished / "model").items())
    with pytest.raises(lowmem.InputError, match="is the folder of a run of the scripts, which save there"):
        model.save(finished, 4)
    monkeypatch.chdir(finished / "model")
    for folder in (finished / "model", "."):
        with pytest.raises(lowmem.InputError, match="is in the folder of a run of the scripts, which writes there"):
            lowmem.export(model, folder)


def test_a_states_folder_that_cannot_be_written_is_refused_before_the_data_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lowmem.run.prepare.load_data", lambda *_: pytest.fail("the data was read"))
    (tmp_path / "file").touch()
    settings = replace(TINY, out=str(tmp_path / "run"), states_folder=str(tmp_path / "file"))
    with pytest.raises(lowmem.InputError, match="--states-folder .*file cannot be written: it is no folder"):
        lowmem.train(settings)


def test_what_makes_steps_slow_is_a_warning_and_a_batch_without_a_label_an_error(monkeypatch):
    from lowmem.core.parameters import Store

    slower = lambda plan: replace(plan, step_seconds=12.5, waiting_seconds=2.5, card=card_named("t4"))  # noqa: E731
    monkeypatch.setattr(Store, "page_lock", lambda self: False)
    monkeypatch.setattr(recovery, "with_pageable_copies", slower)
    with pytest.warns(UserWarning, match="page-locked memory was refused.* 12.5 s") as caught:
        model = lowmem.load(TINY)
    ours = [warning for warning in caught if "page-locked" in str(warning.message)]
    assert model.plan.step_seconds == 12.5 and ours[0].filename == __file__
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    with pytest.raises(lowmem.InputError, match="every label of the batch is -100"):
        model.step(lowmem.Batch(tokens, torch.full_like(tokens, -100)), 0, learning_rate=1e-3)
    model.step(lowmem.Batch(tokens, tokens), 0, learning_rate=1e-3)


@pytest.mark.exhaustive
def test_a_plan_for_a_card_that_is_not_here():
    plan = lowmem.plan(replace(TINY, device="auto", gpu="rtx3060"))
    assert plan.card.name == "rtx3060" and plan.to_dict()["fits"]
    with pytest.raises(lowmem.PlanError, match="--gpu-limit"):
        lowmem.plan(replace(TINY, device="auto", gpu="rtx3060", gpu_limit_bytes=2**20))
    with pytest.raises(lowmem.InputError, match="lowmem.plan"):
        lowmem.train(replace(TINY, plan_only=True))
    for function in (lowmem.plan, lowmem.train, lowmem.load):
        with pytest.raises(lowmem.InputError, match=r"'gpt2' is no Settings: write lowmem.Settings"):
            function("gpt2")


@pytest.mark.parametrize(("words", "code", "said"), [
    ([], 2, "the commands are train, plan, demo and report"), (["trian"], 2, "'trian' is no command"),
    (["train", "--stpes", "3"], 2, "lowmem: Unknown option --stpes"),
    (["plan", "--model", "gpt2", "--gpu", "no card"], 2, "lowmem.plan: "),
])  # fmt: skip
def test_bad_usage_of_the_command(words, code, said):
    done = python("-m", "lowmem", *words)
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr and done.stderr.count("\n") == 1


DEMO = "train --demo --seq 16 --batch 4 --micro-batch 4 --steps 1 --device cpu --out".split()


def test_the_command_plans_and_trains(tmp_path, capsys, text):
    assert command("plan --model gpt2-demo --gpu t4 --seq 64 --batch 2".split()) == 0
    assert capsys.readouterr().out.startswith("Fits: ")
    assert command([*DEMO, str(tmp_path / "demo"), "--data", str(text)]) == 0
    assert (tmp_path / "demo" / "report.json").exists()


@pytest.mark.exhaustive
def test_the_command_plans_gpt2_and_trains_as_a_process(tmp_path, capsys):
    assert command("plan --model gpt2 --gpu t4 --seq 64 --batch 2".split()) == 0
    assert capsys.readouterr().out.startswith("Fits: ")
    done = python("-m", "lowmem", *DEMO, tmp_path / "demo")
    assert done.returncode == 0 and (tmp_path / "demo" / "report.json").exists(), done.stderr


def test_a_loop_of_one_s_own_is_told_of_bad_arguments_before_anything_changes():
    model = lowmem.load(replace(TINY, steps=None))
    before = {name: tensor.clone() for name, tensor in model.decoder.model.state_dict().items()}
    good = loop_batch(0)
    for batch, rate, said in (
        (None, 1e-3, "a lowmem.Batch or a dict, and this is a NoneType"),
        (lowmem.Batch(good["input_ids"][0], good["labels"][0]), 1e-3, "have two dimensions"),
        (good, "x", "learning_rate is 'x'"),
        (good, float("nan"), "learning_rate is nan"),
        (good, True, "learning_rate is True"),
        (
            lowmem.Batch(good["input_ids"], good["labels"].roll(-1, 1), lengths=torch.full((3,), 16)),
            1e-3,
            "lengths of a",
        ),
        ({name: value.repeat(2, 1) for name, value in good.items()}, 1e-3, "8 rows, and the plan is for at most 4"),
        ({name: value.repeat(1, 2) for name, value in good.items()}, 1e-3, "32 tokens wide"),
        ({name: value + 256 for name, value in good.items()}, 1e-3, "token ids are from 0 to"),
        (good | {"labels": torch.full_like(good["labels"], -1)}, 1e-3, "labels are -100 or token ids from 0 to"),
        (good | {"labels": good["labels"] + 10_000}, 1e-3, "labels are -100 or token ids from 0 to"),
    ):
        with pytest.raises(lowmem.InputError, match=said):
            model.step(batch, 0, rate)
    for change, said in ((lambda ids: ids.repeat(1, 2), "32 tokens wide"), (lambda ids: ids + 256, "token ids are")):
        with pytest.raises(lowmem.InputError, match=said):
            model.evaluate([{name: change(value) for name, value in good.items()}])
    with pytest.raises(lowmem.InputError, match=r"a list, \[batch\]"):
        model.evaluate(good)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.decoder.model.state_dict().items())
    assert model.step(good, 0, 1e-3).updated


def test_what_is_in_a_folder_is_not_lost(tmp_path):
    """Seen to fail: an export removed every other file of its folder, a fresh loop's first save the checkpoints of an
    older one, and loading removed the unfinished files of a run that was saving."""
    model = lowmem.load(TINY)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(lowmem.InputError, match="has other files"):
        lowmem.export(model, tmp_path / "mine")
    with pytest.raises(lowmem.InputError, match="letter.txt is a file, and an export is a folder"):
        lowmem.export(model, tmp_path / "mine/letter.txt")
    with pytest.raises(lowmem.LowmemError, match="letter.txt/in cannot be written"):
        lowmem.export(model, tmp_path / "mine/letter.txt/in")
    assert (tmp_path / "mine/letter.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        lowmem.export(model, tmp_path / "empty")
    assert weights(tmp_path / "empty")

    model.save(tmp_path / "mine", 50)
    with pytest.raises(lowmem.InputError, match=r"step-00000050 has more steps than 10: load\(\.\.\., resume="):
        lowmem.load(TINY).save(tmp_path / "mine", 10)
    model.save(tmp_path / "theirs", 5)
    with pytest.raises(lowmem.InputError, match=r"step-00000050 has more steps than 10: load\(\.\.\., resume="):
        lowmem.load(TINY, resume=tmp_path / "theirs").save(tmp_path / "mine", 10)  # of another run
    unfinished = tmp_path / "mine/checkpoints/.tmp-step-00000060"
    unfinished.mkdir()
    with lock_run(tmp_path / "mine"):
        assert lowmem.load(TINY, resume=tmp_path / "mine").done == 50 and unfinished.exists()
    assert lowmem.load(TINY, resume=tmp_path / "mine").done == 50 and not unfinished.exists()


def test_few_steps_and_prompts_without_the_chat_template_are_remarked(tmp_path, capsys):
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    rows = [{"prompt": f"How many legs have {n} spiders? ", "completion": str(8 * n)} for n in range(9)]
    data, template = write_rows(tmp_path / "rows.jsonl", rows), str(tmp_path / "chat.jinja")
    lowmem.train(replace(TINY, steps=None, seq=64, data=data, out=str(tmp_path / "run"), chat_template=template))
    said = capsys.readouterr().err
    assert "warning: 2 steps in all: an epoch has 8 rows, a step 4; a smaller --batch makes more" in said
    assert "joined without the model's chat template" in said
