"""Defines Triton kernels of layers: normalization, sums with dropout, activations, rotary embeddings (RoPE)."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers per program: 8 for each of 128 threads, so that 16-bit numbers come 16 bytes at a time
TILE = 2048  # fewest numbers that a norm's program holds at a time: narrow rows share a tile


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, statistics: Tensor | None, epsilon: float, offset: float,
    centered: bool, branch: Tensor | None = None, total: Tensor | None = None, seeds: Tensor | None = None,
    number: int = 0, p: float = 0.0,
) -> None:  # fmt: skip
    """Normalizes the N rows of `x` [..., D]: y = (x - mean) / sqrt(variance + epsilon) * (weight + offset) + bias.
    Unless `centered`, the mean is taken as 0. `statistics` [1 or 2, N] fp32, if given, gets each row's 1 / sqrt(...)
    and, if centered, its mean. Weight and bias are [D] fp32; all tensors are contiguous.

    With a `branch`, writes x + dropout(branch) into `total` first, and normalizes this sum. The dropout has the
    probability `p` and the seed seeds[number], and needs a D that is a multiple of 4. Without `seeds`, there is none.
    """
    if not x.numel():
        return
    columns = x.shape[-1]
    rows = x.numel() // columns
    block, tile_rows, warps = _tile(rows, columns)
    _normalize[(triton.cdiv(rows, tile_rows),)](
        x, weight, weight if bias is None else bias, y, y if statistics is None else statistics, x if branch is None
        else branch, x if total is None else total, weight if seeds is None else seeds, number, rows, columns, epsilon,
        offset, p, _factor(p), CENTERED=centered, HAS_BIAS=bias is not None, KEPT=statistics is not None,
        ADDS=branch is not None, DROPS=seeds is not None, ROWS=tile_rows, COLUMNS=block, num_warps=warps,
    )  # fmt: skip


def normalize_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, x_gradient: Tensor, partial_sums: Tensor,
    offset: float, other_gradient: Tensor | None = None, branch_gradient: Tensor | None = None,
    seeds: Tensor | None = None, number: int = 0, p: float = 0.0,
) -> None:  # fmt: skip
    """Computes the gradients for the inputs of `normalize` from `gradient`, that for `y`. `x`: the tensor that was
    normalized, which is `total` if there was a branch. Writes the gradient for `x`, plus `other_gradient` from other
    uses of `x`, into `x_gradient` and, after the forward call's dropout (`seeds`, `number`, `p`), into
    `branch_gradient`. `partial_sums` [1 or 2, P, D] fp32 gets the gradients for the weight and, if there is one, the
    bias. Each is P partial sums, which the caller adds up. `statistics`, `offset`: as in the forward call."""
    if not x.numel():
        return
    columns = x.shape[-1]
    rows = x.numel() // columns
    programs = partial_sums.shape[1]
    rows_each = triton.cdiv(rows, programs)
    block, tile_rows, warps = _tile(rows_each, columns)
    _normalize_backward[(programs,)](
        gradient, x, weight, statistics, x_gradient, partial_sums, x if other_gradient is None else other_gradient,
        x if branch_gradient is None else branch_gradient, weight if seeds is None else seeds, number, rows, columns,
        rows_each, offset, p, _factor(p), CENTERED=statistics.shape[0] == 2, HAS_BIAS=partial_sums.shape[0] == 2,
        ADDS=other_gradient is not None, BRANCHES=branch_gradient is not None, DROPS=seeds is not None, ROWS=tile_rows,
        COLUMNS=block, num_warps=warps,
    )  # fmt: skip


@cache
def _tile(rows: int, columns: int) -> tuple[int, int, int]:
    block = triton.next_power_of_2(columns)
    tile_rows = min(max(1, TILE // block), triton.next_power_of_2(rows))
    return block, tile_rows, min(16, max(4, block * tile_rows // 512))


# A norm's row stays in registers. Per element of a 4-byte input and a 2-byte output, forward moves 6 bytes and backward
# 10. PyTorch's LayerNorm with its casts moves 14 and 26, transformers' RMSNorm 46 and more.
@triton.jit(do_not_specialize=["number"])
def _normalize(
    x_at, weight_at, bias_at, y_at, statistics_at, branch_at, total_at, seeds_at, number, rows, columns, epsilon,
    offset, p, factor_of_kept, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, KEPT: tl.constexpr, ADDS: tl.constexpr,
    DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    x = tl.load(x_at + place, there, other=0.0).to(tl.float32)
    if ADDS:
        branch = tl.load(branch_at + place, there, other=0.0).to(tl.float32)
        if DROPS:
            branch = tl.where(_kept(seeds_at, number, row, columns, p, ROWS, COLUMNS), branch * factor_of_kept, 0.0)
        total = (x + branch).to(total_at.dtype.element_ty)
        tl.store(total_at + place, total, there)
        x = total.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) / columns
        x = tl.where(there, x - mean[:, None], 0.0)
        if KEPT:
            tl.store(statistics_at + rows + row, mean, row < rows)
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / columns + epsilon))
    if KEPT:
        tl.store(statistics_at + row, factor, row < rows)
    y = x * factor[:, None] * (tl.load(weight_at + column, column < columns, other=0.0) + offset)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_at + column, column < columns, other=0.0)[None, :]
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), there)


@triton.jit(do_not_specialize=["number"])
def _normalize_backward(
    gradient_at, x_at, weight_at, statistics_at, x_gradient_at, sums_at, other_at, branch_gradient_at, seeds_at, number,
    rows, columns, rows_each, offset, p, factor_of_kept, CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr, BRANCHES: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    of_weight = tl.zeros([COLUMNS], tl.float32)
    of_bias = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, rows_each, ROWS):
        own = start + tl.arange(0, ROWS)
        row = program * rows_each + own
        its = (own < rows_each) & (row < rows)
        there = its[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        x = tl.load(x_at + place, there, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_at + place, there, other=0.0).to(tl.float32)
        factor = tl.load(statistics_at + row, its, other=0.0)[:, None]
        if CENTERED:
            x = tl.where(there, x - tl.load(statistics_at + rows + row, its, other=0.0)[:, None], 0.0)
        x = x * factor
        of_weight += tl.sum(gradient * x, axis=0)
        if HAS_BIAS:
            of_bias += tl.sum(gradient, axis=0)
        # Loaded for each tile, mostly from a cache: held in registers it would make wide rows spill.
        gradient = gradient * (tl.load(weight_at + column, column < columns, other=0.0) + offset)[None, :]
        result = gradient - x * (tl.sum(gradient * x, axis=1) / columns)[:, None]
        if CENTERED:
            result -= (tl.sum(gradient, axis=1) / columns)[:, None]
        result *= factor
        if ADDS:
            result += tl.load(other_at + place, there, other=0.0).to(tl.float32)
        tl.store(x_gradient_at + place, result.to(x_gradient_at.dtype.element_ty), there)
        if BRANCHES:
            if DROPS:
                result = tl.where(_kept(seeds_at, number, row, columns, p, ROWS, COLUMNS), result * factor_of_kept, 0.0)
            tl.store(branch_gradient_at + place, result.to(branch_gradient_at.dtype.element_ty), there)
    # PyTorch adds the programs' sums. The order of addition, and so the bits, depend only on the number of rows.
    tl.store(sums_at + program * columns + column, of_weight, column < columns)
    if HAS_BIAS:
        sums_at += tl.num_programs(0).to(tl.int64) * columns
        tl.store(sums_at + program * columns + column, of_bias, column < columns)


def drop(x: Tensor, added: Tensor | None, y: Tensor, seeds: Tensor, number: int, p: float) -> None:
    """Writes `added` + dropout(x) into `y`; `added` None stands for 0. The mask depends on an element's index and on
    the seed, seeds[number]. All tensors are contiguous and have one shape [..., D]; D is a multiple of 4."""
    n = x.numel()
    _drop[(triton.cdiv(n, BLOCK),)](
        x, x if added is None else added, y, seeds, number, n, p, _factor(p), ADDS=added is not None, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip


def _factor(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


@triton.jit(do_not_specialize=["number"])
def _drop(x_at, added_at, y_at, seeds_at, number, n, p, factor_of_kept, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    there = place < n
    x = tl.load(x_at + place, there, other=0.0).to(tl.float32)
    # As a row of a matrix with BLOCK columns, the block's numbers have the same places.
    kept = tl.reshape(_kept(seeds_at, number, program + tl.zeros([1], tl.int64), BLOCK, p, 1, BLOCK), (BLOCK,))
    y = tl.where(kept, x * factor_of_kept, 0.0)
    if ADDS:
        y += tl.load(added_at + place, there, other=0.0).to(tl.float32)
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), there)


@triton.jit
def _kept(seeds_at, number, row, columns, p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns dropout's mask [ROWS, COLUMNS] for the rows with the indices `row`, in a matrix of `columns` columns.
    True keeps an element. `p`: probability of False. The seed is element `number` of the tensor at `seeds_at`."""
    # One call of Philox gives four random numbers, for four neighbours in a row.
    fourth = row[:, None] * (columns // 4) + tl.arange(0, COLUMNS // 4)[None, :]
    a, b, c, d = tl.rand4x(tl.load(seeds_at + number), fourth.to(tl.int32))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLUMNS)) >= p


