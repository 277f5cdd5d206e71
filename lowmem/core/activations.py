"""Saves an MLP's activation input for backward, not the activation's output, on GPUs that run the fused kernels.

The linear layer after the activation (layers.py) gets an `Inputs` object, and computes the activation's output itself.
No GPU has run this code yet.
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

# A gated MLP has linear layers of these names. An activation's class has one of _NAMES in its own.
LAYERS = ("gate_proj", "up_proj", "down_proj")
_NAMES = ("gelu", "silu", "swish")
# At most this many Triton programs add up a column. Each of them adds up at least this many rows.
MOST_PROGRAMS, LEAST_ROWS = 256, 32


@dataclass(frozen=True)
class Activation:
    """Represents x * sigmoid(linear * x + cubic * x^3): SiLU, or GELU in its tanh form (arXiv:1606.08415). `erf`: True
    for exact GELU instead."""

    linear: float
    cubic: float
    erf: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.erf:
            return x * (1 + torch.erf(x * math.sqrt(0.5))) / 2
        return x * torch.sigmoid(self.linear * x + self.cubic * x**3)

    def values(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Returns activation(gate) * up, rounded once; `up` None stands for 1."""
        return torch.ops.lowmem.gated(gate, up, self.linear, self.cubic, self.erf)

    def differentiate(self, gradient: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Overwrites `gradient` [..., I], the gradient for activation(gate) * up, with the gradient for `gate`. Returns
        activation(gate) * up, computed again as rows [N, I], and the gradient for `up`, or None if `up` is None."""
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
            # For `sum_of_rows`: the kernel has summed up the gradient of the bias before the activation.
            gradient._lowmem_sum_of_rows = gradient._version, sums.sum(0)
        return values, of_up


SILU = Activation(1.0, 0.0)
GELU_TANH = Activation(2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
GELU = Activation(0.0, 0.0, erf=True)
ACTIVATIONS = SILU, GELU_TANH, GELU


def sum_of_rows(gradient: Tensor, rows: Tensor) -> Tensor:
    """Returns a bias's gradient [I] in fp32: the sum of the `rows` [N, I] of `gradient`. If the kernel that wrote
    `gradient` has already computed this sum, it is not computed again."""
    version, noted = getattr(gradient, "_lowmem_sum_of_rows", (None, None))
    # `differentiate` has noted the sum. It is stale if `gradient` has been written since.
    return noted if version == gradient._version else rows.sum(0, dtype=torch.float32)


# Bytes moved per element of the MLP's inner width: 12 for GELU in a recomputed block, 18 for a gated activation. By
# separate operators: 14 and 2 more for the gradient of a bias, and 22.
@dataclass(frozen=True)
class Inputs:
    """Holds the inputs of an activation whose output activation(gate) * up [..., I] is not computed yet; `up` None
    stands for 1."""

    gate: Tensor
    up: Tensor | None
    source: "ActivationForward"  # the object that made these inputs


class ActivationForward:
    """Replaces the forward of `module`, an activation or a gated MLP. The next linear layer gets Inputs, and computes
    the activation itself. Runs the module's own forward if that layer cannot read Inputs, or if a user has replaced the
    activation. Also runs it if a user has set hooks on the layer, on the activation, or on all modules."""

    def __init__(self, module: nn.Module, activation: Activation):
        self._module, self.kind, self._gated = module, activation, _is_gated_mlp(module)
        # (module that has the linear layer, the layer's name there); None until known
        self.place = (module, LAYERS[-1]) if self._gated else None
        self.reader: nn.Module | None = None  # the linear layer that has read Inputs
        self._replaced = self._without_layers()

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor | Inputs:
        module = self._module
        if others or keywords or not self._is_read():
            return type(module).forward(module, x, *others, **keywords)
        if not self._gated:
            return Inputs(x.contiguous(), None, self)
        inputs = Inputs(module.gate_proj(x).contiguous(), module.up_proj(x).contiguous(), self)
        return module.down_proj(inputs)

    def _is_read(self) -> bool:
        # Until the linear layer is known, assumes so.
        if self.place is None:
            return True
        layer = getattr(*self.place)
        if not getattr(vars(layer).get("forward"), "reads_inputs", False):
            return False
        if self._without_layers() != self._replaced:
            return False
        hooks = [of_modules._global_forward_pre_hooks, of_modules._global_forward_hooks]
        for module in (layer, *self._replaced):
            hooks += [module._forward_pre_hooks, module._forward_hooks]
        return all(is_ours(hook) for kind in hooks for hook in kind.values())

    def _without_layers(self) -> list[nn.Module]:
        # the activation, which does not run: a gated MLP's only other module, or the module itself
        children = self._module.named_children()
        return [child for name, child in children if name not in LAYERS] if self._gated else [self._module]


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the one of ACTIVATIONS (SiLU, tanh GELU, exact GELU) that `module`, an activation or a gated MLP,
    applies. Returns None for all other modules."""
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
    """Makes activations and gated MLPs in the blocks of `decoder` save the activation's inputs for backward, not its
    output. Skips an activation if anything but a linear layer reads its output. Linear layers must be FusedProducts
    already (layers.cast_explicitly). `dtype`: that of the matrices."""
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
    """Runs `block` by `run()`. Returns {name of an activation: name of the linear layer that reads its output}. Raises
    an error if anything but a linear layer reads an activation's output."""
    run()
    names = {module: name for name, module in block.named_modules()}
    forwards = {name: vars(module).get("forward") for module, name in names.items()}
    return {name: names[each.reader] for name, each in forwards.items() if getattr(each, "reader", None) in names}
