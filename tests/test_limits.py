"""The caps: measured memory is used memory, and exceeding a cap fails with a sentence.

What PyTorch's CUDA functions would answer comes from a stand-in: no line of this has run on a GPU.
"""

from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lowmem import limits as budget_module
from lowmem.cudasim.allocator import CachingAllocator, SimulatedOutOfMemory
from lowmem.errors import CapExceeded, LowmemError
from lowmem.limits import CONTEXT_BYTES, OVERSHOOT_BYTES, Budget, ram_available_bytes
from lowmem.units import GIB, MIB
from runs import python

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# --- RAM, measured: in processes of their own, whose high-water mark nothing else has raised


def measure(code: str) -> list[int]:
    """What `code` appends to `marks`, of which the first is the mark before it."""
    program = (
        "import mmap, subprocess, sys\n"
        "from lowmem.limits import ram_peak_bytes\n"
        "marks = [ram_peak_bytes()]\n"
        f"{code}\n"
        "print(*marks)"
    )
    return list(map(int, python("-c", program).stdout.split()))


def test_a_buffer_that_can_be_page_locked_counts_once_it_is_touched():
    """A shared anonymous mapping, as core/homes.py makes and registers them; and the mark stays when it is gone."""
    before, made, touched, closed = measure(
        "buffer = mmap.mmap(-1, 96 * 2**20)\n"
        "marks.append(ram_peak_bytes())\n"
        "for page in range(0, len(buffer), mmap.PAGESIZE): buffer[page] = 1\n"
        "marks.append(ram_peak_bytes())\n"
        "buffer.close()\n"
        "marks.append(ram_peak_bytes())"
    )
    assert made - before < 2 * MIB
    assert 95 * MIB < touched - before < 99 * MIB
    assert closed > touched - MIB  # the kernel's own count is not exact to the page


def test_a_program_does_not_inherit_the_mark_of_the_one_that_started_it():
    before, child = measure(
        "buffer = bytearray(512 * 2**20)\n"
        "command = [sys.executable, '-c', 'from lowmem import limits; print(limits.ram_peak_bytes())']\n"
        "marks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))"
    )
    assert child - before < 64 * MIB


def test_each_phase_has_its_own_peak_and_the_run_the_highest():
    size = 192 * MIB
    before, *phases, peak, after = measure(
        "import torch\n"
        "from lowmem.limits import Budget\n"
        "budget = Budget(torch.device('cpu'), None, None)\n"
        "marks[0] = ram_peak_bytes()\n"
        "def work(size): bytearray(b'1') * size\n"
        "budget.enter('load')\n"
        f"work({size})\n"
        "with budget.phase('evaluate'):\n"
        f"    work({2 * size})\n"
        "with budget.phase('evaluate'):\n"
        "    pass\n"
        "budget.enter('train')\n"
        "budget.enter('report')\n"
        "marks += [budget.ram_phases[name] for name in ('prepare', 'load', 'evaluate', 'train')]\n"
        "marks += [budget.peaks()['ram_peak_bytes'], ram_peak_bytes()]"
    )
    prepare, load, evaluate, train = phases
    assert abs(prepare - before) < 8 * MIB and abs(train - before) < 8 * MIB
    assert abs(load - before - size) < 8 * MIB and abs(evaluate - before - 2 * size) < 8 * MIB
    assert peak == max(phases) and after < before + 8 * MIB, "the mark itself has been begun anew"


def test_where_the_mark_cannot_be_begun_anew_no_phase_has_a_figure_and_the_run_has_its_peak(machine):
    files(machine, {"proc/self/status": f"VmHWM: {3 * 2**20} kB"})
    (machine / "proc/self/clear_refs").mkdir()
    budget = Budget(CPU, None, None)
    with budget.phase("evaluate"):
        pass
    assert budget.ram_phases == {} and budget.peaks()["ram_peak_bytes"] == 3 * GIB


# --- RAM, available