def gated(gate: Tensor, up: Tensor | None, linear: float, cubic: float, erf: bool) -> Tensor:
    """Returns activation(gate) * up; `up` None stands for 1. The activation is x * sigmoid(linear * x + cubic * x^3)
    or, if `erf`, exact GELU. Both tensors are contiguous and have one shape."""
    n, y = gate.numel(), torch.empty_like(gate)
    _gated[(triton.cdiv(n, BLOCK),)](
        gate, gate if up is None else up, y, n, linear, cubic, ERF=erf, HAS_UP=up is not None, BLOCK=BLOCK, num_warps=4
    )  # fmt: skip
    return y


def gated_backward(
    gradient: Tensor, gate: Tensor, up: Tensor | None, y: Tensor, of_up: Tensor | None, partial_sums: Tensor | None,
    linear: float, cubic: float, erf: bool,
) -> None:  # fmt: skip
    """Computes the gradients for the inputs of `gated`. Overwrites `gradient`, that for activation(gate) * up, with the
    gradient for `gate`. Writes the gradient for `up` into `of_up`, and activation(gate) * up into `y`. `partial_sums`
    [P, I] fp32, if given, gets the sum over rows of the gradient for `gate`, as P partial sums that the caller adds up.
    `linear`, `cubic`, `erf`: as in the forward call."""
    columns = gate.shape[-1]
    rows = gate.numel() // max(columns, 1)
    if not rows:
        return
    block, tile_rows, warps = _tile(rows, min(columns, BLOCK))
    programs = triton.cdiv(rows, tile_rows) if partial_sums is None else partial_sums.shape[0]
    _gated_backward[(programs, triton.cdiv(columns, block))](
        gradient, gate, gate if up is None else up, y, y if of_up is None else of_up,
        y if partial_sums is None else partial_sums, rows, columns, triton.cdiv(rows, programs), linear, cubic,
        ERF=erf, HAS_UP=up is not None, SUMS=partial_sums is not None, ROWS=tile_rows, COLUMNS=block, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _share(x, linear, cubic, ERF: tl.constexpr):
    # activation(x) / x
    if ERF:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return 1.0 / (1.0 + tl.exp(-x * (linear + cubic * x * x)))


@triton.jit
def _gated(gate_at, up_at, y_at, n, linear, cubic, ERF: tl.constexpr, HAS_UP: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < n
    gate = tl.load(gate_at + place, there, other=0.0).to(tl.float32)
    y = gate * _share(gate, linear, cubic, ERF)
    if HAS_UP:
        y *= tl.load(up_at + place, there, other=0.0).to(tl.float32)
    tl.store(y_at + place, y.to(y_at.dtype.element_ty), there)


@triton.jit
def _gated_backward(
    gradient_at, gate_at, up_at, y_at, of_up_at, sums_at, rows, columns, rows_each, linear, cubic,
    ERF: tl.constexpr, HAS_UP: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows_each, ROWS):
        own = start + tl.arange(0, ROWS)
        row = program * rows_each + own
        there = ((own < rows_each) & (row < rows))[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        gradient = tl.load(gradient_at + place, there, other=0.0).to(tl.float32)
        gate = tl.load(gate_at + place, there, other=0.0).to(tl.float32)
        share = _share(gate, linear, cubic, ERF)
        y = gate * share
        if ERF:
            slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        else:
            slope = share + y * (1.0 - share) * (linear + 3.0 * cubic * gate * gate)
        if HAS_UP:
            tl.store(of_up_at + place, (gradient * y).to(of_up_at.dtype.element_ty), there)
            up = tl.load(up_at + place, there, other=0.0).to(tl.float32)
            y *= up
            gradient *= up
        gradient *= slope
        tl.store(y_at + place, y.to(y_at.dtype.element_ty), there)
        tl.store(gradient_at + place, gradient.to(gradient_at.dtype.element_ty), there)
        if SUMS:
            sums += gradient
    if SUMS:
        tl.store(sums_at + program * columns + column, tl.sum(sums, axis=0), column < columns)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, new_q: Tensor, new_k: Tensor, backward: bool) -> None:
    """Writes `q` [B, H, T, E] and `k` [B, G, T, E] with rotary embeddings (RoPE) into `new_q` and `new_k`, whose
    memory has the order [B, T, H or G, E]. `cos`, `sin` [B or 1, T, R] rotate the first R numbers of each head; others
    are copied. `backward`: True for the inverse rotation. Each tensor's last dimension is contiguous."""
    batch, q_heads, tokens, width = q.shape
    k_heads, half = k.shape[1], cos.shape[-1] // 2
    if not tokens * batch:
        return
    steps = [step for table in (cos, sin) for step in (table.stride(0) if len(table) > 1 else 0, table.stride(1))]
    q_block, k_block, block, passed = (_power_of_2(n) for n in (q_heads, k_heads, half, width - 2 * half))
    _rotate[(tokens * batch,)](
        q, k, cos, sin, new_q, new_k, *q.stride()[:3], *k.stride()[:3], *steps, tokens, width,
        half, q_heads, k_heads, BACKWARD=backward, COLUMNS=block, Q_HEADS=q_block, K_HEADS=k_block, PASSED=passed,
        num_warps=min(16, max(4, q_block * block // 256)),
    )  # fmt: skip


@cache
def _power_of_2(number: int) -> int:
    return triton.next_power_of_2(number) if number else 0


@triton.jit
def _rotate(
    q_at, k_at, cos_at, sin_at, new_q_at, new_k_at, q_batch, q_head, q_token, k_batch, k_head, k_token, cos_batch,
    cos_token, sin_batch, sin_token, tokens, width, half, q_heads, k_heads, BACKWARD: tl.constexpr,
    COLUMNS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    column = tl.arange(0, COLUMNS)
    there = column < half
    cos_at += batch * cos_batch + token * cos_token + column
    sin_at += batch * sin_batch + token * sin_token + column
    cos = tl.load(cos_at, there, other=0.0).to(tl.float32)
    other_cos = tl.load(cos_at + half, there, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, there, other=0.0).to(tl.float32)
    other_sin = tl.load(sin_at + half, there, other=0.0).to(tl.float32)
    if BACKWARD:  # the transposed rotation
        sin, other_sin = -other_sin, -sin
    _rotate_heads(
        q_at + batch * q_batch + token * q_token, q_head, new_q_at + row * q_heads * width, q_heads, width, half,
        cos, other_cos, sin, other_sin, COLUMNS, Q_HEADS, PASSED,
    )  # fmt: skip
    _rotate_heads(
        k_at + batch * k_batch + token * k_token, k_head, new_k_at + row * k_heads * width, k_heads, width, half,
        cos, other_cos, sin, other_sin, COLUMNS, K_HEADS, PASSED,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    from_at, stride, to_at, heads, width, half, cos, other_cos, sin, other_sin, COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[:, None].to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    there = (head < heads) & (column < half)
    source, target = from_at + head * stride + column, to_at + head * width + column
    first = tl.load(source, there, other=0.0).to(tl.float32)
    second = tl.load(source + half, there, other=0.0).to(tl.float32)
    new_first = first * cos[None, :] - second * sin[None, :]
    new_second = second * other_cos[None, :] + first * other_sin[None, :]
    tl.store(target, new_first.to(to_at.dtype.element_ty), there)
    tl.store(target + half, new_second.to(to_at.dtype.element_ty), there)
    if PASSED:
        column = 2 * half + tl.arange(0, PASSED)[None, :]
        there = (head < heads) & (column < width)
        tl.store(to_at + head * width + column, tl.load(from_at + head * stride + column, there), there)
