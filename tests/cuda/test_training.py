"""Training on "cuda", with the values of the CPU: the path over the card changes no bit of them. Fused kernels, run by
Triton's interpreter, differ by roundings."""

import gc
import json
import math

import pytest
import torch
from transformers import GPT2Config, T5Config

from experiments.gpu_acceptance import bitwise
from experiments.harness.trainings import CPU, IN_BACKWARD, LAYOUTS, PLAIN, UNCLIPPED, Shape
from lowmem.core.batch import LEAST_POSITIONS
from lowmem.core.kernels import Kernels, fused
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.parameters import Store
from lowmem.device import collect_garbage, forget_allocations
from lowmem.models.build import make_decoder
from lowmem.units import KIB
from runs import content, loss_rows, stopped_in_step, stored, weights, write_rows
from stand_in.card_library import counts, order, page_locked_limit

CUDA = torch.device("cuda")
SHAPE = Shape.of(True, dropout=0.1)
ARRANGEMENTS = LAYOUTS | IN_BACKWARD
FEW = ("streamed, deferred", "in backward, half streamed")
IN_PRECISIONS = [("bf16", name) for name in ARRANGEMENTS] + [("fp32", name) for name in FEW] + [("fp16", FEW[0])]
# The largest difference of a weight after two steps at a learning rate of 1e-3. Triton's interpreter orders sums of
# exponentials and fused products differently from PyTorch. Adam's first steps are as large as the rate, for any
# gradient, so the sign of a gradient near zero decides.
MOST_WEIGHT_DIFFERENCE = {"fp32": 2e-4, "bf16": 4e-3, "fp16": 4e-3}
MOST_LOSS_DIFFERENCE = {"fp32": 2e-6, "bf16": 2e-3, "fp16": 2e-3}


@pytest.fixture
def plain_lines(monkeypatch):
    """Switches off fused kernels, as on a card that Triton does not know."""
    monkeypatch.setattr(fused, "failures", lambda device: {Kernels.ALL: "this test compares the plain lines"})


@pytest.fixture(scope="module")
def on_cpu():
    """The plain arrangement's outcome on the CPU, by precision and by whether gradients are clipped."""
    known = {}

    def outcome(precision: str, **more):
        key = (precision, *sorted(more))
        if key not in known:
            known[key] = bitwise.train(SHAPE, CPU, precision, **PLAIN | more)
        return known[key]

    return outcome


def reference(on_cpu, precision: str, case: dict):
    """Returns the plain arrangement's outcome for `case`; without clipping also with its group."""
    return on_cpu(precision, **UNCLIPPED) if "clip_norm" in case else on_cpu(precision)


@pytest.mark.parametrize("precision, name", IN_PRECISIONS)
def test_every_arrangement_on_the_card_leaves_the_bits_of_the_cpu(on_cpu, plain_lines, precision, name):
    case = ARRANGEMENTS[name]
    outcome = bitwise.train(SHAPE, CUDA, precision, **PLAIN | case)
    assert outcome.differences(reference(on_cpu, precision, case)) == []
    assert outcome.page_locked


@pytest.mark.parametrize("optimizer", ("adamw8bit", "sgd"))
def test_other_optimizers_leave_the_bits_of_the_cpu(on_cpu, plain_lines, optimizer):
    outcome = bitwise.train(SHAPE, CUDA, "bf16", **PLAIN | {"states_on_gpu": 0, "defer": True, "optimizer": optimizer})
    assert outcome.differences(bitwise.train(SHAPE, CPU, "bf16", **PLAIN | {"optimizer": optimizer})) == []


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_fused_kernels_train_as_the_plain_lines_do(on_cpu, precision):
    case = {"states_on_gpu": 0, "defer": True}
    assert fused.running(CUDA) == Kernels.ALL
    before = counts()["launches"]
    outcome, truth = bitwise.train(SHAPE, CUDA, precision, **PLAIN | case), on_cpu(precision)
    assert counts()["launches"] > before
    for name, weight in truth.weights.items():
        difference = (outcome.weights[name].float() - weight.float()).abs().max().item()
        assert difference <= MOST_WEIGHT_DIFFERENCE[precision], name
    for found, true in zip(outcome.losses, truth.losses, strict=True):
        assert math.isclose(found, true, rel_tol=MOST_LOSS_DIFFERENCE[precision])


