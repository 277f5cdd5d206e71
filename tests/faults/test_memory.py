"""Memory that runs out, or is not there to begin with.

An OutOfMemoryError is put into every phase of a step by counting the operations that PyTorch runs. On the CPU the same
Python code recovers as on a GPU; what the allocator gives back there is not seen here.

Seen to fail: with the retry inside the `except` (tensors still held), with gradients kept, with a parameter's own
.grad kept, with the waiting update dropped, with the loss read after the update was handed over, with updates retried,
with the micro-batch left out of the checkpoint.
"""

import dataclasses
import gc
import os
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch
from reference import VOCABULARY, tiny_config
from runs import assert_same_run, at_call, last_line, loss_rows, simulated, stored, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import lowmem.adam
import lowmem.budget
import lowmem.export
import lowmem.main
import lowmem.recovery
import lowmem.step
import lowmem.train
from lowmem.adam import get_optimizer
from lowmem.blocks import Decoder
from lowmem.budget import Budget
from lowmem.data import Batch
from lowmem.errors import LowmemError
from lowmem.precision import LossScale
from lowmem.recovery import PAGEABLE_SHARE, with_pageable_copies, within_memory
from lowmem.settings import Settings
from lowmem.step import Schedule, Step
from lowmem.store import Store
from lowmem.units import MIB
from lowmem.updates import UpdateInterrupted

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB.\nmore lines"


def run_out(*_):
    raise torch.OutOfMemoryError(FULL)


# --- a step that is begun again

SAMPLES = 17  # of the operations of a step


class OutOfMemoryAt(TorchDispatchMode):
    """Counts PyTorch's operations; the one with this number fails."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            run_out()
        return function(*args, **kwargs or {})


def make_step(group: int = 1) -> tuple[Step, Store]:
    """Two blocks with dropout, states in RAM, micro-batches of two of four rows."""
    config = tiny_config("gpt2", dropout=0.1)
    config.n_layer = 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    initial = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    decoder, rule = Decoder(model), get_optimizer("adamw")
    store = Store(decoder, torch.device("cpu"), torch.float32, rule, resident_units=1)
    store.write(iter(initial))
    step = Step(
        decoder, store, rule, Schedule(micro_batch=2, group=group, segment_blocks=1, recompute=True),
        clip_norm=0.5, weight_decay=0.01, seed=3, loss_scale=LossScale(False),
    )  # fmt: skip
    return step, store


def make_batch(step: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(step))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def train_on(step: Step, numbers: range) -> list:
    return [step(make_batch(number), number, 1e-2) for number in numbers]


def bits_of(store: Store) -> list[bytes]:
    return [tensor.numpy().tobytes() for part in store.parts for tensor in (part.working, *part.state.values())]


@pytest.mark.parametrize("group", [1, 2])
def test_memory_that_runs_out_at_any_operation_of_a_step_costs_no_bit(group):
    """Step 2 fails; the update of step 1, which waits in its forward pass, must be applied once and whole."""
    step, store = make_step(group)
    train_on(step, range(2))
    batch, counting = make_batch(2), OutOfMemoryAt(0)
    with counting:
        step(batch, 2, 1e-2)

    step, store = make_step(group)
    expected = train_on(step, range(2))
    step.schedule = dataclasses.replace(step.schedule, micro_batch=1)
    expected += train_on(step, range(2, 4))
    step.flush()
    expected_bits = bits_of(store)

    phases = dict.fromkeys(("forward, update waiting", "backward", "update"), 0)
    last = range(counting.count - 2, counting.count + 1)
    for number in (*range(1, counting.count - 2, 1 + counting.count // SAMPLES), *last):
        step, store = make_step(group)
        results, recoveries, said = train_on(step, range(2)), [], []
        failing, phase = OutOfMemoryAt(number), []

        def attempt(batch, index, rate, step=step, store=store, failing=failing, phase=phase):
            try:
                with failing:
                    return step(batch, index, rate)
            except torch.OutOfMemoryError:
                waiting = step._updates.waiting
                phase.append("forward, update waiting" if waiting else "backward")
                raise

        try:
            results.append(within_memory(step, recoveries, said.append, 3, attempt, make_batch(2), 2, 1e-2))
        except UpdateInterrupted as error:
            assert error.exit_code == 1 and "some weights new and some old" in str(error)
            phases["update"] += 1
            continue
        results += train_on(step, range(3, 4))
        step.flush()
        assert recoveries == [{"step": 3, "micro_batch": 1}] and "micro-batches of 1 instead of 2" in said[0], number
        assert repr(results) == repr(expected), number
        assert bits_of(store) == expected_bits, number
        phases[phase[0]] += 1
    assert min(phases.values()) > 0, phases


def test_a_gradient_that_did_not_reach_its_accumulator_counts_for_nothing(monkeypatch):
    """The accumulator's own allocation fails in the hook, when the parameter has its .grad already."""
    step, store = make_step()
    step.begin_again(1)
    expected = train_on(step, range(1))
    step, store = make_step()
    part = store.parts[2]
    with monkeypatch.context() as patch:
        at_call(patch, part, "gradient_of", run_out)
        result = within_memory(step, [], lambda _: None, 1, step, make_batch(0), 0, 1e-2)
    assert [result] == expected


