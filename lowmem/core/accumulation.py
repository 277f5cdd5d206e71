"""Gradients added to their fp32 accumulators, each of them once.

A step whose updates have begun cannot be begun again where memory runs out: the weights that its forward pass saw are
not there any more. A part of it, such as the backward pass of a segment, can: its inputs are still there, and it
computes the same bits again. Only what it had added to accumulators by then must not be added a second time. So what
each parameter is given is counted from the beginning of a part on, and a part that is repeated passes over as many.
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

    def _once(self, name: str, add: Callable[[], object]) -> None:
        number = self._seen[name] = self._seen.get(name, 0) + 1
        if number > self._added.get(name, 0):
            add()
            self._added[name] = number
