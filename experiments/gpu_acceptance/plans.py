"""Is the plan true: what the simulated step takes beside what the step takes, the smallest caps, the choice.

    peaks    three steps per layout, measured: allocated and reserved peaks, signed errors against the simulation made
             without a GPU; where an error is too large, what lies in memory at both peaks (at_peak.py)
    caps     for some, the smallest cap under which the step really completes, found by bisection, beside the simulated
    choice   every layout of a small grid, timed; is the planner's choice within 5% of the fastest?

An error is (predicted - measured) / measured: below 0 the plan promised too much. The bars are issue 3's.

One process measures many layouts, each from an empty allocator: everything is freed, cuBLAS's workspaces too, and what
is cached given back, which with segments that grow leaves nothing behind. Every row checks that nothing was left, and
the first layout comes once more at the end, where it must measure the same.

On the CPU (a dry run) the profiler's memory events stand in for the card's: they go through the model of the caching
allocator, caps included. Everything CUDA here has never run on a GPU.
"""

import gc
import math
import statistics
import time
from dataclasses import dataclass, replace

import torch

from experiments.gpu_acceptance.at_peak import differences, tape_of_cpu, tape_of_history
from experiments.gpu_acceptance.child import Result, Setting
from experiments.gpu_acceptance.layouts import CAPPED, DRY_GRID, GRID, Layout
from lowmem import device as devices
from lowmem.allocator import SimulatedOutOfMemory
from lowmem.budget import Budget
from lowmem.cards import CARDS
from lowmem.plan import card_for
from lowmem.planner import MARGIN_BYTES
from lowmem.precision import LossScale
from lowmem.search import Choices, Room, Simulations, fastest, smallest_cap_bytes
from lowmem.settings import Settings
from lowmem.simulate import Recording, Target, cpu_target, gpu_target, under_cap
from lowmem.step import Schedule, Step
from lowmem.store import Store
from lowmem.trace import Tape
from lowmem.units import GIB, MIB

MOST_ALLOCATED_ERROR, MOST_MEDIAN_ERROR, MOST_RESERVED_ERROR, MOST_BELOW = 0.01, 0.005, 0.03, 0.005
MOST_SLOWER = 1.05  # the choice's seconds, of the fastest layout's
CHOICE_LIMIT_BYTES = 4 * GIB  # too little for the layout that would be fastest
RESOLUTION_BYTES = 8 * MIB  # of the measured smallest cap
DIAGNOSES = 4  # layouts that are run again for what lies at the peak
STEPS, TIMED_STEPS = 3, 12  # the first two of either are not timed


