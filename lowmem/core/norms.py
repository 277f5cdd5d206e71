"""Computes a model's norms with one kernel forward and one backward (kernels/triton_kernels.py), if a GPU runs them.

A norm is found by its values, not by its name: `rule_of` compares a module on a few rows with LayerNorm and with
RMSNorm. A module that computes neither keeps its own forward.

In a 16-bit model whose residual stream is fp32, a norm's output is fp32 too, and most products that read it cast it to
16 bit. If nothing else reads it, the norm writes 16 bit itself (`join_to_products`): 8 bytes less per element. The
gradients of several such products are then added in 16 bit. A single such product computes the norm as well, which
spares the processor a call of Python in each direction.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.products import LayerMode

PROGRAMS = 512  # that share the rows in backward, at most: four for each multiprocessor of the largest cards
LEAST_ROWS = 4  # of a program in backward, whose sums take as much traffic as a row or two
_MOST_ERROR = 1e-5  # between a module and its rule, in fp32, for outputs of about 1
_EPSILONS = ("eps", "variance_epsilon", "epsilon")  # names of the attribute
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}


@dataclass(frozen=True)
class Rule:
    """Describes a norm: (x - mean) / sqrt(mean of squares + epsilon) * (weight + offset) + bias. The mean is 0 unless
    `centered`."""

    epsilon: float
    offset: float
    centered: bool

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the norm of the rows of `x` [..., D] in plain PyTorch."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * (weight + self.offset)
        return y if bias is None else y + bias


class Norm:
    """Is the forward of a norm `module` that `rule` describes. `plain`: the forward for calls with more arguments than
    the input. `rounded`: the dtype of the output, None for the input's. `moved`: whether the product that follows
    computes the norm (layers.FusedProduct), and this passes its input on."""

    def __init__(self, module: nn.Module, rule: Rule, plain: Callable):
        self._module, self.rule, self._plain = module, rule, plain
        self.rounded: torch.dtype | None = None
        self.moved = False

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Returns weight and bias."""
        return self._module.weight, self._module._parameters.get("bias")

    @property
    def kind(self) -> tuple:
        """Returns what the simulation has to know to tell two norms apart."""
        return self.moved, self.rounded

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor:
        if self.moved:
            return x
        if others or keywords:
            return self._plain(x, *others, **keywords)
        rows, dtype = x.flatten(0, -2), self.rounded or x.dtype
        if torch.is_grad_enabled():
            y = _Normalize.apply(rows, *self.parameters, self.rule, dtype)
        else:
            y, _ = normalize(rows, *self.parameters, self.rule, dtype, with_statistics=False)
        return y.view(x.shape)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule, dtype: torch.dtype) -> Tensor:
        y, statistics = normalize(x, weight, bias, rule, dtype, with_statistics=True)
        ctx.save_for_backward(x, weight, statistics)
        ctx.rule, ctx.has_bias = rule, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return *normalize_backward(gradient, *ctx.saved_tensors, ctx.rule, ctx.has_bias), None, None


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule, dtype: torch.dtype, *, with_statistics: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes the norm of each row of `x` [N, D] in `dtype`, and what `normalize_backward` needs of the rows."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    statistics = x.new_empty(1 + rule.centered, len(x), dtype=torch.float32) if with_statistics else None
    torch.ops.lowmem.normalize(x, weight, bias, y, statistics, rule.epsilon, rule.offset, rule.centered)
    return y, statistics


def normalize_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, rule: Rule, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the gradients for x [N, D], weight and bias [D], the latter in fp32, from that of y [N, D]."""
    x = x.contiguous()
    rows, columns = x.shape
    x_gradient = torch.empty_like(x)
    rows_each = max(LEAST_ROWS, -(-rows // PROGRAMS))
    sums = x.new_empty(1 + has_bias, -(-rows // rows_each), columns, dtype=torch.float32)
    torch.ops.lowmem.normalize_backward(gradient.contiguous(), x, weight, statistics, x_gradient, sums, rule.offset)
    of_weight, *of_bias = sums.sum(1)
    return x_gradient, of_weight, of_bias[0] if of_bias else None


def rule_of(module: nn.Module) -> Rule | None:
    """Returns the rule that `module` follows; None if it is neither LayerNorm nor RMSNorm over the last dimension."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    given = [parameter for parameter in module._parameters.values() if parameter is not None]
    known = [parameter for parameter in (weight, bias) if parameter is not None]
    if weight is None or weight.dim() != 1 or len(given) != len(known) or not isinstance(epsilon, float):
        return None
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    x = torch.randn(4, weight.numel(), generator=generator) + 0.5
    x[0] *= epsilon**0.5  # for which epsilon matters
    with torch.no_grad():
        for parameter in trial.parameters(recurse=False):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        try:
            truth = trial(x)
        except Exception:  # whatever a module says that needs more arguments
            return None
        for rule in (Rule(epsilon, offset, centered) for centered in (True, False) for offset in (0.0, 1.0)):
            found = rule(x, trial.weight, trial._parameters.get("bias"))
            if truth.shape == found.shape and (truth - found).abs().max() <= _MOST_ERROR * found.abs().max():
                return rule
    return None


def join_to_products(
    model: nn.Module, blocks: Iterable[nn.Module], run: Callable[[], object], dtype: torch.dtype
) -> None:
    """Lets those norms of `model` write `dtype` whose output only matrix products read; these compute in `dtype`
    (layers.py). If it is one product, of a layer in the same one of the `blocks` that makes no other, that computes the
    norm, too. `run`: runs the model, on tensors without data."""
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    block_of = {module: block for block in blocks for module in block.modules()}
    norms = {forward: module for module, forward in forwards.items() if isinstance(forward, Norm)}
    with torch.no_grad(), _Readers(norms) as readers:
        try:
            run()
        except Exception:  # a model that does not run without data: its norms keep the input's dtype
            return
    for norm, layers in readers.layers.items():
        if None in layers:
            continue
        norm.rounded = dtype
        layer, block = layers[0], block_of.get(norms[norm])
        alone = len(layers) == readers.products[layer] == 1 and hasattr(forwards[layer], "norm")
        if alone and block is not None and block is block_of.get(layer):
            norm.moved, forwards[layer].norm = True, norm


class _Readers(LayerMode):
    """Notes what reads the output of each of `norms`. `layers`: {norm: the module that was called last before each
    matrix product that reads it, None for any other operation}. `products`: how many products each module made."""

    def __init__(self, norms: Iterable[Norm]):
        super().__init__()
        self.layers: dict[Norm, list[nn.Module | None]] = {}
        self.products: Counter[nn.Module | None] = Counter()
        self._of_weight = {id(norm.parameters[0]): norm for norm in norms}
        self._outputs: dict[int, tuple[Tensor, Norm]] = {}  # by address of a storage, which the tensor keeps

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if operation is torch.ops.lowmem.normalize.default:
            self._outputs[_address(args[3])] = args[3], self._of_weight[id(args[1])]
        elif not operation.is_view:
            reader = self.called if operation in _PRODUCTS else None
            self.products[reader] += 1
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and (found := self._outputs.get(_address(tensor))):
                    self.layers.setdefault(found[1], []).append(reader)
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
