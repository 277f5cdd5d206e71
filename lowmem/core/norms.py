"""Runs a model's normalization layers ("norms") on GPUs with one kernel for forward and one for backward.

The kernels are in kernels/layer_kernels.py. Any module with Norm in its class's name is a candidate. `rule_of` tests if
its outputs for a few rows equal those of LayerNorm or RMSNorm. If neither fits, the module keeps its own forward.

In a 16-bit model with an fp32 residual stream, a norm's output is fp32, and matmuls that read this output cast it to 16
bit. If all readers are such matmuls, the norm's kernel writes 16 bit directly (`round_for_products`). This moves 8
bytes less per element. The gradients of several such matmuls are then added in 16 bit.

The kernels can also compute the residual addition before a norm, and the gradients of both summands (residual_sums.py).
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from lowmem.core.dry_run import Operation, Trace, agrees, dry_run
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.recorder import address_of

PROGRAMS = 512  # most Triton programs of a backward kernel: four for each multiprocessor of the largest cards
LEAST_ROWS = 4  # fewest rows of such a program: its sums over rows cost as much memory traffic as one or two rows
_EPSILONS = ("eps", "variance_epsilon", "epsilon")  # names of the attribute
_aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """Describes a normalization: (x - mean) / sqrt(mean of (x - mean)^2 + epsilon) * (weight + offset) + bias. If
    `centered` is True, this is a LayerNorm. Otherwise the mean is taken as 0, which makes an RMSNorm."""

    epsilon: float
    offset: float
    centered: bool

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalizes the rows of `x` [..., D] in plain PyTorch. `weight`, `bias`: [D]; without a bias, None."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * (weight + self.offset)
        return y if bias is None else y + bias


def norm_in_fp32(module: nn.Module, x: Tensor, *gate, **keywords) -> Tensor:
    return type(module).forward(module, x.float(), *gate, **keywords).to(x.dtype)


class Norm:
    """Replaces the forward of `module`, a normalization layer that `rule` describes, by the kernel. A call with further
    arguments goes to the module's own forward. `rounded`: the dtype of the output, None for the input's dtype."""

    def __init__(self, module: nn.Module, rule: Rule):
        self._module, self.rule = module, rule
        self.rounded: torch.dtype | None = None

    @property
    def kind(self) -> torch.dtype | None:
        """Returns a key for decoder.kind_of: normalization layers with equal keys allocate the same memory."""
        return self.rounded

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor:
        if others or keywords:
            return norm_in_fp32(self._module, x, *others, **keywords)
        return normalized(x, self)

    def of_sum(self, x: Tensor, branch: Tensor | None = None, drops: "Drops | None" = None) -> tuple[Tensor, Tensor]:
        """Computes a residual addition and its normalization in one kernel. Returns x + dropout(branch), and this sum
        after normalization. Defaults: no branch, no dropout (see `normalize_sum`)."""
        weight, bias = self._module.weight, self._module._parameters.get("bias")
        return normalize_sum(x, branch, drops, weight, bias, self.rule, self.rounded or x.dtype)


@dataclass(frozen=True)
class Drops:
    """Describes a dropout that sets a number to 0 with probability `p`, and divides others by 1 - p. The seed of the
    dropout mask is `seeds[number]`, int64."""

    p: float
    seeds: Tensor
    number: int = 0

    @staticmethod
    def draw(count: int, device: torch.device) -> Tensor:
        """Draws dropout seeds [count] int64 from the random generator of `device`."""
        return torch.randint(2**62, (count,), device=device)


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """Returns `x` [..., D], normalized by `norm`. A TorchFunctionMode may override this function, like functions of
    torch (residual_sums.py)."""
    if has_torch_function_unary(x):
        return handle_torch_function(normalized, (x,), x, norm)
    return norm.of_sum(x)[1]


def normalize_sum(
    x: Tensor, branch: Tensor | None, drops: Drops | None, weight: Tensor, bias: Tensor | None, rule: Rule,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes a residual addition and its normalization in one kernel. Returns x + dropout(branch), in the dtype of
    `x`, and this sum after normalization, in `dtype`. `x` and `branch` have one shape [..., D]. If `branch` is None,
    the sum is `x`. If `drops` is None, there is no dropout. `weight`, `bias`: [D] fp32; without a bias, None."""
    run = _Normalize.apply if torch.is_grad_enabled() else partial(_Normalize.forward, None)
    return run(x, branch, weight, bias, drops, rule, dtype)


