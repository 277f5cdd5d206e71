"""Measures how much single changes of the code speed up a step on this card, with everything in the card's memory."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from transformers import GPT2Config, PretrainedConfig

from experiments.gpu_acceptance import timeline
from experiments.harness.child import Result, Setting
from experiments.harness.measured import capped_device, kernels_of, random_step, sixteen_bit
from lowmem import device as devices
from lowmem.core import loss
from lowmem.core.activations import ActivationForward
from lowmem.core.batch import Batch
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.core.recordings import Recordings
from lowmem.core.step import TrainingStep
from lowmem.models import build
from lowmem.models.build import load_config, make_decoder
from lowmem.planning.simulated_step import StepCase

# norms: one kernel each way, and an output in 16 bit (core/norms.py)
# sums: of the residual stream, by one kernel each way with dropout and norm (core/residual_sums.py)
# activations: computed in the product that reads them, again in backward, by one kernel (core/activations.py)
# skipped product: a recomputed block leaves out its last product (core/products.py)
# head: its products take a multiple of 8 words, and the rest apart (core/loss.py)
# recordings: a segment's operations are repeated without the model's Python (core/recordings.py)
# Older rows have "last product": there a block left out that product, but every operation was watched.
LEVERS = ("norms", "sums", "activations", "skipped product", "head", "recordings")
ROUNDS = 3
LONGEST = 40  # kernels in a row
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Shape:
    """A step of `micro_batches` of `micro_batch` rows each."""

    seq: int
    micro_batch: int
    micro_batches: int

    @property
    def batch(self) -> int:
        return self.micro_batch * self.micro_batches


SHAPES = {"gpt2-large": Shape(1024, 16, 4), "gpt2-xl": Shape(1024, 2, 2)}
TINY = Shape(16, 1, 2)


def check(setting: Setting, models: list[str]) -> Result:
    device = capped_device(setting)
    devices.make_deterministic(device)
    ran = {model: setting.attempt(model, partial(measured, setting, device, model)).values for model in models}
    return Result({"models": models}, {f"{model} ran": bool(values) for model, values in ran.items()})


def measured(setting: Setting, device: torch.device, model: str) -> Result:
    """Returns the median seconds of a step with all changes, without each and without any; off the stand-in, also the
    busy seconds and longest kernels of one recorded step."""
    shape = TINY if setting.dry_run else SHAPES[model]
    config = (
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, bos_token_id=0, eos_token_id=0)
        if setting.dry_run
        else load_config(model, "random")
    )
    ways = {"all": (), **{f"without {lever}": (lever,) for lever in LEVERS}, "without any": LEVERS}
    steps: dict[tuple[str, ...], TrainingStep] = {}
    for left_out in ways.values():
        if (of_model := _of_model(left_out)) not in steps:
            steps[of_model] = made(config, device, shape, of_model)
    runs = {name: _run(steps[_of_model(left_out)], left_out, shape) for name, left_out in ways.items()}
    for run in runs.values():
        run()
        run()  # a segment with one micro-batch is recorded in its second step
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 if setting.dry_run else ROUNDS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    values = {"micro_batch": shape.micro_batch, "micro_batches": shape.micro_batches, "step_seconds": medians}
    values["of_all"] = {name: found / medians["all"] for name, found in medians.items()}
    if not setting.stand_in:
        for name in ("all", "without any"):
            found = timeline.content(timeline.recorded(runs[name], device, 0))
            values |= {f"{name}: busy seconds": found["figures"]["compute_busy_seconds"]}
            values |= {f"{name}: kernels": found["kernels"][:LONGEST]}
    return Result(values, {})


def made(config: PretrainedConfig, device: torch.device, shape: Shape, left_out: tuple[str, ...]) -> TrainingStep:
    precision, kernels = sixteen_bit(device), kernels_of(device)
    with without(left_out):
        decoder = make_decoder(config, precision, "fp32", kernels_without(left_out, kernels))
    layout = Layout(shape.micro_batch, group=shape.micro_batches, states_on_gpu=config.n_layer + 2)
    case = StepCase(shape.seq, shape.batch, layout, WORKING_DTYPES[precision], OPTIMIZERS["adamw"])
    return random_step(decoder, case, device)


def _run(step: TrainingStep, left_out: tuple[str, ...], shape: Shape) -> Callable[[], None]:
    decoder = step.operations.decoder
    words, skippable = decoder.head_weight.shape[0], decoder.skippable_layers
    tokens = torch.randint(0, words, (shape.batch, shape.seq + 1), generator=torch.Generator().manual_seed(0))
    batch, numbers = Batch(tokens[:, :-1], tokens[:, 1:]), itertools.count()
    recordings = None if "recordings" in left_out else Recordings()

    def run() -> None:
        decoder.skippable_layers = [None] * len(skippable) if "skipped product" in left_out else skippable
        step.operations.recordings = recordings
        with without(left_out):
            step(batch, next(numbers), LEARNING_RATE)

    return run


def _of_model(levers: tuple[str, ...]) -> tuple[str, ...]:
    # These change how a model is made, so a step without one of them needs its own model.
    return tuple(lever for lever in levers if lever in ("norms", "sums"))


def kernels_without(levers: tuple[str, ...], kernels: Kernels) -> Kernels:
    for kernel in (Kernels.NORMS, Kernels.SUMS, Kernels.ROTARY):
        if kernel.name.lower() in levers:
            kernels &= ~kernel
    return kernels


@contextmanager
def without(levers: tuple[str, ...]) -> Iterator[None]:
    """Leaves these changes out during the block, except norms, sums and rotary (`kernels_without`). Skipped products
    are left out of decoders made inside."""
    with ExitStack() as stack:
        if "skipped product" in levers:
            stack.enter_context(
                patch.object(build, "skippable_layers", lambda decoder, _: [None] * len(decoder.blocks))
            )
        if "activations" in levers:
            stack.enter_context(patch.object(ActivationForward, "_is_read", lambda forward: False))
        if "head" in levers:
            stack.enter_context(patch.object(loss, "_aligned", lambda words: [slice(0, words)]))
        yield
