"""The caps: set before anything is allocated, measured all along, and a clear failure if one is exceeded.

GPU memory is capped by the caching allocator (`torch.cuda.set_per_process_memory_fraction`), so a run under an 11 GiB
cap behaves on a large card as on a small one. The cap does not count the CUDA context (about 0.5 GiB).

RAM is the high-water mark of the process's resident set. It counts page-locked buffers, because they are anonymous
mappings registered after they were made (core/homes.py); memory from cudaHostAlloc (torch's pin_memory) belongs to the
driver and is not used here. It does not count other processes (wandb's), swapped memory, or the page cache of files.
The kernel keeps the mark, so no peak is missed; each phase of a run starts a new one, so that a report has the peak of
each. Linux adds up each processor's count only now and then: on 2 processors a mark was seen to fall by 0.3 MiB.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lowmem.errors import CapExceeded, InputError, LowmemError
from lowmem.units import MIB, format_size

CONTEXT_BYTES = 512 * MIB  # about what CUDA takes of a card outside its allocator
OVERSHOOT_BYTES = 18 * MIB  # that growing segments may map beyond the allocator's own cap (cudasim/allocator.py)

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Peaks:
    """Bytes since the process began; None if a device has no such figure."""

    gpu_allocated_peak_bytes: int | None
    gpu_reserved_peak_bytes: int | None
    ram_peak_bytes: int


class Budget:
    """The caps of one run on one device; None is no cap."""

    def __init__(self, device: torch.device, gpu_limit_bytes: int | None, ram_limit_bytes: int | None):
        if device.type == "cuda" and device.index is None:  # torch's cap needs an index
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.ram_phases: dict[str, int] = {}  # the peak of each phase so far; empty if the system does not measure it
        self._phase, self._ram_peak_bytes = "prepare", 0
        self.gpu_limit_bytes = gpu_limit_bytes if device.type == "cuda" else None
        self.ram_limit_bytes = ram_limit_bytes

    def apply(self, planned_bytes: int | None = None) -> None:
        """Caps the GPU's allocator. InputError if the card is smaller than the cap; LowmemError if less than
        `planned_bytes` (None: the whole cap) is free on it."""
        if self.device.type != "cuda":
            return
        self.check_card()
        free, total = torch.cuda.mem_get_info(self.device)
        needed = self.gpu_limit_bytes if planned_bytes is None else planned_bytes
        if needed is not None and needed > free:
            raise LowmemError(
                f"the GPU is busy: {format_size(free)} of its {format_size(total)} are free and the plan needs "
                f"{format_size(needed)}; stop what else runs on it (nvidia-smi lists it), or lower --gpu-limit"
            )
        if self.gpu_limit_bytes is not None:
            own_limit_bytes = max(self.gpu_limit_bytes - OVERSHOOT_BYTES, 0)
            torch.cuda.set_per_process_memory_fraction(own_limit_bytes / total, self.device)

    def check_card(self) -> None:
        """InputError, with the largest possible cap, if the card is smaller than the cap."""
        if self.gpu_limit_bytes is None:
            return
        total = torch.cuda.mem_get_info(self.device)[1]
        if self.gpu_limit_bytes > total:
            raise InputError(
                f"--gpu-limit {format_size(self.gpu_limit_bytes)} is more than the card has "
                f"({format_size(total)}); lower it to about {(total - CONTEXT_BYTES) // MIB}MiB"
            )

    def enter(self, phase: str) -> str:
        """Begins a phase of the run, and returns the one before: "prepare" at first."""
        mark = ram_peak_bytes()
        self._ram_peak_bytes = max(self._ram_peak_bytes, mark)
        if begin_ram_peak_anew():
            self.ram_phases[self._phase] = max(self.ram_phases.get(self._phase, 0), mark)
        before, self._phase = self._phase, phase
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The phase of the block; the one before goes on after it."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def peaks(self) -> Peaks:
        ram = max(self._ram_peak_bytes, ram_peak_bytes())
        if self.device.type != "cuda":
            return Peaks(None, None, ram)
        return Peaks(torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device), ram)

    def check(self, where: str) -> None:
        """CapExceeded, with the peak that was measured at `where`, if it is above a cap."""
        peaks = self.peaks()
        for what, peak, limit in (
            ("GPU memory", peaks.gpu_reserved_peak_bytes, self.gpu_limit_bytes),
            ("RAM", peaks.ram_peak_bytes, self.ram_limit_bytes),
        ):
            if limit is not None and peak is not None and peak > limit:
                over = f"{format_size(peak - limit)} over the cap of {format_size(limit)}"
                raise CapExceeded(f"{where}: {what} reached {format_size(peak)}, {over}")


def ram_peak_bytes() -> int:
    """High-water mark of this process's resident set, page-locked mappings included."""
    # VmHWM starts with the program; ru_maxrss is inherited from the process that started it.
    if (size_bytes := _kib_line(_PROC / "self/status", "VmHWM:")) is not None:
        return size_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def begin_ram_peak_anew() -> bool:
    """Lowers the high-water mark to what is resident now; False if the system does not allow it."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def ram_now_bytes() -> int:
    """This process's resident set now."""
    try:
        return int((_PROC / "self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss


def ram_available_bytes() -> tuple[int, str]:
    """How much RAM this process may still take, and where that number is from: the machine's free memory, or the
    smallest limit of its control groups (containers, batch systems) minus their usage."""
    limits = [(_machine_available(), "the machine's free memory")]
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")  # versions 2 and 1
    for group in _groups():
        for limit_name, usage_name in names:
            limit, usage = _number(group / limit_name), _number(group / usage_name)
            if limit is not None and usage is not None:  # without a limit: "max" in version 2, 2**63 in version 1
                limits.append((max(limit - usage + _reclaimable(group), 0), str(group / limit_name)))
    return min(limits)


def _machine_available() -> int:
    if (size_bytes := _kib_line(_PROC / "meminfo", "MemAvailable:")) is not None:
        return size_bytes
    import psutil

    return psutil.virtual_memory().available


def _kib_line(path: Path, name: str) -> int | None:
    """Bytes in the line `name` of a file that counts in KiB; None if there is no such line."""
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _groups() -> list[Path]:
    """Folders of this process's control groups and of all groups above them (version 2, and version 1's memory). Some
    do not exist in a container: the group that limits it is mounted as the root."""
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
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _reclaimable(group: Path) -> int:
    """Bytes of page cache that the kernel would free before the group runs out."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = {name: int(value) for name, value in map(str.split, lines)}
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))  # version 1 has both
