"""Saves an MLP's activation input for backward, not the activation's output, on GPUs that run the kernels.

An MLP computes down(activation(up(x))). A gated MLP, as in Llama, Qwen, Mistral and Gemma, computes
down(activation(gate(x)) * up(x)). Backward needs the activation's output only for the gradient of down's weight. In
backward, one kernel computes this output again from the saved input, together with the gradient for that input:

    forward     values = activation(gate) * up        output = values @ W
    backward    values_gradient = gradient @ W.T      one kernel: values, gate's gradient, up's gradient
                W's gradient = values.T @ gradient

So a recomputed block need not compute `values`, and a block that keeps its graph saves fewer bytes. Per element of the
MLP's inner width, a GELU in a recomputed block moves 12 bytes: 4 in forward and 8 in backward. Separate operators move
14, and 2 more for the gradient of the bias before the GELU. The kernel sums that gradient up, too. A gated activation
moves 18 bytes instead of 22.

The model's own code runs. But an activation module returns an `Inputs` object instead of its output. Only the linear
layers of layers.py can read this object. `fuse_activations` tries each block on tensors without data. If any other code
reads the Inputs object, it raises an error, and the block's activations stay as they are. If a user later replaces the
linear layer or hooks it, the activation module returns its usual output again. No GPU has run this code yet.
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

LAYERS = ("gate_proj", "up_proj", "down_proj")  # names of the linear layers of a gated MLP
MOST_PROGRAMS, LEAST_ROWS = 256, 32  # most Triton programs that share a column's sum; fewest rows of each
_NAMES = ("gelu", "silu", "swish")  # an activation's class has one of these in its name


@dataclass(frozen=True)
class Activation:
    """Describes the function x * sigmoid(linear * x + cubic * x^3). This is SiLU, or GELU in its tanh form
    (arXiv:1606.08415). If `erf` is True, describes exact GELU, x * (1 + erf(x / sqrt(2))) / 2, without the other two
    fields."""

    linear: float
    cubic: float
    erf: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.erf:
            return x * (1 + torch.erf(x * math.sqrt(0.5))) / 2
        return x * torch.sigmoid(self.linear * x + self.cubic * x**3)

    def values(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Returns activation(gate) * up [..., I], rounded once. If `up` is None, returns activation(gate)."""
        return torch.ops.lowmem.gated(gate, up, self.linear, self.cubic, self.erf)

    def differentiate(self, gradient: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computes gradients from `gradient` [..., I], the gradient for activation(gate) * up. Overwrites `gradient`
        with the gradient for `gate`. Returns two tensors: activation(gate) * up once more, as rows [N, I], and the
        gradient for `up`. If `up` is None, the second is None. Then the sum of the rows of `gradient` is also computed,
        for `sum_of_rows`. It is stored as an attribute of `gradient`."""
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
    """Returns a bias's gradient [I] in fp32: the sum of the rows of `gradient`. Takes the sum that `differentiate` has
    stored, if there is one and `gradient` has not been written since. Otherwise adds up `rows` [N, I], a view of
    `gradient`."""
    version, noted = getattr(gradient, "_lowmem_sum_of_rows", (None, None))
    return noted if version == gradient._version else rows.sum(0, dtype=torch.float32)


@dataclass(frozen=True)
class Inputs:
    """Holds the inputs of an activation whose output activation(gate) * up [..., I] is not computed yet. If `up` is
    None, the output is activation(gate). Only FusedProduct (layers.py) can read this object. `source`: the
    ActivationForward that made it."""

    gate: Tensor
    up: Tensor | None
    source: "ActivationForward"


class ActivationForward:
    """Replaces the forward of `module`, an activation or a gated MLP. Passes an Inputs object, not the activation's
    output, to the linear layer that follows. A call with further arguments goes to the module's own forward. So does
    every call if that linear layer is no longer a FusedProduct (layers.py), or if a user's hook would see the Inputs
    object.

    `place`: (module that has the linear layer, the layer's name there); None until known. `reader`: the linear layer
    that has read an Inputs object; None before the first call.
    """

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
        """Returns True if the linear layer that follows can read Inputs and no user's hook would see them. Also returns
        True if that layer is not known yet."""
        if self.place is None:
            return True
        layer = getattr(*self.place)
        can = getattr(vars(layer).get("forward"), "reads_inputs", False)
        hooks = [layer._forward_pre_hooks, layer._forward_hooks] if can else []
        hooks += [of_modules._global_forward_pre_hooks, of_modules._global_forward_hooks]
        return can and all(is_ours(hook) for of_kind in hooks for hook in of_kind.values())


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the Activation that `module` computes or, if `module` is a gated MLP, applies. Finds it by comparing the
    module's outputs for sample inputs with those of ACTIVATIONS. Returns None if none of them agrees."""
    generator, scales = torch.Generator().manual_seed(0), torch.tensor([[3.0], [3.0], [30.0], [1000.0]])
    gate, up = (scales * torch.randn(4, 8, generator=generator) for _ in range(2))  # some clip large numbers
    if _is_gated_mlp(module):
        trial = copy.copy(module)  # with other layers, because the module's own may be large
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
    """Replaces the forward of activations and gated MLPs in the blocks of `decoder` by ActivationForward. The blocks'
    linear layers must be FusedProducts already (layers.py). If code other than a linear layer reads an activation's
    output, that block's activations stay as they are. `dtype`: the matrices' dtype."""
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
    """Runs `block` by calling `run`. Returns {name of an activation: name of the linear layer that reads its output}.
    Raises an error if anything else reads an activation's output."""
    run()
    names = {module: name for name, module in block.named_modules()}
    forwards = {name: vars(module).get("forward") for module, name in names.items()}
    return {name: names[each.reader] for name, each in forwards.items() if getattr(each, "reader", None) in names}
