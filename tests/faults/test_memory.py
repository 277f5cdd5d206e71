"""Memory that runs out in a run, or is not there to begin with. Seen to fail: with the layout left out of the
checkpoint, with another plan's taken for it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

import lowmem.core.operations
import lowmem.core.optimizers
import lowmem.limits
import lowmem.models.export
import lowmem.planning.cpu_plan
import lowmem.run.main
import lowmem.run.prepare
import lowmem.run.recovery
import lowmem.run.train
from lowmem.core.layout import Layout
from lowmem.core.parameters import Store
from lowmem.core.step import TrainingStep
from lowmem.errors import LowmemError
from lowmem.limits import Budget
from lowmem.run import recovery
from lowmem.run.recovery import PAGEABLE_SHARE, with_pageable_copies
from lowmem.settings import Settings
from lowmem.units import MIB
from runs import (
    assert_same_run,
    at_call,
    last_line,
    loss_rows,
    run_out,
    simulated,
    stopped_in_step,
    stored,
    weights,
)

# --- a whole run that runs out of the GPU's memory

EVALUATION, SECOND_STEP = 1, 5  # calls of the loss: two in the evaluation before the first step, two in each step
ALL_MEASURES = 3  # the cache, the layout that keeps nothing, the micro-batch


@contextmanager
def memory_runs_out(calls: range) -> Iterator[None]:
    """Fails at these calls of the loss, so `len(calls)` times one after the other."""
    real, numbers = lowmem.core.operations.linear_cross_entropy, iter(range(1, 10_000))

    def failing(*arguments, **keywords):
        if not simulated() and next(numbers) in calls:
            run_out()
        return real(*arguments, **keywords)

    with patch.object(lowmem.core.operations, "linear_cross_entropy", failing):
        yield


def measures(out) -> list[str]:
    return [measure["measure"] for measure in stored(out / "report.json")["out_of_memory"]]


KEEP, NO_MORE, RETURN = True, False, "return"
EXPORT, END = [NO_MORE, RETURN], [NO_MORE]


@pytest.mark.parametrize(("ram_bytes", "asked"), [
    (0, [KEEP, *EXPORT, *END]),
    (2**40, [KEEP, NO_MORE, *[RETURN] * 3, *EXPORT, *END]),  # after each of three steps
])  # fmt: skip
def test_a_run_that_takes_more_ram_than_planned_returns_freed_memory_after_each_step(
    ram_bytes, asked, finished, train, tmp_path, monkeypatch
):
    """Seen to fail: it was returned once, and the next step took it again. What is kept depends on malloc."""
    done, peaks = [], Budget.peaks
    monkeypatch.setattr(lowmem.run.train.devices, "keep_freed_memory", done.append)
    monkeypatch.setattr(lowmem.run.train.devices, "return_freed_memory", lambda: done.append(RETURN))
    monkeypatch.setattr(lowmem.planning.cpu_plan, "chooses_freed_memory", lambda: True)
    monkeypatch.setattr(Budget, "peaks", lambda budget: peaks(budget) | {"ram_peak_bytes": ram_bytes})
    assert train(tmp_path) == 0
    assert done[done.index(KEEP) :] == asked
    assert (tmp_path / "log.txt").read_text().count("freed memory goes back") == (ram_bytes > 0)
    assert_same_run(finished, tmp_path)


def test_a_run_gives_up_what_costs_no_bit_says_so_and_resumes_without_it(
    finished, train, tmp_path, monkeypatch, capsys
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    failing = range(SECOND_STEP, SECOND_STEP + ALL_MEASURES - 1)
    with memory_runs_out(failing):
        assert train(whole) == 0
    said = (whole / "log.txt").read_text()
    assert (
        "step 2: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.); the allocator's cache was freed"
        in said
    )
    assert "; it is tried again, and training goes on, with less: all 4 blocks recomputed" in said
    found = measures(whole)
    assert found[0] == "cache" and len(found) == len(failing) and "micro_batch" not in found
    assert loss_rows(whole) == loss_rows(finished) and weights(whole) == weights(finished)

    with memory_runs_out(failing), stopped_in_step(2):
        assert train(parts) == 75
    capsys.readouterr()
    taken = []
    with monkeypatch.context() as patch:
        at_call(patch, TrainingStep, "change_layout", lambda: taken.append(True))
        assert train(parts) == 0
    assert taken and "memory ran out before, last in step 2, so this goes on with" in capsys.readouterr().err
    assert stored(parts / "report.json")["out_of_memory"] == stored(whole / "report.json")["out_of_memory"]
    assert_same_run(whole, parts)


@pytest.mark.exhaustive
def test_a_layout_that_was_planned_anew_is_taken_but_for_the_micro_batch(train, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with memory_runs_out(range(SECOND_STEP, SECOND_STEP + ALL_MEASURES)), stopped_in_step(2):
        assert train(out) == 75
    layouts = []
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "change_layout", lambda step, layout: layouts.append(layout))
        train(out, "--recompute", "products")
    assert layouts[0].micro_batch == 1 and layouts[0].kept > 0


def test_smaller_micro_batches_come_last_and_stay(train, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    failing = range(SECOND_STEP, SECOND_STEP + ALL_MEASURES)
    with memory_runs_out(failing):
        assert train(whole) == 0
    assert measures(whole)[-1] == "micro_batch" and "which changes roundings" in (whole / "log.txt").read_text()
    assert [row["tokens"] for row in loss_rows(whole)] == [4 * 32] * 3
    with memory_runs_out(failing), stopped_in_step(2):
        assert train(parts) == 75
    assert train(parts) == 0
    assert_same_run(whole, parts)


def test_an_evaluation_that_runs_out_of_memory_leaves_training_alone(finished, train, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with memory_runs_out(range(EVALUATION, EVALUATION + 3)):
        assert train(out) == 0
    assert measures(out)[-1] == "evaluation_rows" and stored(out / "report.json")["out_of_memory"][0]["step"] == 0
    assert "out of memory in the evaluation" in (out / "log.txt").read_text()
    assert weights(out) == weights(finished)


def test_an_update_that_runs_out_of_memory_is_made_all_the_same(finished, train, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # 13 parts are updated in each step; this is in the middle of the second
        at_call(patch, lowmem.core.optimizers, "update_in_slices", run_out, 20)
        assert train(out) == 0
    assert measures(out) == ["cache"]
    assert weights(out) == weights(finished)


def test_what_a_run_had_come_to_is_saved_when_nothing_is_left_to_give_up(
    finished, train, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    with memory_runs_out(range(SECOND_STEP, 10_000)):
        assert train(out) == 4
    assert "step 2: out of memory" in (sentence := last_line(capsys)) and "even for single sequences" in sentence
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
    assert train(out) == 0
    assert "1 of 3 steps are done" in capsys.readouterr().err
    assert weights(out) == weights(finished)


def test_what_a_run_had_come_to_is_saved_when_an_evaluation_finds_no_memory(
    finished, train, tmp_path, monkeypatch, capsys
):
    """Also after the last step. Seen to fail: all steps since the newest checkpoint were lost."""
    evaluate = lowmem.core.operations.Operations.evaluate
    for steps, option in ((2, "2"), (3, "9")):
        out, calls = tmp_path / option, []

        def failing(operations, batch, calls=calls):
            calls.append(None)
            return evaluate(operations, batch) if simulated() or len(calls) <= 2 else run_out()

        with monkeypatch.context() as patch:
            patch.setattr(lowmem.core.operations.Operations, "evaluate", failing)
            assert train(out, "--eval-every", option) == 4
        assert f"step {steps}: out of memory in the evaluation" in last_line(capsys)
        assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-0000000{steps}"]
        assert train(out, "--eval-every", option) == 0
        assert f"{steps} of 3 steps are done" in capsys.readouterr().err
        assert weights(out) == weights(finished)


@pytest.mark.exhaustive
def test_ram_that_runs_out_in_the_export_is_no_bad_input(finished, train, tmp_path, capsys, monkeypatch):
    """Seen to fail: it said that the config makes no model, with exit code 2 after a whole training."""

    def fail(*_, **__):
        raise MemoryError

    real, out = lowmem.models.export.build_model, tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            lowmem.models.export, "build_model",
            lambda config: patch.setattr(AutoModelForCausalLM, "from_config", fail) or real(config),
        )  # fmt: skip
        assert train(out) == 1
    assert "model or T5: MemoryError); what was saved is safe" in last_line(capsys)
    assert train(out) == 0
    assert "3 of 3 steps are done" in capsys.readouterr().err
    assert weights(out) == weights(finished)


# --- memory that is not there to begin with


def nothing_is_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lowmem.run.prepare, "random_weights", lambda *_: pytest.fail("weights were loaded"))


def test_a_control_group_that_is_too_small_is_refused_before_loading(train, tmp_path, capsys, monkeypatch):
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text(str(1000 * MIB))
    (group / "memory.current").write_text(str(999 * MIB))
    monkeypatch.setattr(lowmem.limits, "_groups", lambda: [group])
    nothing_is_loaded(monkeypatch)
    assert train(tmp_path / "out") == 3
    assert "1.00 MiB are free here" in last_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_busy_gpu_is_refused_before_loading(train, tmp_path, capsys, monkeypatch):
    def busy(self, *_):
        raise LowmemError("the GPU is busy")

    monkeypatch.setattr(Budget, "apply", busy)
    nothing_is_loaded(monkeypatch)
    assert train(tmp_path / "out") == 1
    assert "the GPU is busy" in last_line(capsys)
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_gpu_is_one_sentence_and_the_run_goes_on_from_its_checkpoint(
    finished, train, tmp_path, capsys, monkeypatch
):
    def fail():
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_call(patch, TrainingStep, "__call__", fail, 3)
        assert train(out, "--save-every", "1") == 1
    assert "the GPU failed (CUDA error: an illegal memory access); what was saved is safe" in last_line(capsys)
    assert train(out, "--save-every", "1") == 0
    assert weights(out) == weights(finished)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "the GPU failed"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of RAM"),
        (MemoryError(), "out of RAM"),
    ],
    ids=["cublas", "allocator", "memory"],
)
def test_an_error_of_the_machine_is_one_sentence(tmp_path, capsys, monkeypatch, error, said):
    def fail(settings, stop):
        raise error

    monkeypatch.setattr(lowmem.run.train, "run", fail)
    assert lowmem.run.main.main(Settings(out=str(tmp_path / "out")), []) == 1
    sentence = last_line(capsys)
    assert said in sentence and "what was saved is safe" in sentence


def test_a_mistake_of_ours_is_not_dressed_up_as_one_of_the_machine(train, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("size mismatch")

    at_call(monkeypatch, TrainingStep, "__call__", fail)
    with pytest.raises(RuntimeError, match="size mismatch"):
        train(tmp_path / "out")


def test_without_page_locking_a_step_is_predicted_to_wait_for_its_copies():
    """Also if another phase takes more RAM than training."""
    card, ram = SimpleNamespace(bus_bytes_per_second=12e9), {"streamed_states": 15e9, "process": 2e9}
    timed = {"card": card, "ram": {"prepare": {"process": 30e9}, "train": ram}}
    timed |= {"step_seconds": 10.0, "waiting_seconds": 0.5, "settings": Settings(batch=8), "ranks": 1}
    timed |= {"layout": Layout(2, group=2)}
    plan = dataclasses.make_dataclass("TimedPlan", timed)(**timed)
    slower = with_pageable_copies(plan)
    assert slower.waiting_seconds == 2 * 15e9 / (12e9 * PAGEABLE_SHARE)  # in and out
    assert slower.step_seconds == 9.5 + slower.waiting_seconds
    ram["streamed_weights"] = 3e9  # in for two passes of both groups, and in and out for their updates
    assert with_pageable_copies(plan).waiting_seconds == (2 * 15e9 + 6 * 3e9) / (12e9 * PAGEABLE_SHARE)
    plan = dataclasses.replace(plan, layout=Layout(2, group=4, fate="dropped"))
    assert with_pageable_copies(plan).waiting_seconds == (2 * 15e9 + 6 * 3e9) / (12e9 * PAGEABLE_SHARE)
    ram["streamed_gradients"] = 1e9
    assert with_pageable_copies(plan).waiting_seconds == (2 * 16e9 + 6 * 3e9) / (12e9 * PAGEABLE_SHARE)


def test_page_locking_that_is_refused_is_said_and_the_new_time_is_in_the_plan(train, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "page_lock", lambda self: False)
    slower = {"step_seconds": 12.5, "waiting_seconds": 2.5, "card": SimpleNamespace(name="a card")}
    slower |= {"gpu_reserved_peak_bytes": 2**20}  # a plan with a card is one for a GPU
    monkeypatch.setattr(recovery, "with_pageable_copies", lambda plan: dataclasses.replace(plan, **slower))
    assert train(tmp_path / "out", "--steps", "1") == 0
    said = (tmp_path / "out/log.txt").read_text()
    assert "page-locked memory was refused, so numbers in RAM are copied from pageable memory: " in said
    assert "a step now takes about 12.5 s" in said
    for name in ("plan", "report"):
        found = stored(tmp_path / f"out/{name}.json")
        assert found.get("plan", found)["predicted"]["step_seconds"] == 12.5
