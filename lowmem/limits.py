"""Sets the caps of GPU memory and RAM, measures peaks, and raises CapExceeded if a peak is above its cap.

GPU memory is that of PyTorch's caching allocator, without the CUDA context (about 0.5 GiB). RAM is the peak of this
process's resident set, page-locked buffers included. Swapped memory, the page cache and other processes do not count.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from lowmem.errors import CapExceeded, LowmemError
from lowmem.units import MIB, format_size

CONTEXT_BYTES = 512 * MIB  # about the GPU memory that CUDA takes outside PyTorch's allocator
_KERNELS_BYTES = 256 * MIB  # the part of CONTEXT_BYTES for kernels that CUDA loads during training; assumed
OVERSHOOT_BYTES = 18 * MIB  # expandable segments may exceed the allocator's cap by this

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Budget:
    """Applies the caps of GPU memory and RAM in a training run (None: no limit), and measures the peaks."""

    def __init__(self, device: torch.device, gpu_limit_bytes: int | None, ram_limit_bytes: int | None):
        if device.type == "cuda" and device.index is None:  # torch's cap needs an index
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ram_phases: dict[str, int] = {}  # {phase: peak so far}; empty if the system cannot reset peaks
        self._phase, self._ram_peak_bytes = "prepare", 0
        self.gpu_limit_bytes = gpu_limit_bytes if device.type == "cuda" else None
        self.ram_limit_bytes = ram_limit_bytes

    def apply(self, planned_bytes: int | None = None, allocator_bytes: int | None = None) -> None:
        """Caps PyTorch's GPU allocator by the GPU limit, and by `allocator_bytes` if that is less. Raises LowmemError
        if the card has less free memory than `planned_bytes` (None: the GPU limit). Does nothing on the CPU."""
        if self.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.device)
        limit = None if self.gpu_limit_bytes is None else min(self.gpu_limit_bytes, total - CONTEXT_BYTES)
        needed = limit if planned_bytes is None else planned_bytes
        if needed is not None and needed > free:
            raise LowmemError(
                f"the GPU is busy: {format_size(free)} of its {format_size(total)} are free and the plan needs "
                f"{format_size(needed)}; stop what else runs on it (nvidia-smi lists it), or give --gpu-limit "
                f"{max(free - _KERNELS_BYTES, 0) // MIB}MiB"
            )
        limit = None if limit is None else max(limit - OVERSHOOT_BYTES, 0)
        if caps := [cap for cap in (limit, allocator_bytes) if cap is not None]:
            # PyTorch rounds the share of the card down to bytes.
            torch.cuda.set_per_process_memory_fraction((min(caps) + 0.5) / total, self.device)

    def enter(self, phase: str) -> str:
        """Begins `phase` of the run, such as "load" or "train". Stores in `ram_phases` the RAM peak of the phase
        before, and returns that phase's name."""
        mark = ram_peak_bytes()
        self._ram_peak_bytes = max(self._ram_peak_bytes, mark)
        if reset_ram_peak():
            self.ram_phases[self._phase] = max(self.ram_phases.get(self._phase, 0), mark)
        before, self._phase = self._phase, phase
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the RAM peak in the `with` block as that of the phase `name`."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def peaks(self) -> dict[str, int | None]:
        """Returns the peaks of memory since the run began, {name in metrics.jsonl: bytes}, with None for GPU memory on
        the CPU."""
        cuda = self.device.type == "cuda"
        return {
            "gpu_allocated_peak_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "gpu_reserved_peak_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "ram_peak_bytes": max(self._ram_peak_bytes, ram_peak_bytes()),
        }

    def check(self, where: str) -> None:
        """Raises CapExceeded if a measured peak is above its cap. The message begins with `where`, such as "step
        12"."""
        peaks = self.peaks()
        for what, peak, limit in (
            ("GPU memory", peaks["gpu_reserved_peak_bytes"], self.gpu_limit_bytes),
            ("RAM", peaks["ram_peak_bytes"], self.ram_limit_bytes),
        ):
            if limit is not None and peak is not None and peak > limit:
                over = f"{format_size(peak - limit)} over the cap of {format_size(limit)}"
                raise CapExceeded(f"{where}: {what} reached {format_size(peak)}, {over}")


def ram_peak_bytes() -> int:
    """Returns the peak of this process's resident set, since the process began or since the last `reset_ram_peak`."""
    with suppress(OSError):
        for line in (_PROC / "self/status").read_text().splitlines():
            # Counts page-locked buffers: core/homes.py registers anonymous mappings. Memory of torch's pin_memory
            # belongs to the driver. Linux sums processors' counts only now and then: on 2, a peak once fell by 0.3 MiB.
            if line.startswith("VmHWM:"):  # ru_maxrss may include the parent's peak
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_ram_peak() -> bool:
    """Resets the peak of the resident set to its current size. Returns False if the system refuses."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def ram_now_bytes() -> int:
    return psutil.Process().memory_info().rss


def ram_available_bytes() -> tuple[int, str]:
    """Returns the bytes of RAM that this process may still take, and the name of the limit: the machine's free memory
    or a control group (container), whichever is smaller."""
    limits = [(psutil.virtual_memory().available, "the machine's free memory")]
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")  # versions 2 and 1
    for group in _groups():
        for limit_name, usage_name in names:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None:  # without a limit: "max" in version 2, 2**63 in version 1
                limits.append((max(limit - usage + _reclaimable(group), 0), str(group / limit_name)))
    return min(limits)


def _groups() -> list[Path]:
    """Returns the folders of this process's control groups (versions 1 and 2) and of all groups above them."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = _CGROUPS / ("memory" if controllers else "")
            folder = root / path.lstrip("/")
            # Some may not exist: in a container, the limiting group is mounted as the root.
            folders += [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]
    return folders


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _reclaimable(group: Path) -> int:
    """Returns the bytes of page cache that the kernel would free before the control group is full; 0 if unknown."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(value) for name, value in map(str.split, lines)}
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))  # version 1 has both
