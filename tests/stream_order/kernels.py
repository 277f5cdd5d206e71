"""Computes lowmem/core/kernels/triton_kernels.py in plain PyTorch, a thousand times as fast as Triton's interpreter,
for tests in which a kernel has to be one operator with the right result."""

import torch
from torch import Tensor

from lowmem.core import precision
from lowmem.core.loss import IGNORED
from stand_in.plain_layers import drop as drop
from stand_in.plain_layers import gated as gated
from stand_in.plain_layers import gated_backward as gated_backward
from stand_in.plain_layers import normalize as normalize
from stand_in.plain_layers import normalize_backward as normalize_backward
from stand_in.plain_layers import rotate as rotate


def adamw(
    working: Tensor, low: Tensor | None, m: Tensor, v: Tensor, gradient: Tensor, gradient_scale: float,
    decay_factor: float, one_minus_beta1: float, beta2: float, one_minus_beta2: float, root: float, epsilon: float,
    step_size: float,
) -> None:  # fmt: skip
    gradient = gradient * gradient_scale
    m.lerp_(gradient, one_minus_beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=one_minus_beta2)
    master = precision.join(working, low) * decay_factor
    _write(working, low, master.addcdiv_(m, (v.sqrt() / root).add_(epsilon), value=-step_size))


def sgd(
    working: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    gradient_scale: float,
    decay_factor: float,
    learning_rate: float,
) -> None:
    master = precision.join(working, low) * decay_factor
    _write(working, low, master.sub_(gradient * gradient_scale, alpha=learning_rate))


def join(working: Tensor, low: Tensor, master: Tensor) -> None:
    master.copy_(precision.join(working, low))


def split(working: Tensor, low: Tensor, master: Tensor) -> None:
    _write(working, low, master)


def _write(working: Tensor, low: Tensor | None, master: Tensor) -> None:
    high, rest = precision.split(master, working.dtype)
    working.copy_(high)
    if low is not None:
        low.copy_(rest)


def cross_entropy(logits: Tensor, bias: Tensor | None, labels: Tensor, losses: Tensor, scale: float | None) -> None:
    counted = labels != IGNORED
    labels = labels.clamp(min=0)[:, None]
    z = logits.float() if bias is None else logits.float() + bias
    log_shares = z.log_softmax(1)
    losses.copy_(torch.where(counted, -log_shares.gather(1, labels)[:, 0], 0.0))
    if scale is not None:
        gradient = log_shares.exp().scatter_add_(1, labels, -torch.ones_like(z[:, :1]))
        logits.copy_(gradient * torch.where(counted, scale, 0.0)[:, None])
