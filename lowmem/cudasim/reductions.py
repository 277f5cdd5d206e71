"""Computes the temporary buffers of PyTorch's reductions on CUDA, such as sums over rows and norms.

If a reduction has few outputs, several CUDA blocks compute each of them. They write partial results to a buffer, which
is larger on a GPU with more multiprocessors. Source: aten/src/ATen/native/cuda/Reduce.cuh of torch 2.14.1. The order of
the dimensions comes from TensorIterator.cpp, which PyTorch does not install; it is inferred here. A test compares the
bytes with PyTorch's own allocator.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lowmem.cudasim.gpus import Capability, Multiprocessor, multiprocessor

WIDE = 8  # 16-bit entries that a thread of a sum reads at once
_WARP = 32
_MOST_THREADS = 512  # of a block, divided by the outputs of a thread
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # per thread
_MOST_VECTOR = 4  # outputs per thread


def bytes_each(*tensors: Tensor) -> tuple[int, ...]:
    """Returns the bytes of each tensor's elements."""
    return tuple(tensor.numel() * tensor.itemsize for tensor in tensors)


class _Loop(NamedTuple):
    """Describes a dimension of a reduction's input, or several that are merged because they follow one another in
    memory."""

    size: int
    stride: int  # of the input, in entries


@dataclass(frozen=True)
class Gpu:
    """Holds the properties of a GPU that decide how much temporary memory kernels take."""

    capability: Capability
    multiprocessors: int
    deterministic: bool = True  # whether torch.use_deterministic_algorithms is on

    @property
    def multiprocessor(self) -> Multiprocessor:
        return multiprocessor(self.capability)


def staging_bytes(
    gpu: Gpu, tensor: Tensor, dims: Sequence[int] | int | None, result_bytes: int, *,
    partial_bytes: int | None = None, vector: int = 4,
) -> tuple[int, ...]:  # fmt: skip
    """Returns the bytes of each temporary buffer of a CUDA reduction of `tensor` over `dims` (None or []: all).
    `result_bytes`: bytes per element of the result. `partial_bytes`: bytes of a partial result; None: as many as an
    element of `tensor` has, but at least 4. `vector`: how many 16-bit elements of a row a thread loads at once."""
    dims = range(tensor.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    sum_bytes = max(4, tensor.itemsize) if partial_bytes is None else partial_bytes
    input_vector = vector if tensor.itemsize == 2 else 4
    reduced, kept = _loops(tensor, {dim % tensor.dim() for dim in dims} if tensor.dim() else set())
    if not reduced or not all(loop.size for loop in (*reduced, *kept)):
        return ()
    parts = list(_parts(tensor.storage_offset(), reduced, kept, tensor.itemsize))
    # one kernel's output for the next kernel
    handed_on = len(parts) > 1 and result_bytes < sum_bytes
    buffers = (_buffers(gpu, *part, sum_bytes, input_vector) for part in parts)
    return *max(buffers, key=sum), *([math.prod(loop.size for loop in kept) * sum_bytes] if handed_on else [])


def _parts(offset: int, reduced: list[_Loop], kept: list[_Loop], entry_bytes: int) -> Iterator[tuple]:
    """Splits a reduction, as PyTorch does, so that each kernel's input spans less than 2 GiB. Yields for each kernel:
    (offset of its input in entries, dimensions that it reduces, dimensions that it keeps). `entry_bytes`: bytes of an
    entry of the input."""
    # A reduction that spans more is halved at the dimension that spans the most.
    loops = [*reduced, *kept]
    reach = [(loop.size - 1) * loop.stride for loop in loops]
    if 1 + sum(reach) * entry_bytes < 2**31:
        yield offset, reduced, kept
        return
    longest = reach.index(max(reach))
    size, stride = loops[longest]
    for start, part in ((0, size // 2), (size // 2, size - size // 2)):
        loops[longest] = _Loop(part, stride)
        yield from _parts(offset + start * stride, loops[: len(reduced)], loops[len(reduced) :], entry_bytes)


def _buffers(
    gpu: Gpu, offset: int, reduced: list[_Loop], kept: list[_Loop], sum_bytes: int, input_vector: int
) -> tuple[int, ...]:
    inputs, outputs = math.prod(loop.size for loop in reduced), math.prod(loop.size for loop in kept)
    along_rows = not kept or reduced[0].stride < kept[0].stride
    width, height = (inputs, outputs) if along_rows else (outputs, inputs)
    output_vector = 1
    if along_rows:
        if reduced[0].stride == 1 and width >= 128 and len(reduced) == 1:
            width //= input_vector
    elif kept[0].stride == 1:
        others = [loop.stride for loop in (*reduced, *kept[1:])]
        output_vector = math.gcd(_MOST_VECTOR, offset, kept[0].size, *others)
        width //= output_vector
    block_width, block_height = _block(width, height, _MOST_THREADS // output_vector)

    step_of_inputs, step_of_outputs = (block_width, 1) if along_rows else (1, block_width)
    if -(-inputs // step_of_inputs) < min(block_height * 16, _MOST_VALUES):
        return ()  # a thread has too few values to share them with its block
    values = -(-inputs // (step_of_inputs * block_height))
    grid = -(-(outputs // output_vector) // step_of_outputs)
    resident = gpu.multiprocessors * (gpu.multiprocessor.threads // (block_width * block_height))
    if values < _MOST_VALUES or grid > resident:
        return ()
    blocks = min(max(-(-resident // grid), -(-values // _MOST_VALUES)), -(-values // _FEWEST_VALUES))
    if blocks == 1:
        return ()
    # the threads of a block in x, of which only one has an output
    in_a_row = 1 if along_rows else block_width * output_vector
    # partial results, and counters
    return sum_bytes * outputs * blocks * in_a_row, 4 * grid


def _loops(tensor: Tensor, dims: set[int]) -> tuple[list[_Loop], list[_Loop]]:
    all_loops = [_Loop(*loop) for loop in zip(tensor.shape, tensor.stride(), strict=True)]
    reduced = [loop for dim, loop in enumerate(all_loops) if dim in dims and loop.size != 1]
    kept = [loop for dim, loop in enumerate(all_loops) if dim not in dims and loop.size != 1]
    # in the order of TensorIterator: the fastest first
    return _merged(_in_order(reduced[::-1])), _merged(kept[::-1])


def _in_order(loops: list[_Loop]) -> list[_Loop]:
    for place in range(1, len(loops)):
        for before in range(place - 1, -1, -1):
            first, second = loops[before], loops[place]
            # TensorIterator's insertion sort skips comparisons with loops of stride 0.
            if first.stride == 0 or second.stride == 0:
                continue
            if first.stride < second.stride:
                break
            if first.stride > second.stride or first.size > second.size:
                loops[before], loops[place] = second, first
                place = before
    return loops


def _merged(loops: list[_Loop]) -> list[_Loop]:
    merged: list[_Loop] = []
    for loop in loops:
        # the loops follow each other in memory
        if merged and loop.stride == merged[-1].size * merged[-1].stride:
            merged[-1] = _Loop(merged[-1].size * loop.size, merged[-1].stride)
        else:
            merged.append(loop)
    return merged


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    most_width, most_height = _power_of_two(min(width, threads)), _power_of_two(min(height, threads))
    block_height = min(most_height, threads // min(most_width, _WARP))
    return min(most_width, threads // block_height), block_height


def _power_of_two(number: int) -> int:
    # the largest power of two up to `number`
    return 1 << max(0, number.bit_length() - 1)
