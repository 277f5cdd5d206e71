"""Sets the caps of GPU memory and RAM, measures peaks, and raises CapExceeded if a peak is above its cap.

GPU memory is capped by the caching allocator (`torch.cuda.set_per_process_memory_fraction`). So training under a cap of
11 GiB behaves on a large card as on a small one. The cap does not count the CUDA context (about 0.5 GiB).

RAM is measured as the peak of the process's resident set, which the kernel records. The peak counts page-locked
buffers, because they are anonymous mappings that are registered with CUDA later (core/homes.py). Memory from
cudaHostAlloc (torch's pin_memory) belongs to the driver and is not used here. The peak does not count other processes
(wandb's), swapped memory, or the page cache. Each phase of a training run resets the peak, so that the report has one
peak per phase. Linux sums the counts of all processors only now and then, so values may be slightly too low: on 2
processors, a peak once fell by 0.3 MiB.
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
OVERSHOOT_BYTES = 18 * MIB  # expandable segments may exceed the allocator's cap by this (cudasim/allocator.py)

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class Budget:
    """Applies the caps (limits) of GPU memory and RAM in a training run, and measures the peaks. None: no limit."""

    def __init__(self, device: torch.device, gpu_limit_bytes: int | None, ram_limit_bytes: int | None):
        if device.type == "cuda" and device.index is None:  # torch's cap needs an index
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ram_phases: dict[str, int] = {}  # {phase: peak so far}; empty if the system cannot reset peaks
        self._phase, self._ram_peak_bytes = "prepare", 0
        self.gpu_limit_bytes = gpu_limit_bytes if device.type == "cuda" else None
        self.ram_limit_bytes = ram_limit_bytes

    def apply(self, planned_bytes: int | None = None, allocator_bytes: int | None = None) -> None:
        """Caps PyTorch's GPU allocator at OVERSHOOT_BYTES below the GPU limit, because the allocator may exceed its cap
        by that. Caps it at `allocator_bytes` instead if that is less (None: no such cap). `planned_bytes`: predicted
        peak of GPU memory; None: as much as the GPU limit. Raises LowmemError if the card has less free memory than
        `planned_bytes`. Does nothing on the CPU."""
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
        """Ends the current phase of the training run, and begins `phase`, such as "load" or "train". Stores the RAM
        peak of the ended phase in `ram_phases`, and returns that phase's name. The first phase is "prepare"."""
        mark = ram_peak_bytes()
        self._ram_peak_bytes = max(self._ram_peak_bytes, mark)
        if reset_ram_peak():
            self.ram_phases[self._phase] = max(self.ram_phases.get(self._phase, 0), mark)
        before, self._phase = self._phase, phase
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the RAM peak in the `with` block as that of the phase `name`, such as "save". After the block, the
        earlier phase goes on."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def peaks(self) -> dict[str, int | None]:
        """Returns the peaks of memory since the training run began, as {name in metrics.jsonl: bytes}. Without a GPU,
        the values of GPU memory are None."""
        cuda = self.device.type == "cuda"
        return {
            "gpu_allocated_peak_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "gpu_reserved_peak_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "ram_peak_bytes": max(self._ram_peak_bytes, ram_peak_bytes()),
        }

    def check(self, where: str) -> None:
        """Raises CapExceeded if a measured peak is above its cap. `where`: the work that was just done, such as
        "step 12"; the message begins with it."""
        peaks = self.peaks()
        for what, peak, limit in (
            ("GPU memory", peaks["gpu_reserved_peak_bytes"], self.gpu_limit_bytes),
            ("RAM", peaks["ram_peak_bytes"], self.ram_limit_bytes),
        ):
            if limit is not None and peak is not None and peak > limit:
                over = f"{format_size(peak - limit)} over the cap of {format_size(limit)}"
                raise CapExceeded(f"{where}: {what} reached {format_size(peak)}, {over}")


def ram_peak_bytes() -> int:
    """Returns the peak size of this process's resident set, page-locked memory included, since the process began or
    since the last `reset_ram_peak`."""
    with suppress(OSError):
        for line in (_PROC / "self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # ru_maxrss may include the parent's peak
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_ram_peak() -> bool:
    """Resets the peak of the resident set to its current size. Returns False if the system does not allow that."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def ram_now_bytes() -> int:
    """Returns the current size of this process's resident set."""
    return psutil.Process().memory_info().rss


def ram_available_bytes() -> tuple[int, str]:
    """Returns the bytes of RAM that this process may still take, and the name of the limit. The limit is the machine's
    free memory or the room in a control group (containers, batch systems), whichever is smaller."""
    limits = [(psutil.virtual_memory().available, "the machine's free memory")]
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")  # versions 2 and 1
    for group in _groups():
        for limit_name, usage_name in names:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None:  # without a limit: "max" in version 2, 2**63 in version 1
                limits.append((max(limit - usage + _reclaimable(group), 0), str(group / limit_name)))
    return min(limits)


def _groups() -> list[Path]:
    """Returns the folders of this process's control groups (version 2, and version 1's memory) and of all groups above
    them. Some of these folders may not exist: in a container, the limiting group is mounted as the root."""
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
            folders += [folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)]
    return folders


def _number(path: Path) -> int | None:
    """Returns the number in the file `path`; None if there is no such file or no number in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _reclaimable(group: Path) -> int:
    """Returns the bytes of page cache that the kernel would free before the control group runs out of memory. Returns 0
    if the group's statistics cannot be read."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(value) for name, value in map(str.split, lines)}
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))  # version 1 has both
