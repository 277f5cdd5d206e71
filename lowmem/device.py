"""Selects the training device, configures CUDA and the memory allocators of PyTorch and glibc, and frees memory."""

import ctypes
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from glob import glob

import torch

from lowmem.errors import InputError, first_line
from lowmem.units import MIB

RETURNED_FROM_BYTES = 6 * MIB  # CPU memory blocks of at least this size go back to the system when freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # constants of malloc.h
CUBLAS_WORKSPACES = ":4096:8"  # eight buffers of 4 MiB
_NVIDIA_FILES = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so*")  # on Linux; in WSL
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch 2.9 and newer read the first


def set_environment() -> None:
    """Sets environment variables for PyTorch's CUDA allocator and cuBLAS, and options of glibc's allocator. Leaves out
    each of these three if the user has set environment variables for it. Must be called before CUDA starts."""
    # Expandable segments keep reserved memory within 0.2% of allocated memory.
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True"))
    # A workspace of fixed size makes matrix products reproducible.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
    keep_freed_memory(False)


def chooses_freed_memory() -> bool:
    """Returns True if `keep_freed_memory` has an effect: with glibc, unless the user has set its options."""
    set_by_user = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    return not set_by_user and _mallopt() is not None


def keep_freed_memory(keep: bool) -> None:
    """Sets options of glibc's allocator. With `keep`, it keeps all freed memory for new tensors. Otherwise new blocks
    of at least RETURNED_FROM_BYTES will go back to the system when freed. New tensors then have new pages, with a page
    fault for each."""
    if not chooses_freed_memory():
        return
    set_option = _mallopt()
    set_option(_M_MMAP_THRESHOLD, RETURNED_FROM_BYTES)
    set_option(_M_MMAP_MAX, 0 if keep else 65536)  # blocks apart from the heap; the second is glibc's default
    set_option(_M_TRIM_THRESHOLD, -1 if keep else 64 * MIB)  # free at the heap's end; -1: any number


def _mallopt() -> Callable[[int, int], int] | None:
    with suppress(OSError, AttributeError, TypeError):  # a C library without it
        return ctypes.CDLL(None).mallopt
    return None


def release_freed_memory() -> None:
    """Collects garbage and returns the heap's free memory to the system."""
    # Cycles keep objects that only loading needed, and glibc keeps small freed tensors: with GPT-Neo, RAM varied by 0.3
    # GiB.
    collect_garbage()
    return_freed_memory()


def return_freed_memory() -> None:
    """Returns the heap's free memory to the system."""
    with suppress(OSError, AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def expandable_segments() -> bool:
    """Returns True if PyTorch's CUDA allocator uses expandable segments, as ALLOCATOR_VARIABLES or, without these,
    `set_environment` say. Raises InputError if the variables differ, or for settings that no plan can simulate."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise InputError("PYTORCH_NO_CUDA_MEMORY_CACHING is set, and no plan holds without the cache; unset it")
    found = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    if len(set(found.values())) > 1:
        raise InputError(f"{' and '.join(ALLOCATOR_VARIABLES)} differ; set one of them")
    grow = not found
    for name, text in list(found.items())[:1]:
        for setting in filter(None, map(str.strip, text.split(","))):
            key, _, value = (word.strip() for word in setting.partition(":"))
            if key == "expandable_segments" and value in ("True", "False"):
                grow = value == "True"
            elif not key.startswith("pinned_") and (key, value) != ("backend", "native"):
                raise InputError(
                    f"{name} has {setting}, which no plan knows; it may have expandable_segments:True or False"
                )
    return grow


def select_device(wanted: str) -> torch.device:
    """Returns the device for "cuda", "cpu" or "auto" (a GPU if PyTorch finds one, else the CPU). Raises InputError if
    "cuda" finds no GPU, or if PyTorch was not built for the GPU."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = why_no_gpu() or "PyTorch finds no CUDA device here"
        raise InputError(f"--device cuda: {why}; use --device cpu, or another build of PyTorch (docs/training.md)")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()
    if not any(_runs_on(name, major, minor) for name in built):
        raise InputError(
            f"PyTorch {torch.__version__} has no code for {torch.cuda.get_device_name(device)} (sm_{major}{minor}); it "
            f"has {' '.join(built)}. Cards before Turing need a CUDA 12.6 build of PyTorch 2.11 to 2.13"
        )
    return device


def why_no_gpu() -> str | None:
    """Returns the reason why PyTorch cannot use this machine's NVIDIA GPU; None if PyTorch can, or if the GPU is
    missing or hidden by CUDA_VISIBLE_DEVICES."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hidden or torch.cuda.is_available() or not any(map(glob, _NVIDIA_FILES)):
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the driver is too old; a build of PyTorch for the CPU
        return first_line(error).split(". ")[0].rstrip(".")
    return None


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    # Code for sm_75 runs on cards of this major and the same or a later minor version. Code for sm_90a runs only on
    # 9.0, and code for compute_90 on all later cards, too.
    kind, number = architecture.split("_")
    built = divmod(int("".join(filter(str.isdigit, number))), 10)
    if number.endswith("a"):
        return built == (major, minor)
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def collect_garbage() -> None:
    """Frees reference cycles, such as a model's parameters and their hooks."""
    # The first collection removes the hooks from the parameters, the second frees the parameters.
    for _ in range(2):
        gc.collect()


def take_workspaces(device: torch.device) -> None:
    """Makes the main thread and PyTorch's backward thread allocate their cuBLAS workspaces. Must be called before any
    other GPU allocation, because the predicted memory assumes this order. Does nothing on the CPU."""
    if device.type == "cuda":
        # A thread allocates its workspace at its first product, and keeps it. Taken now, both are adjacent.
        matrix = torch.ones(8, 8, device=device, requires_grad=True)
        product = matrix @ matrix
        torch.addmm(matrix.detach()[0], product, matrix).sum().backward()  # a bias: cuBLASLt, with its own workspace


def finish_failed_backward(device: torch.device) -> None:
    """Makes PyTorch's backward thread release the memory of a failed backward pass. Does nothing on the CPU."""
    if device.type != "cuda":
        return
    # The thread keeps the error, and the tensors in it, until it next takes Python's lock (GIL). Of these two empty
    # passes, the first releases the error, and the second drops the failed pass's unfinished tasks.
    with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
        nothing = torch.empty(0, device=device, requires_grad=True)
        for _ in range(2):
            torch.autograd.grad(nothing.view(0), nothing, torch.empty(0, device=device))


def forget_allocations(device: torch.device) -> None:
    """Collects garbage, empties the cache of PyTorch's CUDA allocator, and resets the allocator's peak statistics."""
    collect_garbage()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def make_deterministic(device: torch.device) -> None:
    """Makes PyTorch choose CUDA kernels that give the same bits each time, as CPU kernels do by default. Switches off
    TF32 and sums of reduced precision in matrix products. Does nothing on the CPU."""
    if device.type != "cuda":
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