@dataclass(frozen=True)
class Measured:
    """`step_seconds`: the median of the steps from the third on; `left_bytes`: reserved before anything began; `tape`:
    of what was allocated, where that was recorded."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    step_seconds: float
    updates: int
    left_bytes: int
    tape: Tape | None


@dataclass(frozen=True)
class Simulated:
    """A layout as the planner sees it."""

    simulations: Simulations
    schedule: Schedule
    resident_units: int

    @classmethod
    def of(cls, layout: Layout, target: Target) -> "Simulated":
        simulations = Simulations(layout.decoder, layout.case(0), target)
        case = layout.case(simulations.units)
        return cls(simulations, case.schedule, case.resident_units)

    @property
    def recording(self) -> Recording:
        return self.simulations.record(self.schedule, self.resident_units)[1]


def check(setting: Setting) -> Result:
    """All of the above, one row per measured layout, cap and choice; the last row sums up."""
    device, target = _prepare(setting)
    peaks = check_peaks(setting, device, target)
    chosen = check_choice(setting, device, target)
    return Result(peaks.values | chosen.values, peaks.checks | chosen.checks)


def check_peaks(setting: Setting, device: torch.device, target: Target) -> Result:
    """A row per layout, then one per smallest cap; their sum."""
    grid, capped = (DRY_GRID, DRY_GRID[:1]) if setting.dry_run else (GRID, CAPPED)
    errors: dict[str, float] = {}
    peaks: list[int] = []
    held: dict[str, bool] = {}
    diagnoses = 1 if setting.dry_run else DIAGNOSES
    for layout in (*grid, grid[0]):
        name = f"{layout.name}, again" if layout.name in held else layout.name
        recording = Simulated.of(layout, target).recording
        predicted, measured = under_cap(recording.tape), measure(layout, device)
        if measured is None:
            held[name] = False
            setting.record(name, {"predicted_allocated_peak_bytes": predicted.allocated_peak_bytes}, {"fits": False})
            continue
        allocated = predicted.allocated_peak_bytes / measured.allocated_peak_bytes - 1
        reserved = predicted.reserved_peak_bytes / measured.reserved_peak_bytes - 1
        peaks.append(measured.allocated_peak_bytes)
        values = {
            "allocated_error": allocated,
            "reserved_error": reserved,
            "predicted_allocated_peak_bytes": predicted.allocated_peak_bytes,
            "measured_allocated_peak_bytes": measured.allocated_peak_bytes,
            "predicted_reserved_peak_bytes": predicted.reserved_peak_bytes,
            "measured_reserved_peak_bytes": measured.reserved_peak_bytes,
            "predicted_step_seconds": recording.seconds,
            "measured_step_seconds": measured.step_seconds,
        }
        # a page of the allocator is much of a tiny model: there reserved has no bar
        met = bars(allocated, 0.0 if setting.dry_run else reserved)
        if diagnoses and (setting.dry_run or not all(met.values())):
            diagnoses -= 1
            tape = measured.tape or measure(layout, device, history=True).tape
            values |= differences(tape, recording.tape)
        checks = met | {
            "every update was made": measured.updates == STEPS,
            "began with nothing reserved": measured.left_bytes == 0,
        }
        if name == layout.name:
            errors[name] = allocated
        else:
            checks["measures what it did at first"] = measured.allocated_peak_bytes == peaks[0]
        held[name] = setting.record(name, values, checks)
    for layout in (layout for layout in capped if layout.name in errors):
        held[f"smallest cap of {layout.name}"] = smallest_cap(setting, layout, device, target)
    median = statistics.median(map(abs, errors.values())) if errors else math.inf
    held[f"median of allocated within {MOST_MEDIAN_ERROR:.1%}"] = median <= MOST_MEDIAN_ERROR
    values = {"layouts": len(errors), "median_allocated_error": median}
    values |= {"lowest_error": min(errors.values(), default=None), "highest_error": max(errors.values(), default=None)}
    return Result(values, held)


def bars(allocated_error: float, reserved_error: float) -> dict[str, bool]:
    """Whether signed relative errors are small enough."""
    return {
        f"allocated within {MOST_ALLOCATED_ERROR:.0%}": abs(allocated_error) <= MOST_ALLOCATED_ERROR,
        f"reserved within {MOST_RESERVED_ERROR:.0%}": abs(reserved_error) <= MOST_RESERVED_ERROR,
        f"not more than {MOST_BELOW:.1%} below": min(allocated_error, reserved_error) >= -MOST_BELOW,
    }


def smallest_cap(setting: Setting, layout: Layout, device: torch.device, target: Target) -> bool:
    """A row: the smallest cap under which the simulation completes beside that under which the step does. A plan takes
    the layout from MARGIN_BYTES above the former on."""
    simulated = Simulated.of(layout, target)
    simulated_bytes = smallest_cap_bytes(simulated.simulations, simulated.schedule, simulated.resident_units)
    resolution = MIB // 2 if setting.dry_run else RESOLUTION_BYTES
    free = measure(layout, device, steps=2)
    fails, completes = free.allocated_peak_bytes - 1, free.reserved_peak_bytes
    trials = 0
    while completes - fails > resolution:
        trials += 1
        middle = (fails + completes) // 2
        if measure(layout, device, middle, steps=2) is None:
            fails = middle
        else:
            completes = middle
    values = {
        "difference_bytes": simulated_bytes - completes,
        "error": simulated_bytes / completes - 1,
        "simulated_smallest_cap_bytes": simulated_bytes,
        "measured_completes_bytes": completes,
        "measured_fails_bytes": fails,
        "margin_bytes": MARGIN_BYTES,
        "trials": trials,
    }
    planned = measure(layout, device, simulated_bytes + MARGIN_BYTES, steps=2)
    checks = {
        "what a plan calls fitting completes": planned is not None,
        "nothing that runs is refused beyond the margin": simulated_bytes - completes <= MARGIN_BYTES,
        "nothing that fails is called fitting within the margin": completes - simulated_bytes <= MARGIN_BYTES,
    }
    return setting.record(f"smallest cap of {layout.name}", values, checks)


def check_choice(setting: Setting, device: torch.device, target: Target) -> Result:
    """A row per layout of a small grid under CHOICE_LIMIT_BYTES, less the margin that the planner leaves; its choice
    beside the fastest."""
    if setting.dry_run:  # where the simulation of the CPU has no clock, and the grid is three layouts
        base, target, room, steps = DRY_GRID[0], gpu_target(CARDS["rtx3060"]), None, STEPS
        micro_batches, groups, states = (4,), (1,), ("resident",)
    else:
        base, room, steps = Layout("gpt2"), CHOICE_LIMIT_BYTES - MARGIN_BYTES, TIMED_STEPS
        micro_batches, groups, states = (4, 8), (1, 2), ("streamed", "resident")
    layouts = [
        replace(base, micro_batch=micro_batch, group=group, segment=segment, recompute=recompute, states=kind)
        for micro_batch in micro_batches
        for group in groups
        for segment, recompute in ((1, True), (2, True), (1, False))
        for kind in states
        if base.batch % (micro_batch * group) == 0
    ]
    simulations = Simulated.of(base, target).simulations
    kept = (0, 2 * simulations.blocks)
    resident = sorted({layout.case(simulations.units).resident_units for layout in layouts})
    found = fastest(simulations, Choices(micro_batches, groups, (1, 2), kept, resident), Room(room, None))
    seconds: dict[str, float] = {}
    chosen = None
    for layout in layouts:
        case = layout.case(simulations.units)
        recording = Simulated(simulations, case.schedule, case.resident_units).recording
        measured = measure(layout, device, room, steps=steps)
        if measured is not None:
            seconds[layout.name] = measured.step_seconds
        if found is not None and found.case == case:
            chosen = layout.name
        values = {
            "measured_step_seconds": seconds.get(layout.name),
            "predicted_step_seconds": recording.seconds,
            "completes": measured is not None,
            "predicted_to_complete": _completes(recording.tape, room),
        }
        setting.record(f"choice of {layout.name}", values, {})
    best = min(seconds, key=seconds.get, default=None)
    values = {"chosen": chosen, "fastest": best, "choices": len(layouts), "completed": len(seconds)}
    checks = {"the choice completes": chosen in seconds}
    if chosen in seconds:
        values["seconds_over_fastest"] = seconds[chosen] / seconds[best]
        if device.type == "cuda":
            checks["within 5% of the fastest"] = seconds[chosen] <= MOST_SLOWER * seconds[best]
    return Result(values, checks)


def measure(
    layout: Layout, device: torch.device, limit_bytes: int | None = None, *, steps: int = STEPS, history: bool = False
) -> Measured | None:
    """Really runs `layout` from an empty allocator on; None where it ran out of memory under the cap. `history`: with
    the tape of what was allocated, which the CPU always has."""
    _empty(device)
    if device.type == "cpu":
        tape, (seconds, updates) = tape_of_cpu(lambda: _run(layout, device, steps))
        try:
            taken = under_cap(tape, limit_bytes)
        except SimulatedOutOfMemory:
            return None
        return Measured(taken.allocated_peak_bytes, taken.reserved_peak_bytes, seconds, updates, 0, tape)
    left = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    Budget(device, limit_bytes, None).apply()
    if history:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
    try:
        seconds, updates = _run(layout, device, steps)
        peaks = Budget(device, None, None).peaks()
        tape = tape_of_history(torch.cuda.memory._snapshot()["device_traces"][device.index]) if history else None
    except torch.OutOfMemoryError:
        torch.cuda.synchronize(device)  # while the tensors that are being copied still live
        return None
    finally:
        if history:
            torch.cuda.memory._record_memory_history(None)
    return Measured(peaks.gpu_allocated_peak_bytes, peaks.gpu_reserved_peak_bytes, seconds, updates, left, tape)


def _run(layout: Layout, device: torch.device, steps: int) -> tuple[float, int]:
    """The step as training makes it, on random weights: seconds of one in the long run, and how many updates."""
    decoder = layout.decoder()
    case = layout.case(len(decoder.units))
    store = Store(decoder, device, case.dtype, case.optimizer, case.resident_units)
    for part in store.parts:
        part.working.normal_(0, 0.02)
    store.page_lock()
    step = Step(
        decoder, store, case.optimizer, case.schedule, clip_norm=case.clip_norm, weight_decay=0.01, seed=0,
        loss_scale=LossScale(layout.precision == "fp16", scale=1024.0),
    )  # fmt: skip
    batch = layout.tokens()
    seconds = []
    for number in range(steps):
        started = time.perf_counter()
        step(batch, number, 1e-4)  # which ends with a number read back
        seconds.append(time.perf_counter() - started)
    step.flush()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(seconds[2:] or seconds), step.updates


def _empty(device: torch.device) -> None:
    """Frees what earlier runs left: hooks and parameters hold each other, cuBLAS holds a workspace per thread."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _prepare(setting: Setting) -> tuple[torch.device, Target]:
    """The device, set up as training sets it up, and what to simulate."""
    devices.set_environment()
    if setting.device == "cpu":
        return torch.device("cpu"), cpu_target()
    device = devices.select_device("cuda")
    devices.make_deterministic(device)
    return device, gpu_target(card_for(Settings()))


def _completes(tape: Tape, limit_bytes: int | None) -> bool:
    try:
        under_cap(tape, limit_bytes)
    except SimulatedOutOfMemory:
        return False
    return True
