"""Computes a model's norms with one kernel forward and one backward (kernels/layer_kernels.py), if a GPU runs them.

Any module with Norm in its class's name may be a norm. `rule_of` compares its outputs for a few rows with those of
LayerNorm and RMSNorm. A module that computes neither keeps its own forward.

In a 16-bit model with an fp32 residual stream, a norm's output is fp32, and products that read it cast it to 16 bit. If
all readers cast it, the norm writes 16 bit itself (`join_to_products`): 8 bytes less per element. The gradients of
several such products are then added in 16 bit. If one product is the only reader, its layer also computes the norm,
which saves a Python call in each direction.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from lowmem.core.dry_run import LayerMode, agrees, dry_run
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.products import MATRIX_PRODUCTS
from lowmem.core.recorder import address_of

PROGRAMS = 512  # most Triton programs of a backward kernel: four for each multiprocessor of the largest cards
LEAST_ROWS = 4  # fewest rows of such a program: its sums over rows cost as much memory traffic as one or two rows
_EPSILONS = ("eps", "variance_epsilon", "epsilon")  # names of the attribute
_aten = torch.ops.aten


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


def norm_in_fp32(module: nn.Module, x: Tensor, *gate, **keywords) -> Tensor:
    return type(module).forward(module, x.float(), *gate, **keywords).to(x.dtype)


class Norm:
    """Takes the place of `module.forward` in a norm that `rule` describes. A call with more arguments goes to the
    module's own forward. `rounded`: the dtype of the output, None for the input's. `moved`: whether the next layer
    computes the norm together with its matrix product (layers.FusedProduct). Then a call of this object returns its
    argument unchanged."""

    def __init__(self, module: nn.Module, rule: Rule):
        self._module, self.rule = module, rule
        self.rounded: torch.dtype | None = None
        self.moved = False

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Returns weight and bias."""
        return self._module.weight, self._module._parameters.get("bias")

    @property
    def kind(self) -> tuple:
        """Returns a key: norms with equal keys allocate the same memory (decoder.kind_of)."""
        return self.moved, self.rounded

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor:
        if self.moved:
            return x
        if others or keywords:
            return norm_in_fp32(self._module, x, *others, **keywords)
        rows, dtype = x.reshape(-1, x.shape[-1]), self.rounded or x.dtype
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
    """Returns the norm of each row of `x` [N, D] in `dtype`. Also returns the rows' statistics that
    `normalize_backward` needs, or None unless `with_statistics`."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    statistics = x.new_empty(1 + rule.centered, len(x), dtype=torch.float32) if with_statistics else None
    torch.ops.lowmem.normalize(x, weight, bias, y, statistics, rule.epsilon, rule.offset, rule.centered)
    return y, statistics


def normalize_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, rule: Rule, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients for `x` [N, D], and for weight and bias [D] in fp32. `gradient` [N, D] is the gradient for
    the norm's output."""
    x = x.contiguous()
    rows, columns = x.shape
    x_gradient = torch.empty_like(x)
    rows_each = max(LEAST_ROWS, -(-rows // PROGRAMS))
    sums = x.new_empty(1 + has_bias, -(-rows // rows_each), columns, dtype=torch.float32)
    torch.ops.lowmem.normalize_backward(gradient.contiguous(), x, weight, statistics, x_gradient, sums, rule.offset)
    of_weight, *of_bias = sums.sum(1)
    return x_gradient, of_weight, of_bias[0] if of_bias else None


def rule_of(module: nn.Module) -> Rule | None:
    """Returns the formula of the norm `module`; None if it is neither LayerNorm nor RMSNorm over the last dimension."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    given = [parameter for parameter in module._parameters.values() if parameter is not None]
    known = [parameter for parameter in (weight, bias) if parameter is not None]
    if weight is None or weight.dim() != 1 or len(given) != len(known) or not isinstance(epsilon, float):
        return None
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    x = torch.randn(4, weight.numel(), generator=generator) + 0.5
    x[0] *= epsilon**0.5  # a row for which epsilon matters
    with torch.no_grad():
        for parameter in trial.parameters(recurse=False):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        try:
            truth = trial(x)
        except Exception:  # a module that needs more arguments may raise any error
            return None
        for rule in (Rule(epsilon, offset, centered) for centered in (True, False) for offset in (0.0, 1.0)):
            if agrees(truth, rule(x, trial.weight, trial._parameters.get("bias"))):
                return rule
    return None


def join_to_products(
    model: nn.Module, blocks: Iterable[nn.Module], run: Callable[[], object], dtype: torch.dtype
) -> None:
    """Makes a norm of `model` write its output in `dtype` on two conditions: all layers that read the output are in the
    norm's block, and all cast it to `dtype`.

    If only one layer reads the output, and makes one matrix product, that layer computes the norm, too. Norm and layer
    must be in the same one of `blocks`. `run` runs the model once; its parameters are on the meta device then.
    """
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    block_of = {module: block for block in blocks for module in block.modules()}
    norms = {module: forward for module, forward in forwards.items() if isinstance(forward, Norm)}

    def watched() -> _Readers:
        with torch.no_grad(), _Readers(norms, dtype) as readers:
            run()
        return readers

    readers = dry_run(model, dtype, watched) or _Readers(norms, dtype)
    for module, norm in norms.items():
        layers, others = readers.layers[norm], readers.others[norm]
        block = block_of.get(module)
        if norm in readers.exact or any(block_of.get(reader) is not block for reader in layers + others):
            continue  # an output that leaves the block is part of the residual stream, and keeps its dtype
        if norm in readers.wide and layers + others:
            norm.rounded = dtype
        alone = not others and len(layers) == 1 == readers.products[layers[0]]
        if alone and block is not None and hasattr(product := forwards[layers[0]], "norm"):
            norm.moved, product.norm = True, norm


class _Readers(LayerMode):
    """Notes which modules read the outputs of `norms`. A copy of an output in `dtype` counts as that output."""

    def __init__(self, norms: dict[nn.Module, Norm], dtype: torch.dtype):
        super().__init__()
        self.exact: set[Norm] = set()  # norms whose output an operation reads without a cast to `dtype`
        self.wide: set[Norm] = set()  # norms whose output has another dtype than `dtype`
        self.layers: dict[Norm, list] = {norm: [] for norm in norms.values()}  # modules multiplying it by their weight
        self.others: dict[Norm, list] = {norm: [] for norm in norms.values()}  # modules using it in another way
        self.products: Counter[nn.Module | None] = Counter()  # how many matrix products each module makes
        self._dtype, self._of_weight = dtype, {id(module.weight): norm for module, norm in norms.items()}
        self._outputs: dict[int, tuple[Tensor, Norm]] = {}  # by the storage's address; the tensor keeps it

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation is torch.ops.lowmem.normalize.default:
            output, norm = args[3], self._of_weight[id(args[1])]
            self._outputs[address_of(output)] = output, norm
            if output.dtype is not self._dtype:
                self.wide.add(norm)
        elif not operation.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.products[self.called] += operation in MATRIX_PRODUCTS
            for tensor in tensors:
                if found := self._outputs.get(address_of(tensor)):
                    self._note(operation, tensors, result, tensor.dtype, found[1])
        return result

    def _note(self, operation, tensors: list[Tensor], result, dtype: torch.dtype, norm: Norm) -> None:
        if dtype is self._dtype:
            own = [address_of(weight) for weight in self.called._parameters.values() if weight is not None]
            its_product = operation in MATRIX_PRODUCTS and any(address_of(tensor) in own for tensor in tensors)
            (self.layers if its_product else self.others)[norm].append(self.called)
        elif operation is _aten._to_copy.default and result.dtype is self._dtype:
            self._outputs[address_of(result)] = result, norm
        else:
            self.exact.add(norm)
