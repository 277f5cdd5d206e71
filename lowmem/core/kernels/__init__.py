"""Defines operators for updates, the loss, layers and gradients, each in one pass over memory.

operators.py registers them (`torch.ops.lowmem`). triton_kernels.py and layer_kernels.py have the Triton code. When
training begins, fused.py compiles them and compares them with the plain PyTorch code. The plain code runs in the
place of those that fail.
"""

from enum import Flag, auto


class Kernels(Flag):
    """Names sets of fused kernels, as flags. Those of all other sets need those of `PRODUCTS`."""

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