def test_states_that_cannot_be_page_locked_are_streamed_all_the_same(on_cpu, plain_lines):
    with page_locked_limit(counts()["page_locked_bytes"] + 64 * KIB), order("late"):  # PyTorch's own buffers still can
        outcome = bitwise.train(SHAPE, CUDA, "bf16", **PLAIN | LAYOUTS["streamed, deferred"])
    assert not outcome.page_locked
    assert outcome.differences(on_cpu("bf16")) == []


# --- whole runs

ON_CARD = ("--device", "cuda", "--precision", "fp32")


def losses(out) -> list[tuple]:
    return [(row["loss"], row["grad_norm"], row.get("eval_loss")) for row in loss_rows(out)]


def test_a_t5_on_the_card_is_that_of_the_cpu(train, text, tmp_path, plain_lines):
    """Whole runs: resident, and with weights and boundaries in RAM and states on a disk."""
    T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    ).save_pretrained(tmp_path / "t5")
    options = ("--model", str(tmp_path / "t5"), "--init", "random", "--target-tokens", "8")
    streamed = ("--weights", "streamed", "--boundaries", "streamed", "--recompute", "on", "--states", "disk")
    assert train(tmp_path / "cpu", *options, "--precision", "fp32") == 0
    assert train(tmp_path / "card", *options, *ON_CARD) == 0
    assert train(tmp_path / "streamed", *options, *ON_CARD, *streamed, "--states-folder", str(tmp_path / "states")) == 0
    for out in ("card", "streamed"):
        assert losses(tmp_path / out) == losses(tmp_path / "cpu")
        assert weights(tmp_path / out) == weights(tmp_path / "cpu")


def test_a_whole_run_on_the_card_is_that_of_the_cpu(finished, train, tmp_path, plain_lines):
    """Plan, evaluation, steps, checkpoint, export: the saved bytes are the same."""
    collect_garbage()  # an earlier run's tensors would count as this one's
    assert train(tmp_path / "out", *ON_CARD) == 0
    assert losses(tmp_path / "out") == losses(finished)
    assert weights(tmp_path / "out") == weights(finished)
    report = stored(tmp_path / "out/report.json")
    assert report["device"] == "NVIDIA GeForce RTX 3060"
    measured, predicted = report["measured"], report["plan"]["predicted"]
    assert 0 < measured["gpu_allocated_peak_bytes"] <= measured["gpu_reserved_peak_bytes"]
    assert measured["gpu_allocated_peak_bytes"] <= predicted["gpu_allocated_peak_bytes"]

    newest = sorted((tmp_path / "out/checkpoints").iterdir())[-1]
    mine, cpus = content(newest), content(finished / "checkpoints" / newest.name)
    same = [name for name in cpus if name.endswith(".bin") or name.endswith(".safetensors")]
    assert same and all(mine[name] == cpus[name] for name in same)


@pytest.mark.parametrize("pack", ("sorted", "packed"))
def test_examples_of_many_lengths_train_on_the_card_as_on_the_cpu(train, tmp_path, monkeypatch, plain_lines, pack):
    # A GPU's own least micro-batch is larger, and sums would have another order.
    monkeypatch.setitem(LEAST_POSITIONS, "cuda", LEAST_POSITIONS["cpu"])
    examples = [{"prompt": f"{n}:", "completion": "x" * (n * n % 29 + 1)} for n in range(40)]
    options = ("--data", write_rows(tmp_path / "examples.jsonl", examples), "--pack", pack, "--precision", "fp32")
    for device in ("cpu", "cuda"):
        assert train(tmp_path / device, *options, "--device", device) == 0
    assert losses(tmp_path / "cuda") == losses(tmp_path / "cpu")
    assert weights(tmp_path / "cuda") == weights(tmp_path / "cpu")
    report = stored(tmp_path / "cuda/report.json")
    assert 0 < report["measured"]["gpu_allocated_peak_bytes"] <= report["plan"]["predicted"]["gpu_allocated_peak_bytes"]


