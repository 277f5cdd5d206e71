"""The invariant on the card: where tensors lie and in what order work is done changes no bit.

A small GPT-2 with dropout and clipping trains a few steps under every kind of placement and layout; weights, low
halves, m, v, losses and norms must equal those of the plain arrangement. Parts are large enough that copies and kernels
really overlap: a missing wait between streams shows as a different bit. Without dropout, the losses must also follow
fp32 on the CPU, for two wrong runs can agree.

What this cannot show: that other shapes take kernels that are as deterministic.
"""

import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config

from experiments.gpu_acceptance.capped import capped_device, precisions, sixteen_bit
from experiments.harness.child import Result, Setting
from lowmem import device as devices
from lowmem.core.batch import Batch
from lowmem.core.decoder import Decoder
from lowmem.core.homes import DiskStates, host_tensor
from lowmem.core.kernels import fused
from lowmem.core.layers import cast_explicitly
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.step import StepResult, TrainingStep
from lowmem.models.build import build_model
from lowmem.models.load import random_weights

ALL = 10**6
PLAIN = {"resident_units": ALL, "group": 1, "segment_blocks": 1, "recompute": True, "defer": False}
CASES = {
    "the same again": {},
    "streamed": {"resident_units": 0},
    "deferred": {"defer": True},
    "streamed, deferred": {"resident_units": 0, "defer": True},
    "half streamed, deferred, groups of 2": {"resident_units": 3, "defer": True, "group": 2},
    "streamed, deferred, one group, segments of 3": {
        **{"resident_units": 0, "defer": True, "group": 4, "segment_blocks": 3},
    },
    "streamed, deferred, the first group larger": {"resident_units": 0, "defer": True, "first_group": 3},
    "products kept": {"product_blocks": ALL},
    "products of some kept, others whole, streamed, deferred": {
        **{"product_blocks": 1, "whole_blocks": 1, "resident_units": 0, "defer": True},
    },
    "forward and backward twice, streamed": {"norm_first": True, "group": 4, "resident_units": 0, "defer": True},
    "weights streamed, deferred": {"resident_weights": 1, "resident_units": 0, "defer": True},
    "weights of some streamed, forward and backward twice": {
        **{"resident_weights": 2, "resident_units": 1, "norm_first": True, "group": 4, "segment_blocks": 2},
    },
    "boundaries in RAM": {"group": 4, "boundaries_in_ram": True, "resident_units": 0},
    "gradients in RAM, deferred": {"group": 4, "gradients_in_ram": True, "resident_units": 0, "defer": True},
    "half on a disk, deferred": {"disk_units": 2, "resident_units": 0, "defer": True},
    "no recompute": {"recompute": False},
    "no recompute, half streamed, deferred": {"recompute": False, "resident_units": 3, "defer": True},
}
UNCLIPPED = {"clip_norm": None, "group": 4}
UPDATED_IN_BACKWARD = {"defer": True, "resident_units": 3, "segment_blocks": 2}
MOST_LOSS_ERROR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}  # relative to fp32 on the CPU, over the first steps


@dataclass(frozen=True)
class Shape:
    config: GPT2Config
    seq: int
    batch: int
    steps: int

    @classmethod
    def of(cls, tiny: bool, dropout: float) -> "Shape":
        """35 million parameters, of which a unit of 3 to 6 is updated at once; `tiny`: 30 thousand."""
        layers, width, heads, vocabulary, seq, steps = (3, 32, 2, 101, 16, 2) if tiny else (8, 512, 8, 16384, 256, 4)
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=seq, bos_token_id=0,
            eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return cls(config, seq, batch=8, steps=steps)

    def batches(self) -> list[Batch]:
        """Half-predictable tokens; every row of a batch has another number of trained ones."""
        generator = torch.Generator().manual_seed(4)
        batches = []
        for _ in range(self.steps):
            tokens = torch.randint(0, self.config.vocab_size, (self.batch, self.seq + 1), generator=generator)
            tokens[:, 1::2] = tokens[:, :-1:2] * 3 % self.config.vocab_size
            labels = tokens[:, 1:].clone()
            for row in range(self.batch):
                labels[row, self.seq - row :] = -100
            batches.append(Batch(tokens[:, :-1].contiguous(), labels))
        return batches


