"""Defines Triton kernels for the optimizer update (AdamW, SGD) and for the cross-entropy loss.

Needs Triton, which PyTorch's CUDA builds for Linux have. This file and layer_kernels.py are tested in Triton's
interpreter, and compiled for sm_75 to sm_120.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 4096  # of the vocabulary, at a time: 16 for each of 256 threads
BLOCK = 1024  # parameters per program: 8 for each of 128 threads, so that 16-bit numbers come 16 bytes at a time
FP32, BF16, FP16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROUND = tl.constexpr(1.5 * 2**23)  # added to a small fp32 number and subtracted again, it leaves the nearest integer


def _launch(kernel, working: Tensor, low: Tensor | None, *others: Tensor | float) -> None:
    """Runs a `kernel` that updates, joins or splits weights `working` [n]. `low`: low halves [n] of the fp32 weights
    (precision.py), if `working` is in 16 bits; else None."""
    n, kind = working.numel(), _KINDS[working.dtype]
    bits = working if low is None else working.view(torch.int16)
    halves = bits, bits if low is None else low  # a kernel for fp32 does not look at the second
    kernel[(triton.cdiv(n, BLOCK),)](*halves, n, *others, KIND=kind, BLOCK=BLOCK, num_warps=4)


def cross_entropy(
    logits: Tensor, bias: Tensor | None, labels: Tensor, losses: Tensor, scale: float | None,
    outer: float = 1.0, inner: float | None = None,
) -> None:  # fmt: skip
    """Writes `losses` [C] fp32, the cross-entropy of f(`logits` [C, V] + `bias` [V] fp32) with `labels` [C]. f(z) is
    outer * z or, if `inner` is given, outer * tanh(inner * z). Unless `scale` is None, overwrites the logits with
    `scale` times the loss's gradient for them. For a label of -100, loss and gradient are 0.

    `labels` and `bias` are contiguous. Rows of logits begin at multiples of 16 numbers, so that Triton reads 16 bytes
    at a time. The padding after a row may be overwritten.
    """
    _cross_entropy[(logits.shape[0],)](
        logits, logits if bias is None else bias, labels, losses, 0.0 if scale is None else scale, outer, inner or 0.0,
        logits.shape[1], logits.stride(0), HAS_BIAS=bias is not None, CAPPED=inner is not None,
        DIFFERENTIATE=scale is not None, BLOCK=WORDS, num_warps=8,
    )  # fmt: skip


# Reads a row of 16-bit logits twice and writes it once: 6 bytes per logit. The plain code moves about 50. The first
# read finds the maximum and the sum of exponentials (arXiv:1805.02867).
@triton.jit
def _cross_entropy(
    logits_at, bias_at, labels_at, losses_at, scale, outer, inner, words, stride,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_at + row)
    logits_at += row * stride
    highest = tl.full((), -3.0e38, tl.float32)  # finite, because all logits of a block may be -inf
    total = tl.zeros((), tl.float32)
    for start in range(0, stride, BLOCK):
        word = start + tl.arange(0, BLOCK)
        z = outer * _logits(logits_at, bias_at, word, words, stride, inner, HAS_BIAS, CAPPED)
        z = tl.where(word < words, z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher), axis=0)
        highest = higher
    log_total = tl.log(total)
    counted = label != -100
    target = tl.load(logits_at + label, counted, other=0.0).to(tl.float32)
    if HAS_BIAS:
        target += tl.load(bias_at + label, counted, other=0.0)
    if CAPPED:
        target = _tanh(inner * target)
    tl.store(losses_at + row, tl.where(counted, log_total + highest - outer * target, 0.0))
    if DIFFERENTIATE:
        factor = tl.where(counted, scale, 0.0) * outer
        if CAPPED:
            factor *= inner
        tl.debug_barrier()  # the target's logit is read by one thread, and overwritten by another
        for start in range(0, stride, BLOCK):
            word = start + tl.arange(0, BLOCK)
            z = _logits(logits_at, bias_at, word, words, stride, inner, HAS_BIAS, CAPPED)
            share = tl.div_rn(tl.exp(outer * z - highest), total)
            gradient = factor * (share - tl.where(word == label, 1.0, 0.0))
            if CAPPED:
                gradient *= 1 - z * z
            tl.store(logits_at + word, gradient.to(logits_at.dtype.element_ty), word < stride)


@triton.jit
def _logits(logits_at, bias_at, word, words, stride, inner, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr):
    """Returns a row's logits, with bias, for the token ids `word`; tanh(inner * logit) if CAPPED. `logits_at`: pointer
    to the row. `words`: size of the vocabulary; ids beyond it get 0. `stride`: length of the row with its padding."""
    z = tl.load(logits_at + word, word < stride, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_at + word, word < words, other=0.0)
    if CAPPED:
        z = _tanh(inner * z)
    return tl.where(word < words, z, 0.0)


@triton.jit
def _tanh(x):
    # Has an absolute error of 1e-7. The interpreter lacks the compiler's own tanh.
    return 1 - tl.div_rn(2.0, tl.exp(2 * x) + 1)


# The arithmetic is that of optimizers.py, line by line, in fp32; square root and division round correctly. A compiler
# may fuse a product and a sum in either, so both agree to a few units in the last place. Each number is read and
# written once: 28 bytes per parameter with 16-bit weights. The plain code moves about 140.
@triton.jit
def _adamw(
    working_at, low_at, n, m_at, v_at, gradient_at,
    gradient_scale, decay_factor, one_minus_beta1, beta2, one_minus_beta2, root_of_correction2, epsilon, step_size,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < n
    g = tl.load(gradient_at + place, there) * gradient_scale
    m = tl.load(m_at + place, there)
    v = tl.load(v_at + place, there)
    w = _read(working_at, low_at, place, there, KIND) * decay_factor
    m = m + one_minus_beta1 * (g - m)
    v = v * beta2 + one_minus_beta2 * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root_of_correction2) + epsilon
    w = w - tl.div_rn(step_size * m, denominator)
    tl.store(m_at + place, m, there)
    tl.store(v_at + place, v, there)
    _write(working_at, low_at, place, there, w, KIND)


@triton.jit
def _sgd(
    working_at, low_at, n, gradient_at, gradient_scale, decay_factor, learning_rate, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < n
    g = tl.load(gradient_at + place, there) * gradient_scale
    w = _read(working_at, low_at, place, there, KIND) * decay_factor - learning_rate * g
    _write(working_at, low_at, place, there, w, KIND)


@triton.jit
def _join_all(working_at, low_at, n, master_at, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < n
    tl.store(master_at + place, _read(working_at, low_at, place, there, KIND), there)


@triton.jit
def _split_all(working_at, low_at, n, master_at, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < n
    _write(working_at, low_at, place, there, tl.load(master_at + place, there), KIND)


@triton.jit
def _read(working_at, low_at, place, there, KIND: tl.constexpr):
    """Loads weights in fp32, at the offsets `place` where the mask `there` is set. `KIND`: FP32, BF16 or FP16, their
    stored dtype. Joins 16-bit weights, which are given as int16, with their low halves (precision.join)."""
    working = tl.load(working_at + place, there)
    if KIND == FP32:
        master = working
    else:
        low = tl.load(low_at + place, there)
        if KIND == BF16:
            master = ((working.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            unit = (((working.to(tl.int32) >> 10) & 0x1F) + (127 - 39)) << 23
            high = working.to(tl.float16, bitcast=True).to(tl.float32)
            master = high + low.to(tl.float32) * unit.to(tl.float32, bitcast=True)
    return master


@triton.jit
def _write(working_at, low_at, place, there, master, KIND: tl.constexpr):
    """Stores fp32 weights `master` at the offsets `place` where the mask `there` is set. `KIND`: their stored dtype,
    FP32, BF16 or FP16. Splits 16-bit weights (precision.split) into int16 halves, at `working_at` and `low_at`."""
    if KIND == FP32:
        tl.store(working_at + place, master, there)
    elif KIND == BF16:
        bits = master.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(working_at + place, high.to(tl.int16), there)
        tl.store(low_at + place, (bits - (high << 16)).to(tl.int16), there)
    else:
        working = master.to(tl.float16)
        bits = working.to(tl.int16, bitcast=True)
        one_over_unit = (127 + 39 - ((bits.to(tl.int32) >> 10) & 0x1F)) << 23  # a power of two: the product is exact
        steps = (master - working.to(tl.float32)) * one_over_unit.to(tl.float32, bitcast=True)
        tl.store(working_at + place, bits, there)
        tl.store(low_at + place, ((steps + _ROUND) - _ROUND).to(tl.int16), there)


adamw, sgd, join, split = (partial(_launch, kernel) for kernel in (_adamw, _sgd, _join_all, _split_all))