def test_a_run_that_is_stopped_on_the_card_goes_on_there_bit_for_bit(finished, train, tmp_path, plain_lines):
    options = (*ON_CARD, "--states", "streamed")
    with stopped_in_step(2):
        assert train(tmp_path / "out", *options) == 75
    assert train(tmp_path / "out", *options) == 0
    assert losses(tmp_path / "out") == losses(finished)
    assert weights(tmp_path / "out") == weights(finished)


def test_a_run_whose_states_cannot_be_page_locked_says_so(finished, train, tmp_path, capsys, plain_lines):
    collect_garbage()  # an earlier run's buffers would be given back in the middle of this one
    with page_locked_limit(counts()["page_locked_bytes"] + 64 * KIB):  # PyTorch's own buffers still can be
        assert train(tmp_path / "out", *ON_CARD, "--states", "streamed") == 0
    assert "page-locked memory was refused" in capsys.readouterr().err
    assert weights(tmp_path / "out") == weights(finished)


def test_an_error_of_the_card_is_not_taken_for_the_models(train, tmp_path, capsys, plain_lines):
    """PyTorch page-locks a few bytes when it reads a number back: if even that is refused, no precision helps."""
    torch._C._host_emptyCache()  # else some are there, from an earlier run
    with page_locked_limit(0):
        assert train(tmp_path / "out", *ON_CARD) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the GPU failed (CUDA error: out of memory" in said and "precision" not in said


def test_a_run_with_everything_the_card_has(train, tmp_path, capsys):
    """bf16, fused kernels, 8-bit moments streamed, one sequence at a time; then the same run in fp16."""
    options = ("--device", "cuda", "--optimizer", "adamw8bit", "--states", "streamed", "--micro-batch", "1")
    for precision in ("bf16", "fp16"):
        assert train(tmp_path / precision, *options, "--precision", precision) == 0
        first, *_, last = losses(tmp_path / precision)
        assert last[0] < first[0]
    assert "without fused kernels" not in capsys.readouterr().err


def test_a_run_without_some_kernels_says_so_and_plans_for_the_others(train, tmp_path, capsys, monkeypatch):
    failures = {Kernels.NORMS | Kernels.SUMS: "a norm is 3 off", Kernels.ROTARY: "no ptxas"}
    monkeypatch.setattr(fused, "failures", lambda device: failures)
    assert train(tmp_path / "out", "--device", "cuda", "--precision", "bf16") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "without fused kernels of norms and sums, which takes more memory and time: a norm is 3 off" in said
    assert "without fused kernels of rotary, which takes more memory and time: no ptxas" in said
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["choice"]["fused_kernels"] == ["products", "activations"]


def test_a_cap_that_the_card_does_not_have_becomes_all_that_it_has(train, tmp_path, capsys):
    """As 11 GiB, the default, on a card of 8."""
    assert train(tmp_path / "out", *ON_CARD, "--gpu-limit", "12GiB") == 0
    said = capsys.readouterr().err
    assert (
        "of 11.3 GiB GPU" in said and "rtx3060 has 11.3 GiB for training, less than the 12.0 GiB of --gpu-limit" in said
    )


def test_what_was_tried_before_training_is_given_back():
    """Also memory that only a collection of garbage frees."""
    torch._C._cuda_clearCublasWorkspaces()
    forget_allocations(CUDA)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()  # what other tests of this process still hold
    gc.disable()
    try:
        config = GPT2Config(n_layer=3, n_embd=128, n_head=2, n_positions=256, vocab_size=211)
        decoder = make_decoder(config, "bf16", "fp32", Kernels.ALL)
        Store(decoder, CUDA, torch.bfloat16, get_optimizer("adamw"), Layout(1, states_on_gpu=99))
        del decoder
        torch._C._cuda_clearCublasWorkspaces()
        assert torch.cuda.memory_allocated() > before[0]
        forget_allocations(CUDA)
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()) == before
    finally:
        gc.enable()


def test_a_run_on_a_card_that_another_fills_is_refused(train, tmp_path, capsys, plain_lines):
    free = torch.cuda.mem_get_info()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda *device: (1 << 20, free))
        assert train(tmp_path / "out", *ON_CARD) != 0
    assert not (tmp_path / "out/checkpoints").exists()
    assert "Traceback" not in capsys.readouterr().err
