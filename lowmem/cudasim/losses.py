"""Computes the bytes of temporary tensors that losses allocate on CUDA, for temporaries.py. Sources are below
aten/src/ATen/native."""

from collections.abc import Callable
from functools import partial

import torch

from lowmem.cudasim.reductions import WIDE, Gpu, bytes_each, staging_bytes

_aten = torch.ops.aten


# Sources: Loss.cpp, cuda/Loss.cu.
def _losses(gpu: Gpu, result, input, target, *_, reduced_in_place: bool = False, **__):
    if result.dim():
        return ()
    # The losses of all elements are a temporary, or `reduced_in_place`: then they have the result's storage.
    losses = torch.empty(torch.broadcast_shapes(input.shape, target.shape), dtype=result.dtype, device="meta")
    sums = staging_bytes(gpu, losses, None, result.itemsize, vector=WIDE)
    return (result.itemsize if reduced_in_place else losses.numel() * losses.itemsize), *sums


# Source: Loss.cpp.
def _losses_of_logits(gpu: Gpu, result, input, target, weight=None, positive=None, *_, **__):
    weights = () if positive is None else bytes_each(positive)  # the classes' weights less one
    if result.dim():
        return *bytes_each(input), *weights
    sums = staging_bytes(gpu, input, None, result.itemsize, vector=WIDE)  # after the weights
    return *bytes_each(input, input), *max(weights, sums, key=sum)  # logarithms of sigmoids, and losses


# Source: Loss.cpp.
def _soft_margin_backward(gpu: Gpu, result, gradient, input, *_, **__):
    return bytes_each(input, input)  # products that become the exponential


LOSSES: dict[torch._ops.OpOverload, Callable] = {
    _aten.mse_loss.default: _losses,
    _aten.smooth_l1_loss.default: _losses,
    _aten.huber_loss.default: _losses,
    _aten.binary_cross_entropy.default: partial(_losses, reduced_in_place=True),
    _aten.binary_cross_entropy_with_logits.default: _losses_of_logits,
    _aten.soft_margin_loss.default: partial(_losses, reduced_in_place=True),
    _aten.soft_margin_loss_backward.default: _soft_margin_backward,
}
