"""Computes on the CPU what the card's kernels would compute, and writes it to their output memory.

The card's memory is memory of this process. Each operator runs unchanged on CUDA tensors, with kernels that do nothing.
The CPU's version is queued on the kernel's stream, over the same bytes. So a missing wait, or memory that was freed too
early, changes the values, as on a card. Code that disables dispatch modes is not computed (printing a CUDA tensor does;
print `tensor.cpu()`).
"""

import _thread
import ctypes
import itertools
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from stand_in.card_library import COMPUTATION, library

_computations: dict[int, Callable[[], None]] = {}  # by number: those that wait in a stream's queue
_numbers = itertools.count()
_mode: list[TorchDispatchMode] = []
_MOST_STATES = 8192  # of generators that are kept
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


def begin() -> None:
    """Starts to compute the operators of this thread and of its backward passes."""
    library().card_set_computation(_run)
    torch.cuda.empty_cache = _when_all_is_computed(torch.cuda.empty_cache)
    _mode.append(Values())
    _mode[0].__enter__()


def _when_all_is_computed(empty_cache: Callable[[], None]) -> Callable[[], None]:
    # cudaFree waits for the card, whose computations need Python's lock. PyTorch calls cudaFree with its allocator's
    # lock taken, for which another thread may wait with Python's lock: a deadlock.
    def wait_and_empty() -> None:
        library().card_cudaDeviceSynchronize()
        empty_cache()

    return wait_and_empty


@COMPUTATION
def _run(number: int) -> int:
    """Runs the computation `number`; the card calls this when a stream reaches it. Returns 0, or 1 for an error."""
    try:
        with _disable_current_modes(), torch.no_grad():
            _computations.pop(number)()
    except KeyboardInterrupt:
        _thread.interrupt_main()  # the program's to answer, when it runs again
        return 1
    except BaseException:
        print("stand_in: a computation failed, as a kernel may; the card is of no use from here on", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


class Values(TorchDispatchMode):
    """Computes the kernels of the thread that imported PyTorch, and of the backward passes that it begins."""

    def __init__(self):
        super().__init__()
        from stand_in import counterparts  # needs PyTorch whole

        self._counterparts = counterparts.COUNTERPARTS
        self._random, self._waits = counterparts.RANDOM, counterparts.waits
        self._card = library()
        self._draws = _Draws()
        # Addresses of the few results that lie on the host though kernels make them: seeds of dropout in attention. To
        # whom they are given they are not known yet.
        self._computed_on_host: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._waits(func, args) and _any_cuda(args, kwargs):
            return self._at_once(func, args, kwargs)
        place = self._draws.place(func, args, kwargs) if func in self._random else None
        self._card.card_count_launches()
        result = func(*args, **kwargs)
        stream = ctypes.c_void_p()
        launches = self._card.card_launches(ctypes.byref(stream))
        if launches < 0:
            raise RuntimeError(f"stand_in: {func} launched kernels on several streams")
        if launches:
            compute = self._computation(func, args, kwargs, result, place)
            number = next(_numbers)
            _computations[number] = compute
            self._card.card_compute(stream, number)
            if func in _COPIES and _host_waits(args, kwargs, result):
                self._card.card_cudaStreamSynchronize(stream)
        return result

    def _computation(self, func, args: tuple, kwargs: dict, result: Any, place) -> Callable[[], None]:
        call = self._counterparts.get(func, func)
        over_args, over_kwargs = _over(func, args, kwargs, self._computed_on_host)
        results = [_alias(leaf) for leaf in tree_leaves(result)]
        self._computed_on_host |= {t.data_ptr() for t in results if isinstance(t, Tensor) and not _is_on_card(t)}
        draw = None if place is None else self._draws.reserve(call, over_args, over_kwargs, place)

        def compute() -> None:
            found = call(*over_args, **over_kwargs) if draw is None else draw(call, over_args, over_kwargs)
            for into, value in zip(results, tree_leaves(found), strict=False):
                if isinstance(into, Tensor) and isinstance(value, Tensor) and into.data_ptr() != value.data_ptr():
                    into.copy_(value)

        return compute

    def _at_once(self, func, args: tuple, kwargs: dict) -> Any:
        # The host decides from device memory, which earlier computations fill (a number of nonzero entries, for
        # example).
        torch.cuda.synchronize()
        call = self._counterparts.get(func, func)
        over_args, over_kwargs = _over(func, args, kwargs, self._computed_on_host)
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda)
        with torch.no_grad():
            found = call(*over_args, **over_kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, found)