def files(root: Path, contents: dict[str, str | int]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 20 GiB available, whose /proc and /sys/fs/cgroup are folders."""
    monkeypatch.setattr(budget_module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(budget_module, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * GIB))
    return tmp_path


MACHINE = "the machine's free memory"
CONTROL_GROUPS = {  # files of /proc and /sys/fs/cgroup; the bytes that are available; the end of the limit's name
    "no groups": ({}, 20 * GIB, MACHINE),
    "of two groups above the process, the outer has the larger limit and less of it left": (
        {
            "proc/self/cgroup": "0::/batch/job/step",
            **{"cgroup/batch/memory.max": 9 * GIB, "cgroup/batch/memory.current": 4 * GIB},
            **{"cgroup/batch/job/memory.max": 8 * GIB, "cgroup/batch/job/memory.current": GIB},
            **{"cgroup/batch/job/step/memory.max": "max", "cgroup/batch/job/step/memory.current": GIB},
        },
        *(5 * GIB, "batch/memory.max"),
    ),
    "page cache that a group gives back is available": (
        {
            **{"proc/self/cgroup": "0::/job", "cgroup/job/memory.max": 8 * GIB, "cgroup/job/memory.current": 7 * GIB},
            "cgroup/job/memory.stat": f"anon {GIB}\ninactive_file {5 * GIB}\nactive_file {GIB}",
        },
        *(6 * GIB, "job/memory.max"),
    ),
    "version 1 in a container: its group is the root, and the host's path does not exist": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/ab\n4:hugetlb,memory:/docker/ab\n0::/docker/ab",
            "cgroup/memory/memory.limit_in_bytes": 8 * GIB,
            "cgroup/memory/memory.usage_in_bytes": 3 * GIB,
            "cgroup/memory/memory.stat": f"inactive_file 4096\ntotal_inactive_file {GIB}",
        },
        *(6 * GIB, "memory/memory.limit_in_bytes"),
    ),
    "version 1 without a limit says a huge number": (
        {
            "proc/self/cgroup": "4:memory:/",
            "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "cgroup/memory/memory.usage_in_bytes": 19 * GIB,
        },
        *(20 * GIB, MACHINE),
    ),
    "a group over its limit": (
        {"proc/self/cgroup": "0::/job", "cgroup/job/memory.max": GIB, "cgroup/job/memory.current": 2 * GIB},
        *(0, "job/memory.max"),
    ),
}


@pytest.mark.parametrize(("contents", "available", "named"), CONTROL_GROUPS.values(), ids=CONTROL_GROUPS)
def test_available_is_what_the_machine_and_every_group_above_the_process_leave(machine, contents, available, named):
    files(machine, contents)
    found, what = ram_available_bytes()
    assert found == available and what.endswith(named)


# --- caps


def test_a_peak_over_the_ram_cap_fails_with_exit_4_and_names_all_three_figures(monkeypatch):
    monkeypatch.setattr(budget_module, "ram_peak_bytes", lambda: 5 * GIB)
    with pytest.raises(CapExceeded) as caught:
        Budget(CPU, None, 2 * GIB).check("step 7")
    assert str(caught.value) == "step 7: RAM reached 5.00 GiB, 3.00 GiB over the cap of 2.00 GiB"
    assert caught.value.exit_code == 4
    for limit in (5 * GIB, None):
        Budget(CPU, None, limit).check("step 7")


def test_the_cpu_has_no_gpu_figures_and_no_gpu_cap(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)  # calling it would fail
    budget = Budget(CPU, 1, None)
    budget.apply(None)
    budget.check("step 1")
    peaks = budget.peaks()
    assert (peaks["gpu_allocated_peak_bytes"], peaks["gpu_reserved_peak_bytes"]) == (None, None)
    assert peaks["ram_peak_bytes"] > 50 * MIB  # torch alone is more


class Card:
    """Stands in for torch.cuda's functions on memory."""

    def __init__(self, monkeypatch, free: int, total: int, allocated: int = 0, reserved: int = 0):
        self.fraction = None
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)

    def set_fraction(self, fraction: float, device: torch.device) -> None:
        assert device.index is not None  # as torch does
        self.fraction = fraction


def test_the_gpu_cap_becomes_the_share_of_the_card_that_the_allocator_may_take(monkeypatch):
    card = Card(monkeypatch, free=70 * GIB, total=80 * GIB)
    Budget(CUDA, 11 * GIB, None).apply(10 * GIB)
    assert int(card.fraction * 80 * GIB) == 11 * GIB - OVERSHOOT_BYTES


