"""Estimates how long a GPU works on an operation, with a roofline model:

    seconds = KERNEL_SECONDS + max(flops / (sustained flops x share of the card in use), bytes / (bandwidth x share),
                                   elements / elements per second)    (less for bytes in a large last-level cache)

The seconds may be off by a third. Constants without a source are assumed.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.cudasim import attention
from lowmem.cudasim.cuda_ops import MATRIX_PRODUCTS
from lowmem.cudasim.gpus import Card

HOST_SECONDS_PER_OPERATION = 10e-6  # Python, dispatcher and launch of an eager forward operation; assumed
HOST_SECONDS_PER_BACKWARD_OPERATION = 6e-6  # the same from autograd's C++ engine; assumed
KERNEL_SECONDS = 2e-6  # a kernel's start and end on the GPU; assumed
# Elements that a multiprocessor processes per clock, in kernels that may be slower than memory. Measured on an H200, in
# a step of GPT-2-Large (experiments/gpu_acceptance/results/rows.jsonl, levers/step). Random numbers are assumed to cost
# a norm and a sum what they cost PyTorch's dropout; this was not measured. MIXED and STRIDED are for kernels without
# vector instructions. These have arguments of two dtypes (measured), or strides that differ from the result's (fitted
# to an A100 and an H200, tests/published).
_ELEMENTS_PER_CLOCK = {"normalize": 1.8, "normalize_backward": 1.2, "native_dropout": 2.4, "cross_entropy": 1.85}
_ELEMENTS_PER_CLOCK["drop"] = _ELEMENTS_PER_CLOCK["native_dropout"]
_POSITION_OF_SEEDS = {"normalize": 10, "normalize_backward": 9}
_SUMS_PER_CLOCK = 4.7  # of 16-bit numbers: gradients of biases
MIXED_PER_CLOCK, STRIDED_PER_CLOCK = 1.1, 1.6
# Operations with new results move a part of their bytes at the last-level cache's speed. That part is nothing if they
# move CACHE_REACH times the cache's size, and larger if they move less. Both are fitted to steps of an RTX 5090
# (tests/published). The caches of an A100 and an H200 are two halves, and measured no faster than memory.
CACHE_SPEED, CACHE_REACH = 2.5, 1.5  # multiples of memory's speed and of the cache's size
# Speed of 16-bit products with a size that 8 does not divide: 116 of 156 TFLOP/s in pytorch#181718. Hopper then runs
# Turing's kernels: the head's three products of 50,257 words took an H200 177 ms a step of Large, those of 50,256 41.
UNALIGNED_SHARE, UNALIGNED_SHARE_ON_HOPPER = 0.7, 0.19
# The tiles of a product that one multiprocessor computes at a time. In fp32 half a tile is as fast for its size: the
# kernels of a training step on an A100 show it (ampere_sgemm_128x64_tn: 17.0 TFLOP/s; yyin-dev/cs336-a2, writeup.md).
# Tensor cores would wait for the inputs of smaller tiles.
_TILES = ((128, 128),)
_FP32_TILES = ((128, 128), (128, 64), (64, 128))
_SMALLEST_TILE = 16
_SMALLEST_SPLIT = 256  # fewest terms of a sum that one more multiprocessor is worth

_aten = torch.ops.aten
_NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "_local_scalar_dense")  # beginnings of names
# Operators that write an argument without reading it. The second line has those of lowmem.
_OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_"}
_OVERWRITES |= {"normalize", "normalize_backward", "drop", "gated_backward", "rotate"}
_UPDATED = {"gradient"}  # they read an argument with this name first
_COPIES = {"clone", "copy_", "_to_copy"}
_COPY_FIRST = {"masked_fill"}  # copies the input, then changes the copy in place (TensorAdvancedIndexing.cpp)
# Operators that read some rows of their first argument. Those of the second line write them, too.
_GATHERS = {"embedding", "gather", "index", "index_select"}
_SCATTERS = {"scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_", "_index_put_impl_", "add_rows"}


def operation_seconds(
    card: Card, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any, *, deterministic: bool = True
) -> float:
    """Estimates the seconds that the GPU works on an aten operation. Returns 0 if no kernel runs (views, empty tensors,
    `.item()`). The tensors need no data. `deterministic`: is torch.use_deterministic_algorithms on?"""
    traffic = _traffic(func)
    if traffic is None:
        return 0.0
    moved = _bytes_moved(traffic, args, kwargs, result)
    seconds = moved / card.sustained_bytes_per_second
    if card.cache_bytes and traffic.results:
        cached = max(0.0, 1 - moved / (CACHE_REACH * card.cache_bytes))
        seconds *= 1 - cached * (1 - 1 / CACHE_SPEED)
    seconds = max(seconds, _issue_seconds(card, func, args, result))
    packet = func._overloadpacket
    first = 0 if packet is _aten._grouped_mm else MATRIX_PRODUCTS.get(packet)
    if first is not None:
        seconds = max(seconds, _product_seconds(card, args[first], args[first + 1]))
    elif packet in attention.OPERATORS:
        seconds = max(seconds, attention.attention_seconds(card, func, args, kwargs, deterministic))
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        seconds = max(seconds, flops / card.sustained_flops(args[0].dtype))
    return KERNEL_SECONDS + seconds if seconds else 0.0


class _Traffic(NamedTuple):
    # times that each is read from or written to GPU memory; arguments in the order of the schema
    arguments: dict[str, int]
    results: int


@cache
def _traffic(func: torch._ops.OpOverload) -> _Traffic | None:
    schema, name = func._schema, func._overloadpacket.__name__
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    aliases = any(r.alias_info is not None for r in schema.returns)
    tensors = any("Tensor" in str(r.type) for r in schema.returns)
    is_view = torch.Tag.inplace_view in func.tags or (aliases and not any(written))
    # no kernel
    if is_view or name.startswith(_NO_KERNEL) or not (tensors or any(written)):
        return None
    once = name in _OVERWRITES
    times = [
        2 if write and not a.is_out and (not once or a.name in _UPDATED) else 1
        for a, write in zip(schema.arguments, written, strict=True)
    ]
    results = 3 if name in _COPY_FIRST else 0 if aliases else 1
    if name in _GATHERS:  # reads the rows, not the table
        times[0], results = 0, 2
    if name in _SCATTERS:  # reads the new values, reads and writes their places, and does not touch the rest
        times = [0] + [3] * (len(times) - 1)
    return _Traffic(dict(zip((a.name for a in schema.arguments), times, strict=True)), results)


def _bytes_moved(traffic: _Traffic, args: tuple, kwargs: dict, result: Any) -> int:
    seen: set[int] = set()
    total = sum(times * _bytes_of(arg, seen) for times, arg in zip(traffic.arguments.values(), args, strict=False))
    total += sum(traffic.arguments[name] * _bytes_of(arg, seen) for name, arg in kwargs.items())
    return total + (traffic.results * _bytes_of(result, seen) if traffic.results else 0)


def _bytes_of(value: Any, seen: set[int]) -> int:
    if isinstance(value, Tensor):
        if id(value) in seen:
            return 0
        seen.add(id(value))
        return min(value.nbytes, value.untyped_storage().nbytes())
    return sum(_bytes_of(one, seen) for one in value) if isinstance(value, list | tuple) else 0


def _issue_seconds(card: Card, func: torch._ops.OpOverload, args: tuple, result: Any) -> float:
    """Estimates a kernel's seconds from the elements that it processes per clock; 0 for kernels without such a rate."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim()]
    if not tensors:
        return 0.0
    name, new = func._overloadpacket.__name__, result if isinstance(result, Tensor) else tensors[0]
    per_clock = _ELEMENTS_PER_CLOCK.get(name)
    if len(args) > _POSITION_OF_SEEDS.get(name, len(args)) and args[_POSITION_OF_SEEDS[name]] is not None:
        per_clock = 1 / (1 / per_clock + 1 / _ELEMENTS_PER_CLOCK["native_dropout"])
    elif name == "sum" and tensors[0].dtype.itemsize == 2:
        per_clock = _SUMS_PER_CLOCK
    elif torch.Tag.pointwise in func.tags or name in _COPIES:
        dtypes = {each.dtype for each in tensors if each.dtype is not torch.bool}
        if len(dtypes) > 1 and name not in _COPIES:
            per_clock = MIXED_PER_CLOCK
        elif any(each.shape != new.shape or each.stride() != new.stride() for each in tensors):
            per_clock = STRIDED_PER_CLOCK
    if per_clock is None:
        return 0.0
    elements = max(each.numel() for each in (*tensors, new))
    return elements / (per_clock * card.multiprocessors * card.clocks_per_second)


