"""Where CUDA allocates otherwise than the same operation on tensors without data.

trace.py runs the training step on the meta device, which takes PyTorch's generic path. A GPU does not always: it has
fused operators that save other tensors for backward, kernels with temporaries of their own, and libraries that want a
workspace. This file is the table of those differences, and all of it:

- `CudaFunctions` puts CUDA's operator in the place of the generic one, so that autograd saves what CUDA's would;
- `hidden_bytes` are the temporaries that a kernel takes from the caching allocator and gives back before it returns;
- `PRODUCTS`, `blas_workspace_bytes` and `blaslt_workspace_bytes`: what the first matrix product takes for good.

**None of it has been compared with a GPU.** Each entry names the file it was read in, below aten/src/ATen. "2.13" is
what torch 2.13.0 installs (headers, meta kernels, the composites that it runs); "recent" a source of unknown release
close to that; "main" is newer, "old" an earlier release; "assumed" was not read.

Left out: temporaries below 64 KiB (vector_norm, philox seeds, sorting the 512 labels of loss.py's scatter_add_);
staging buffers of reductions that several blocks share (assumed: a few numbers per resident thread at most, so below
5 MiB on the largest card, and mostly none); partial sums of layer_norm's backward (assumed: only above 65,536 tokens);
copies of a product's operand in which no dimension has stride 1; F.rms_norm, one kernel there and a composite here,
which no decoder tried calls; settings that this project never makes (attention kernels off, FlashAttention 3, ...).

Taken to be alike, as 2.13 runs the operators here for which CUDA has kernels: layer_norm (statistics in fp32), gelu,
silu, embedding, cross_entropy, addmm, baddbmm, vector_norm, linear, softmax of bf16 in fp32. Alike but for C++ that
tests for dispatch modes and meta (assumed, from autograd/input_buffer.cpp and native/Linear.cpp): two gradients that
meet at a residual connection, and the bias of a linear whose input is not contiguous, are added into a new tensor
here, in place there. Backward runs on a thread of its own there, with a second cuBLAS handle, so workspaces are due
twice.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lowmem import operators  # noqa: F401  defines torch.ops.lowmem

_aten = torch.ops.aten
_16_BIT = (torch.float16, torch.bfloat16)
SMALLEST_BYTES = 64 * 1024  # what is smaller is left out of `hidden_bytes`
Capability = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """What `hidden_bytes` depends on."""

    capability: Capability
    multiprocessors: int
    deterministic: bool = True


class CudaFunctions(TorchFunctionMode):
    """Inside `with CudaFunctions(capability):` functions of tensors without data (on meta, or FakeTensors of any
    device) run the operators that CUDA would choose, its cuDNN attention switched off. Functions that do not differ,
    and tensors with data, are left alone."""

    def __init__(self, capability: Capability):
        super().__init__()
        self._replacements: dict[Callable, Callable] = {
            F.scaled_dot_product_attention: lambda *args, **kwargs: _attention(capability, *args, **kwargs),
            F.dropout: _dropout,
            torch.dropout: lambda input, p, train: _dropout(input, p, train),
            F.softmax: lambda input, dim=None, _stacklevel=3, dtype=None: _softmax(input, dim, dtype),
            torch.softmax: _softmax,
            Tensor.softmax: _softmax,
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        replacement = self._replacements.get(func)
        result = NotImplemented if replacement is None else replacement(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def attention_kernel(
    capability: Capability, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False
) -> str:
    """The kernel that scaled_dot_product_attention chooses on CUDA: "flash", else "efficient", else "math".

    native/transformers/cuda/sdp_utils.cpp (main), sdp_utils_cpp.h (2.13). In main the efficient kernel takes grouped
    queries; up to 2.13 it does not (the template of 2.13's header, and its dispatch source as others quote it).
    """
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype != query.dtype or t.shape[0] != query.shape[0] or t.numel() == 0 for t in tensors):
        return "math"
    width, value_width = query.shape[-1], value.shape[-1]
    contiguous_rows = all(t.stride(-1) == 1 for t in tensors)
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    groups = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)  # no room for wide heads' backward
    if (
        (8, 0) <= capability <= (12, 1)
        and query.dtype in _16_BIT
        and attn_mask is None
        and width == key.shape[-1] == value_width <= 256
        and (same_heads or groups)
        and (contiguous_rows or width == 1)
        and (not is_causal or query.shape[-2] == key.shape[-2])
        and not (differentiates and small and width > 192 and (dropout_p > 0 or width <= 224))
    ):
        return "flash"
    alignment = 1
    if capability >= (8, 0) or (capability >= (7, 0) and query.dtype in _16_BIT):
        alignment = 16 // query.dtype.itemsize
    if (
        (5, 0) <= capability <= (12, 1)
        and (query.dtype in (torch.float16, torch.float32) or (query.dtype is torch.bfloat16 and capability >= (8, 0)))
        and width == key.shape[-1]
        and width % alignment == value_width % alignment == 0
        and same_heads
        and contiguous_rows
        and (attn_mask is None or attn_mask.stride(-1) == 1)
    ):
        return "efficient"
    return "math"


def _attention(
    capability, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """native/transformers/attention.cpp (recent)."""
    if not _without_data(query):
        return NotImplemented
    kernel = attention_kernel(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if kernel == "flash":
        width = query.shape[-1]
        padded = (F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value))
        scale = 1 / math.sqrt(width) if scale is None else scale
        # Its small results are as on CUDA: rng_state 16 bytes, an unused number, and no debug mask.
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    mask = _additive(attn_mask, query.dtype)
    if kernel == "math":
        return _math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    if mask is not None:
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            keys = mask.shape[-1]
            mask = F.pad(mask, (0, 8 - keys % 8))[..., :keys]  # a whole 8 more where `keys` is a multiple of 8
        mask = mask.expand(*query.shape[:3], key.shape[2])
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, differentiates, dropout_p, is_causal, scale=scale
    )[0]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _math_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa):
    """The composite of attention.cpp (recent) as it runs on CUDA: with a fused dropout, and the mask added in place.
    Names die where they die there."""
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
    second_result = weights.to(dtype)  # noqa: F841  computed first, and thrown away
    return torch.matmul(weights, expanded[1]).to(dtype)


def _dropout(input, p=0.5, training=True, inplace=False):
    """native/Dropout.cpp (recent): one operator that saves a mask of bools; in place, noise of the input's dtype."""
    if not (_without_data(input) and training and not inplace and 0 < p < 1 and input.numel()):
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def _softmax(input, dim, dtype=None):
    """native/SoftMax.cpp (main): fp16 to fp32 inside the kernel. Not so for bf16."""
    if not (_without_data(input) and input.dtype is torch.float16 and dtype is torch.float32 and dim is not None):
        return NotImplemented
    return _aten._softmax(input, dim, True)


def hidden_bytes(func, args: tuple, kwargs: dict, result, gpu: Gpu) -> tuple[int, ...]:
    """Sizes of the temporaries that `func`, an aten overload with these arguments and this result, has on CUDA: alive
    together, and beside its results. Nothing for most."""
    if func not in _TEMPORARIES:
        return ()
    return tuple(size for size in _TEMPORARIES[func](gpu, *args) if size >= SMALLEST_BYTES)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _copies(*tensors: Tensor) -> tuple[int, ...]:
    """Of gradients and outputs [B, H, T, D] that are not contiguous as [B, T, H, D]."""
    return tuple(t.numel() * t.itemsize for t in tensors if not t.transpose(1, 2).is_contiguous())


def _flash_width(D: int) -> int:
    return _up(D, 32 if D <= 128 else 64)


def _flash_forward(gpu: Gpu, query, key, value, dropout_p=0.0, *_):
    """flash_attn/flash_api.cpp (main), set_params_splitkv: few (sequence, head, 64 queries) split the keys instead."""
    B, H, T, D = query.shape
    if dropout_p > 0:
        return ()
    keys = 256 if D <= 64 else 128 if D <= 128 else 64
    splits = _splits(B * H * -(-T // 64), 2 * gpu.multiprocessors, -(-key.shape[2] // keys))
    rows = splits * B * H * T
    return (rows * 4, rows * _flash_width(D) * 4) if splits > 1 else ()


def _splits(blocks: int, slots: int, key_blocks: int) -> int:
    """The fewest splits that reach 85% of the best occupancy."""
    if blocks >= 0.8 * slots:
        return 1
    efficiency = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    return next(s for s, e in efficiency.items() if e >= 0.85 * max(efficiency.values()))


def _flash_backward(gpu: Gpu, grad_out, query, key, value, out, *_):
    """flash_attn/flash_api.cpp (main), mha_bwd: dq in fp32, once per split of the keys where sums have an order."""
    B, H, T, D = query.shape
    rows = B * H * _up(T, 128)
    splits = -(-gpu.multiprocessors // (B * H)) if gpu.deterministic else 1
    groups = (B * H * key.shape[2] * D * query.itemsize,) * 2 if key.shape[1] != H else ()
    return *_copies(grad_out, out), rows * 4, splits * rows * _flash_width(D) * 4, *groups


def _efficient_forward(gpu: Gpu, query, key, value, *_):
    """mem_eff_attention/kernel_forward.h (2.13): heads wider than 128 are summed in fp32 outside the registers."""
    B, H, T, D = query.shape
    wide = max(D, value.shape[-1]) > 128 and query.dtype in _16_BIT
    return (B * H * T * value.shape[-1] * 4,) if wide else ()


def _efficient_backward(gpu: Gpu, grad_out, query, key, value, bias, out, *_):
    """cuda/attention_backward.cu (old), mem_eff_attention/kernel_backward.h and kernels/cutlassB.h (2.13).

    Tiles of 64 queries x 64 keys throughout. For wider heads cards with room for larger tiles keep dk and dv in
    registers; which do is not known here, so those sums are counted: 0.5 x D KiB per sequence and head too many.
    """
    B, H, T, D = query.shape
    half, width = query.dtype in _16_BIT, value.shape[-1]
    per_head = 0
    if half and max(D, width) > 64:
        splits = 1 if gpu.deterministic else max(1, min(-(-key.shape[2] // 64), 200 // (B * H)))
        per_head += splits * 64 * (_up(D, 64) + _up(width, 64))
    if half or gpu.capability >= (7, 0):
        per_head += -(-T // 64) * -(-D // 64) * (4 + 64 * 64)  # dq, and a lock per tile
    rows = B * H * T * 4
    while_running = rows, B * H * _up(per_head, 4) * 4
    before = ()  # the sums of grad_out x out, which only 16-bit kernels take themselves
    if not half or (max(D, width) > 64 and (7, 0) <= gpu.capability < (7, 5)):
        before = rows * width * (3 if half else 1), rows, rows
    return *_copies(grad_out), *max(before, while_running, key=sum)


def _embedding_backward(gpu: Gpu, gradient, indices, words, *_):
    """cuda/Embedding.cu and EmbeddingBackwardKernel.cu (recent): from 3,073 lookups on they are sorted, and runs of up
    to ten of one word are summed in fp32."""
    lookups = indices.numel()
    copy = () if gradient.is_contiguous() else (gradient.numel() * gradient.itemsize,)
    if lookups <= 3072:
        return copy
    runs = min(lookups, words)
    partial_runs = lookups // 10 + runs
    tables = lookups, lookups, lookups, runs, runs, partial_runs
    return *copy, *(entries * indices.itemsize for entries in tables), partial_runs * gradient.shape[-1] * 4


_TEMPORARIES: dict[object, Callable] = {
    _aten._scaled_dot_product_flash_attention.default: _flash_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    # which weights are minus infinity, as bools: native/transformers/attention.cpp (recent)
    _aten._safe_softmax.default: lambda gpu, weights, *_: (weights.numel(),),
    _aten.embedding_dense_backward.default: _embedding_backward,
}

# What goes through a cuBLAS or cuBLASLt handle: cuda/Blas.cpp (recent).
PRODUCTS = frozenset(
    overload
    for product in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv, _aten.dot)
    for overload in (product.default, product.out)
) | {_aten.addmm_.default, _aten.baddbmm_.default, _aten.addmv_.default, torch.ops.lowmem.add_product.default}


def blas_workspace_bytes(capability: Capability, config: str | None, torch_version: tuple[int, int] = (2, 13)) -> int:
    """What a thread's first product on a stream takes; `config`: CUBLAS_WORKSPACE_CONFIG, pairs of ":KiB:count".

    cuda/CublasHandlePool.cpp: recent, whose declarations are 2.13's; that releases before it were like old is assumed.
    In main every product takes its workspace and gives it back.
    """
    pairs = re.findall(":([0-9]+):([0-9]+)", config or "")
    if pairs:
        return sum(int(kib) * 1024 * int(count) for kib, count in pairs)
    large = capability[0] in (9, 10, 12) if torch_version >= (2, 13) else capability == (9, 0)
    return 8 * 4096 * 1024 if large else 2 * 4096 * 1024 + 8 * 16 * 1024


def blaslt_workspace_bytes(torch_version: tuple[int, int] = (2, 13)) -> int:
    """What a thread's first product through cuBLASLt takes beside that: nothing where the two share one buffer
    (CublasHandlePool.cpp, recent), else 1 MiB (old; assumed for releases before 2.13).

    Such a product is an addmm (beta 1, a new result) of a contiguous bias vector, no side of it 1: cuda/Blas.cpp (old).
    """
    return 0 if torch_version >= (2, 13) else 1024 * 1024