@dataclass(frozen=True)
class Outcome:
    """Everything that a training leaves, on the CPU."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    page_locked: bool  # of the streamed states: pageable memory is copied without overlap, and shows nothing

    @classmethod
    def of(cls, results: Sequence[StepResult], store: Store, page_locked: bool) -> "Outcome":
        """After `TrainingStep.flush`."""
        states = {
            f"{part.name} {key}": tensor.to("cpu", copy=True)
            for part in store.parts
            for key, tensor in part.state.items()
        }
        losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
        weights = {name: store.part_of(name).master(name) for name in store.names()}
        return cls(losses, norms, weights, states, page_locked)

    def differences(self, other: "Outcome") -> list[str]:
        """Names of what is not bitwise equal."""
        found = [name for name in ("losses", "norms") if getattr(self, name) != getattr(other, name)]
        for mine, theirs in ((self.weights, other.weights), (self.states, other.states)):
            found += [name for name in mine if not torch.equal(mine[name], theirs[name])]
        return found


def check(setting: Setting) -> Result:
    """A case per precision and arrangement."""
    device = capped_device(setting)
    devices.make_deterministic(device)
    shape, plain_shape = Shape.of(setting.dry_run, dropout=0.1), Shape.of(setting.dry_run, dropout=0.0)
    cases: dict[str, Callable[[], Result]] = {}
    for (precision, base), found in itertools.groupby(arrangements(device, setting.dry_run), lambda case: case[:2]):
        # made once, when the first case asks for it: it may be another process's
        plain = functools.cache(partial(train, shape, device, precision, **PLAIN | base))
        for _, _, name, case in found:
            outcome = partial(train, shape, device, precision, **PLAIN | base | case)
            streamed = device.type == "cuda" and case.get("resident_units", ALL) != ALL
            cases[f"{precision}, {name}"] = partial(_equal, plain, outcome, streamed)
    truth = functools.cache(partial(train, plain_shape, torch.device("cpu"), "fp32", **PLAIN))
    for precision in precisions(device):
        outcome = partial(train, plain_shape, device, precision, **PLAIN)
        most = MOST_LOSS_ERROR[precision]
        cases[f"{precision} follows fp32 on the CPU"] = partial(_follows, truth, outcome, most)
    done = {name: setting.attempt(name, work).held for name, work in cases.items()}
    return Result({"parts": len(done)}, done)


def arrangements(device: torch.device, few: bool) -> list[tuple[str, dict, str, dict]]:
    """(precision, what the plain arrangement differs in, name, case) of what is held against the plain one, in all
    16-bit precisions of the device."""
    half = sixteen_bit(device)
    found = [(name, {}, *case) for name in precisions(device) if name != "fp32" for case in CASES.items()]
    if find_spec("bitsandbytes"):
        found.append((half, {"optimizer": "adamw8bit"}, "8-bit, streamed, deferred", CASES["streamed, deferred"]))
    found.append((half, UNCLIPPED, "no clipping, updated in backward", UPDATED_IN_BACKWARD))
    return found[4::8] if few else found  # tests/core/test_step.py and tests/cuda/test_training.py have all of them


def _equal(plain: Callable[[], Outcome], outcome: Callable[[], Outcome], streamed: bool) -> Result:
    found = outcome()
    different = plain().differences(found)
    checks = {
        "every bit equal": not different,
        "every number finite": all(map(math.isfinite, found.losses + found.norms)),
    }
    if streamed:
        checks["page-locked"] = found.page_locked
    return Result({"different": len(different), "first": different[:5], "losses": found.losses}, checks)


def _follows(truth: Callable[[], Outcome], outcome: Callable[[], Outcome], most: float) -> Result:
    found = outcome()
    error = max(abs(loss - true) / true for loss, true in zip(found.losses, truth().losses, strict=True))
    return Result({"error": error, "losses": found.losses}, {f"within {most:g}": error <= most})


class FlushedStep(TrainingStep):
    """All its updates are made before it returns."""

    def __call__(self, *arguments) -> StepResult:
        result = super().__call__(*arguments)
        self.flush()
        return result


def train(
    shape: Shape, device: torch.device, precision: str, *, resident_units: int, clip_norm: float | None = 0.1,
    optimizer: str = "adamw", **layout: int | bool,
) -> Outcome:  # fmt: skip
    """`shape.steps` steps of `optimizer` from the same random weights, two sequences at a time."""
    kernels = fused.available(device)
    step, store = make_step(
        shape, device, precision, kernels, resident_units, clip_norm=clip_norm, optimizer=optimizer, **layout
    )
    page_locked = store.page_lock()
    results = [step(batch, index, 1e-3) for index, batch in enumerate(shape.batches())]
    step.flush()
    outcome = Outcome.of(results, store, page_locked)
    if device.type == "cuda":  # hooks and parameters hold each other: a run would stay on the card beside the next
        del step, store
        devices.collect_garbage()
    return outcome


def make_step(
    shape: Shape, device: torch.device, precision: str, kernels: bool, resident_units: int, *, clip_norm: float | None,
    optimizer: str, host_tensor: Callable[[int, torch.dtype], Tensor] = host_tensor,
    disk_tensor: Callable[[int, torch.dtype], Tensor] | None = None, defer: bool = True, **layout: int | bool | None,
) -> tuple[TrainingStep, Store]:  # fmt: skip
    """The step, two sequences at a time, and the store, with the same random weights each time; `kernels`: whether with
    fused operators; `disk_tensor`: makes what is on a disk, None: in the folder for temporary files; `defer`: whether
    its updates may wait for the next one. The keywords that are not named here are Layout's."""
    model = build_model(shape.config)
    if precision != "fp32":
        cast_explicitly(model, torch.float32, kernels)
    decoder = Decoder(model, kernels)
    rule = get_optimizer(optimizer)
    laid_out = Layout(2, resident_units=min(resident_units, len(decoder.units)), **layout)
    store = Store(
        decoder, device, WORKING_DTYPES[precision], rule, laid_out, host_tensor,
        disk_tensor or DiskStates(Path(tempfile.gettempdir())).tensor,
    )  # fmt: skip
    store.write(random_weights(shape.config, seed=0))
    step = (TrainingStep if defer else FlushedStep)(
        decoder, store, rule, laid_out,
        clip_norm=clip_norm, weight_decay=0.01, seed=0, loss_scale=LossScale(precision == "fp16", scale=4096.0),
    )  # fmt: skip
    return step, store
