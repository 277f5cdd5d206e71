"""A model's own layers in the precision and the form in which training runs them.

`cast_explicitly` gives a model in 16 bit what autocast would: matrix products in 16 bit, norms and softmax in fp32, the
residual stream as asked for. The casts stand here, in the open, and not in torch.autocast, whose rules differ between
devices. `fused` puts operators.py's in the place of some lines, on GPUs that have them:

  * the gradient of a matrix is added to its fp32 accumulator by the product that computes it, which saves rounding it
    to 16 bit, and writing and reading it once more: 8 bytes of memory traffic per parameter and micro-batch, not 12.

`accumulated` says how that is done for a parameter; one of which nothing is said gets its gradient from autograd.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem


def fuse_gelu(model: nn.Module) -> None:
    """Puts torch's own tanh-GELU in the place of transformers' composition of it (`gelu_new`): the same function, one
    kernel and one saved tensor of the MLP's inner width where there were eight and four. It differs by rounding."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def cast_explicitly(model: nn.Module, residual: torch.dtype, fused: bool = False) -> None:
    """Gives `model`, whose matrices are in 16 bit and whose vectors (norms, biases) are in fp32, the precision that
    autocast would: products in 16 bit, norms and softmax in fp32.

    With `residual` fp32 the embeddings' output, and so the residual stream, is fp32; with a 16-bit `residual` it is
    rounded after every block half, and a saved boundary costs half. `fused`: with operators.py's operators.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and residual is torch.float32:
            module.forward = functools.partial(_embedding_in_fp32, module)
        elif isinstance(module, nn.Linear):
            module.forward = functools.partial(_fused_linear if fused else _linear, module)
        elif isinstance(module, Conv1D):
            module.forward = functools.partial(_fused_conv1d if fused else _conv1d, module)
        elif "Norm" in type(module).__name__ and module._parameters:
            module.forward = functools.partial(_norm_in_fp32, module)
        elif _is_router_or_experts(module):
            module.register_forward_pre_hook(_input_in_16_bit, with_kwargs=True)
        if isinstance(module, GradientCheckpointingLayer):  # transformers' name for a block
            module.register_forward_pre_hook(_extras_in_16_bit, with_kwargs=True)


def accumulated(parameter: nn.Parameter, add_product: Callable[[Tensor, Tensor], None]) -> None:
    """From now on fused layers give the factors of `parameter`'s gradients, [M, K] and [K, N] in 16 bit, to
    `add_product`, which adds the product to an accumulator."""
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


def _fused_linear(module: nn.Linear, x: Tensor) -> Tensor:
    return _fused_product(module, x, True) if x.dim() > 1 else _linear(module, x)


def _fused_conv1d(module: Conv1D, x: Tensor) -> Tensor:
    return _fused_product(module, x, False)


def _fused_product(module: nn.Linear | Conv1D, x: Tensor, transposed: bool) -> Tensor:
    dtype = module.weight.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    run = _Product.apply if torch.is_grad_enabled() else _product  # the former takes Python ten microseconds more
    return run(x.to(dtype).flatten(0, -2), module.weight, bias, transposed).view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    matrix = weight.T if transposed else weight
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


class _Product(torch.autograd.Function):
    """x [N, I] @ weight [I, O] + bias, or with `transposed` x @ weight.T, of a weight [O, I]; all in 16 bit."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.transposed = weight, transposed
        return _product(x, weight, bias, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        matrix = ctx.weight.T if ctx.transposed else ctx.weight
        bias_gradient = gradient.sum(0) if of_bias else None
        x_gradient = gradient @ matrix.T if of_x else None
        factors = (gradient.T, x) if ctx.transposed else (x.T, gradient)
        add_product = getattr(ctx.weight, "_lowmem_add_product", None)
        weight_gradient = None
        if of_weight and add_product is None:
            weight_gradient = torch.mm(*factors)
        elif of_weight:
            add_product(*factors)
        return x_gradient, weight_gradient, bias_gradient, None


def _norm_in_fp32(module: nn.Module, x: Tensor, *gate, **keywords) -> Tensor:
    return type(module).forward(module, x.float(), *gate, **keywords).to(x.dtype)


def _is_router_or_experts(module: nn.Module) -> bool:
    """Whether `module` multiplies by matrices of its own and does nothing else: a mixture's router, or all its experts
    in one. A scan's decay rates, say, are a matrix too, but stand beside layers."""
    layers = (nn.Embedding, nn.modules.conv._ConvNd)
    matrices = any(p.dim() >= 2 for p in module.parameters(recurse=False))
    alone = not any(True for child in module.children() for _ in child.parameters())
    return matrices and alone and not isinstance(module, layers)


def _input_in_16_bit(module: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
    dtype = _matrices_dtype(module)
    named = {name: _cast(value, dtype) if name == "hidden_states" else value for name, value in keywords.items()}
    return (*_cast(arguments[:1], dtype), *arguments[1:]), named


def _extras_in_16_bit(block: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
    """Rotary tables and additive masks meet queries and keys, which are in the matrices' dtype."""
    dtype = _matrices_dtype(block)
    rest = {name: value if name == "hidden_states" else _cast(value, dtype) for name, value in keywords.items()}
    return (*arguments[:1], *_cast(arguments[1:], dtype)), rest


def _matrices_dtype(module: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in module.parameters() if parameter.dim() >= 2)


def _cast(value, dtype: torch.dtype):
    """Floating-point tensors, in tuples too; whatever else there is stays."""
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
