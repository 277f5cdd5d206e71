"""Computes activation(gate) * up of gated MLPs with one kernel per direction (kernels/layer_kernels.py), if a GPU can.

Llama, Qwen, Mistral, Gemma and others compute down(activation(gate(x)) * up(x)), and name the three layers as in
LAYERS. `activation_of` compares such a module's output with that of SiLU and of GELU with tanh. A module that computes
anything else keeps its own forward.

Per element of the inner width, forward moves 6 bytes and backward 10; PyTorch's operators move 10 and 18. Only gate and
up are saved for backward, not the activation's output.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowmem.core.dry_run import agrees
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem

LAYERS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Activation:
    """Describes x * sigmoid(linear * x + cubic * x^3): SiLU, or GELU with tanh (arXiv:1606.08415)."""

    linear: float
    cubic: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.linear * x + self.cubic * x**3)


SILU = Activation(1.0, 0.0)
GELU_TANH = Activation(2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)


def gated_mlp(module: nn.Module, activation: Activation, x: Tensor, *others, **keywords) -> Tensor:
    """Takes the place of `module.forward` in a gated MLP, with one kernel for activation(gate) * up. A call with more
    arguments goes to the module's own forward."""
    if others or keywords:
        return type(module).forward(module, x, *others, **keywords)
    return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        y = torch.empty_like(up)
        torch.ops.lowmem.gated(gate, up, y, activation.linear, activation.cubic)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        numbers = ctx.activation.linear, ctx.activation.cubic
        torch.ops.lowmem.gated_backward(gradient.contiguous(), gate, up, of_gate, of_up, *numbers)
        return of_gate, of_up, None


gated = _Gated.apply  # (gate, up, activation): activation(gate) * up, rounded once; all have one shape and dtype


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the activation of `module` if it is a gated MLP whose activation the kernel computes; otherwise None."""
    if not all(isinstance(module._modules.get(name), nn.Linear) for name in LAYERS):
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(4, 8, generator=generator) for _ in range(2))
    trial = copy.copy(module)  # with other layers: a module's own may be large
    trial._modules = module._modules | dict(zip(LAYERS, (lambda _: gate, lambda _: up, nn.Identity()), strict=True))
    try:
        with torch.no_grad():
            truth = type(module).forward(trial, gate)
    except Exception:  # a module that needs more arguments, or its layers' weights, may raise any error
        return None
    return next((each for each in (SILU, GELU_TANH) if agrees(truth, each(gate) * up)), None)