def test_the_failed_attempts_tensors_are_gone_when_it_is_begun_again(monkeypatch):
    step, _ = make_step()
    alive, seen = [], []
    real = lowmem.step.linear_cross_entropy

    def failing(hidden, *arguments, **keywords):
        alive.append(weakref.ref(hidden))
        if len(alive) == 2:
            run_out()
        return real(hidden, *arguments, **keywords)

    monkeypatch.setattr(lowmem.step, "linear_cross_entropy", failing)
    gc.disable()  # no collection by chance: they must be free at once
    try:
        within_memory(step, [], lambda _: seen.extend(r() is None for r in alive), 1, step, make_batch(0), 0, 1e-2)
    finally:
        gc.enable()
    assert seen == [True, True]


def test_micro_batches_shrink_until_it_fits_or_single_sequences_do_not(monkeypatch):
    step, _ = make_step()
    step.schedule = dataclasses.replace(step.schedule, micro_batch=12)
    sizes, recoveries = [], []

    def work():
        sizes.append(step.schedule.micro_batch)
        run_out()

    with pytest.raises(torch.OutOfMemoryError):
        within_memory(step, recoveries, lambda _: None, 7, work)
    assert sizes == [12, 6, 3, 1]
    assert recoveries == [{"step": 7, "micro_batch": size} for size in (6, 3, 1)]


# --- a whole run

EVALUATION, SECOND_STEP = 1, 6  # calls of the loss: two in the evaluation before the first step, two in each step


@pytest.mark.parametrize(("call", "number"), [(EVALUATION, 0), (SECOND_STEP, 2)])
def test_a_run_goes_on_with_smaller_micro_batches_says_so_and_resumes_with_them(
    train, tmp_path, monkeypatch, call, number
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with monkeypatch.context() as patch:
        at_call(patch, lowmem.step, "linear_cross_entropy", run_out, call)
        assert train(whole) == 0
    said = f"step {number}: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.)"
    assert said in (whole / "log.txt").read_text()
    assert stored(whole / "report.json")["out_of_memory"] == [{"step": number, "micro_batch": 1}]
    assert [row["tokens"] for row in loss_rows(whole)] == [4 * 32] * 3

    with monkeypatch.context() as patch:
        at_call(patch, lowmem.step, "linear_cross_entropy", run_out, call)
        at_call(patch, Step, "__call__", lambda: os.kill(os.getpid(), signal.SIGTERM), 3 if number else 2)
        assert train(parts) == 75
    assert train(parts) == 0
    assert stored(parts / "report.json")["out_of_memory"] == [{"step": number, "micro_batch": 1}]
    assert_same_run(whole, parts)


def test_an_update_that_ran_out_of_memory_is_never_saved_and_the_run_goes_on_from_the_last_checkpoint(
    finished, train, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # 13 parts are updated in each step; this is in the middle of the second
        at_call(patch, lowmem.adam, "update_in_slices", run_out, 20)
        assert train(out, "--save-every", "1") == 1
    assert "out of memory within update 2" in last_line(capsys)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000001"]
    assert train(out, "--save-every", "1") == 0
    assert "1 of 3 steps are done" in capsys.readouterr().err
    assert weights(out) == weights(finished)


def test_ram_that_runs_out_in_the_export_is_no_bad_input(finished, train, tmp_path, capsys, monkeypatch):
    """Seen to fail: it said that the config makes no model, with exit code 2 after a whole training."""

    def fail(*_, **__):
        raise MemoryError

    real, out = lowmem.export.build_model, tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            lowmem.export, "build_model",
            lambda config: patch.setattr(AutoModelForCausalLM, "from_config", fail) or real(config),
        )  # fmt: skip
        assert train(out) == 1
    assert "model: MemoryError); what was saved is safe" in last_line(capsys)
    assert train(out) == 0
    assert "3 of 3 steps are done" in capsys.readouterr().err
    assert weights(out) == weights(finished)


def test_single_sequences_that_do_not_fit_end_the_run_with_exit_4(train, tmp_path, capsys, monkeypatch):
    real = lowmem.step.linear_cross_entropy

    def failing(*arguments, **keywords):
        return real(*arguments, **keywords) if simulated() else run_out()

    monkeypatch.setattr(lowmem.step, "linear_cross_entropy", failing)
    assert train(tmp_path / "out") == 4
    assert "out of GPU memory under --gpu-limit, even for single sequences" in last_line(capsys)


# --- memory that is not there to begin with


def nothing_is_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lowmem.train, "random_weights", lambda *_: pytest.fail("weights were loaded"))


