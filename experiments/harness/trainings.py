"""Makes small trainings in every layout, for tests and experiments that compare bits.

A layout says how a step is cut and where tensors are stored. PLAIN is the simplest. All others here must give bitwise
equal weights, low halves, moments, losses and norms.

    step, store = make_step(model, precision="bf16", **PLAIN | LAYOUTS["streamed, deferred"])
    outcome = train(step, store, batches)
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config

from lowmem.core.batch import Batch
from lowmem.core.homes import DiskStates, host_tensor
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Layout
from lowmem.core.optimizers import Hyperparameters, get_optimizer
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.ranks import Ranks
from lowmem.core.step import StepResult, TrainingStep
from lowmem.models.build import build_model, decoder_of
from lowmem.models.load import random_weights

CPU = torch.device("cpu")
ALL = 10**6  # units
LEARNING_RATE = 1e-3
TensorMaker = Callable[[int, torch.dtype], Tensor]

# Fields of Layout, and `defer`: whether updates may wait for the next step. `kept` as a float is a multiple of the
# model's blocks. Batches are four micro-batches of two sequences.
PLAIN = {"states_on_gpu": ALL, "group": 1, "segment_blocks": 1, "defer": False}
STREAMED = {"states_on_gpu": 0, "defer": True}
WEIGHTS_STREAMED = STREAMED | {"weights_on_gpu": 1}
WHOLE = {"group": 4}
TWICE = WHOLE | {"fate": "dropped"}
SENT = WHOLE | {"fate": "sent"}
LAYOUTS = {
    "the same again": {},
    "streamed": {"states_on_gpu": 0},
    "deferred": {"defer": True},
    "streamed, deferred": STREAMED,
    "one unit streamed, deferred": STREAMED | {"states_on_gpu": 4},
    "half streamed, deferred, groups of 2": STREAMED | {"states_on_gpu": 3, "group": 2},
    "streamed, deferred, one group, segments of 3": STREAMED | WHOLE | {"segment_blocks": 3},
    "products kept": {"kept": 1.0},
    "products of some kept, streamed, deferred": STREAMED | {"kept": 1 / 3},
    "products of some kept, others whole, half streamed, groups of 2": STREAMED
    | {"states_on_gpu": 3, "group": 2, "kept": 4 / 3},
    "no recompute": {"kept": 2.0},
    "no recompute, half streamed, deferred": STREAMED | {"states_on_gpu": 3, "kept": 2.0},
    "forward and backward twice, streamed": STREAMED | TWICE,
    "weights streamed, deferred": WEIGHTS_STREAMED,
    "weights of some streamed, forward and backward twice": WEIGHTS_STREAMED
    | TWICE
    | {"weights_on_gpu": 2, "segment_blocks": 2},
    "boundaries in RAM": WHOLE | {"states_on_gpu": 0, "boundaries_in_ram": True},
    "boundaries and weights in RAM, products kept": WEIGHTS_STREAMED
    | {"group": 2, "kept": 1 / 3, "boundaries_in_ram": True},
    "gradients in RAM, deferred": STREAMED | SENT,
    "gradients of some in RAM, weights and boundaries of all": WEIGHTS_STREAMED
    | SENT
    | {"boundaries_in_ram": True, "states_on_gpu": 1},
    "on a disk": STREAMED | {"states_on_disk": ALL},
    "half on a disk, deferred": STREAMED | {"states_on_disk": 2},
    "half on a disk, gradients in RAM": STREAMED | SENT | {"states_on_disk": 3},
}
# Without clipping, and with the whole batch as one group, updates can be made during backward.
UNCLIPPED = {"clip_norm": None} | WHOLE
APPLIED = UNCLIPPED | {"fate": "applied"}
IN_BACKWARD = {
    "in backward, half streamed": APPLIED | {"defer": True, "states_on_gpu": 3, "segment_blocks": 2},
    "in backward, all streamed": APPLIED | STREAMED,
    "in backward, weights streamed": APPLIED | WEIGHTS_STREAMED,
    "in backward, boundaries in RAM": APPLIED | STREAMED | {"boundaries_in_ram": True},
    "in backward, half on a disk, weights streamed": APPLIED | WEIGHTS_STREAMED | {"states_on_disk": 3},
}


class FlushedStep(TrainingStep):
    def __call__(self, *arguments) -> StepResult:
        result = super().__call__(*arguments)
        self.flush()
        return result


@dataclass(frozen=True)
class Shape:
    config: GPT2Config
    seq: int
    batch: int
    steps: int

    @classmethod
    def of(cls, tiny: bool, dropout: float) -> "Shape":
        """Returns the shape of a training: a GPT-2 of 35 million parameters, or of 30 thousand if `tiny`."""
        layers, width, heads, vocabulary, seq, steps = (3, 32, 2, 101, 16, 2) if tiny else (8, 512, 8, 16384, 256, 4)
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=seq, bos_token_id=0,
            eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return cls(config, seq, batch=8, steps=steps)

    def batches(self) -> list[Batch]:
        """Returns a batch for each step. Every second token follows from the one before it; all others are random. Each
        row has a different number of trained tokens."""
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

    def make_step(self, **how) -> tuple[TrainingStep, Store]:
        how = {"clip_norm": 0.1, "dropout_seed": 0} | how
        scale = LossScale(how["precision"] == "fp16", scale=4096.0)
        weights = random_weights(self.config, seed=0)
        return make_step(build_model(self.config), weights, loss_scale=scale, **how)


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    updated: list[bool]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    page_locked: bool = True  # of the streamed states: pageable memory is copied without overlap, and shows nothing

    @classmethod
    def of(cls, results: Sequence[StepResult], store: Store, page_locked: bool = True) -> "Outcome":
        """Collects the losses, norms, weights and states of a training. Must be called after `TrainingStep.flush`."""
        states = {
            f"{part.name} {key}": tensor.to("cpu", copy=True)
            for part in store.parts
            for key, tensor in part.state.items()
        }
        weights = {name: store.part_of(name).master(name) for name in store.names()}
        losses, norms, updated = ([getattr(r, key) for r in results] for key in ("loss", "grad_norm", "updated"))
        return cls(losses, norms, updated, weights, states, page_locked)

    def differences(self, other: "Outcome") -> list[str]:
        """Returns the names of everything that is not bitwise equal in both outcomes."""
        found = [name for name in ("losses", "norms", "updated") if getattr(self, name) != getattr(other, name)]
        for mine, theirs in ((self.weights, other.weights), (self.states, other.states)):
            assert mine.keys() == theirs.keys()
            found += [name for name in mine if not torch.equal(mine[name], theirs[name])]
        return found


def make_step(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]] | None = None, *, device: torch.device = CPU,
    precision="fp32", optimizer="adamw", clip_norm: float | None = 0.5, residual="fp32",
    fused_kernels: Kernels = Kernels.NONE,
    loss_scale: LossScale | None = None, dropout_seed=3, defer=True, beta1=0.9, beta2=0.999, epsilon=1e-8,
    host_tensor: TensorMaker = host_tensor, disk_tensor: TensorMaker | None = None, kept: float = 0,
    ranks: Ranks = Ranks(), **layout,  # noqa: B008  it does nothing
) -> tuple[TrainingStep, Store]:  # fmt: skip
    """Returns the step that trains `model`, and the store of its weights and optimizer states. `weights` None: the
    model's own. `kept`: how much blocks save for backward (Layout.kept); a float is a multiple of the number of blocks.
    `defer`: updates may wait for the next step. `disk_tensor` None: temporary files. Other keywords are Layout's; by
    default, micro-batches have 2 sequences, and all states are on the device."""
    if weights is None:
        weights = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    dtype, rule = WORKING_DTYPES[precision], get_optimizer(optimizer)
    decoder = decoder_of(model, precision, residual, fused_kernels)
    if isinstance(kept, float):
        kept = round(kept * len(decoder.blocks))
    laid_out = Layout(kept=kept, **{"micro_batch": 2, "states_on_gpu": ALL} | layout)
    disk_tensor = disk_tensor or DiskStates(Path(tempfile.gettempdir())).tensor
    store = Store(decoder, device, dtype, rule, laid_out, host_tensor, disk_tensor, ranks)
    store.write(iter(weights))
    step = (TrainingStep if defer else FlushedStep)(
        decoder, store, Hyperparameters(weight_decay=0.01, beta1=beta1, beta2=beta2, epsilon=epsilon),
        clip_norm=clip_norm, seed=dropout_seed, loss_scale=loss_scale or LossScale(precision == "fp16"),
    )  # fmt: skip
    return step, store


def train(
    step: TrainingStep, store: Store, batches: Sequence[Batch], rates: Sequence[float] | None = None,
    before_step: Callable[[TrainingStep, int], None] = lambda step, index: None,
) -> Outcome:  # fmt: skip
    """Takes a step for each batch, and returns the outcome. `rates`: learning rates by step; None: LEARNING_RATE."""
    page_locked = store.page_lock()
    results = []
    for index, batch in enumerate(batches):
        before_step(step, index)
        results.append(step(batch, index, rates[index] if rates else LEARNING_RATE))
    step.flush()
    return Outcome.of(results, store, page_locked)
