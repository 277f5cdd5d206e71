"""Makes meta tensors use the operators that PyTorch uses on CUDA, and computes the workspaces of matmuls.

On CUDA some functions are fused operators, which save other tensors for backward. Each function names its source below
aten/src/ATen, and the version read: a number, "near 2.13" or "main branch". A test compares all replaced functions
with PyTorch 2.14.1's CUDA build.
"""

import functools
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowmem.cudasim import meta_kernels
from lowmem.cudasim.autocast import narrowed
from lowmem.cudasim.gpus import Capability
from lowmem.units import KIB, MIB

_aten = torch.ops.aten
_16_BIT = (torch.float16, torch.bfloat16)
# Matrix products, each with the index of its first factor among the arguments.
MATRIX_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.addmm_: 1, _aten.baddbmm: 1, _aten.baddbmm_: 1}
# All operators that use a cuBLAS or cuBLASLt handle: cuda/Blas.cpp (near 2.13).
CUBLAS_OPERATORS = {
    getattr(packet, overload)
    for packet in (
        *MATRIX_PRODUCTS,
        *(_aten.mv, _aten.addmv, _aten.addmv_, _aten.dot, _aten.linalg_solve_triangular),
        *(_aten.linalg_inv_ex, _aten._linalg_solve_ex, _aten.linalg_lu_factor_ex, _aten.linalg_lu_solve),
        *(_aten._linalg_det, _aten._linalg_slogdet, _aten._trilinear),
    )  # fmt: skip
    for overload in {"default", "out"} & set(packet.overloads())
}


class CudaFunctions(TorchFunctionMode):
    """Makes PyTorch functions, such as softmax and attention, call the operators to which they would dispatch on CUDA.
    Acts only on tensors without data: meta tensors, or FakeTensors of any device. Never chooses cuDNN's attention."""

    def __init__(self, capability: Capability, torch_version: tuple[int, int] = (2, 13)):
        super().__init__()
        chosen = functools.partial(attention_kernel, capability, torch_version=torch_version)
        self._replacements: dict[Callable, Callable] = {
            F.scaled_dot_product_attention: functools.partial(_attention, chosen),
            F.linear: _linear,
            F.dropout: _dropout,
            torch.dropout: lambda input, p, train: _dropout(input, p, train),
            F.softmax: lambda input, dim=None, _stacklevel=3, dtype=None: _softmax(input, dim, dtype),
            torch.softmax: _softmax,
            Tensor.softmax: _softmax,
            torch.gru_cell: meta_kernels.gru_cell,
            torch.lstm_cell: meta_kernels.lstm_cell,
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        replacement = self._replacements.get(func)
        result = NotImplemented if replacement is None else replacement(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def attention_kernel(
    capability: Capability, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False, *,
    torch_version: tuple[int, int] = (2, 13),
) -> str:  # fmt: skip
    """Returns the kernel that scaled_dot_product_attention chooses on CUDA: "flash" if it supports these arguments,
    else "efficient" if that does, else "math". Sources: native/transformers/cuda/sdp_utils.cpp (main branch) and
    sdp_utils_cpp.h (2.13 and 2.14)."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype != query.dtype or t.shape[0] != query.shape[0] or t.numel() == 0 for t in tensors):
        return "math"
    width, value_width, dtype = query.shape[-1], value.shape[-1], query.dtype
    contiguous_rows = all(t.stride(-1) == 1 for t in tensors)
    # then "efficient" supports grouped-query attention, and both support one head of keys for all queries (observed)
    newer = torch_version >= (2, 14)
    one_head = query.shape[1] == key.shape[1] == value.shape[1] or (newer and key.shape[1] == value.shape[1] == 1)
    groups = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)  # no room for wide heads' backward
    if (
        (8, 0) <= capability <= (12, 1)
        and dtype in _16_BIT
        and attn_mask is None
        and width == key.shape[-1] == value_width <= 256
        and (one_head or groups)
        and (contiguous_rows or width == 1)
        and (not is_causal or query.shape[-2] == key.shape[-2])
        and not (_differentiated(*tensors) and small and width > 192 and (dropout_p > 0 or width <= 224))
    ):
        return "flash"
    aligned = capability >= (8, 0) or (capability >= (7, 0) and dtype in _16_BIT)
    alignment = 16 // dtype.itemsize if aligned else 1
    if (
        (5, 0) <= capability <= (12, 1)
        and (dtype in (torch.float16, torch.float32) or (dtype is torch.bfloat16 and capability >= (8, 0)))
        and width == key.shape[-1]
        and width % alignment == value_width % alignment == 0
        and (one_head or (groups and newer))
        and contiguous_rows
        and (attn_mask is None or attn_mask.stride(-1) == 1)
    ):
        return "efficient"
    return "math"


def _attention(chosen, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Runs scaled_dot_product_attention by CUDA's operators. Returns NotImplemented for tensors with data. `chosen`:
    returns the kernel for the arguments (`attention_kernel`). Source: native/transformers/attention.cpp (near 2.13)."""
    if not _without_data(query):
        return NotImplemented
    query, key, value, attn_mask = map(narrowed, (query, key, value, attn_mask))
    kernel = chosen(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if kernel == "flash":
        width = query.shape[-1]
        padded = (F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value))
        scale = 1 / math.sqrt(width) if scale is None else scale
        # On meta, its small results are as on CUDA: rng_state 16 bytes, an unused number, and no debug mask.
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    mask = _additive(attn_mask, query.dtype)
    if kernel == "math":
        return _math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            keys = mask.shape[-1]
            mask = F.pad(mask, (0, 8 - keys % 8))[..., :keys]  # 8 more if `keys` is a multiple of 8
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, _differentiated(query, key, value), dropout_p, is_causal, scale=scale
    )[0]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    """Computes attention from single operators, as attention.cpp (near 2.13) does on CUDA. Frees tensors in the order
    of the C++ code."""
    dtype = query.dtype
    if dtype in _16_BIT:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scaled = query * factor
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        mask = _additive(torch.ones(shape, dtype=torch.bool, device=query.device).tril(), query.dtype)
    expanded = [key, value]
    if enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        expanded = [t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in expanded]
    weights = torch.matmul(scaled, expanded[0].transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    second_result = weights.to(dtype)  # noqa: F841  the C++ code computes it first and does not use it
    return torch.matmul(weights, expanded[1]).to(dtype)


def _linear(input, weight, bias=None):
    """Runs F.linear with a bias on a non-contiguous input without data, of 3 or more dimensions: adds the bias in
    place, as CUDA does. Returns NotImplemented for all other arguments. Source: native/Linear.cpp."""
    # If the input cannot be viewed as a matrix, CUDA adds the bias in place. Without data, and under a dispatch mode,
    # PyTorch would make a new tensor.
    alike = not _without_data(input) or bias is None or input.dim() < 3 or input.is_contiguous()
    if alike:
        return NotImplemented
    input, weight, bias = map(narrowed, (input, weight, bias))
    return torch.matmul(input, weight.t()).add_(bias)


def _dropout(input, p=0.5, training=True, inplace=False):
    """Runs dropout on a tensor without data by CUDA's operator, which saves a mask of bools. Returns NotImplemented for
    other tensors, for `inplace`, and if nothing is random. Source: native/Dropout.cpp (near 2.13)."""
    # With `inplace`, the mask has the input's dtype.
    if not (_without_data(input) and training and not inplace and 0 < p < 1 and input.numel()):
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def _softmax(input, dim, dtype=None):
    """Runs softmax with dtype=fp32 on fp16 inputs without data, which CUDA converts inside the kernel. Returns
    NotImplemented for all other arguments. Source: native/SoftMax.cpp (main branch)."""
    if not (_without_data(input) and input.dtype is torch.float16 and dtype is torch.float32 and dim is not None):
        return NotImplemented
    return _aten._softmax(input, dim, True)


def allocated(func: Callable, args: tuple, kwargs: dict, results: list[Tensor]) -> list[Tensor]:
    """Returns the results of an aten operator that are allocated on the device, in order of allocation. Seen with
    PyTorch 2.14.1."""
    # the mask first (cuda/Dropout.cu)
    if func is _aten.native_dropout.default:
        return results[::-1]
    # its buffer is for the CPU
    if func is _aten.log_sigmoid_forward.default:
        return results[:1]
    # With dropout, two results are random numbers in RAM.
    if func is _aten._scaled_dot_product_efficient_attention.default:
        dropout_p = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
        return results[:2] if dropout_p > 0 else results
    return results


def _of_losses(func: Callable, args: tuple, kwargs: dict) -> int | None:
    reduction = args[_REDUCTION[func]] if len(args) > _REDUCTION[func] else kwargs.get("reduction", 1)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in args[:2]))
    itemsize = torch.promote_types(args[0].dtype, args[1].dtype).itemsize
    return math.prod(shape) * itemsize if reduction else None  # 0 reduces nothing


