"""Compares the allocations of one call on a CUDA device with the simulator's, on tensors without data.

A call is made on the meta device. The same call on tensors of the same sizes, strides and shared storages is made on
the device, where the caching allocator's counters give its temporaries.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from lowmem.cudasim.allocator import ROUNDING
from lowmem.cudasim.cuda_ops import CudaFunctions
from lowmem.cudasim.device_model import DeviceModel
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import FREED
from lowmem.cudasim.temporaries import Gpu, hidden_bytes

META = torch.device("meta")
VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
SMALL_BYTES = 16  # of a result: seeds and offsets of random numbers, which attention keeps where it likes


@dataclass(frozen=True)
class Described:
    """A tensor without its storage; those of one call with the same `storage` share it."""

    storage: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def layout(self) -> tuple:
        """Returns the properties that two results must share; strides of sizes of 1 say nothing."""
        stride = tuple(stride for size, stride in zip(self.shape, self.stride, strict=True) if size > 1)
        return self.shape, stride, self.dtype, rounded(self.storage_bytes)


@dataclass(frozen=True)
class Call:
    """A call of `func`, an aten overload, with Described in the place of tensors; `temporaries`: bytes by the table."""

    func: Callable
    args: tuple
    kwargs: dict
    results: list
    temporaries: int

    @property
    def key(self) -> tuple:
        """Returns the properties that two calls must share to be one case."""
        leaves, structure = tree_flatten((self.args, self.kwargs))
        return str(self.func), str(structure), *(_without_storage(leaf) for leaf in leaves)

    @property
    def case(self) -> str:
        leaves = tree_leaves((self.args, self.kwargs))
        return " ".join(
            f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{list(leaf.stride)}" if isinstance(leaf, Described) else str(leaf)
            for leaf in leaves
        )


def described(value: Any) -> Any:
    """Returns `value` with Described in the place of its tensors."""

    def describe(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        storage = leaf.untyped_storage()
        place = leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type
        return Described(storage._cdata, storage.nbytes(), *place)

    return tree_map(describe, value)


def call_on_meta(gpu: Gpu, func: Callable, *args, **kwargs) -> tuple[Call, Any]:
    """Makes a call, and returns its Call and its result."""
    before = described((args, kwargs))
    result = func(*args, **kwargs)
    return record_of(gpu, func, args, kwargs, result, before), result


def record_of(gpu: Gpu, func: Callable, args: tuple, kwargs: dict, result, before: tuple | None = None) -> Call:
    """Returns the Call of a call that was made already."""
    of_args, of_kwargs = before or described((args, kwargs))
    temporaries = sum(rounded(size) for size in hidden_bytes(func, args, kwargs, result, gpu))
    return Call(func, of_args, of_kwargs, tree_leaves(described(result)), temporaries)


def measure(call: Call, device: torch.device) -> tuple[int, str]:
    """Returns the bytes of the call's temporaries on `device`, and a sentence if a result differs from that on meta,
    else ""."""
    args, kwargs = _made((call.args, call.kwargs), device)
    given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    with _peak(device) as peak:
        result = call.func(*args, **kwargs)
    kept = {
        leaf.untyped_storage().data_ptr(): rounded(leaf.untyped_storage().nbytes())
        for leaf in tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.untyped_storage().data_ptr() not in given
    }
    pairs = zip(tree_leaves(described(result)), call.results, strict=True)
    differences = [
        f"{there.layout} is {here.layout} on meta"
        for there, here in pairs
        if isinstance(here, Described) and here.storage_bytes > SMALL_BYTES and there.layout != here.layout
    ]
    return peak[0] - sum(kept.values()), "; ".join(differences)


def rounded(size: int) -> int:
    """Returns the bytes that the allocator counts for a request."""
    return -(-size // ROUNDING) * ROUNDING


class Peaks(NamedTuple):
    """Bytes that a function and its backward add: the peak of each, and the bytes kept for backward."""

    forward: int
    saved: int
    backward: int


def peaks_on(device: torch.device, function: Callable, *tensors: Tensor) -> Peaks:
    """Returns the peaks of `function` of tensors like `tensors`, which are on meta. Its result has to be a tensor."""
    inputs = _made(described(tensors), device)
    for made, tensor in zip(inputs, tensors, strict=True):
        made.requires_grad_(tensor.requires_grad)
    before = torch.cuda.memory_allocated(device)
    with _peak(device) as forward:
        result = function(*inputs)
    saved = torch.cuda.memory_allocated(device) - before
    gradient = torch.empty_like(result)
    started = torch.cuda.memory_allocated(device)
    with _peak(device) as backward:
        result.backward(gradient)
    return Peaks(forward[0], saved, started - before + backward[0])


def peaks_simulated(gpu: Gpu, function: Callable, *tensors: Tensor) -> Peaks:
    """Returns the simulated peaks of `function` of `tensors`, on meta."""
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    machine = DeviceModel(hidden_bytes=lambda *operation: hidden_bytes(*operation, gpu))
    with CudaFunctions(gpu.capability, VERSION), Recorder(machine) as recorder:
        for tensor in inputs:
            recorder.note(tensor)
        given = len(list(recorder.tape))
        result = function(*inputs)
        done = len(list(recorder.tape))
        result.backward(torch.empty_like(result))
        heights = list(_heights(recorder.tape))
    base = heights[given - 1]
    return Peaks(max(heights[given - 1 : done]) - base, heights[done - 1] - base, max(heights[done - 1 :]) - base)


def _heights(tape) -> Iterator[int]:
    live: dict[int, int] = {}
    now = 0
    for storage, size, _ in tape:
        now += -live.pop(storage) if size == FREED else live.setdefault(storage, rounded(size))
        yield now


@contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """Yields a list that has, afterwards, the most bytes that were allocated inside."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    found: list[int] = []
    yield found
    found.append(torch.cuda.max_memory_allocated(device) - before)


def _made(value: Any, device: torch.device) -> Any:
    """Returns `value` with uninitialised tensors in the place of Described: on `device` instead of meta."""
    storages: dict[int, torch.UntypedStorage] = {}

    def make(leaf):
        if isinstance(leaf, torch.device) and leaf == META:
            return device
        if not isinstance(leaf, Described):
            return leaf
        where = device if leaf.device == "meta" else torch.device(leaf.device)
        if leaf.storage not in storages:
            empty = torch.empty(leaf.storage_bytes, dtype=torch.uint8, device=where)
            storages[leaf.storage] = empty.untyped_storage()
        tensor = torch.empty(0, dtype=leaf.dtype, device=where)
        return tensor.set_(storages[leaf.storage], leaf.offset, leaf.shape, leaf.stride)

    return tree_map(make, value)


def _without_storage(leaf: Any) -> Any:
    return leaf.layout[:3] + (leaf.offset % 4, leaf.device) if isinstance(leaf, Described) else leaf
