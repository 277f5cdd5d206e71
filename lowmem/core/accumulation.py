"""Adds gradients to fp32 accumulators, micro-batch by micro-batch."""

from functools import partial

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.layers import register_add_product
from lowmem.core.lookups import register_add_rows
from lowmem.core.operation_recorder import called_again
from lowmem.core.parameters import Part, Store


class Accumulation:
    """Registers hooks that add gradients of the parameters of `decoder` to fp32 accumulators in `store`. If blocks
    share a parameter, call `join` after backward has run through all blocks for all micro-batches."""

    def __init__(self, decoder: Decoder, store: Store):
        for unit in decoder.units:
            for name, parameter in unit.parameters.items():
                part = store.part_of(name)
                register_add_product(parameter, partial(called_again, _add_product, part, name))
                if parameter.dim() == 2:
                    register_add_rows(parameter, partial(_add_rows, part, name))
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, part, name))
        self._shared: list[tuple[str, Part, Tensor]] = []  # (parameter's name, its part, one block's summed gradient)
        # Each block has a separate accumulator for a shared parameter: in one accumulator, the order of the sum would
        # depend on the order in which blocks run.
        for use in decoder.shared:
            parameter = use.parameter()
            gradient = torch.zeros(parameter.shape, device=parameter.device)
            use.own = nn.Parameter(parameter.detach())
            use.own.register_post_accumulate_grad_hook(partial(_add_to_own, gradient))
            self._shared.append((use.name, store.part_of(use.name), gradient))

    def join(self) -> None:
        """Adds each block's separate gradient for a shared parameter to the parameter's accumulator, in the order of
        the blocks. Then sets these separate gradients to zero."""
        for name, part, gradient in self._shared:
            _add(part, name, gradient)
        self.clear()

    def clear(self) -> None:
        """Sets to zero the separate gradients that blocks have for shared parameters."""
        for _, _, gradient in self._shared:
            gradient.zero_()


def _add_product(part: Part, name: str, left: Tensor, right: Tensor) -> None:
    torch.ops.lowmem.add_product(part.gradient_of(name), left, right)


def _add_rows(part: Part, name: str, ids: Tensor, rows: Tensor) -> None:
    torch.ops.lowmem.add_rows(part.gradient_of(name), ids, rows.float())


def _add_gradient(part: Part, name: str, parameter: nn.Parameter) -> None:
    if parameter.grad is not None:  # None if a fused layer has added it already
        called_again(_add, part, name, parameter.grad)
        parameter.grad = None


def _add(part: Part, name: str, gradient: Tensor) -> None:
    part.gradient_of(name).add_(gradient)


def _add_to_own(gradient: Tensor, parameter: nn.Parameter) -> None:
    gradient.add_(parameter.grad)
    parameter.grad = None
