"""Estimates how long a GPU works on a fused attention kernel.

A kernel's CUDA blocks each compute some tiles of one head's T x T products. A multiprocessor without a further block
waits until the last block ends. Deterministic backward kernels have few, unequal blocks: with few heads, this wait is
as long as the work.
"""

import heapq
import math
from functools import cache

import torch
from torch import Tensor

from lowmem.cudasim.gpus import Card, multiprocessor
from lowmem.units import KIB, round_up

# Speed relative to a large product on the same card, while no multiprocessor waits: (kernel, on Hopper): (forward,
# backward). Tiles count whole, also those on the diagonal of causal attention. Flash's shares are for infinitely long
# rows. The sources' shares are taken to have no waits. For heads of 64:
# flash: RTX 4090 0.90, 0.61 (apache/tvm, tl_doc/flash_perf.md), RTX A5000 0.93, 0.8 (gpu-mode/ring-attention#10). These
#   kernels are made for Ampere and do not use the product instructions of Hopper: H100 0.38, 0.37 (arXiv:2407.08608).
#   Hopper's numbers are fitted to an H200: for 1,024 tokens and 320 heads, its kernels reached 0.23 and 0.19 (measured:
#   experiments/gpu_acceptance/results/rows.jsonl, levers/step), waits included.
# efficient: 0.6 to 0.8, 0.3 to 0.5 of flash's speed (Dao-AILab/flash-attention#416). On Hopper fitted to the slowdown
#   of steps of 16,384 tokens on an H200 (NVIDIA/cudnn-frontend, benchmark/Llama-3.2-1B-Training).
SHARES = {
    ("flash", False): (1.0, 0.78),
    ("flash", True): (0.43, 0.41),
    ("efficient", False): (0.6, 0.4),
    ("efficient", True): (0.25, 0.15),
}
# {on Hopper: tokens}: if a block passes over this many queries or keys, it reaches half of flash's share
HALF_SPEED_TOKENS = {False: 250, True: 750}

_aten = torch.ops.aten
# By operator: kernel of SHARES; 0 forward or 1 backward; index of the query among the arguments; number of products
# over the width of query and key, and over the width of the value.
OPERATORS = {
    getattr(_aten, f"_scaled_dot_product_{name}{suffix}"): (kernel, *numbers)
    for name, kernel in (
        ("flash_attention", "flash"), ("efficient_attention", "efficient"), ("cudnn_attention", "flash"),
        ("flash_attention_for_cpu", "flash"),
    )
    for suffix, *numbers in (("", 0, 0, 1, 1), ("_backward", 1, 1, 3, 2))
}  # fmt: skip


def flash_width(E: int) -> int:
    """Returns the width of the numbers that flash attention computes for heads of width `E`."""
    return round_up(E, 32 if E <= 128 else 64)


def query_gradient_bytes(query: Tensor) -> int:
    """Returns the bytes of one copy of the queries' gradient, in fp32, in flash attention's backward."""
    B, H, T, E = query.shape
    return B * H * round_up(T, 128) * flash_width(E) * torch.float32.itemsize


def gradients_of_queries(multiprocessors: int, heads: int) -> int:
    """Returns how many copies of the queries' gradient flash attention's deterministic backward fills and then adds up:
    one for each CUDA block of a head. `heads`: B x H. Source: aten/src/ATen/native/transformers/cuda/flash_attn/
    flash_api.cpp, mha_bwd."""
    return math.ceil(multiprocessors / heads)


def splits_of_keys(multiprocessors: int, query: Tensor, key: Tensor, dropout_p: float) -> int:
    """Returns into how many parts flash attention's forward splits the keys. It does not split them if CUDA blocks of
    64 queries are 80% of those that the GPU runs at once. Else it takes the fewest parts that reach 85% of the best
    occupancy. Source: flash_api.cpp, set_params_splitkv."""
    B, H, T, E = query.shape
    blocks, slots = B * H * -(-T // 64), 2 * multiprocessors
    tiles = -(-key.shape[2] // (256 if E <= 64 else 128 if E <= 128 else 64))
    if dropout_p > 0 or blocks >= 0.8 * slots:
        return 1
    efficiency = {}
    for splits in range(1, min(128, slots, tiles) + 1):
        if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1)):
            waves = blocks * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    return next(s for s, e in efficiency.items() if e >= 0.85 * max(efficiency.values()))


