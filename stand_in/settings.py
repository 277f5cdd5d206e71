"""Makes environment variables that tell the stand-in's libraries which card of lowmem's table to model."""

import os
from collections.abc import Sequence
from pathlib import Path

from lowmem.cudasim.gpus import CARDS, multiprocessor
from lowmem.units import MIB

ROOT = Path(__file__).resolve().parents[1]
CONTEXT_BYTES = 256 * MIB  # of a card's memory; what a context really takes depends on the driver
UNLIMITED = 2**62
ORDERS = ("issue", "late", "lowest", "highest", "random:N")


def environment(
    gpu: str, *, libraries: Path, architectures: Sequence[int], memory_bytes: int | None = None,
    page_locked_bytes: int = UNLIMITED, devices: int = 1, host_resident: bool = False, values: bool = False,
    order: str = "issue", sanitize: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Returns the environment variables for a process that finds a card of kind `gpu`, a name in the table of cards.

    Args:
        libraries: build.py's folder.
        architectures: compute capabilities of PyTorch's kernels, 86 for 8.6.
        memory_bytes: the card's memory; None for the table's.
        page_locked_bytes: host memory that may be page-locked.
        host_resident: page-locked memory and destinations of copies take RAM, as with a GPU.
        values: the CPU computes operators; else not even copies write device memory.
        order: in which the work of streams runs, one of ORDERS (card/streams.c).
        sanitize: PyTorch's own checker of streams runs.
    """
    card = CARDS[gpu]
    major, minor = card.capability
    processor = multiprocessor(card.capability)
    properties = {
        "name": f"NVIDIA {card.reported_names[0]}", "capability": major * 10 + minor,
        "binary": max((n for n in architectures if n // 10 == major and n % 10 <= minor), default=major * 10),
        "multiprocessors": card.multiprocessors, "threads_per_multiprocessor": processor.threads,
        "blocks_per_multiprocessor": processor.blocks, "shared_bytes_per_multiprocessor": processor.shared_bytes,
        "shared_bytes_per_block": processor.shared_bytes_of_block, "memory_bytes": memory_bytes or card.memory_bytes,
        "context_bytes": CONTEXT_BYTES, "page_locked_bytes": page_locked_bytes,
        "copied_bytes": UNLIMITED if values else 0, "host_resident": int(host_resident), "devices": devices,
    }  # fmt: skip
    search = [str(Path(__file__).parent / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = dict(os.environ)
    found |= {
        "STAND_IN_CARD": ";".join(f"{key}={value}" for key, value in properties.items()),
        "STAND_IN_GPU": gpu,
        "STAND_IN_LIBRARIES": str(libraries),
        "STAND_IN_ORDER": order,
        "STAND_IN_VALUES": "1" if values else "",
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "TRITON_LIBCUDA_PATH": str(libraries),  # where Triton looks for libcuda.so.1
    }
    found.pop("TORCH_CUDA_SANITIZER", None)  # PyTorch runs its checker if the variable is set
    if sanitize:
        found["TORCH_CUDA_SANITIZER"] = "1"
    return found