def test_a_control_group_that_is_too_small_is_refused_before_loading(train, tmp_path, capsys, monkeypatch):
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text(str(1000 * MIB))
    (group / "memory.current").write_text(str(999 * MIB))
    monkeypatch.setattr(lowmem.budget, "_groups", lambda: [group])
    nothing_is_loaded(monkeypatch)
    assert train(tmp_path / "out") == 3
    assert "1.00 MiB are free here" in last_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_busy_gpu_is_refused_before_loading(train, tmp_path, capsys, monkeypatch):
    def busy(self, planned_bytes):
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
        at_call(patch, Step, "__call__", fail, 3)
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

    monkeypatch.setattr(lowmem.train, "run", fail)
    assert lowmem.main.main(Settings(out=str(tmp_path / "out")), []) == 1
    sentence = last_line(capsys)
    assert said in sentence and "what was saved is safe" in sentence


def test_a_mistake_of_ours_is_not_dressed_up_as_one_of_the_machine(train, tmp_path, monkeypatch):
    def fail():
        raise RuntimeError("size mismatch")

    at_call(monkeypatch, Step, "__call__", fail)
    with pytest.raises(RuntimeError, match="size mismatch"):
        train(tmp_path / "out")


@dataclasses.dataclass(frozen=True)
class TimedPlan:
    card: object
    ram_breakdown: dict
    step_seconds: float
    waiting_seconds: float


def test_without_page_locking_a_step_is_predicted_to_wait_for_its_copies():
    @dataclasses.dataclass(frozen=True)
    class Card:
        bus_bytes_per_second: float = 12e9

    plan = TimedPlan(Card(), {"streamed_states": 15e9, "process": 2e9}, step_seconds=10.0, waiting_seconds=0.5)
    slower = with_pageable_copies(plan)
    assert slower.waiting_seconds == 2 * 15e9 / (12e9 * PAGEABLE_SHARE)  # in and out
    assert slower.step_seconds == 9.5 + slower.waiting_seconds


def test_page_locking_that_is_refused_is_said_and_the_new_time_is_in_the_plan(train, tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "page_lock", lambda self: False)
    slower = {"step_seconds": 12.5, "waiting_seconds": 2.5, "card": SimpleNamespace(name="a card")}
    monkeypatch.setattr(lowmem.train, "with_pageable_copies", lambda plan: dataclasses.replace(plan, **slower))
    assert train(tmp_path / "out", "--steps", "1") == 0
    sentence = (
        "page-locked memory was refused, so states are streamed from pageable memory: a step now takes about 12.5 s"
    )
    assert sentence in (tmp_path / "out/log.txt").read_text()
    for name in ("plan", "report"):
        found = stored(tmp_path / f"out/{name}.json")
        assert found.get("plan", found)["predicted"]["step_seconds"] == 12.5