def attention_seconds(card: Card, func: torch._ops.OpOverload, args: tuple, kwargs: dict, deterministic: bool) -> float:
    """Estimates the seconds of a fused attention kernel. Query, key and value are [B, H, T, E]. `deterministic`: is
    torch.use_deterministic_algorithms on?"""
    kernel, backward, first, over_query, over_value = OPERATORS[func._overloadpacket]
    query, key, value = args[first : first + 3]
    heads, queries, keys, E = query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3]
    if not heads * queries * keys:
        return 0.0
    flash, causal = kernel == "flash", bool(_argument("is_causal", func, args, kwargs, False))
    side = _side(card, E, bool(backward)) if flash else 64
    copies = 1  # of the queries' gradient
    if not backward:
        dropout_p = _argument("dropout_p", func, args, kwargs, 0.0)
        splits = splits_of_keys(card.multiprocessors, query, key, dropout_p) if flash else 1
        sizes = _forward_sizes(queries, keys, causal, side, splits)
    elif deterministic:
        copies = gradients_of_queries(card.multiprocessors, heads) if flash else 1
        sizes = _backward_sizes(queries, keys, causal, side, copies)
    else:
        sizes = _backward_sizes(queries, keys, causal, side, None)
    hopper = card.capability[0] == 9 and query.dtype.itemsize == 2
    share = SHARES[kernel, hopper][backward] * _share_of_time_in_use(card.multiprocessors, heads, sizes)
    if flash:
        passed = round_up(queries if backward else keys, side)
        share *= passed / (passed + HALF_SPEED_TOKENS[hopper])
    flops = 2 * heads * sum(sizes) * (over_query * E + over_value * value.shape[3])
    # Copies beyond the first are cleared before the kernel, and added after it.
    moved = 2 * (copies - 1) * query_gradient_bytes(query)
    return flops / (card.sustained_flops(query.dtype) * share) + moved / card.sustained_bytes_per_second


def _argument(name: str, func: torch._ops.OpOverload, args: tuple, kwargs: dict, default):
    position = _positions(func)[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


@cache
def _positions(func: torch._ops.OpOverload) -> dict[str, int]:
    return {argument.name: position for position, argument in enumerate(func._schema.arguments)}


def _side(card: Card, E: int, backward: bool) -> int:
    """Returns how many queries of forward, or keys of backward, a CUDA block of flash attention takes at a time.
    Sources: flash_fwd_launch_template.h, where few kernels differ, and flash_bwd_launch_template.h."""
    room = multiprocessor(card.capability).shared_bytes_of_block >= 144 * KIB
    return 64 if backward and E > (128 if room else 96) else 128


@cache
def _forward_sizes(queries: int, keys: int, causal: bool, side: int, splits: int) -> tuple[float, ...]:
    """Returns the sizes of one head's CUDA blocks, in pairs of a query and a key, in the order of their start. A block
    computes a row of tiles of `side` x `side`, or one of `splits` parts of it."""
    rows, columns = math.ceil(queries / side), math.ceil(keys / side)
    tiles = [min(row + 1, columns) if causal else columns for row in range(rows)]
    return tuple(number * side**2 / splits for number in tiles for _ in range(splits))


@cache
def _backward_sizes(queries: int, keys: int, causal: bool, side: int, most: int | None) -> tuple[int, ...]:
    """Returns the sizes of one head's CUDA blocks, in pairs of a query and a key, in the order of their start. A block
    computes columns of tiles of `side` x `side`: one, or if there are `most` blocks, every `most`-th."""
    rows, columns = math.ceil(queries / side), math.ceil(keys / side)
    tiles = [max(0, rows - column) if causal else rows for column in range(columns)]
    blocks = min(columns, most or columns)
    return tuple(sum(tiles[first::blocks]) * side**2 for first in range(blocks))


@cache
def _share_of_time_in_use(multiprocessors: int, heads: int, sizes: tuple[float, ...]) -> float:
    """Returns the share (0 to 1) of a kernel's time in which a multiprocessor computes a CUDA block, on average. Each
    computes one block after another. `sizes`: those of one head's blocks."""
    # As many heads as multiprocessors leave almost none idle. So of many heads, only the last are simulated.
    simulated = min(heads, multiprocessors + heads % multiprocessors)
    ends = [0.0] * multiprocessors
    for size in sizes * simulated:
        heapq.heapreplace(ends, ends[0] + size)
    idle = max(ends) * multiprocessors - simulated * sum(sizes)
    work = heads * sum(sizes)
    return work / (work + idle)
