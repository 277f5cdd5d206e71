"""Measures peaks of GPU memory and RAM of any training, in the same way for every peer.

Managed memory counts separately: bitsandbytes' paged states come from cudaMallocManaged, which PyTorch's allocator
neither counts nor caps.
"""

import sys
import threading

import torch

from lowmem.limits import ram_now_bytes, ram_peak_bytes
from lowmem.units import MIB

LOOK_SECONDS = 0.02
PROBE_BYTES = 32 * MIB


class Memory:
    """Measures during its `with` block. Enter it before the training allocates anything."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._adds_locked = self._cuda and not _locked_is_resident()
        self._ram_bytes = self._locked_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._free_before_bytes, _ = torch.cuda.mem_get_info()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def values(self) -> dict[str, int | None]:
        """Returns bytes; None for figures that the device lacks. Call it after the block."""
        found = dict.fromkeys(
            (
                *("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "gpu_managed_bytes", "gpu_device_used_bytes"),
                "ram_page_locked_peak_bytes",
            )
        )
        if self._cuda:
            free_bytes, _ = torch.cuda.mem_get_info()
            found = {
                "gpu_allocated_peak_bytes": torch.cuda.max_memory_allocated(),
                "gpu_reserved_peak_bytes": torch.cuda.max_memory_reserved(),
                "gpu_managed_bytes": _managed_bytes(),
                "gpu_device_used_bytes": self._free_before_bytes - free_bytes,
                "ram_page_locked_peak_bytes": self._locked_bytes,
            }
        return found | {"ram_peak_bytes": max(self._ram_bytes, ram_peak_bytes())}

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        locked = _locked_now_bytes() if self._cuda else 0
        self._locked_bytes = max(self._locked_bytes, locked)
        self._ram_bytes = max(self._ram_bytes, ram_now_bytes() + (locked if self._adds_locked else 0))


def _locked_now_bytes() -> int:
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def _locked_is_resident() -> bool:
    # The driver decides whether page-locked memory is in a process's resident set, so a filled block is tried. If not,
    # the allocator's bytes are added, in powers of two as it takes them.
    torch.empty(1, pin_memory=True)  # whatever the first call brings along
    before = ram_now_bytes()
    block = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    return ram_now_bytes() - before > block.nbytes / 2


def _managed_bytes() -> int:
    """Returns the bytes of bitsandbytes' paged states."""
    if "bitsandbytes" not in sys.modules:
        return 0
    from bitsandbytes.functional import GlobalPageManager

    return sum(tensor.nbytes for tensor in GlobalPageManager.get_instance().paged_tensors)