_REDUCTION = {  # losses whose result has the storage of the losses of all entries, with the place of `reduction`
    _aten.mse_loss.default: 2, _aten.smooth_l1_loss.default: 2, _aten.soft_margin_loss.default: 2,
    _aten.binary_cross_entropy.default: 3,
}  # fmt: skip
# Operators whose result is a larger storage, made for something else (Loss.cpp, cuda/Loss.cu, cuda/Col2Im.cu).
STORAGE_BYTES: dict[Callable, Callable] = {
    **dict.fromkeys(_REDUCTION, _of_losses),
    _aten.col2im.default: lambda func, args, kwargs: args[0].numel() * args[0].itemsize,
}


def workspace_bytes(capability: Capability, config: str | None, torch_version: tuple[int, int]) -> tuple[int, ...]:
    """Returns the bytes of each workspace that a thread allocates at its first matmul, and keeps. The first is
    cuBLAS's. In PyTorch 2.12 and older a second one follows, cuBLASLt's, which only forward's thread has. `config`:
    value of CUBLAS_WORKSPACE_CONFIG, pairs of ":KiB:count", or None. Source: cuda/CublasHandlePool.cpp (2.13)."""
    # cuBLASLt computes addmm with a bias vector. An H200 with PyTorch 2.11 allocated these bytes. Not modelled: the
    # main branch, whose threads free the workspace after each matmul.
    shared_with_blaslt = torch_version >= (2, 13)
    pairs = re.findall(":([0-9]+):([0-9]+)", config or "")
    large = capability[0] in (9, 10, 12) if shared_with_blaslt else capability == (9, 0)
    by_itself = 8 * 4096 * KIB if large else 2 * 4096 * KIB + 8 * 16 * KIB
    blas = sum(int(kib) * KIB * int(count) for kib, count in pairs) if pairs else by_itself
    return (blas,) if shared_with_blaslt else (blas, MIB)
