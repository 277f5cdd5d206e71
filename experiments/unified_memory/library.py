"""Builds managed memory as a library on first use, and plugs it into PyTorch only for tensors that ask for it. Both the
host and the GPU can use this memory."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from experiments.harness import rows as row_file
from lowmem.errors import InputError, LowmemError
from lowmem.limits import ram_available_bytes
from lowmem.units import GIB

SOURCE = Path(__file__).with_name("managed.c")
HOST = -1
READ_MOSTLY, PREFERRED_LOCATION, ACCESSED_BY = 1, 3, 5  # CUDA's numbers of advice; one more takes it back
ATTRIBUTES = {"read_mostly": 1, "preferred_location": 2, "accessed_by": 3, "last_prefetch_location": 4}
CONTEXT_BYTES = GIB  # most that this process's own context takes of a GPU
COMPILERS = ("cc", "gcc", "clang", "nvcc")


def build(cuda_major: int | None = None) -> Path:
    """Returns the shared library for this PyTorch's runtime (or for `cuda_major`), built in the user's cache if it does
    not exist. Raises InputError without a compiler, and LowmemError if the cache cannot be written or the compiler
    fails."""
    major = cuda_major or _cuda_major()
    made_of = hashlib.sha256(SOURCE.read_bytes() + f"{major} {os.uname().machine}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowmem"
    library = folder / f"managed-{made_of}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), *COMPILERS))), None)
    if compiler is None:
        raise InputError(f"managed memory needs a C compiler: install one of {', '.join(COMPILERS)}, or name one in CC")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part_folder = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise LowmemError(f"managed memory's library cannot be kept in {folder}: {error.strerror}") from error
    # Its name is given when it is whole: another process may be building or loading the same.
    with part_folder as name:
        part = Path(name) / library.name
        position = ["-Xcompiler", "-fPIC"] if Path(compiler).name == "nvcc" else ["-fPIC"]
        command = [compiler, "-shared", *position, "-O2", f"-DCUDA_MAJOR={major}", "-o", str(part), str(SOURCE)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            said = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
            raise LowmemError(f"{compiler} cannot build {SOURCE.name}: {said}")
        part.rename(library)
    return library


def _cuda_major() -> int:
    # The newest, if PyTorch is built without CUDA.
    return int((torch.version.cuda or "13").partition(".")[0])


@cache
def loaded() -> ctypes.CDLL:
    """Returns the loaded library. Raises InputError if PyTorch sees no GPU, or if CUDA's runtime is not found."""
    if not torch.cuda.is_available():
        raise InputError("managed memory needs a GPU; on the CPU leave out what needs it (--placement resident)")
    torch.cuda.init()
    # PyTorch has loaded it; by its name it is the same one, whose functions the library then finds.
    try:
        ctypes.CDLL(f"libcudart.so.{_cuda_major()}", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise InputError(f"managed memory needs CUDA's runtime as a library of its own: {error}") from error
    found = ctypes.CDLL(str(build()))
    for name in ("managed_advise", "managed_prefetch", "managed_attribute"):
        getattr(found, name).restype = ctypes.c_char_p
    found.managed_advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    found.managed_prefetch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    found.managed_attribute.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
    return found


@cache
def pool() -> torch.cuda.MemPool:
    """Returns the pool whose tensors are managed memory. The pool lives as long as the process."""
    loaded()
    # A global pluggable allocator would lose PyTorch's statistics and OutOfMemoryError (pytorch #133281, #133280).
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(build()), "managed_allocate", "managed_free")
    return torch.cuda.MemPool(allocator.allocator())


def check_room(size_bytes: int, limit_bytes: int | None = None, oversubscribe: bool = False) -> None:
    """Raises InputError if managed memory of this size has no room. `limit_bytes`, or without a limit all of it, have
    to be free on the GPU. `oversubscribe`: the driver pages, and nobody else may use the GPU."""
    loaded()
    free_bytes, card_bytes = torch.cuda.mem_get_info()
    others_bytes = card_bytes - free_bytes - torch.cuda.memory_reserved()
    if oversubscribe and others_bytes > CONTEXT_BYTES:
        raise InputError(
            f"--oversubscribe lets page faults stall whoever shares the GPU, and others use {others_bytes:,} bytes of "
            "it: give --physical-limit, or take a GPU of your own"
        )
    if not oversubscribe and min(limit_bytes or size_bytes, size_bytes) > free_bytes:
        most, what = (limit_bytes, "--physical-limit") if limit_bytes else (size_bytes, "managed memory")
        raise InputError(f"{what} is {most:,} bytes, and {free_bytes:,} are free on the GPU: give a lower limit")
    # Weights are loaded in RAM, and go back there.
    available_bytes, whose = ram_available_bytes()
    if row_file.computes_values() and size_bytes > available_bytes:
        raise InputError(f"{size_bytes:,} bytes of managed memory need as much RAM, and {whose} is {available_bytes:,}")


def managed_tensor(size_bytes: int) -> Tensor:
    """Returns uint8 [size_bytes] in managed memory, which has no pages until it is written or prefetched."""
    loaded()
    with torch.cuda.use_mem_pool(pool()):
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def advise(tensor: Tensor, advice: int, device: int = HOST) -> None:
    """Gives CUDA `advice`, one of the three above. Raises LowmemError with CUDA's words."""
    _check(loaded().managed_advise(tensor.data_ptr(), tensor.nbytes, advice, device))


def prefetch(tensor: Tensor, device: int, stream: torch.cuda.Stream) -> None:
    """Moves the tensor's pages to `device` (or HOST), in the order of `stream`. Raises LowmemError with CUDA's
    words."""
    _check(loaded().managed_prefetch(tensor.data_ptr(), tensor.nbytes, device, stream.cuda_stream))


def attributes(tensor: Tensor) -> dict[str, int]:
    """Returns CUDA's attributes of the tensor, by ATTRIBUTES: 0 or 1, a device, or HOST; -2 if pages differ or do not
    exist."""
    found = {}
    for name, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        _check(loaded().managed_attribute(tensor.data_ptr(), tensor.nbytes, number, ctypes.byref(value)))
        found[name] = value.value
    return found


def _check(said: bytes | None) -> None:
    if said is not None:
        raise LowmemError(f"managed memory: CUDA says: {said.decode()}")
