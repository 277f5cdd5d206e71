"""Which device computes, and what has to be set before it does."""

import ctypes
import gc
import os
from contextlib import suppress

import torch

from lowmem.errors import InputError
from lowmem.units import MIB

RETURNED_FROM_BYTES = 6 * MIB  # from here on memory of the CPU goes back to the system when it is freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
CUBLAS_WORKSPACES = ":4096:8"  # eight of 4 MiB
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first is torch's from 2.9 on


def set_environment() -> None:
    """To be called before CUDA starts: segments that grow (reserved memory stays within 0.2% of allocated), and the
    cuBLAS workspace that makes products reproducible. What the user has set stays."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True"))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return_freed_memory()


def return_freed_memory() -> None:
    """Has glibc give large tensors of the CPU back to the system when they are freed. By itself it learns to keep
    pieces of up to 32 MiB and does not find them all again: GPT-2-Medium took 0.4 GiB more. The price is that their
    pages are made anew each time: a fifth of a step's time with 128 tokens, nothing to be seen with 1,024. What the
    user has set stays; other systems' allocators are left as they are."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):  # no C library that knows it
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, RETURNED_FROM_BYTES)
        set_option(_M_TRIM_THRESHOLD, 64 * MIB)


def release_freed_memory() -> None:
    """Collects garbage, and has glibc give back what is then free in its heap. What only loading needed is held by
    cycles until the next collection, and small tensors that are freed among others, as those that a model's masks are
    made of, stay in the heap: for both, one run of GPT-Neo took 0.3 GiB more RAM than another of the same command."""
    collect_garbage()
    with suppress(OSError, AttributeError):  # no C library that knows it
        ctypes.CDLL(None).malloc_trim(0)


def expandable_segments() -> bool:
    """Whether the segments of CUDA's caching allocator grow: as the environment says, else as set_environment would.
    InputError where the environment asks the allocator for what cudasim/allocator.py does not know."""
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
    """`auto`, `cuda` or `cpu` made concrete; InputError where CUDA is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA device here; use --device cpu, or install a CUDA build")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    built = torch.cuda.get_arch_list()  # sm_75, sm_90a: for that major version; compute_90: for all later
    numbers = [
        (name.split("_")[0], *divmod(int("".join(filter(str.isdigit, name.split("_")[1]))), 10)) for name in built
    ]
    if not any(
        (kind == "sm" and of == major and at <= minor) or (kind == "compute" and (of, at) <= (major, minor))
        for kind, of, at in numbers
    ):
        raise InputError(
            f"PyTorch {torch.__version__} has no code for {torch.cuda.get_device_name(device)} (sm_{major}{minor}); it "
            f"has {' '.join(built)}. Cards before Turing need a CUDA 12.6 build of PyTorch 2.11 to 2.13"
        )
    return device


def collect_garbage() -> None:
    """Frees what nothing but itself holds, as a training's parameters and hooks hold each other. The first collection
    takes the hooks from the parameters, the second one the parameters."""
    for _ in range(2):
        gc.collect()


def take_workspaces(device: torch.device) -> None:
    """Has both threads compute a product, in forward and in backward. The first one on a thread takes a workspace for
    good (cuda_ops.py); taken before all else they lie side by side, where the plan has them."""
    if device.type == "cuda":
        matrix = torch.ones(8, 8, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()


def finish_failed_backward(device: torch.device) -> None:
    """Returns when PyTorch's thread for backward passes on a GPU holds nothing of a pass that failed. It keeps the
    error, and with it the tensors of all frames that this came through, until it next gets Python's lock: mostly after
    the caller has caught the error and gone on. Two passes over no numbers, which take no memory, wait for it: when the
    first is done the error is gone, and tasks that the failed pass had not begun are dropped before the second."""
    if device.type != "cuda":
        return
    with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
        nothing = torch.empty(0, device=device, requires_grad=True)
        for _ in range(2):
            torch.autograd.grad(nothing.view(0), nothing, torch.empty(0, device=device))


def forget_allocations(device: torch.device) -> None:
    """What was allocated so far, and is no longer used, goes back to the card and counts for no peak; garbage, too."""
    collect_garbage()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def make_deterministic(device: torch.device) -> None:
    """The same command gives the same bits: kernels that add in a fixed order, one attention kernel on every card.
    The CPU's are so anyway."""
    if device.type != "cuda":
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
