"""A decoder on the CPU and all that trains it, without a run around it: what tests of steps and saves share."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from experiments.gpu_acceptance.bitwise import FlushedStep
from lowmem.core.batch import Batch
from lowmem.core.encoder_decoder import take_apart
from lowmem.core.homes import DiskStates
from lowmem.core.layers import cast_explicitly
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.step import TrainingStep
from reference import VOCABULARY


def make_step(
    model: nn.Module, *, precision="fp32", optimizer="adamw", clip_norm: float | None = 0.5, residual="fp32",
    fused_kernels=False, loss_scale: LossScale | None = None, dropout_seed=3, defer=True,
    beta1=0.9, beta2=0.999, epsilon=1e-8, **layout,
) -> tuple[TrainingStep, Store]:  # fmt: skip
    """The step that trains `model` from the fp32 weights that it has, and its store. The keywords that are not named
    here are Layout's; micro-batches of 2 and all states on the device, if it is not said. `defer`: whether updates may
    wait for the next step."""
    initial = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    dtype = WORKING_DTYPES[precision]
    if precision != "fp32":
        cast_explicitly(model, torch.float32 if residual == "fp32" else dtype, fused_kernels)
    decoder, rule = take_apart(model, fused_kernels), get_optimizer(optimizer)
    laid_out = Layout(**{"micro_batch": 2, "resident_units": 99} | layout)
    on_disk = DiskStates(Path(tempfile.gettempdir())).tensor
    store = Store(decoder, torch.device("cpu"), dtype, rule, laid_out, disk_tensor=on_disk)
    store.write(iter(initial))
    scale = loss_scale or LossScale(precision == "fp16")
    step = (TrainingStep if defer else FlushedStep)(
        decoder, store, rule, laid_out, clip_norm=clip_norm, weight_decay=0.01, seed=dropout_seed, loss_scale=scale,
        beta1=beta1, beta2=beta2, epsilon=epsilon,
    )  # fmt: skip
    return step, store


def make_batch(seed: int, rows: int, seq: int) -> Batch:
    """Random tokens, each row's labels one token further."""
    tokens = torch.randint(0, VOCABULARY, (rows, seq + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
