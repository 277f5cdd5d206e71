"""Computes a matrix product of an activation's output without saving that output, if a GPU runs the kernels.

An MLP computes down(activation(up(x))). A gated MLP, as in Llama, Qwen, Mistral and Gemma, computes
down(activation(gate(x)) * up(x)). Backward needs the activation's output only for the gradient of down's weight. There,
one kernel computes this output again, from its input, together with the input's gradient:

    product     values = activation(gate) * up        output = values @ W
    backward    values_gradient = gradient @ W.T      one kernel: values, gate's gradient, up's gradient
                W's gradient = values.T @ gradient

So a recomputed block need not compute the values, and a block that keeps its graph saves less. Per element of the inner
width, a GELU in a recomputed block moves 12 bytes in all: 4 forward and 8 backward. It was 14, and 2 for the gradient
of the bias before it, which the kernel adds up, too. A gated activation moves 18 bytes instead of 22.

The model's own code runs. An activation hands the next layer its `Inputs` and not its output. Only a product of
layers.py can read them. `fuse_activations` tries each block without data: if another layer reads them, this is an
error, and the block's activations stay as they are. If a user replaces or hooks the product later, the activation
computes its output. No GPU has run this code yet.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules

from lowmem.core.decoder import Decoder
from lowmem.core.dry_run import agrees, is_ours, look_at_blocks
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem

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

    def values(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Returns activation(gate) * up, rounded once. Without `up`, returns activation(gate)."""
        return torch.ops.lowmem.gated(gate, up, self.linear, self.cubic, self.erf)

    def differentiate(self, gradient: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the values again, as rows [N, I], and the gradient for `up`. `gradient` [..., I]: for the values. It
        becomes the gradient for gate, in place. Without `up`, notes the sum of its rows for `sum_of_rows`."""
        columns = gate.shape[-1]
        rows = gate.numel() // columns
        values = gate.new_empty(rows, columns)
        of_up = sums = None
        if up is None:
            rows_each = max(LEAST_ROWS, -(-rows // MOST_PROGRAMS))
            sums = gate.new_empty(-(-rows // rows_each), columns, dtype=torch.float32)
        else:
            of_up = torch.empty_like(up)
        numbers = self.linear, self.cubic, self.erf
        torch.ops.lowmem.gated_backward(gradient, gate, up, values, of_up, sums, *numbers)
        if sums is not None:
            gradient._lowmem_sum_of_rows = gradient._version, sums.sum(0)
        return values, of_up


SILU = Activation(1.0, 0.0)
GELU_TANH = Activation(2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
GELU = Activation(0.0, 0.0, erf=True)
ACTIVATIONS = SILU, GELU_TANH, GELU


def sum_of_rows(gradient: Tensor, rows: Tensor) -> Tensor:
    """Returns the sum of the rows of `gradient` in fp32: a bias's gradient [I]. Takes the sum that `differentiate` has
    noted, unless something was written into `gradient` since. `rows` [N, I]: a view of `gradient`."""
    version, noted = getattr(gradient, "_lowmem_sum_of_rows", (None, None))
    return noted if version == gradient._version else rows.sum(0, dtype=torch.float32)


@dataclass(frozen=True)
class Inputs:
    """Stands for activation(gate) * up, which is not computed yet. Only a product of layers.py can read it."""

    gate: Tensor
    up: Tensor | None
    source: "ActivationForward"


class ActivationForward:
    """Takes the place of `module.forward` in an activation or a gated MLP. Hands the next product Inputs instead of the
    activation's output. The module's own forward runs for a call with more arguments, and if that product is no longer
    one of layers.py. `place`: (module, name) of the product, None if it is not known yet; `reader`: the product that
    has read the Inputs."""

    def __init__(self, module: nn.Module, activation: Activation):
        self._module, self.kind, self._gated = module, activation, _is_gated_mlp(module)
        self.place = (module, LAYERS[-1]) if self._gated else None
        self.reader: nn.Module | None = None

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor | Inputs:
        module = self._module
        if others or keywords or not self._is_read():
            return type(module).forward(module, x, *others, **keywords)
        if not self._gated:
            return Inputs(x.contiguous(), None, self)
        inputs = Inputs(module.gate_proj(x).contiguous(), module.up_proj(x).contiguous(), self)
        return module.down_proj(inputs)

    def _is_read(self) -> bool:
        """Returns True if the next product can read Inputs, and no hook of a user sees them."""
        if self.place is None:
            return True
        layer = getattr(*self.place)
        can = getattr(vars(layer).get("forward"), "reads_inputs", False)
        hooks = [layer._forward_pre_hooks, layer._forward_hooks] if can else []
        hooks += [of_modules._global_forward_pre_hooks, of_modules._global_forward_hooks]
        return can and all(is_ours(hook) for of_kind in hooks for hook in of_kind.values())


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the activation of `module` if it is an activation that the kernel computes, or a gated MLP with one.
    Otherwise returns None."""
    generator, scales = torch.Generator().manual_seed(0), torch.tensor([[3.0], [3.0], [30.0], [1000.0]])
    gate, up = (scales * torch.randn(4, 8, generator=generator) for _ in range(2))  # some clip large numbers
    if _is_gated_mlp(module):
        trial = copy.copy(module)  # with other layers: a module's own may be large
        trial._modules = module._modules | dict(zip(LAYERS, (lambda _: gate, lambda _: up, nn.Identity()), strict=True))
    elif any(name in type(module).__name__.lower() for name in _NAMES) and not list(module.parameters()):
        trial, up = module, torch.ones(gate.shape)
    else:
        return None
    try:
        with torch.no_grad():
            truth = type(module).forward(trial, gate)
    except Exception:  # a module that needs more arguments, or its layers' weights, may raise any error
        return None
    if not isinstance(truth, Tensor) or truth.shape != gate.shape:
        return None
    return next((each for each in ACTIVATIONS if all(map(agrees, truth, each(gate) * up))), None)


def _is_gated_mlp(module: nn.Module) -> bool:
    return all(isinstance(module._modules.get(name), nn.Linear) for name in LAYERS)


def fuse_activations(decoder: Decoder, dtype: torch.dtype) -> None:
    """Replaces the forward of the activations and gated MLPs in the blocks of `decoder`, whose products are those of
    layers.py already. Leaves out blocks in which anything but such a product reads an activation's output. `dtype`: the
    matrices' dtype."""
    for block in decoder.blocks:
        of_gated_mlps = {child for module in block.modules() if _is_gated_mlp(module) for child in module.children()}
        for module in block.modules():
            activation = None if module in of_gated_mlps else activation_of(module)
            if activation is not None:
                module.forward = ActivationForward(module, activation)
    for block, readers in zip(decoder.blocks, look_at_blocks(decoder, dtype, _readers), strict=True):
        for name, module in block.named_modules():
            forward = vars(module).get("forward")
            if not isinstance(forward, ActivationForward) or forward.place is not None:
                continue
            if readers and name in readers:
                owner, _, last = readers[name].rpartition(".")
                forward.place = block.get_submodule(owner), last
            else:
                del module.forward


def _readers(block: nn.Module, run: Callable[[], object]) -> dict[str, str]:
    """Returns {name of an activation of `block`: name of the product that reads its output}. Raises an error if
    anything else reads an activation's output."""
    run()
    names = {module: name for name, module in block.named_modules()}
    forwards = {name: vars(module).get("forward") for module, name in names.items()}
    return {name: names[each.reader] for name, each in forwards.items() if getattr(each, "reader", None) in names}