class _Draws:
    """Maps each seed and offset of CUDA's generator to a state of the CPU's, so that one seed gives both the same
    dropout masks. Operators such as poisson, whose number of draws depends on values, are not supported."""

    def __init__(self):
        self._states: OrderedDict[tuple[int, int], Tensor] = OrderedDict()  # of the CPU's generator, 5 KiB each
        # All draws use the CPU's default generator. A thread of gloo that waits for a stream computes what is queued
        # there, also while the main thread reserves a draw.
        self._generator = threading.RLock()

    def place(self, func, args: tuple, kwargs: dict) -> tuple[torch.Generator, tuple[int, int]] | None:
        """Returns the CUDA generator, with its seed and offset, that `func` draws from; None if it uses a CPU's."""
        given = kwargs.get("generator")
        if given is None:
            given = next((value for value in args if isinstance(value, torch.Generator)), None)
        if given is None:
            if not _any_cuda(args, kwargs):
                return None
            torch.cuda.init()
            given = torch.cuda.default_generators[_device_index(args, kwargs)]
        if given.device.type != "cuda":
            return None
        return given, (given.initial_seed(), given.get_offset())

    def reserve(self, call: Callable, args: tuple, kwargs: dict, place) -> Callable:
        """Calls `call` with tensors of ones, to learn the CPU generator's state after it. Returns a function that later
        calls `call` from the state before. `place`: result of the method `place`."""
        generator, before = place
        state = self._state(before)
        stand_ins = tree_map(lambda leaf: torch.ones_like(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with self._generator, _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(state)
            call(*stand_ins[0], **stand_ins[1])
            after = torch.default_generator.get_state()
        self._states[generator.initial_seed(), generator.get_offset()] = after
        if len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)

        def draw(call: Callable, args: tuple, kwargs: dict) -> Any:
            with self._generator, torch.random.fork_rng(devices=[]):
                torch.default_generator.set_state(state)
                return call(*args, **kwargs)

        return draw

    def _state(self, place: tuple[int, int]) -> Tensor:
        seed, offset = place
        if offset == 0 or place not in self._states:  # one that was set from outside has no history here
            return torch.Generator().manual_seed(seed + offset).get_state()
        return self._states[place]


def _device_index(args: tuple, kwargs: dict) -> int:
    devices = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    devices += [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_cuda]
    index = devices[0].index if devices else None
    return torch.cuda.current_device() if index is None else index


def _any_cuda(args: tuple, kwargs: dict) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs)))


def _over(func, args: tuple, kwargs: dict, computed_on_host: set[int]) -> tuple[tuple, dict]:
    """Returns (args, kwargs) of `func` for the CPU, with CPU tensors that have the CUDA tensors' memory.
    `computed_on_host`: addresses of the CPU tensors that kernels write."""
    written = {
        id(value)
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    } | {
        id(kwargs[argument.name])
        for argument in func._schema.arguments
        if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write
    }

    # A CPU tensor that is only read, and neither page-locked nor computed by a kernel, is copied now, as a launch does.
    def over(leaf):
        if isinstance(leaf, torch.device):
            return torch.device("cpu") if leaf.type == "cuda" else leaf
        if isinstance(leaf, torch.Generator):
            return None
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_cuda or id(leaf) in written or leaf.data_ptr() in computed_on_host or leaf.is_pinned():
            return _alias(leaf)
        return leaf.detach().clone()

    with _disable_current_modes():
        args, kwargs = tree_map(over, (args, kwargs))
    kwargs.pop("pin_memory", None)
    kwargs.pop("non_blocking", None)
    return args, kwargs


def _host_waits(args: tuple, kwargs: dict, result: Any) -> bool:
    """Returns True if a copy from or to the host has finished when the call returns; False for copies on the card."""
    tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    non_blocking = kwargs.get("non_blocking") or args[2:3] == (True,)
    return bool(on_host) and not (non_blocking and all(tensor.is_pinned() for tensor in on_host))


def _is_on_card(tensor: Tensor) -> bool:
    first, end = _arena()
    return first <= tensor.data_ptr() < end


@cache
def _arena() -> tuple[int, int]:
    start, size = ctypes.c_void_p(), ctypes.c_size_t()
    library().card_arena(ctypes.byref(start), ctypes.byref(size))
    return start.value, start.value + size.value


def _alias(leaf):
    """Returns a CPU tensor with the memory, shape and strides of the tensor `leaf`; returns anything else unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_cuda:
        return leaf.detach()
    storage = leaf.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    with _disable_current_modes():
        over = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        alias = torch.empty(0, dtype=leaf.dtype).set_(over, leaf.storage_offset(), leaf.shape, leaf.stride())
        alias = alias.conj() if leaf.is_conj() else alias
        return torch._neg_view(alias) if leaf.is_neg() else alias
