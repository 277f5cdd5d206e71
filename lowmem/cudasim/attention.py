"""Estimates how long a GPU works on a fused attention kernel.

A kernel's CUDA blocks each take some tiles of one head's T x T products. Multiprocessors that find no more blocks idle
until the last one ends. With few heads this takes as long as the work itself: deterministic kernels then have few and
unequal blocks.
"""

import heapq
import math
from functools import cache

import torch

from lowmem.cudasim.gpus import Card

# Speed relative to a large product on the same card, while no multiprocessor idles: (kernel, on Hopper): (forward,
# backward). A tile on the diagonal of causal attention counts whole. Flash's shares are for infinitely long rows. For
# heads of 64:
# flash: RTX 4090 0.90, 0.61 (apache/tvm, tl_doc/flash_perf.md), RTX A5000 0.93, 0.8 (gpu-mode/ring-attention#10). These
#   kernels are made for Ampere and do not use the product instructions of Hopper: H100 0.38, 0.37 (arXiv:2407.08608).
#   Hopper's numbers are fitted to an H200: for 1,024 tokens and 320 heads, its kernels reached 0.23 and 0.20 (measured:
#   experiments/gpu_acceptance/results/rows.jsonl, levers/step). A test compares, also with 50 heads: 0.16 and 0.13.
# efficient: 0.6 to 0.8, 0.3 to 0.5 of flash's speed (Dao-AILab/flash-attention#416). On Hopper fitted to the slowdown
#   of steps of 16,384 tokens on an H200 (NVIDIA/cudnn-frontend, benchmark/Llama-3.2-1B-Training).
SHARES = {
    ("flash", False): (1.0, 0.78),
    ("flash", True): (0.43, 0.41),
    ("efficient", False): (0.6, 0.4),
    ("efficient", True): (0.25, 0.15),
}
HALF_SPEED_TOKENS = {False: 250, True: 750}  # {on Hopper: tokens}: rows of this length reach half of flash's share
_TILE = 128  # tokens

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


def gradients_of_queries(multiprocessors: int, heads: int) -> int:
    """Returns how many gradients of the queries flash attention's deterministic backward makes, which it then adds up:
    one for each CUDA block of a head. `heads`: B x H. Source: transformers/cuda/flash_attn/flash_bwd_launch_template.h.
    """
    return math.ceil(multiprocessors / heads)


def attention_seconds(card: Card, func: torch._ops.OpOverload, args: tuple, kwargs: dict, deterministic: bool) -> float:
    """Estimates the seconds of a fused attention kernel. Query, key and value are [B, H, T, E]. `deterministic`: is
    torch.use_deterministic_algorithms on?"""
    kernel, backward, first, over_query, over_value = OPERATORS[func._overloadpacket]
    query, key, value = args[first : first + 3]
    heads, queries, keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
    flops = 2 * heads * queries * keys * (over_query * query.shape[3] + over_value * value.shape[3])
    if not flops:
        return 0.0
    position = _position_of_causal(func)
    causal = args[position] if position < len(args) else kwargs.get("is_causal", False)
    if causal:  # skips tiles above the diagonal
        flops *= 0.5 * (1 + min(1.0, _TILE / keys))
    hopper = card.capability[0] == 9 and query.dtype.itemsize == 2
    share = SHARES[kernel, hopper][backward]
    blocks = None  # one for each tile
    if kernel == "flash":
        share *= keys / (keys + HALF_SPEED_TOKENS[hopper])
    if backward and deterministic:
        blocks = gradients_of_queries(card.multiprocessors, heads) if kernel == "flash" else 1
    share *= _share_in_use(card.multiprocessors, heads, _tiles(queries, keys, bool(causal), bool(backward), blocks))
    # further gradients of the queries: written before the kernel, and read after it
    bytes_moved = 2 * ((blocks or 1) - 1) * heads * queries * query.shape[3] * torch.float32.itemsize
    return flops / (card.sustained_flops(query.dtype) * share) + bytes_moved / card.sustained_bytes_per_second


@cache
def _position_of_causal(func: torch._ops.OpOverload) -> int:
    return [argument.name for argument in func._schema.arguments].index("is_causal")


@cache
def _tiles(queries: int, keys: int, causal: bool, backward: bool, blocks: int | None) -> tuple[int, ...]:
    """Returns the tiles that each CUDA block of a head computes, in the order of their start. `blocks`: most blocks of
    a head; None: one for each tile of queries, in backward of keys."""
    rows, columns = math.ceil(queries / _TILE), math.ceil(keys / _TILE)
    if backward:  # a block goes through the queries
        tiles = [max(1, rows - column) if causal else rows for column in range(columns)]
    else:
        tiles = [min(row + 1, columns) if causal else columns for row in range(rows)]
    blocks = min(len(tiles), blocks or len(tiles))
    return tuple(sum(tiles[first::blocks]) for first in range(blocks))


@cache
def _share_in_use(multiprocessors: int, heads: int, tiles: tuple[int, ...]) -> float:
    """Returns the share (0 to 1) of the time for which multiprocessors have work on average, if each computes one CUDA
    block after another. `tiles`: sizes of one head's blocks."""
    # Whole rounds leave none idle. So of many heads, the last ones tell how long the others are waited for.
    simulated = heads if heads < 2 * multiprocessors else heads % multiprocessors + multiprocessors
    ends = [0] * multiprocessors
    for size in tiles * simulated:
        heapq.heapreplace(ends, ends[0] + size)
    idle = max(ends) * multiprocessors - simulated * sum(tiles)
    work = heads * sum(tiles)
    return work / (work + idle)