@pytest.mark.parametrize(("limit", "allocator", "expected"), [
    (11 * GIB, 10 * GIB, 10 * GIB), (11 * GIB, 12 * GIB, 11 * GIB - OVERSHOOT_BYTES), (None, 10 * GIB, 10 * GIB)
])  # fmt: skip
def test_a_plan_may_ask_for_a_smaller_cap_of_the_allocator(monkeypatch, limit, allocator, expected):
    card = Card(monkeypatch, free=70 * GIB, total=80 * GIB)
    Budget(CUDA, limit, None).apply(10 * GIB, allocator)
    assert int(card.fraction * 80 * GIB) == expected


@pytest.mark.parametrize("grow", [True, False])
def test_what_segments_map_beyond_the_allocators_cap_stays_under_the_runs(grow):
    """One request after another of each size, in the model of the allocator: how far it gets beyond its own cap."""
    furthest = 0
    for limit, size in product(range(200 * MIB, 220 * MIB, MIB), range(MIB + 512, 45 * MIB, 3 * MIB + 512)):
        allocator = CachingAllocator(expandable_segments=grow, limit_bytes=limit)
        with suppress(SimulatedOutOfMemory):
            while True:
                allocator.allocate(size)
        furthest = max(furthest, allocator.peak_reserved_bytes - limit)
    assert furthest <= OVERSHOOT_BYTES and (furthest > 0) == grow


def test_a_device_without_its_number_is_the_current_one(monkeypatch):
    card = Card(monkeypatch, free=70 * GIB, total=80 * GIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    budget = Budget(torch.device("cuda"), 11 * GIB, None)
    budget.apply()
    assert budget.device.index == 3 and card.fraction is not None


def test_without_a_gpu_cap_the_allocator_is_left_alone(monkeypatch):
    card = Card(monkeypatch, free=70 * GIB, total=80 * GIB)
    Budget(CUDA, None, None).apply(10 * GIB)
    assert card.fraction is None


def test_a_cap_that_is_more_than_the_card_leaves_room_for_cuda(monkeypatch):
    total = 11 * GIB - 100 * MIB
    card = Card(monkeypatch, free=10 * GIB, total=total)
    Budget(CUDA, 11 * GIB, None).apply(10 * GIB)
    assert int(card.fraction * total) == total - CONTEXT_BYTES - OVERSHOOT_BYTES


@pytest.mark.parametrize("limit", [11 * GIB, None])
def test_a_card_with_less_free_than_the_plan_needs_is_refused(monkeypatch, limit):
    card = Card(monkeypatch, free=6 * GIB, total=16 * GIB)
    busy = r"busy: 6.00 GiB of its 16.0 GiB are free and the plan needs 7.00 .* --gpu-limit 5888MiB"
    with pytest.raises(LowmemError, match=busy) as caught:
        Budget(CUDA, limit, None).apply(7 * GIB)
    assert caught.value.exit_code == 1
    assert card.fraction is None
    Budget(CUDA, limit, None).apply(6 * GIB)  # the plan counts, and not the cap


def test_where_there_is_no_plan_the_whole_cap_must_be_free(monkeypatch):
    Card(monkeypatch, free=6 * GIB, total=16 * GIB)
    with pytest.raises(LowmemError, match="needs 7.00 GiB"):
        Budget(CUDA, 7 * GIB, None).apply()
    Budget(CUDA, None, None).apply()


def test_what_the_gpu_reserved_is_held_against_its_cap(monkeypatch):
    Card(monkeypatch, free=70 * GIB, total=80 * GIB, allocated=10 * GIB, reserved=12 * GIB)
    monkeypatch.setattr(budget_module, "ram_peak_bytes", lambda: 3 * GIB)
    budget = Budget(CUDA, 11 * GIB, 4 * GIB)
    assert list(budget.peaks().values()) == [10 * GIB, 12 * GIB, 3 * GIB]
    with pytest.raises(CapExceeded, match=r"step 2: GPU memory reached 12.0 GiB, 1.00 GiB over the cap of 11.0 GiB"):
        budget.check("step 2")
