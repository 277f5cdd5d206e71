"""Calls of operators and functions on meta tensors, over shapes and dtypes, whose allocations operators.py compares.
bf16 is left out for cards that have none."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from lowmem.cudasim.temporaries import Gpu
from tests.cuda.allocations import META, Call, call_on_meta

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = (  # of queries: batch, heads, tokens, width of a head
    *((1, 12, 1024, 64), (1, 20, 1024, 64), (2, 25, 1024, 64), (1, 1, 1024, 64), (1, 2, 4096, 128), (4, 16, 512, 128)),
    *((1, 8, 1000, 80), (1, 8, 1024, 96), (2, 16, 768, 112), (1, 16, 2048, 256), (1, 4, 1024, 192), (8, 12, 128, 64)),
    *((1, 32, 4096, 128), (1, 16, 100, 64), (16, 12, 33, 40), (1, 1, 16, 64), (32, 16, 100, 96)),
)
MATRICES = (  # of which rows, columns and everything are reduced: the widths of models and vocabularies among them
    *((rows, columns) for rows in (128, 1000, 4096, 16384) for columns in (64, 768, 1280, 1600, 3072, 6400, 50257)),
    *((65536, 1280), (65536, 6400), (262144, 50), (3, 1_000_003), (1, 4096), (4096, 1)),
)


def heads(B: int, H: int, T: int, D: int, dtype: torch.dtype, tokens_first: bool = True) -> Tensor:
    """Returns [B, H, T, D] on meta, laid out as [B, T, H, D] with `tokens_first`, as models make it."""
    if tokens_first:
        return torch.empty(B, T, H, D, dtype=dtype, device=META).transpose(1, 2)
    return torch.empty(B, H, T, D, dtype=dtype, device=META)


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def caller(gpu: Gpu) -> Callable[..., Call]:
    """Returns a function that makes a call and returns its record."""
    return lambda func, *args, **kwargs: call_on_meta(gpu, func, *args, **kwargs)[0]


def operators(gpu: Gpu) -> Iterator[Call]:
    """Yields calls of the operators of the table, and of some that must have no temporaries."""
    yield from whose_sums_have_an_order(gpu)
    for dtype in dtypes_of(gpu):
        yield from reductions(gpu, dtype)
        yield from norms(gpu, dtype)
        yield from of_logits(gpu, dtype)
        yield from products(gpu, dtype)
        yield from losses(gpu, dtype)


def whose_sums_have_an_order(gpu: Gpu) -> Iterator[Call]:
    """Yields the operators that differ without deterministic algorithms, and related ones."""
    for shape, dtype, dropout, causal, tokens_first in itertools.product(
        SHAPES, dtypes_of(gpu), (0.0, 0.1), (True, False), (True, False)
    ):
        for masked in (False,) if causal else (False, True):
            yield from efficient_attention(gpu, shape, dtype, dropout, causal, tokens_first, masked)
        if gpu.capability >= (8, 0) and dtype is not FP32:
            for groups in (1, 4) if shape[1] % 4 == 0 else (1,):
                yield from flash_attention(gpu, shape, dtype, dropout, causal, tokens_first, groups)
    for dtype in dtypes_of(gpu):
        yield from lookups(gpu, dtype)


def dtypes_of(gpu: Gpu) -> tuple[torch.dtype, ...]:
    return (BF16, FP16, FP32) if gpu.capability >= (8, 0) else (FP16, FP32)


def lookups(gpu: Gpu, dtype: torch.dtype) -> Iterator[Call]:
    """Yields lookups of rows of a table, and the sums of their gradients."""
    call = caller(gpu)
    for number, words, width in (
        *((1024, 50257, 1280), (3072, 50257, 1280), (3073, 50257, 1280), (4096, 50257, 768), (8192, 1024, 768)),
        *((65536, 32000, 1024), (16384, 5000, 512)),
    ):
        indices = meta(1, number, dtype=torch.int64)
        for gradient in (meta(1, number, width, dtype=dtype), meta(1, width, number, dtype=dtype).mT):
            yield call(aten.embedding_dense_backward.default, gradient, indices, words, -1, False)
    for number in (100, 512, 1024):
        labels = meta(number, 1, dtype=torch.int64)
        for func in (aten.scatter_add.default, aten.scatter_add_.default):
            yield call(func, meta(number, 5000, dtype=dtype), 1, labels, meta(number, 1, dtype=dtype))
    table = meta(64, 1024, dtype=dtype)
    rows, columns = meta(64, 1, dtype=torch.int64), meta(1, 1000, dtype=torch.int64)
    for indices in ((rows, columns), (rows, rows), (None, columns), (rows.expand(64, 1000), columns.expand(64, 1000))):
        yield call(aten.index.Tensor, table, list(indices))


def norms(gpu: Gpu, dtype: torch.dtype) -> Iterator[Call]:
    for rows, width in ((1024, 768), (65536, 1024), (65537, 768), (131072, 768), (131072, 4096), (70000, 100)):
        x, vector = meta(rows, width, dtype=dtype), meta(width, dtype=dtype)
        forward, (_, mean, rstd) = call_on_meta(gpu, aten.native_layer_norm.default, x, [width], vector, vector, 1e-5)
        yield forward
        backward, wanted = aten.native_layer_norm_backward.default, [True] * 3
        yield call_on_meta(gpu, backward, x, x, [width], mean, rstd, vector, vector, wanted)[0]
        forward, (_, rstd) = call_on_meta(gpu, aten._fused_rms_norm.default, x, [width], vector, 1e-6)
        yield forward
        backward = aten._fused_rms_norm_backward.default
        yield call_on_meta(gpu, backward, x, x, [width], rstd, vector, [True, True])[0]


def of_logits(gpu: Gpu, dtype: torch.dtype) -> Iterator[Call]:
    call = caller(gpu)
    for rows, words in ((128, 50257), (1024, 32000), (512, 128256), (16384, 1024)):
        x, targets = meta(rows, words, dtype=dtype), meta(rows, dtype=torch.int64)
        for func in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
            yield call(func, x, x, 1, dtype)
            if dtype is FP16:
                yield call(func, x.float(), x.float(), 1, FP16)
        for func in (aten._softmax.default, aten._log_softmax.default):
            yield call(func, x, 1, False)
        yield call(aten._safe_softmax.default, x, 1)
        yield call(aten.logsumexp.default, x, [1])
        yield call(aten.gather.default, x, 1, targets[:, None])
        yield call(aten.native_dropout.default, x, 0.1, True)
        yield call(aten.gelu.default, x)


def losses(gpu: Gpu, dtype: torch.dtype) -> Iterator[Call]:
    """Yields losses of all entries, unfolding, and gradients of indexed tensors."""
    call = caller(gpu)
    for rows, columns in ((128, 64), (1000, 768), (4096, 6400)):
        x, target = meta(rows, columns, dtype=dtype), meta(rows, columns, dtype=dtype)
        for reduction in range(3):
            for loss in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss):
                yield call(loss.default, x, target, reduction)
            yield call(aten.binary_cross_entropy.default, x, target, None, reduction)
            for weights in (None, meta(columns, dtype=dtype)):
                logits = aten.binary_cross_entropy_with_logits.default
                yield call(logits, x, target, None, weights, reduction)
            gradient = torch.empty_like(x) if reduction == 0 else torch.empty((), dtype=dtype, device=META)
            yield call(aten.soft_margin_loss_backward.default, gradient, x, target, reduction)
    rows, weight = meta(512, 64, dtype=dtype), meta(16, 64, 64, dtype=dtype)
    gradient = meta(512, 16, dtype=dtype)
    yield call(aten._trilinear.default, rows, weight, rows, [1, 3], [0], [1, 2], [2, 3])
    yield call(aten._trilinear.default, gradient, weight, rows, [2, 3], [0], [1, 2], [1, 3])
    yield call(aten._trilinear.default, rows, gradient, rows, [1, 3], [2, 3], [1, 2], [0])
    yield call(aten._trilinear.default, rows, weight, gradient, [1, 3], [0], [2, 3], [1, 2])
    yield call(aten.im2col.default, meta(2, 3, 64, 64, dtype=dtype), [3, 3], [1, 1], [0, 0], [1, 1])
    for numbers in (16, 100, 2000):
        table, values = meta(64, 1024, dtype=dtype), meta(numbers, 1024, dtype=dtype)
        yield call(aten.index_put.default, table, [meta(numbers, dtype=torch.int64)], values, True)


def efficient_attention(
    gpu: Gpu, shape: tuple, dtype: torch.dtype, dropout: float, causal: bool, tokens_first: bool, masked: bool
) -> Iterator[Call]:
    B, H, T, D = shape
    query, key, value = (heads(*shape, dtype, tokens_first) for _ in range(3))
    mask = meta(B, 1, T, -(-T // 8) * 8, dtype=dtype)[..., :T].expand(B, H, T, T) if masked else None
    forward, results = call_on_meta(
        gpu, aten._scaled_dot_product_efficient_attention.default, query, key, value, mask, True, dropout, causal
    )
    yield forward
    out, logsumexp = results[:2]
    seed = torch.zeros((), dtype=torch.int64)  # is read on the host
    gradient = heads(*shape, dtype, not (tokens_first and causal))  # sometimes not as the output is laid out
    yield call_on_meta(
        gpu, aten._scaled_dot_product_efficient_attention_backward.default, gradient, query, key, value, mask, out,
        logsumexp, seed, seed, dropout, [True, True, True, False], causal,
    )[0]  # fmt: skip


def flash_attention(
    gpu: Gpu, shape: tuple, dtype: torch.dtype, dropout: float, causal: bool, tokens_first: bool, groups: int
) -> Iterator[Call]:
    B, H, T, D = shape
    query, key, value = (heads(B, count, T, D, dtype, tokens_first) for count in (H, H // groups, H // groups))
    forward, results = call_on_meta(
        gpu, aten._scaled_dot_product_flash_attention.default, query, key, value, dropout, causal, False
    )
    yield forward
    out, logsumexp, of_queries, of_keys, most_queries, most_keys, seed, offset, _ = results
    gradient = heads(*shape, dtype, not (tokens_first and causal))
    yield call_on_meta(
        gpu, aten._scaled_dot_product_flash_attention_backward.default, gradient, query, key, value, out, logsumexp,
        of_queries, of_keys, most_queries, most_keys, dropout, causal, seed, offset,
    )[0]  # fmt: skip


def reductions(gpu: Gpu, dtype: torch.dtype) -> Iterator[Call]:
    call = caller(gpu)
    for rows, columns in MATRICES:
        x = meta(rows, columns, dtype=dtype)
        for matrix in (x, x.mT, meta(rows, columns + 3, dtype=dtype)[:, 1:-2], x.view(1, rows, columns)[0, :1]):
            for dims in ([0], [1], [0, 1]):
                yield call(aten.sum.dim_IntList, matrix, dims)
                yield call(aten.amax.default, matrix, dims)
                yield call(aten.amin.default, matrix, dims)
        yield call(aten.sum.dim_IntList, x, [0], True, dtype=FP32)
        yield call(aten.mean.dim, x, [-1], True)
        for func in (aten.sum.default, aten.mean.default, aten.linalg_vector_norm.default):
            yield call(func, x)
        yield call(aten.sum.default, meta(rows, columns, dtype=torch.bool))
    for dims in ([0, 1], [0], [1, 2], [0, 2]):  # broadcast biases, masks and heads
        yield call(aten.sum.dim_IntList, meta(4, 1024, 768, dtype=dtype), dims, True)
        yield call(aten.sum.dim_IntList, heads(4, 16, 1024, 64, dtype), dims)
        yield call(aten.sum.dim_IntList, meta(1, 1, 768, dtype=dtype).expand(4, 1024, 768), dims)


def products(gpu: Gpu, dtype: torch.dtype) -> Iterator[Call]:
    call = caller(gpu)
    for rows, terms, columns in ((1024, 768, 2304), (1000, 1600, 4800), (1, 768, 768), (768, 8, 768)):
        bias, right = meta(columns, dtype=dtype), meta(columns, terms, dtype=dtype).t()
        left = meta(rows, terms, dtype=dtype)
        for x in (left, meta(terms, rows, dtype=dtype).t(), meta(rows, 2 * terms, dtype=dtype)[:, ::2],
                  meta(rows, 3 * terms, dtype=dtype)[:, terms : 2 * terms], left[:1].expand(rows, terms)):  # fmt: skip
            yield call(aten.mm.default, x, right)
            yield call(aten.addmm.default, bias, x, right)
            batch = x.expand(3, rows, terms)
            yield call(aten.bmm.default, batch, right.expand(3, terms, columns))
            yield call(
                aten.baddbmm.default, meta(3, rows, columns, dtype=dtype), batch, meta(3, terms, columns, dtype=dtype)
            )
        out, outs = meta(rows, columns, dtype=dtype), meta(3, rows, columns, dtype=dtype)
        strided = meta(rows, 2 * terms, dtype=dtype)[:, ::2]
        for x in (left, strided):
            yield call(aten.mm.out, x, right, out=out)
            yield call(aten.addmm.out, bias, x, right, out=out)
            yield call(aten.addmm_.default, out, x, right)
            batch = x.expand(3, rows, terms)
            yield call(aten.bmm.out, batch, right.expand(3, terms, columns), out=outs)
            yield call(aten.baddbmm.out, outs, batch, right.expand(3, terms, columns), out=outs)
            yield call(aten.baddbmm_.default, outs, batch, right.expand(3, terms, columns))
        yield call(aten.bmm.default, heads(2, 8, rows, 64, dtype)[0], heads(2, 8, rows, 64, dtype)[1].mT)
    if dtype is not FP32:
        accumulator, left, right = meta(768, 2304), meta(1024, 768, dtype=dtype), meta(1024, 2304, dtype=dtype)
        yield call(torch.ops.lowmem.add_product.default, accumulator, left.T, right)


def functions(gpu: Gpu) -> Iterator[tuple[str, Callable, tuple[Tensor, ...]]]:
    """Yields names, functions and their arguments on meta."""

    def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
        return meta(*shape, dtype=dtype).requires_grad_()

    def attention(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, **keywords) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, *mask, **keywords)

    for dtype, (H, groups), (T, D), dropout, kind in itertools.product(
        dtypes_of(gpu), ((12, 1), (16, 4)), ((1024, 64), (130, 128), (1000, 80), (512, 60), (512, 256)), (0.0, 0.1),
        ("causal", "all", "boolean", "additive", "cut"),
    ):  # fmt: skip
        inputs = [heads(2, count, T, D, dtype).requires_grad_() for count in (H, H // groups, H // groups)]
        keywords = {"dropout_p": dropout, "is_causal": kind == "causal", "enable_gqa": groups > 1}
        if kind == "boolean":
            inputs.append(meta(2, 1, T, T, dtype=torch.bool))
        elif kind == "additive":
            inputs.append(meta(2, 1, T, T, dtype=dtype))
        elif kind == "cut":
            inputs.append(meta(2, 1, T, T + 8, dtype=dtype)[..., :T])
        name = f"attention {dtype} {H}/{groups} heads {T}x{D} dropout {dropout} {kind}"
        yield name, lambda *tensors, keywords=keywords: attention(*tensors, **keywords), tuple(inputs)
    for dtype in dtypes_of(gpu):
        x, weight, bias = leaf(4, 1024, 768, dtype=dtype), leaf(3072, 768, dtype=dtype), leaf(3072, dtype=dtype)
        vector = leaf(768, dtype=dtype)
        yield f"dropout {dtype}", lambda x: F.dropout(x, 0.1), (x,)
        yield f"dropout in place {dtype}", lambda x: F.dropout(x * 2, 0.1, inplace=True), (x,)
        yield f"softmax {dtype}", lambda x: F.softmax(x, -1), (x,)
        yield f"softmax in fp32 {dtype}", lambda x: F.softmax(x, -1, dtype=FP32), (x,)
        yield f"linear {dtype}", F.linear, (x, weight, bias)
        yield f"linear of a transposed {dtype}", lambda x, w, b: F.linear(x.transpose(0, 1), w, b), (x, weight, bias)
        yield f"layer_norm {dtype}", lambda x, w, b: F.layer_norm(x, (768,), w, b), (x, vector, vector)
        yield f"gelu {dtype}", lambda x: F.gelu(x, approximate="tanh"), (x,)
        yield f"silu {dtype}", F.silu, (x,)
        tokens = meta(4, 1024, dtype=torch.int64)
        yield f"embedding {dtype}", lambda weight, tokens: F.embedding(tokens, weight), (weight, tokens)
        logits, labels = leaf(1024, 5000, dtype=dtype), meta(1024, dtype=torch.int64)
        yield f"cross_entropy {dtype}", F.cross_entropy, (logits, labels)
