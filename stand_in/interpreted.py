"""Runs the project's Triton kernels by Triton's interpreter on tensors in host memory.

Kernels of layers are plain PyTorch instead (plain_layers.py), because the interpreter takes milliseconds per block.
"""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from stand_in import plain_layers

_LARGEST_BLOCK = 2**20  # the most entries that Triton lets a tensor have
_lock = threading.RLock()


@cache
def interpreted_kernels() -> ModuleType:
    """Loads lowmem.core.kernels.triton_kernels a second time, for the interpreter. Raises ImportError without
    Triton."""
    import triton

    # `triton.jit` decides at its definition whether a function is compiled or interpreted, and the stand-in also
    # compiles and launches the real kernels.
    specification = importlib.util.find_spec("lowmem.core.kernels.triton_kernels")
    copy = importlib.util.spec_from_file_location("stand_in._interpreted_kernels", specification.origin)
    module = importlib.util.module_from_spec(copy)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        copy.loader.exec_module(module)
    return module


@contextmanager
def language_interpreted() -> Iterator[None]:
    # The interpreter changes Triton's language and does not undo all of it, which breaks the compiler: all is restored
    # here. Kernels may call the language's own jitted functions, and bf16 is rounded as on GPUs, not truncated.
    import triton
    from triton.runtime import interpreter

    with suppress(ImportError):  # it looks at the language when it is first imported, which launching a kernel does
        importlib.import_module("triton.experimental.gluon")

    language, convert = triton.language, interpreter._convert_float

    def rounded(numbers, source, target, mode):
        if (source, target) != (language.float32, language.bfloat16):
            return convert(numbers, source, target, mode)
        return torch.from_numpy(numbers.copy()).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")

    modules = (language, language.standard, language.random)
    changing = (*modules, language.core, language.math, language.tensor, language.dtype)
    before = [dict(vars(thing)) for thing in changing]
    for module in modules:
        for name, function in list(vars(module).items()):
            if isinstance(function, triton.JITFunction):
                setattr(module, name, _interpreted(function))
    interpreter._convert_float = rounded
    try:
        yield
    finally:
        interpreter._convert_float = convert
        for thing, attributes in zip(changing, before, strict=True):
            if isinstance(thing, type):  # names that were added to modules are globals of interpreted functions
                for name in vars(thing).keys() - attributes.keys():
                    delattr(thing, name)
            for name, value in attributes.items():
                if vars(thing).get(name) is not value:
                    setattr(thing, name, value)


@cache
def _interpreted(function):
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function.fn)


def _kernel(name: str) -> Callable:
    def run(first: Tensor, *others) -> None:
        kernels = interpreted_kernels()
        with _lock, language_interpreted():
            # Large blocks, because a block of any size takes milliseconds. The loss keeps its own: its sums depend on
            # it.
            kernels.BLOCK = min(1 << max(first.numel() - 1, 0).bit_length(), _LARGEST_BLOCK)
            getattr(kernels, name)(first, *others)

    return run


COUNTERPARTS: dict[OpOverload, Callable] = {
    getattr(torch.ops.lowmem, name).default: _kernel(name)
    for name in ("adamw", "sgd", "join", "split", "cross_entropy")
} | {
    getattr(torch.ops.lowmem, name).default: getattr(plain_layers, name)
    for name in ("normalize", "normalize_backward", "drop", "gated", "gated_backward", "rotate")
}
