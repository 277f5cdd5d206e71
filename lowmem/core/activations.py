"""Computes a matrix product of an activation's output without saving that output, if a GPU runs the kernels.

An MLP computes down(activation(up(x))). A gated MLP, as in Llama, Qwen, Mistral and Gemma, computes
down(activation(gate(x)) * up(x)). Backward needs the activation's output only for the gradient of down's weight. There,
one kernel computes this output again, from its input, together with the input's gradient:

    product     values = activation(gate) * up        output = values @ W
    backward    values_gradient = gradient @ W.T      one kernel: values, gate's gradient, up's gradient
                W's gradient = values.T @ gradient

So a recomputed block need not compute the values, and a block that keeps its graph saves less. Per element of the inner
width, a recomputed GELU moves 12 bytes instead of 20. The kernel also adds up the gradient for the bias of the layer
before, which otherwise reads 2 more bytes.

The model's own code runs. An `ActivationForward` passes an empty tensor on, and the product (layers.py) fills it.
`fuse_activations` runs each block once without data, and keeps those whose output one product reads, and nothing else.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder
from lowmem.core.dry_run import Trace, agrees, look_at_blocks
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.products import MATRIX_PRODUCTS
from lowmem.core.recorder import address_of

LAYERS = ("gate_proj", "up_proj", "down_proj")  # of a gated MLP
MOST_PROGRAMS, LEAST_ROWS = 256, 32  # Triton programs that share a column's sum, and the fewest rows of each
_NAMES = ("gelu", "silu", "swish")  # in the class's name of an activation


@dataclass(frozen=True)
class Activation:
    """Describes x * sigmoid(linear * x + cubic * x^3): SiLU, or GELU with tanh (arXiv:1606.08415). With `erf`,
    describes GELU itself, x * (1 + erf(x / sqrt(2))) / 2."""

    linear: float
    cubic: float
    erf: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.erf:
            return x * (1 + torch.erf(x * math.sqrt(0.5))) / 2
        return x * torch.sigmoid(self.linear * x + self.cubic * x**3)

    def compute(self, values: Tensor, gate: Tensor, up: Tensor | None) -> None:
        """Writes activation(gate) * up into `values`, rounded once. Without `up`, writes activation(gate)."""
        torch.ops.lowmem.gated(gate, up, values, self.linear, self.cubic, self.erf)

    def differentiate(self, gradient: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the values of `compute` and the gradient for `up`. `gradient` [..., I]: for the values. It becomes
        the gradient for gate, in place. Without `up`, notes the sum of its rows for `sum_of_rows`."""
        values = torch.empty_like(gate)
        of_up = sums = None
        if up is None:
            rows = gate.numel() // gate.shape[-1]
            rows_each = max(LEAST_ROWS, -(-rows // MOST_PROGRAMS))
            sums = gate.new_empty(-(-rows // rows_each), gate.shape[-1], dtype=torch.float32)
        else:
            of_up = torch.empty_like(up)
        torch.ops.lowmem.gated_backward(gradient, gate, up, values, of_up, sums, self.linear, self.cubic, self.erf)
        if sums is not None:
            gradient._lowmem_sum_of_rows = gradient._version, sums.sum(0)
        return values, of_up


SILU = Activation(1.0, 0.0)
GELU_TANH = Activation(2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
GELU = Activation(0.0, 0.0, erf=True)
ACTIVATIONS = SILU, GELU_TANH, GELU


def sum_of_rows(gradient: Tensor) -> Tensor:
    """Returns the sum of all rows of `gradient` [..., I], in fp32: a bias's gradient [I]. Takes the sum that
    `differentiate` has noted, unless something was written into `gradient` since."""
    version, noted = getattr(gradient, "_lowmem_sum_of_rows", (None, None))
    return noted if version == gradient._version else gradient.flatten(0, -2).sum(0, dtype=torch.float32)


class Inputs(NamedTuple):
    """Holds the inputs of a tensor's values, which are not computed yet: activation(gate) * up."""

    gate: Tensor
    up: Tensor | None
    activation: Activation


def inputs_of(x: Tensor) -> Inputs | None:
    """Returns the inputs of `x` if its values are not computed yet, otherwise None."""
    return getattr(x, "_lowmem_inputs", None)


class ActivationForward:
    """Takes the place of `module.forward` in an activation or a gated MLP. Instead of the activation's output, passes
    on an empty tensor, which the next product fills. If `off`, and for a call with more arguments, the module's own
    forward runs."""

    def __init__(self, module: nn.Module, activation: Activation):
        self._module, self.kind, self.off = module, activation, False

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor:
        module = self._module
        if self.off or others or keywords:
            return type(module).forward(module, x, *others, **keywords)
        if not _is_gated_mlp(module):
            return self._empty(x, None)
        return module.down_proj(self._empty(module.gate_proj(x), module.up_proj(x)))

    def _empty(self, gate: Tensor, up: Tensor | None) -> Tensor:
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        values = torch.empty_like(gate)
        values._lowmem_inputs = Inputs(gate, up, self.kind)
        return values


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the activation of `module` if it is an activation that the kernel computes, or a gated MLP with one.
    Otherwise returns None."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (3 * torch.randn(4, 8, generator=generator) for _ in range(2))
    if _is_gated_mlp(module):
        trial = copy.copy(module)  # with other layers: a module's own may be large
        trial._modules = module._modules | dict(zip(LAYERS, (lambda _: gate, lambda _: up, nn.Identity()), strict=True))
    elif any(name in type(module).__name__.lower() for name in _NAMES) and not list(module.parameters()):
        trial, up = module, torch.ones(())
    else:
        return None
    try:
        with torch.no_grad():
            truth = type(module).forward(trial, gate)
    except Exception:  # a module that needs more arguments, or its layers' weights, may raise any error
        return None
    return next((each for each in ACTIVATIONS if agrees(truth, each(gate) * up)), None)


def _is_gated_mlp(module: nn.Module) -> bool:
    return all(isinstance(module._modules.get(name), nn.Linear) for name in LAYERS)


def fuse_activations(decoder: Decoder, dtype: torch.dtype) -> None:
    """Gives an activation of `decoder` its own forward back, unless one product, and nothing else, reads its output.
    `dtype`: the matrices' dtype."""
    found = look_at_blocks(decoder, dtype, _names_of_fused)
    fused = {
        block.get_submodule(name) for block, names in zip(decoder.blocks, found, strict=True) for name in names or ()
    }
    for module in decoder.model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, ActivationForward):
            if module in fused or _is_gated_mlp(module):
                decoder.shortcuts.append(forward)
            else:
                del module.forward


def _names_of_fused(block: nn.Module, run: Callable[[], object]) -> list[str]:
    """Returns the names of the activations of `block` whose output one product reads, and nothing else."""
    with torch.no_grad(), Trace() as trace:
        run()
    readers: dict[int, list] = {}  # {storage: the operations that read or write it}
    for each in trace.operations:
        for address in set(map(address_of, each.reads)):
            readers.setdefault(address, []).append(each.function)
    fused = set()
    for each in trace.operations:
        if each.function is torch.ops.aten.empty_like.default:
            first, *others = readers.get(address_of(each.result), [None])
            if first is torch.ops.lowmem.gated.default and len(others) == 1 and others[0] in MATRIX_PRODUCTS:
                fused.add(each.module)
    return [name for name, module in block.named_modules() if module in fused]
