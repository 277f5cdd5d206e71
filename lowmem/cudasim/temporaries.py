"""Computes the temporaries of PyTorch's CUDA kernels: memory that a kernel takes from the allocator while it runs.

TEMPORARIES maps an operator to the function that returns the bytes of each of its temporaries. Operators that are not
in it take less than 1 KiB. Sources are below aten/src/ATen/native. A test compares all functions with PyTorch's own
allocator. "assumed" marks figures that no test can show.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from lowmem.cudasim import attention
from lowmem.cudasim.cuda_ops import MATRIX_PRODUCTS
from lowmem.cudasim.losses import LOSSES
from lowmem.cudasim.reductions import WIDE, Gpu, bytes_each, staging_bytes
from lowmem.units import round_up

_aten = torch.ops.aten
_16_BIT = (torch.float16, torch.bfloat16)


def hidden_bytes(func, args: tuple, kwargs: dict, result, gpu: Gpu) -> tuple[int, ...]:
    """Returns the bytes of each temporary tensor that the aten operator `func` allocates on CUDA; () for tensors on the
    CPU. All exist at the same time. They are allocated after the results; operators in COPIED_FIRST allocate them
    before the results."""
    if func not in TEMPORARIES or (args[0].is_cpu and not isinstance(args[0], FakeTensor)):
        return ()
    return tuple(size for size in TEMPORARIES[func](gpu, result, *args, **kwargs) if size)


# --- attention: query [B, H, T, D], key and value [B, H or fewer, T, D]


def _copies(*tensors: Tensor) -> tuple[int, ...]:
    # Attention's backward copies a tensor unless it is stored in memory as [B, T, H, D].
    return bytes_each(*(tensor for tensor in tensors if not tensor.transpose(1, 2).is_contiguous()))


def _ungrouped(query, key, value) -> tuple[int, ...]:
    """Returns the bytes of the temporary gradients of keys and values, which grouped-query attention computes for every
    query head. Returns () if each query head has a key head of its own."""
    B, H, _, D = query.shape
    entries = B * H * key.shape[2]
    # The kernel then sums them over the query heads that share a key head.
    return (entries * D * key.itemsize, entries * value.shape[-1] * key.itemsize) if key.shape[1] != H else ()


def _flash_forward(gpu: Gpu, result, query, key, value, dropout_p=0.0, *_, **__):
    """Returns the bytes of flash attention's partial results in fp32; () if it does not split the keys. Source:
    transformers/cuda/flash_attn/flash_api.cpp, set_params_splitkv."""
    B, H, T, D = query.shape
    splits = attention.splits_of_keys(gpu.multiprocessors, query, key, dropout_p)
    rows = splits * B * H * T
    # a log-sum-exp per row, and outputs
    return (rows * 4, rows * attention.flash_width(D) * 4) if splits > 1 else ()


def _flash_backward(gpu: Gpu, result, grad_out, query, key, value, out, *_, **__):
    """Returns the bytes of each temporary of flash attention's backward. Source:
    transformers/cuda/flash_attn/flash_api.cpp, mha_bwd."""
    B, H, T, _ = query.shape
    sums = B * H * round_up(T, 128) * 4  # one per row
    gradients = attention.gradients_of_queries(gpu.multiprocessors, B * H) if gpu.deterministic else 1
    of_queries = gradients * attention.query_gradient_bytes(query)
    return *_copies(grad_out, out), sums, of_queries, *_ungrouped(query, key, value)


def _efficient_forward(gpu: Gpu, result, query, key, value, *_, **__):
    B, H, T, D = query.shape
    # In 16 bit, such heads add up their output in fp32; others in registers
    # (transformers/cuda/mem_eff_attention/kernel_forward.h).
    wide = max(D, value.shape[-1]) > 128 and query.dtype in _16_BIT
    return (B * H * T * value.shape[-1] * 4,) if wide else ()


def _efficient_tile(gpu: Gpu, dtype: torch.dtype, width: int, dropout: bool) -> tuple[int, int, bool]:
    """Returns (queries, keys, True if dk and dv stay in registers) of a tile in memory-efficient attention's backward.
    `width`: the larger head size of query and value. Source: transformers/cuda/mem_eff_attention/kernels/cutlassB.h."""
    # PyTorch takes the first kernel for this `width` that fits into shared memory. The bytes that a kernel asks for
    # were read off its launches; those on Volta are assumed.
    half, shared = dtype in _16_BIT, gpu.multiprocessor.shared_bytes_of_block
    if width <= 64:
        return 64, 64, half
    if not half:
        large = gpu.capability >= (8, 0) and shared >= 121_344
        return (128 if large else 64), 64, False
    if (7, 0) <= gpu.capability < (8, 0):
        return 128, 64, width <= 128
    if gpu.capability < (7, 0):
        return 64, 64, False
    if width > 128:
        return 128, 64, False
    if width <= 96 and gpu.capability in ((8, 6), (8, 9)) and not dropout:
        return 128, 64, True
    large = shared >= (162_304 if dropout else 154_112)  # of fp16; bf16 asks for less
    return (128, 128, True) if large else (64, 64, False)


def _efficient_backward(
    gpu: Gpu, result, grad_out, query, key, value, bias, out, logsumexp, seed, offset, dropout_p, *_, **__
):
    """Returns the bytes of each temporary of memory-efficient attention's backward. Sources:
    transformers/cuda/attention_backward.cu, mem_eff_attention/kernel_backward.h."""
    B, H, T, D = query.shape
    half, width = query.dtype in _16_BIT, value.shape[-1]
    queries, keys, in_registers = _efficient_tile(gpu, query.dtype, max(D, width), dropout_p > 0)
    per_head, sums_of_dk_and_dv = 0, half and not in_registers
    if sums_of_dk_and_dv:
        splits = 1
        if not gpu.deterministic and gpu.capability >= (7, 0):
            splits = -(-key.shape[2] // keys)
            splits = 1 if B * H >= 256 and splits <= 2 else max(1, min(splits, 200 // (B * H)))
        per_head += splits * keys * (round_up(D, queries) + round_up(width, queries))
    if half or gpu.capability >= (7, 0):
        per_head += -(-T // queries) * -(-D // keys) * (4 + queries * keys)  # sums of dq, and a lock per tile
    rows = B * H * T * 4
    while_running = rows, B * H * round_up(per_head, 4) * 4
    before = ()  # the sums of grad_out x out, which only 16-bit kernels compute themselves
    if not half or (sums_of_dk_and_dv and (7, 0) <= gpu.capability < (7, 5)):
        sums = rows if H == 1 else 2 * rows  # those of several heads are transposed
        before = rows * width * (1 if query.dtype is torch.float32 else 3), sums
    # Some buffers exist only before the kernel, and some only while it runs: the larger set counts.
    return *_copies(grad_out), *_ungrouped(query, key, value), *max(before, while_running, key=sum)


# --- softmax, embeddings, norms, indexing, products


# Source: transformers/attention.cpp.
def _safe_softmax(gpu: Gpu, result, weights, *_, **__):
    # bool masks: of scores that are minus infinity, and of rows of only such scores
    return weights.numel(), weights.numel() // max(1, weights.shape[-1])


# Source: cuda/SoftMax.cu.
def _softmax_backward(gpu: Gpu, result, gradient, output, *_, **__):
    # the product of gradient and output
    return (gradient.numel() * torch.promote_types(gradient.dtype, output.dtype).itemsize,)


# Sources: cuda/Embedding.cu, EmbeddingBackwardKernel.cu.
def _embedding_backward(gpu: Gpu, result, gradient, indices, words, *_, **__):
    lookups = indices.numel()
    copy = () if gradient.is_contiguous() else bytes_each(gradient)
    if lookups <= 3072:
        return copy
    runs = min(lookups, words)
    # sorted lookups, and partial sums in fp32 of up to ten lookups of one word
    partial_runs = lookups // 10 + runs
    tables = lookups, lookups, lookups, runs, runs, partial_runs
    return *copy, *(entries * indices.itemsize for entries in tables), partial_runs * gradient.shape[-1] * 4


# Source: cuda/layer_norm_kernel.cu.
def _norm_backward(gpu: Gpu, result, gradient, input, shape: list[int], *_, weights: int, **__):
    """Returns the bytes of the temporaries of a norm's backward. `weights`: 2 for LayerNorm (weight and bias), 1 for
    RMSNorm."""
    columns, rows = math.prod(shape), gradient.numel() // math.prod(shape)
    # With more rows, and too few columns to keep all multiprocessors busy, the weights' gradients are first summed over
    # blocks of rows.
    if rows <= 64 * 1024 or columns // 32 >= gpu.multiprocessors // 2:
        return ()
    blocks = min(64 * 1024 // 2 // -(-columns // 32), -(-rows // 32))
    sums = gradient.new_empty(blocks, columns, device="meta")
    sum_of_sums = columns * gradient.itemsize  # takes the place of a result
    return *bytes_each(sums) * weights, sum_of_sums, *staging_bytes(gpu, sums, (0,), gradient.itemsize, vector=WIDE)


# Source: TensorAdvancedIndexing.cpp.
def _index(gpu: Gpu, result, tensor, indices, *_, **__):
    indices = [index for index in indices if index is not None]
    if len(indices) < 2 or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return ()
    expanded = torch.broadcast_tensors(*indices)
    # Indices with different strides in one shape are copied as 64-bit numbers.
    if all(index.stride() == expanded[0].stride() for index in expanded):
        return ()
    return tuple(index.numel() * 8 for index in expanded if not index.is_contiguous())


# Source: cuda/Indexing.cu, index_put_with_sort_kernel.
def _scatter_add(gpu: Gpu, result, tensor, dim, index, *_, **__):
    if not gpu.deterministic:
        return ()
    table = index.numel() * 8
    # sorted indices and their positions; a sort of more than 2,048 has two more buffers, any other a byte
    return (table,) * 5 + (1,) if index.numel() <= 2048 else (table,) * 7


# Source: cuda/Indexing.cu, index_put_with_sort_kernel.
def _index_put(gpu: Gpu, result, tensor, indices, values, accumulate=False, *_, **__):
    indices = [index for index in indices if index is not None]
    if not (accumulate or gpu.deterministic) or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return ()
    numbers = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    return (numbers * 8,) * 4 + (1,) if numbers <= 2048 else (numbers * 8,) * 6


def matrix_product(gpu: Gpu, result, *matrices: Tensor, **_):
    """Returns the bytes of the copies that a matmul makes of matrices with gaps in both rows and columns. Source:
    cuda/Blas.cpp, prepare_matrix_for_cublas."""
    return bytes_each(*(matrix for matrix in matrices if matrix.dim() > 1 and not _fits_cublas(matrix)))


def _fits_cublas(matrix: Tensor) -> bool:
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.stride()[-2:]
    if matrix.is_contiguous() or matrix.mT.is_contiguous():
        return True  # also if a size of 1 has another stride
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


# --- reductions


# Sources: cuda/ReduceSumProdKernel.cu, ReduceMomentKernel.cu.
def _sum(gpu: Gpu, result, tensor, dims=None, *_, **__):
    # no copy in the dtype of the result
    if tensor.dtype is result.dtype or (tensor.dtype in _16_BIT and result.dtype is torch.float32):
        return staging_bytes(gpu, tensor, dims, result.itemsize, vector=WIDE)
    copy = torch.empty_like(tensor, dtype=result.dtype, device="meta")
    return *bytes_each(copy), *staging_bytes(gpu, copy, dims, result.itemsize, vector=WIDE)


# Source: cuda/ReduceNormKernel.cu.
def _norm(gpu: Gpu, result, tensor, order=2, dims=None, *_, **__):
    return staging_bytes(gpu, tensor, dims, result.itemsize)


# Sources: cuda/ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu.
def _extreme(gpu: Gpu, result, tensor, dims=None, *_, **__):
    return staging_bytes(gpu, tensor, dims, result.itemsize, partial_bytes=tensor.itemsize)


# Source: ReduceOps.cpp, logsumexp_out_impl.
def _log_sum_exp(gpu: Gpu, result, tensor, dims, *_, **__):
    # largest entries, exponentials, and partial results
    copy = torch.empty_like(tensor, device="meta")
    return *bytes_each(result), *bytes_each(copy), *staging_bytes(gpu, copy, dims, result.itemsize, vector=WIDE)


# Source: Linear.cpp, whose loop over one dimension multiplies slices.
def _trilinear(gpu: Gpu, result, first, second, third, expand1, expand2, expand3, summed, unrolled=1):
    slices = []
    for tensor, places in ((first, expand1), (second, expand2), (third, expand3)):
        shape = list(tensor.shape)
        for place in sorted(places):
            shape.insert(place, 1)
        shape[unrolled] = 1
        slices.append(shape)
    product = [max(sizes) for sizes in zip(*slices[:2], strict=True)]
    product = [1 if dim in summed and dim in expand3 else size for dim, size in enumerate(product)]
    both = [1 if dim in summed else max(sizes) for dim, sizes in enumerate(zip(product, slices[2], strict=True))]
    return math.prod(product) * first.itemsize, math.prod(both) * first.itemsize


# Source: cuda/Im2Col.cu.
def _unfold(gpu: Gpu, result, input, *_, **__):
    return bytes_each(input)  # an output that is too small


# Their temporaries are made before the result.
COPIED_FIRST = frozenset((
    _aten.index.Tensor, _aten.huber_loss.default, _aten.binary_cross_entropy_with_logits.default,
    _aten.soft_margin_loss_backward.default, _aten.im2col.default,
))  # fmt: skip
TEMPORARIES: dict[torch._ops.OpOverload, Callable] = {
    _aten._scaled_dot_product_flash_attention.default: _flash_forward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._safe_softmax.default: _safe_softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.native_layer_norm_backward.default: partial(_norm_backward, weights=2),
    _aten._fused_rms_norm_backward.default: partial(_norm_backward, weights=1),
    _aten.index.Tensor: _index,
    _aten.scatter_add.default: _scatter_add,
    _aten.scatter_add_.default: _scatter_add,
    _aten.index_put.default: _index_put,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.default: _sum,
    _aten.mean.dim: _sum,
    _aten.linalg_vector_norm.default: _norm,
    _aten.amax.default: _extreme,
    _aten.amin.default: _extreme,
    _aten.logsumexp.default: _log_sum_exp,
    **LOSSES,
    _aten.im2col.default: _unfold,
    _aten._trilinear.default: _trilinear,
    **{
        getattr(packet, overload): matrix_product
        for packet in MATRIX_PRODUCTS
        for overload in {"default", "out"} & set(packet.overloads())
    },
}
