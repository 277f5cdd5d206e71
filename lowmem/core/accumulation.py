"""Gradients added to their fp32 accumulators, each of them once.

A step whose updates have begun cannot be begun again where memory runs out: the weights that its forward pass saw are
not there any more. A part of it, such as the backward pass of a segment, can: its inputs are still there, and it
computes the same bits again. Only what it had added to accumulators by then must not be added a second time. So what
each parameter is given is counted from the beginning of a part on, and a part that is repeated passes over as many.

What several blocks share gets a gradient from each of them. Were all added to one accumulator as they come, the order
of the sums would be the schedule's. So each use has an accumulator of its own, and they are joined, in the order of the
blocks, when backward has been through all blocks of all micro-batches.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lowmem.core.decoder import Decoder
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.layers import accumulated
from lowmem.core.parameters import Part, Store


class Accumulation:
    """Sees to it that every gradient of `decoder`'s parameters reaches its accumulator in `store`."""

    def __init__(self, decoder: Decoder, store: Store):
        self._added: dict[str, int] = {}  # by parameter: how often it was added to in this part of the step
        self._seen: dict[str, int] = {}  # the same of this attempt at the part
        for unit in decoder.units:
            for name, parameter in unit.parameters.items():
                part = store.part_of(name)
                accumulated(parameter, partial(self._add_product, part, name))
                parameter.register_post_accumulate_grad_hook(partial(self._add_gradient, part, name))
        self._shared: list[tuple[str, Part, Tensor]] = []  # and not what blocks compute with, whose hooks hold this
        for use in decoder.shared:
            parameter, part = use.parameter(), store.part_of(use.name)
            gradient = torch.zeros(parameter.shape, device=parameter.device)
            use.own = nn.Parameter(parameter.detach())
            use.own.register_post_accumulate_grad_hook(
                partial(self._add_to_own, f"{use.name} in block {use.block}", gradient)
            )
            self._shared.append((use.name, part, gradient))

    def join(self) -> None:
        """Adds what blocks have given to the parameters that they share."""
        for number, (name, part, gradient) in enumerate(self._shared):
            self._once(f"{name} joined {number}", partial(_move_into, part, name, gradient))

    def clear(self) -> None:
        """What has not been joined is dropped."""
        for _, _, gradient in self._shared:
            gradient.zero_()

    def begin_part(self) -> None:
        """A part of the step begins."""
        self._added, self._seen = {}, {}

    def repeat_part(self) -> None:
        """The part that was begun last begins again."""
        self._seen = {}

    def _add_product(self, part: Part, name: str, left: Tensor, right: Tensor) -> None:
        self._once(name, lambda: torch.ops.lowmem.add_product(part.gradient_of(name), left, right))

    def _add_gradient(self, part: Part, name: str, parameter: nn.Parameter) -> None:
        """A hook that moves a parameter's fresh gradient into its accumulator."""
        if parameter.grad is not None:  # else a fused layer has added it already
            self._once(name, lambda: part.gradient_of(name).add_(parameter.grad))
            parameter.grad = None

    def _add_to_own(self, name: str, gradient: Tensor, parameter: nn.Parameter) -> None:
        self._once(name, lambda: gradient.add_(parameter.grad))
        parameter.grad = None

    def _once(self, name: str, add: Callable[[], object]) -> None:
        number = self._seen[name] = self._seen.get(name, 0) + 1
        if number > self._added.get(name, 0):
            add()
            self._added[name] = number


def _move_into(part: Part, name: str, gradient: Tensor) -> None:
    part.gradient_of(name).add_(gradient)
    gradient.zero_()
