"""Is the plan true: what the simulated step takes beside what the step takes, the smallest caps, the choice.

    peaks    three steps per layout, measured: allocated and reserved peaks, signed errors against the simulation made
             without a GPU; where an error is too large, what lies in memory at both peaks (at_peak.py)
    caps     for some, the smallest cap under which the step really completes, found by bisection, beside the simulated
    choice   every layout of a small grid, timed; is the planner's choice within 5% of the fastest?

An error is (predicted - measured) / measured: below 0 the plan promised too much. The bars are issue 3's.

One process measures many layouts, each from an empty allocator (measured.py). Every row checks that nothing was left of
the one before, and the first layout comes once more at the end, where it must measure the same.
"""

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch

from experiments.gpu_acceptance import measured
from experiments.gpu_acceptance.at_peak import differences
from experiments.gpu_acceptance.layouts import CAPPED, DRY_GRID, GRID, Layout
from experiments.gpu_acceptance.measured import Measured, Ran, error, prepared, train
from experiments.harness.child import Result, Setting
from lowmem.allocator import SimulatedOutOfMemory
from lowmem.cards import CARDS
from lowmem.planner import MARGIN_BYTES
from lowmem.search import Choices, Room, fastest
from lowmem.simulate import Recording, Target, gpu_target, under_cap
from lowmem.simulations import Simulations, smallest_cap_bytes
from lowmem.step import Schedule
from lowmem.trace import Tape
from lowmem.units import GIB, MIB

MOST_ALLOCATED_ERROR, MOST_MEDIAN_ERROR, MOST_RESERVED_ERROR, MOST_BELOW = 0.01, 0.005, 0.03, 0.005
MOST_SLOWER = 1.05  # the choice's seconds, of the fastest layout's
CHOICE_LIMIT_BYTES = 4 * GIB  # too little for the layout that would be fastest
RESOLUTION_BYTES = 8 * MIB  # of the measured smallest cap
DIAGNOSES = 4  # layouts that are run again for what lies at the peak
STEPS, TIMED_STEPS = 3, 12  # the first two of either are not timed


@dataclass(frozen=True)
class Simulated:
    """A layout as the planner sees it."""

    simulations: Simulations
    schedule: Schedule
    resident_units: int

    @classmethod
    def of(cls, layout: Layout, target: Target) -> "Simulated":
        simulations = Simulations(partial(layout.decoder, target.fused_kernels), layout.case(0), target)
        case = layout.case(simulations.units)
        return cls(simulations, case.schedule, case.resident_units)

    @property
    def recording(self) -> Recording:
        return self.simulations.record(self.schedule, self.resident_units)[1]


def check(setting: Setting) -> Result:
    """All of the above, one row per measured layout, cap and choice; the last row sums up."""
    device, _, target = prepared(setting)
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
        predicted, real = under_cap(recording.tape), measure(layout, device, target)
        if real is None:
            held[name] = False
            setting.record(name, {"predicted_allocated_peak_bytes": predicted.allocated_peak_bytes}, {"fits": False})
            continue
        allocated = error(predicted.allocated_peak_bytes, real.allocated_peak_bytes)
        reserved = error(predicted.reserved_peak_bytes, real.reserved_peak_bytes)
        peaks.append(real.allocated_peak_bytes)
        values = {
            "allocated_error": allocated,
            "reserved_error": reserved,
            "predicted_allocated_peak_bytes": predicted.allocated_peak_bytes,
            "measured_allocated_peak_bytes": real.allocated_peak_bytes,
            "predicted_reserved_peak_bytes": predicted.reserved_peak_bytes,
            "measured_reserved_peak_bytes": real.reserved_peak_bytes,
            "predicted_step_seconds": recording.seconds,
            "measured_step_seconds": real.returned.step_seconds,
        }
        # a page of the allocator is much of a tiny model: there reserved has no bar
        met = bars(allocated, 0.0 if setting.dry_run else reserved)
        if diagnoses and (setting.dry_run or not all(met.values())):
            diagnoses -= 1
            tape = real.tape or measure(layout, device, target, history=True).tape
            values |= differences(tape, recording.tape)
        checks = met | {
            "every update was made": real.returned.updates == STEPS,
            "began with nothing reserved": real.left_bytes == 0,
        }
        if name == layout.name:
            errors[name] = allocated
        else:
            checks["measures what it did at first"] = real.allocated_peak_bytes == peaks[0]
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
    free = measure(layout, device, target, steps=2)
    fails, completes = free.allocated_peak_bytes - 1, free.reserved_peak_bytes
    trials = 0
    while completes - fails > resolution:
        trials += 1
        middle = (fails + completes) // 2
        if measure(layout, device, target, middle, steps=2) is None:
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
    planned = measure(layout, device, target, simulated_bytes + MARGIN_BYTES, steps=2)
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
        base, target, room, steps = DRY_GRID[0], gpu_target(CARDS["rtx3060"], fused_kernels=False), None, STEPS
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
        real = measure(layout, device, target, room, steps=steps)
        if real is not None:
            seconds[layout.name] = real.returned.step_seconds
        if found is not None and found.case == case:
            chosen = layout.name
        values = {
            "measured_step_seconds": seconds.get(layout.name),
            "predicted_step_seconds": recording.seconds,
            "completes": real is not None,
            "predicted_to_complete": _completes(recording.tape, room),
        }
        setting.record(f"choice of {layout.name}", values, {})
    best = min(seconds, key=seconds.get, default=None)
    values = {"chosen": chosen, "fastest": best, "choices": len(layouts), "completed": len(seconds)}
    checks = {"the choice completes": chosen in seconds}
    if chosen in seconds:
        values["seconds_over_fastest"] = seconds[chosen] / seconds[best]
        if not setting.dry_run:
            checks["within 5% of the fastest"] = seconds[chosen] <= MOST_SLOWER * seconds[best]
    return Result(values, checks)


def measure(
    layout: Layout, device: torch.device, target: Target, limit_bytes: int | None = None, *, steps: int = STEPS,
    history: bool = False,
) -> Measured[Ran] | None:  # fmt: skip
    """Really runs `layout`, with the kernels that `target` counts on; None where it ran out of memory under the cap."""

    def work() -> Ran:
        decoder = layout.decoder(target.fused_kernels)
        return train(decoder, layout.case(len(decoder.units)), layout.tokens(), device, steps)

    return measured.measure(work, device, limit_bytes, history=history)


def _completes(tape: Tape, limit_bytes: int | None) -> bool:
    try:
        under_cap(tape, limit_bytes)
    except SimulatedOutOfMemory:
        return False
    return True