class _Normalize(torch.autograd.Function):
    """Computes x + dropout(branch), and this sum after normalization. Backward gets a gradient for each of the two
    outputs, or None for an output that was not used."""

    @staticmethod
    def forward(
        ctx, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, drops: Drops | None, rule: Rule,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given, x, columns = x, x.contiguous(), x.shape[-1]
        rows = x.numel() // max(columns, 1)
        # With a graph, saves another tensor than the output, which autograd would detach twice.
        total = x if branch is None else x.new_empty(x.shape if ctx is None else (rows, columns))
        y = torch.empty_like(x, dtype=dtype)
        statistics = None if ctx is None else x.new_empty(1 + rule.centered, rows, dtype=torch.float32)
        torch.ops.lowmem.normalize(
            x, weight, bias, y, statistics, rule.epsilon, rule.offset, rule.centered,
            *(None, None) if branch is None else (branch.contiguous(), total), *arguments_of(drops),
        )  # fmt: skip
        if ctx is None:
            return total, y
        seeds, *ctx.drops = arguments_of(drops)
        ctx.save_for_backward(total, weight, statistics, seeds)
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.branch_dtype = rule, None if branch is None else branch.dtype
        return given if branch is None else total.view(x.shape), y

    @staticmethod
    @once_differentiable
    def backward(ctx, of_total: Tensor | None, of_y: Tensor | None):
        total, weight, statistics, seeds = ctx.saved_tensors
        of_y = torch.zeros_like(of_total) if of_y is None else of_y.contiguous()
        rows, columns = statistics.shape[1], total.shape[-1]
        of_x, of_branch = torch.empty_like(of_y, dtype=total.dtype), None
        if ctx.branch_dtype is not None:
            same = seeds is None and ctx.branch_dtype is of_x.dtype
            of_branch = of_x if same else torch.empty_like(of_y, dtype=ctx.branch_dtype)
        rows_each, has_bias = max(LEAST_ROWS, -(-rows // PROGRAMS)), ctx.needs_input_grad[3]
        sums = total.new_empty(1 + has_bias, -(-rows // rows_each), columns, dtype=torch.float32)
        torch.ops.lowmem.normalize_backward(
            of_y, total, weight, statistics, of_x, sums, ctx.rule.offset,
            None if of_total is None else of_total.contiguous(), None if of_branch is of_x else of_branch, seeds,
            *ctx.drops,
        )  # fmt: skip
        of_weight, *of_bias = sums.sum(1)
        return of_x, of_branch, of_weight, of_bias[0] if of_bias else None, None, None, None


def dropped(x: Tensor, added: Tensor | None, dtype: torch.dtype, seeds: Tensor, number: int, p: float) -> Tensor:
    """Returns `added` + dropout(x) in `dtype`. If `added` is None, returns dropout(x). `seeds`, `number`, `p`: as in
    Drops."""
    x = x.contiguous()
    y = x.new_empty(x.shape, dtype=dtype)  # not empty_like: a recording may leave out `drop` (products.py)
    torch.ops.lowmem.drop(x, None if added is None else added.contiguous(), y, seeds, number, p)
    return y


def arguments_of(drops: Drops | None) -> tuple[Tensor | None, int, float]:
    """Returns the arguments (seeds, number, p) of torch.ops.lowmem operators for the dropout `drops`. For None, returns
    (None, 0, 0.0): no dropout."""
    return (None, 0, 0.0) if drops is None else (drops.seeds, drops.number, drops.p)


def rule_of(module: nn.Module) -> Rule | None:
    """Returns the Rule that describes `module`, a normalization layer. Returns None if `module` is neither LayerNorm
    nor RMSNorm over the last dimension."""
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


def round_for_products(
    model: nn.Module, blocks: Iterable[nn.Module], run: Callable[[], object], dtype: torch.dtype
) -> None:
    """Makes a normalization layer of `model` write its output in `dtype` if each layer that reads the output casts it
    to `dtype`. These layers must be in the same block. `blocks`: the model's blocks. `run()` runs the model once, with
    parameters on the meta device."""
    forwards = {module: vars(module).get("forward") for module in model.modules()}
    block_of = {module: block for block in blocks for module in block.modules()}
    norms = {module: forward for module, forward in forwards.items() if isinstance(forward, Norm)}

    def watched() -> dict[Norm, list]:
        with torch.no_grad(), Trace() as trace:
            run()
        return _readers(trace.operations, norms, dtype)

    readers = dry_run(model, dtype, watched) or {}
    for module, norm in norms.items():
        # An output that leaves the block is part of the residual stream, and keeps its dtype.
        if (found := readers.get(norm)) and all(block_of.get(reader) is block_of.get(module) for reader in found):
            norm.rounded = dtype


def _readers(
    operations: Iterable[Operation], norms: dict[nn.Module, Norm], dtype: torch.dtype
) -> dict[Norm, list[nn.Module | None]]:
    """Returns {norm: modules that read its output in `dtype`}, for normalization layers. A copy of the output in
    `dtype` counts as the output. Leaves out norms whose output has `dtype` already, and norms whose output is also read
    in another dtype. `operations`: all PyTorch operations of one run. `norms`: {module: its Norm}."""
    of_weight = {id(module.weight): norm for module, norm in norms.items()}
    outputs: dict[int, Norm] = {}  # by the storage's address
    readers: dict[Norm, list] = {}
    others: set[Norm] = set()
    for each in operations:
        if each.function is torch.ops.lowmem.normalize.default:
            output, norm = each.args[3], of_weight[id(each.args[1])]
            outputs[address_of(output)] = norm
            readers.setdefault(norm, [])
            if output.dtype is dtype:
                others.add(norm)
            continue
        for tensor in each.reads:
            if (norm := outputs.get(address_of(tensor))) is None:
                continue
            if tensor.dtype is dtype:
                readers[norm].append(each.module)
            elif each.function is _aten._to_copy.default and each.result.dtype is dtype:
                outputs[address_of(each.result)] = norm
            else:
                others.add(norm)
    return {norm: modules for norm, modules in readers.items() if norm not in others}
