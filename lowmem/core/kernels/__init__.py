"""Defines fused GPU operators for optimizer updates, the loss, layers and gradients, with few passes over memory.

operators.py registers them (`torch.ops.lowmem`). triton_kernels.py and layer_kernels.py have the Triton code. When
training begins, fused.py compiles the kernels and compares them with plain PyTorch code. If a kernel fails, the plain
code runs in its place.
"""

from collections.abc import Iterable
from enum import Flag, auto
from functools import reduce
from operator import or_


class Kernels(Flag):
    """Names sets of fused kernels, as flags. Every other set also needs the kernels of `PRODUCTS`."""

    NONE = 0
    PRODUCTS = auto()  # gradients of matrix products, updates, and the loss
    NORMS = auto()
    SUMS = auto()  # sums of the residual stream, with dropout and norm
    ACTIVATIONS = auto()
    ROTARY = auto()
    ALL = PRODUCTS | NORMS | SUMS | ACTIVATIONS | ROTARY

    @property
    def names(self) -> list[str]:
        return [kernel.name.lower() for kernel in self]

    @classmethod
    def named(cls, names: Iterable[str]) -> "Kernels":
        return reduce(or_, (cls[name.upper()] for name in names), cls.NONE)


def used_in(precision: str) -> Kernels:
    """Returns the sets of fused kernels that training in `precision` can use. In fp32, layers keep PyTorch's
    operators."""
    return Kernels.PRODUCTS if precision == "fp32" else Kernels.ALL
