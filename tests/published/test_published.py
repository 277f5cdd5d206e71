"""Others' measurements on GPUs are predicted no worse than before; the committed predictions are the code's."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.gpu_acceptance.levers import SHAPES
from experiments.harness.rows import read
from experiments.harness.tables import written
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.cudasim.gpus import CARDS
from lowmem.models.build import load_config, make_decoder
from lowmem.planning.simulated_step import StepCase, gpu_target, record_step
from tests.published import table
from tests.published.peaks import peak_bytes
from tests.published.points import peaks, step_times
from tests.published.programs import build
from tests.published.reserved import reserved, reserved_bytes
from tests.published.simulated import simulate

ROWS = Path(__file__).resolve().parents[2] / "experiments/gpu_acceptance/results/rows.jsonl"
# How far the median of a group may be from what was measured: what was seen, rounded up.
WORST_MEDIANS = {
    "A100 fp32, forward": 0.02, "A100 fp32, forward and backward": 0.05, "A100 fp32, whole step": 0.06,
    "A100 bf16 autocast, whole step": 0.07, "H200 Llama-3.2-1B bf16, whole step": 0.03,
    "A100 nanoGPT bf16 autocast, whole step": 0.12, "A100-80GB build-nanogpt fp32, whole step": 0.06,
    "A100-80GB build-nanogpt bf16 autocast, whole step": 0.2, "RTX 3090 Ti gpt2-medium bf16 autocast, whole step": 0.09,
    "RTX 5090 fp32, whole step": 0.2, "RTX 5090 fp32, forward": 0.05,
    "A100-80GB bf16 autocast, forward and backward": 0.07, "RTX 3090 book's GPT fp32, whole step": 0.07,
    "RTX 3090 book's GPT fp16 autocast, whole step": 0.09, "A100-80GB torchtune Llama-3.2-3B bf16, whole step": 0.05,
    "RTX 4070 Ti SUPER ViT-giant bf16, whole step": 0.03, "H200 fp32, forward": 0.09,
    "H200 fp32, forward and backward": 0.05, "H200 fp32, whole step": 0.03, "H200 bf16 autocast, forward": 0.06,
    "H200 bf16 autocast, forward and backward": 0.05, "H100 bf16 autocast, forward": 0.01,
    "H100 bf16 autocast, forward and backward": 0.09, "RTX 4090 48GB fp32, forward": 0.05,
    "RTX 4090 48GB fp32, forward and backward": 0.05, "RTX 4090 48GB fp32, whole step": 0.19,
    "RTX 4090 48GB bf16 autocast, forward and backward": 0.25, "A800 fp32, forward": 0.02,
    "A800 fp32, forward and backward": 0.02, "A800 fp32, whole step": 0.02,
    "A800 bf16 autocast, forward and backward": 0.02, "A800 bf16 autocast, whole step": 0.15,
    "RTX 4090 foreach AdamW fp32, whole step": 0.12, "RTX 4090 foreach AdamW bf16 autocast, whole step": 0.05,
    "RTX 4090 with checks fp32, forward": 0.07, "RTX 4090 with checks fp32, whole step": 0.1,
    "RTX 4090 with checks bf16 autocast, forward": 0.11, "RTX 4090 with checks bf16 autocast, whole step": 0.05,
}  # fmt: skip
EXCEPTIONS = {  # points further off than MOST_APART, by group, layers and tokens; none is kept for judging
    # bound by the host, which einops and einx make twice as slow as the clock's
    *(("A100 fp32, forward", *which) for which in ((12, 128), (12, 256), (24, 128), (36, 128))),
    ("A100 fp32, forward and backward", 12, 128),
    ("RTX 5090 fp32, forward", 48, 128),  # not bound by the host: 0.72 without any; the reason is not known
}
# One point of each kind, the smallest, by its place in the file.
SMALLEST_STEPS = {
    (point.group["program"], point.group["precision"]): number
    for number, point in reversed(list(enumerate(step_times())))
    if point.group["program"] != "gpt2-medium"  # takes longest
}
SMALLEST_PEAKS = {(peak.model, peak.eager): number for number, peak in reversed(list(enumerate(peaks())))}


@pytest.mark.exhaustive
def test_step_times_of_others_are_predicted_no_worse_than_they_were():
    found = table.ratios()
    medians = {name: abs(statistics.median(group) - 1) for name, group in found.items()}
    assert medians.keys() == WORST_MEDIANS.keys()
    assert {name: distance for name, distance in medians.items() if distance > WORST_MEDIANS[name]} == {}
    trained = table.with_backward(found)
    assert (len(trained), table.within_a_third(trained)) >= (113, 112)
    assert abs(statistics.median(trained) - 1) <= 0.035
    assert min(found["H200 Llama-3.2-1B bf16, whole step"]) > 0.95  # it was 0.75 to 0.83,
    assert max(max(found[name]) for name in found if name.startswith("A100 fp32")) < 1.24  # and 1.35
    assert max(found["RTX 5090 fp32, whole step"]) < 1.26  # it was 1.49


def test_points_kept_for_judging_are_predicted_and_exceptions_are_named():
    judging, fitted = table.ratios_of(False), table.ratios_of(True)
    assert (len(judging), len(fitted)) == (97, 87)
    assert abs(statistics.median(judging) - 1) <= 0.02
    far = [point for point, ratio in table.compared() if not 1 / table.MOST_APART <= ratio <= table.MOST_APART]
    assert all(point.is_fitted for point in far)
    assert {(point.group["name"], point.shape["layers"], point.shape["tokens"]) for point in far} == EXCEPTIONS
    readme = table.README.read_text(encoding="utf-8")
    assert f"{len(judging)} of {len(judging) + len(fitted)} points are kept for judging" in readme
    near = sum(1 / table.MOST_APART <= ratio <= table.MOST_APART for ratio in judging)
    said = f"{near} of {len(judging)} are within {table.MOST_APART}, and the median is {statistics.median(judging):.2f}"
    assert said in " ".join(readme.split())


def test_the_docs_say_how_many_steps_are_within_a_third():
    trained = table.with_backward(table.ratios())
    counts = f"{table.within_a_third(trained)} of {len(trained)} with a backward pass are within a third"
    said = (Path(__file__).resolve().parents[2] / "docs/cuda-memory.md").read_text(encoding="utf-8")
    assert f"{counts}, median {statistics.median(trained):.2f}" in said


@pytest.mark.exhaustive
def test_peaks_of_others_are_predicted_no_worse_than_they_were():
    errors = [error for group in table.peak_errors().values() for error in group]
    assert (len(errors), table.within_a_percent(errors)) >= (87, 84)
    assert table.median_size(errors) <= 0.0025
    assert max(map(abs, errors)) < 0.012


@pytest.mark.exhaustive
def test_reserved_memory_of_others_is_predicted_no_worse_than_it_was():
    """Nothing was fitted to these five."""
    assert max(map(abs, table.reserved_errors())) < 0.0035
    assert reserved_bytes(reserved()[-1]) == table.predictions()["reserved_bytes"][-1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", SMALLEST_STEPS.values(), ids=map(str, SMALLEST_STEPS))
def test_the_committed_seconds_are_the_clocks(number):
    """If this fails, run `python -m tests.published` again. Releases of transformers differ a little."""
    point = step_times()[number]
    assert simulate(point.card, *build(point), point.host_share) == pytest.approx(
        table.predictions()["step_seconds"][number], rel=0.02
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", SMALLEST_PEAKS.values(), ids=map(str, SMALLEST_PEAKS))
def test_the_committed_peaks_are_the_simulations(number):
    assert peak_bytes(peaks()[number]) == table.predictions()["peak_bytes"][number]


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_a_steps_kernels_take_as_long_as_they_ran_on_an_h200(model):
    """The rows were made by experiments/gpu_acceptance/levers.py, with everything on the card, before sums were fused.
    The clock's constants are chosen with Large in view. XL waits for its host, which is left out here."""
    row = [row for row in read(ROWS) if (row["section"], row["name"]) == ("levers", f"step: {model}")][-1]
    shape, config = SHAPES[model], load_config(model, "random")
    layout = Layout(shape.micro_batch, group=shape.micro_batches, states_on_gpu=config.n_layer + 2)
    case = StepCase(shape.seq, shape.batch, layout, torch.bfloat16, OPTIMIZERS["adamw"])
    kernels = Kernels.ALL & ~Kernels.SUMS
    target = gpu_target(CARDS["h200"], kernels)
    without_host = replace(target.device_model, host_seconds=(0.0, 0.0), more_host_seconds={})
    decoder = make_decoder(config, "bf16", "fp32", kernels)
    seconds = record_step(decoder, case, replace(target, device_model=without_host), {}).seconds
    assert seconds == pytest.approx(row["values"]["all: busy seconds"], rel=0.05)


def test_the_readme_says_what_the_predictions_say():
    assert written(table.README, table.BEGIN) == table.tables()
