"""Replaces the forward of a model's layers, to compute in the precision and with the kernels of training.

The casts are explicit because torch.autocast's rules differ between devices.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lowmem.core.activations import Activation, Inputs, sum_of_rows
from lowmem.core.kernels import Kernels, operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.norms import Norm, norm_in_fp32, rule_of
from lowmem.core.rotary import rotary_forward

_aten = torch.ops.aten


def fuse_gelu(model: nn.Module) -> None:
    """Replaces transformers' tanh-GELU (`gelu_new`) by torch's single kernel, which saves one tensor for backward
    instead of four. Results differ by rounding."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def cast_explicitly(model: nn.Module, residual: torch.dtype, fused_kernels: Kernels = Kernels.NONE) -> None:
    """Makes a model with 16-bit matrices and fp32 vectors compute matmuls in 16 bit and normalization in fp32.
    `residual`: dtype of the residual stream. `fused_kernels`: kernels that layers use instead of PyTorch's."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and residual is torch.float32:
            module.forward = partial(_embedding_in_fp32, module)
        elif isinstance(module, nn.Linear | Conv1D):
            plain = _linear if isinstance(module, nn.Linear) else _conv1d
            module.forward = FusedProduct(module) if Kernels.PRODUCTS in fused_kernels else partial(plain, module)
        elif "Norm" in type(module).__name__ and module._parameters:
            rule = rule_of(module) if Kernels.NORMS in fused_kernels else None
            module.forward = partial(norm_in_fp32, module) if rule is None else Norm(module, rule)
        elif _is_router_or_experts(module):
            module.register_forward_pre_hook(partial(_cast_inputs, hidden=True), with_kwargs=True)
        if Kernels.ROTARY in fused_kernels and (rotary := rotary_forward(module)) is not None:
            module.forward = rotary
        if isinstance(module, GradientCheckpointingLayer):  # transformers' base class of a block
            # Rotary tables and additive masks are combined with queries and keys, which are in 16 bit.
            module.register_forward_pre_hook(partial(_cast_inputs, hidden=False), with_kwargs=True)


def register_add_product(parameter: nn.Parameter, add_product: Callable[[Tensor, Tensor], None]) -> None:
    """Makes the backward of FusedProducts with the weight `parameter` [M, N] call `add_product(left, right)`, and not
    set `parameter.grad`. The gradient is left [M, K] @ right [K, N], both in 16 bit."""
    parameter._lowmem_add_product = add_product


def _embedding_in_fp32(module: nn.Embedding, *arguments, **keywords) -> Tensor:
    return type(module).forward(module, *arguments, **keywords).float()


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    dtype = module.weight.dtype
    return F.linear(x.to(dtype), module.weight, None if module.bias is None else module.bias.to(dtype))


def _conv1d(module: Conv1D, x: Tensor) -> Tensor:
    dtype = module.weight.dtype
    flat = torch.addmm(module.bias.to(dtype), x.to(dtype).flatten(0, -2), module.weight)
    return flat.view(*x.shape[:-1], -1)


class FusedProduct:
    """Replaces the forward of a linear layer. Backward adds the weight's gradient to an accumulator
    (`register_add_product`). Forward also takes activations.Inputs, and then computes the activation itself."""

    def __init__(self, module: nn.Linear | Conv1D):
        self._module, self._transposed = module, isinstance(module, nn.Linear)
        self.reads_inputs = True  # the Inputs of activations.py

    def __call__(self, x: Tensor | Inputs) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        # An autograd Function takes ten microseconds more than its forward alone.
        run = _Product.apply if torch.is_grad_enabled() else partial(_Product.forward, None)
        if isinstance(x, Inputs):
            if x.gate.dtype is not weight.dtype:
                raise TypeError("the activation before this product has another dtype")
            x.source.reader = self._module
            return run(x.gate, weight, bias, self._transposed, x.up, x.source.kind)
        return run(x.to(weight.dtype), weight, bias, self._transposed, None, None)


class _Product(torch.autograd.Function):
    """Computes x [..., I] @ weight [I, O] + bias; with `transposed`, the weight is [O, I]. With an `activation`,
    activation(x) * up takes the place of x; `up` None stands for 1."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool, up: Tensor | None,
        activation: Activation | None,
    ) -> Tensor:  # fmt: skip
        values = x if activation is None else activation.values(x, up)
        rows = values.reshape(-1, x.shape[-1])
        if ctx is not None:
            ctx.save_for_backward(rows if activation is None else x, up)
            ctx.weight, ctx.transposed, ctx.activation = weight, transposed, activation
        matrix = weight.T if transposed else weight
        y = torch.mm(rows, matrix) if bias is None else torch.addmm(bias.to(x.dtype), rows, matrix)
        return _aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))  # no view: models may write into it

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        x, up = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        rows, matrix = gradient.reshape(-1, gradient.shape[-1]), ctx.weight.T if ctx.transposed else ctx.weight
        bias_gradient = sum_of_rows(gradient, rows) if of_bias else None
        x_gradient = (rows @ matrix.T).view(*gradient.shape[:-1], matrix.shape[0]) if of_x else None
        up_gradient = weight_gradient = None
        if ctx.activation is not None and not of_x:
            x = ctx.activation.values(x, up).view(-1, x.shape[-1])
        elif ctx.activation is not None:
            x, up_gradient = ctx.activation.differentiate(x_gradient, x, up)
        factors = (rows.T, x) if ctx.transposed else (x.T, rows)
        add_product = getattr(ctx.weight, "_lowmem_add_product", None)
        if of_weight and add_product is None:
            weight_gradient = torch.mm(*factors)
        elif of_weight:
            # Adds to the fp32 accumulator: 8 bytes per parameter and micro-batch, not 12 as for a gradient in 16 bit.
            add_product(*factors)
        return x_gradient, weight_gradient, bias_gradient, None, up_gradient, None


def _is_router_or_experts(module: nn.Module) -> bool:
    layers = (nn.Embedding, nn.modules.conv._ConvNd)
    matrices = any(p.dim() >= 2 for p in module.parameters(recurse=False))
    # A state-space layer is none: with its matrix of decay rates, it has submodules with parameters.
    alone = not any(True for child in module.children() for _ in child.parameters())
    return matrices and alone and not isinstance(module, layers)


def _cast_inputs(module: nn.Module, arguments: tuple, keywords: dict, *, hidden: bool) -> tuple[tuple, dict]:
    """Casts inputs of `module` to the dtype of its matrices: the hidden state (first argument or `hidden_states`) if
    `hidden`, else all other inputs. Returns all arguments, as a forward pre-hook does."""
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.dim() >= 2)
    cast = {name: _cast(value, dtype) for name, value in keywords.items() if (name == "hidden_states") == hidden}
    first, rest = arguments[:1], arguments[1:]
    return (*_cast(first, dtype), *rest) if hidden else (*first, *_cast(rest, dtype)), keywords | cast


def _cast(value, dtype: torch.dtype):
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