def _product_seconds(card: Card, left: Tensor, right: Tensor) -> float:
    """Estimates the seconds of the matmul of `left` [(B,) M, K] and `right` [(B,) K, N]."""
    # If only one has a dimension B, the matmul is grouped: M, K or N is cut into B groups.
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    flops = 2 * batch * rows * terms * columns
    if flops == 0:
        return 0.0
    tiles = _FP32_TILES if left.dtype.itemsize > 2 else _TILES
    share = max(_share_in_use(card.multiprocessors, batch, rows, columns, terms, tile) for tile in tiles)
    if left.dtype.itemsize == 2 and card.capability >= (7, 0) and (rows % 8 or columns % 8 or terms % 8):
        share *= UNALIGNED_SHARE_ON_HOPPER if card.capability[0] == 9 else UNALIGNED_SHARE
    return flops / (card.sustained_flops(left.dtype) * share)


def _share_in_use(
    multiprocessors: int, batch: int, rows: int, columns: int, terms: int, tile: tuple[int, int]
) -> float:
    """Returns the share (0 to 1) of the GPU that `batch` matmuls of [rows, terms] and [terms, columns] keep busy.
    `tile`: most rows and columns of the result that a multiprocessor computes at a time."""
    # A multiprocessor computes one tile of the result at a time. Parts of tiles beyond the edges are lost, and so are
    # multiprocessors without a tile in the last round (wave quantization). If tiles are few, several share a long sum
    # (split-K).
    height, width = _tile_side(rows, tile[0]), _tile_side(columns, tile[1])
    tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
    splits = max(1, min(multiprocessors // tiles, terms // _SMALLEST_SPLIT))
    rounds = math.ceil(tiles * splits / multiprocessors)
    return batch * rows * columns * splits / (rounds * multiprocessors * height * width)


def _tile_side(size: int, largest: int) -> int:
    return min(largest, max(_SMALLEST_TILE, 1 << (size - 1).bit_length()))
