"""Registers kernels for meta tensors, for operators with one kernel on CUDA. Without these, PyTorch would run several
operators for a meta tensor, or fail."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowmem.cudasim.autocast import narrowed

_aten = torch.ops.aten
_16_BIT = (torch.float16, torch.bfloat16)


def _mish_backward(gradient: Tensor, input: Tensor) -> Tensor:
    return torch.empty_like(input)


def _rms_norm(input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    rows = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
    dtype = torch.float32 if input.dtype in _16_BIT else input.dtype
    return torch.empty_like(input, memory_format=torch.contiguous_format), input.new_empty(rows, dtype=dtype)


def _gru_cell(input_gates, hidden_gates, hidden, input_bias=None, hidden_bias=None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])  # workspace for backward


def _gru_cell_backward(gradient: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(gradient), *biases


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Inside `with`, registers kernels for meta tensors: for RMSNorm, GRU cells and the backward of Mish."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in (
            ("mish_backward", _mish_backward), ("_fused_rms_norm", _rms_norm),
            ("_thnn_fused_gru_cell", _gru_cell), ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
        ):  # fmt: skip
            library.m.impl(name, "Meta", kernel, False)  # library.impl refuses operators that PyTorch can divide
        yield


def gru_cell(input, hidden, *weights: Tensor):
    """Runs torch.gru_cell on meta tensors as CUDA does: two matmuls, then one fused operator. Returns NotImplemented
    for other tensors, and outside of `fused_on_meta`. Source: native/RNN.cpp."""
    if not input.is_meta or not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_thnn_fused_gru_cell", "Meta"):
        return NotImplemented
    input, hidden, of_input, of_hidden, *biases = map(narrowed, (input, hidden, *weights))
    gates = torch.matmul(input, of_input.t()), torch.matmul(hidden, of_hidden.t())
    return _aten._thnn_fused_gru_cell(*gates, hidden, *biases)[0]


def lstm_cell(input, states, *weights: Tensor):
    """Runs torch.lstm_cell on meta tensors as CUDA does: two matmuls, then one fused operator. Returns NotImplemented
    for other tensors. Source: native/RNN.cpp."""
    if not input.is_meta:
        return NotImplemented
    input, hidden, cell, of_input, of_hidden, *biases = map(narrowed, (input, *states, *weights))
    gates = torch.matmul(input, of_input.t()), torch.matmul(hidden, of_hidden.t())
    return _aten._thnn_fused_lstm_cell(*gates, cell, *biases)[:2]
