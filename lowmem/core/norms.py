"""Runs a model's normalization layers ("norms") on GPUs with one kernel for forward and one for backward.

The kernel can also write its output in a 16-bit dtype, for matmuls, and compute the residual addition before the norm
(residual_sums.py).
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from lowmem.core.decoder import AnswerYes, Decoder
from lowmem.core.dry_run import Operation, Trace, agrees, dry_run
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.operation_recorder import address_of

PROGRAMS = 512  # most Triton programs of a backward kernel: four for each multiprocessor of the largest cards
LEAST_ROWS = 4  # fewest rows of such a program: its sums over rows cost as much memory traffic as one or two rows
_EPSILONS = ("eps", "variance_epsilon", "epsilon")  # names of the attribute
_aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """Describes a norm by its formula: LayerNorm if `centered`, else RMSNorm, with `offset` added to the weight.
    Calling the rule computes the norm in plain PyTorch."""

    epsilon: float
    offset: float
    centered: bool

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * (weight + self.offset)
        return y if bias is None else y + bias


def norm_in_fp32(module: nn.Module, x: Tensor, *gate, **keywords) -> Tensor:
    return type(module).forward(module, x.float(), *gate, **keywords).to(x.dtype)


class Norm:
    """Replaces the forward of `module`, a normalization layer that computes `rule`, by the fused kernel. If called with
    more arguments than the input, runs the module's own forward, in fp32."""

    def __init__(self, module: nn.Module, rule: Rule):
        self._module, self.rule = module, rule
        self.kind: torch.dtype | None = None  # dtype of the output, None for the input's; decoder.kind_of compares it

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor:
        if others or keywords:
            return norm_in_fp32(self._module, x, *others, **keywords)
        return normalized(x, self)

    def of_sum(self, x: Tensor, branch: Tensor | None = None, drops: "Drops | None" = None) -> tuple[Tensor, Tensor]:
        """Returns x + dropout(branch), and this sum after normalization. One kernel computes both. `branch`: the tensor
        that a residual addition adds to `x`; None to normalize `x` itself. `drops`: the dropout of `branch`, if any."""
        weight, bias = self._module.weight, self._module._parameters.get("bias")
        return normalize_sum(x, branch, drops, weight, bias, self.rule, self.kind or x.dtype)


@dataclass(frozen=True)
class Drops:
    """Describes a dropout with probability `p`. The mask's seed is `seeds[number]`, int64."""

    p: float
    seeds: Tensor
    number: int = 0

    @staticmethod
    def draw(count: int, device: torch.device) -> Tensor:
        return torch.randint(2**62, (count,), device=device)


def normalized(x: Tensor, norm: Norm) -> Tensor:
    """Returns `x` [..., D], normalized by `norm`. A TorchFunctionMode may override this function (residual_sums.py)."""
    if has_torch_function_unary(x):
        return handle_torch_function(normalized, (x,), x, norm)
    return norm.of_sum(x)[1]


def normalize_sum(
    x: Tensor, branch: Tensor | None, drops: Drops | None, weight: Tensor, bias: Tensor | None, rule: Rule,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns x + dropout(branch), in the dtype of `x`, and this sum after normalization, in `dtype`, by one kernel.
    `x` and `branch` have the shape [..., D]; without a branch, the sum is `x`. `weight`, `bias`: [D] fp32."""
    run = _Normalize.apply if torch.is_grad_enabled() else partial(_Normalize.forward, None)
    return run(x, branch, weight, bias, drops, rule, dtype)


class _Normalize(torch.autograd.Function):
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
        # The gradient for an output that was not used is None.
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
    """Returns `added` + dropout(x) in `dtype`; `added` None stands for 0. The mask's seed is `seeds[number]`."""
    x = x.contiguous()
    y = x.new_empty(x.shape, dtype=dtype)  # not empty_like: `drop` may be left out (products.py)
    torch.ops.lowmem.drop(x, None if added is None else added.contiguous(), y, seeds, number, p)
    return y


def arguments_of(drops: Drops | None) -> tuple[Tensor | None, int, float]:
    return (None, 0, 0.0) if drops is None else (drops.seeds, drops.number, drops.p)


def rule_of(module: nn.Module) -> Rule | None:
    """Returns the Rule that describes `module`, found by a trial on random numbers. Returns None if `module` is neither
    LayerNorm nor RMSNorm over the last dimension, or has no weight."""
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


def round_for_products(decoder: Decoder, dtype: torch.dtype) -> None:
    """Makes a norm write its output in `dtype`, the dtype of matmuls, if all layers that read it are in the norm's
    block and cast to `dtype`."""
    forwards = {module: vars(module).get("forward") for module in decoder.model.modules()}
    block_of = {module: block for block in decoder.blocks for module in block.modules()}
    norms = {module: forward for module, forward in forwards.items() if isinstance(forward, Norm)}

    def watched() -> dict[Norm, list]:
        with torch.no_grad(), AnswerYes(), Trace() as trace:
            decoder.logits(*decoder.example(decoder.head_weight.shape[0]))
        return _readers(trace.operations, norms, dtype)

    readers = dry_run(decoder.model, dtype, watched) or {}
    for module, norm in norms.items():
        # An output that leaves the block is part of the residual stream, and keeps its dtype.
        if (found := readers.get(norm)) and all(block_of.get(reader) is block_of.get(module) for reader in found):
            # This moves 8 bytes less per element. The gradients of several readers are then added in 16 bit.
            norm.kind = dtype


def _readers(
    operations: Iterable[Operation], norms: dict[nn.Module, Norm], dtype: torch.dtype
) -> dict[Norm, list[nn.Module | None]]:
    """Returns {norm: modules that read its output in `dtype`} in the `operations` of one run. Leaves out norms that
    write `dtype` already, and norms that are also read in another dtype. `norms`: {normalization layer: its Norm}."""
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
                # A copy of the output in `dtype` counts as the output.
                outputs[address_of(each.result)] = norm
            else:
                others.add(norm)
    return {norm: modules for norm, modules in readers.items() if norm not in others}
