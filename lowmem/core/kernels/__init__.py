"""Defines fused GPU operators (operators.py) for optimizer updates, the loss, layers and gradients.

fused.py tests them when training begins. Plain PyTorch code runs in the place of kernels that fail.
"""

from collections.abc import Iterable
from enum import Flag, auto
from functools import reduce
from operator import or_


class Kernels(Flag):
    """Names sets of fused GPU kernels, as flags. A set that a run uses is empty or contains `PRODUCTS`."""

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
    # In fp32, layers keep PyTorch's operators.
    return Kernels.PRODUCTS if precision == "fp32" else Kernels.ALL
