"""Compares plans with real steps.

    peaks    three steps per layout: allocated and reserved peaks
    caps     the smallest cap under which a real step completes, by bisection
    choice   every layout of a small grid, timed: is the planner's choice within 5% of the fastest?

An error is (predicted - measured) / measured; below 0 the plan promised too much. The first layout is measured again at
the end, and must give the same.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from experiments.gpu_acceptance.layouts import CAPPED, DRY_GRID, GRID, ModelLayout
from experiments.harness import measured
from experiments.harness.at_peak import differences
from experiments.harness.child import Result, Setting
from experiments.harness.measured import Measured, Ran, error, prepared, sixteen_bit, train
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Layout
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import Tape, under_cap
from lowmem.planning.caps import MARGIN_BYTES
from lowmem.planning.choices import Choices, only
from lowmem.planning.fastest import fastest_layout
from lowmem.planning.search import Room
from lowmem.planning.simulated_step import SimulatedStep, Target, gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.units import GIB, MIB

MOST_ALLOCATED_ERROR, MOST_MEDIAN_ERROR, MOST_RESERVED_ERROR, MOST_BELOW = 0.01, 0.005, 0.03, 0.005
MOST_SLOWER = 1.05  # the planner's choice may take this many times the seconds of the fastest layout
# The cap excludes the layout that is fastest without a cap.
CHOICE_LIMIT_BYTES = 4 * GIB
RESOLUTION_BYTES = 8 * MIB  # the search for the smallest cap stops at this distance
SEARCH_SECONDS = 100.0  # the time planned for that search; other work fits into the least time of a job
DIAGNOSES = 4  # so many layouts run again, and list the memory at their peak
STEPS, TIMED_STEPS = 3, 12  # the first two steps of each layout are not timed


@dataclass(frozen=True)
class Simulated:
    simulations: Simulations
    layout: Layout

    @classmethod
    def of(cls, layout: ModelLayout, target: Target) -> "Simulated":
        simulations = Simulations(partial(layout.decoder, target.fused_kernels), layout.case(0), target)
        return cls(simulations, layout.case(simulations.units).layout)

    @property
    def step(self) -> SimulatedStep:
        return self.simulations.record(self.layout)


def check(setting: Setting) -> Result:
    device, _, target = prepared(setting)
    peaks = check_peaks(setting, device, target)
    chosen = check_choice(setting, device, target)
    return Result(peaks.values | chosen.values, peaks.checks | chosen.checks)


def check_peaks(setting: Setting, device: torch.device, target: Target) -> Result:
    grid, capped = (DRY_GRID, DRY_GRID[:1]) if setting.dry_run else (on_card(GRID, device), on_card(CAPPED, device))
    found: dict[str, Result] = {}
    diagnoses = 1 if setting.dry_run else DIAGNOSES
    for layout in (*grid, grid[0]):
        again = layout.name in found
        first = found[layout.name].values.get("measured_allocated_peak_bytes") if again else None
        diagnosed = sum("at_measured_peak" in result.values for result in found.values())
        work = partial(_peaks_of, setting, layout, device, target, first, diagnosed < diagnoses)
        name = f"{layout.name}, again" if again else layout.name
        found[name] = setting.attempt(name, work)
    measured = {layout.name: found[layout.name].values.get("allocated_error") for layout in grid}
    errors = [error for error in measured.values() if error is not None]
    held = {name: result.held for name, result in found.items()}
    for layout in (layout for layout in capped if measured.get(layout.name) is not None):
        name = f"smallest cap of {layout.name}"
        work = partial(smallest_cap, setting, layout, device, target)
        held[name] = setting.attempt(name, work, SEARCH_SECONDS).held
    median = statistics.median(map(abs, errors)) if errors else math.inf
    held[f"median of allocated within {MOST_MEDIAN_ERROR:.1%}"] = median <= MOST_MEDIAN_ERROR
    values = {"layouts": len(errors), "median_allocated_error": median}
    values |= {"lowest_error": min(errors, default=None), "highest_error": max(errors, default=None)}
    return Result(values, held)


def on_card(layouts: Sequence[ModelLayout], device: torch.device) -> tuple[ModelLayout, ...]:
    """Returns each layout once, in precisions of the device: fp16 replaces a missing bf16."""
    half = sixteen_bit(device)
    return tuple(
        dict.fromkeys(replace(layout, precision=half) if layout.precision == "bf16" else layout for layout in layouts)
    )


def _peaks_of(
    setting: Setting, layout: ModelLayout, device: torch.device, target: Target, first: int | None, diagnose: bool
) -> Result:
    """Compares one layout's simulated and measured peaks. `first`: its first measured peak, in bytes."""
    simulated = Simulated.of(layout, target).step
    predicted, real = under_cap(simulated.tape), measure(layout, device, target)
    if real is None:
        return Result({"predicted_allocated_peak_bytes": predicted.allocated_peak_bytes}, {"fits": False})
    allocated = error(predicted.allocated_peak_bytes, real.allocated_peak_bytes)
    reserved = error(predicted.reserved_peak_bytes, real.reserved_peak_bytes)
    values = {
        "allocated_error": allocated,
        "reserved_error": reserved,
        "predicted_allocated_peak_bytes": predicted.allocated_peak_bytes,
        "measured_allocated_peak_bytes": real.allocated_peak_bytes,
        "predicted_reserved_peak_bytes": predicted.reserved_peak_bytes,
        "measured_reserved_peak_bytes": real.reserved_peak_bytes,
        "predicted_step_seconds": simulated.seconds,
        "measured_step_seconds": real.returned.step_seconds,
    }
    # a page of the allocator is much of a tiny model: there reserved has no bar
    checks = bars(allocated, 0.0 if setting.dry_run else reserved)
    if diagnose and (setting.dry_run or not all(checks.values())):
        tape = real.tape or measure(layout, device, target, history=True).tape
        values |= differences(tape, simulated.tape)
    checks |= {
        "every update was made": real.returned.updates == STEPS,
        "began with nothing reserved": real.left_bytes == 0,
    }
    if first is not None:
        checks["measures what it did at first"] = real.allocated_peak_bytes == first
    return Result(values, checks)


def bars(allocated_error: float, reserved_error: float) -> dict[str, bool]:
    """Returns {bar: met} for signed relative errors."""
    return {
        f"allocated within {MOST_ALLOCATED_ERROR:.0%}": abs(allocated_error) <= MOST_ALLOCATED_ERROR,
        f"reserved within {MOST_RESERVED_ERROR:.0%}": abs(reserved_error) <= MOST_RESERVED_ERROR,
        f"not more than {MOST_BELOW:.1%} below": min(allocated_error, reserved_error) >= -MOST_BELOW,
    }


def smallest_cap(setting: Setting, layout: ModelLayout, device: torch.device, target: Target) -> Result:
    """Returns the smallest caps under which the simulated and the real step complete. A plan accepts the layout from
    MARGIN_BYTES above the simulated cap on."""
    simulated = Simulated.of(layout, target)
    simulated_bytes = simulated.simulations.smallest_cap_bytes(simulated.layout)
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
    return Result(values, checks)


def check_choice(setting: Setting, device: torch.device, target: Target) -> Result:
    """Measures each layout of a small grid under CHOICE_LIMIT_BYTES, and compares the planner's choice with the
    fastest."""
    if setting.dry_run:  # where the simulation of the CPU has no clock, and the grid is three layouts
        base, target, room, steps = DRY_GRID[0], gpu_target(CARDS["rtx3060"], Kernels.NONE), None, STEPS
        micro_batches, groups, states = (4,), (1,), ("resident",)
    else:
        (base,) = on_card([ModelLayout("gpt2")], device)
        room, steps = CHOICE_LIMIT_BYTES - MARGIN_BYTES, TIMED_STEPS
        micro_batches, groups, states = (4, 8), (1, 2), ("streamed", "resident")
    layouts = [
        replace(base, micro_batch=micro_batch, group=group, segment=segment, kept=kept, states=kind)
        for micro_batch in micro_batches
        for group in groups
        for segment, kept in ((1, 0), (2, 0), (1, 2))
        for kind in states
        if base.batch % (micro_batch * group) == 0
    ]
    simulations = Simulated.of(base, target).simulations
    choices = [
        Choices(Layout(1), micro_batches, groups, (1, 2), only(kept), only(units))
        for kept in (0, 2 * simulations.blocks)
        for units in sorted({layout.case(simulations.units).layout.states_on_gpu for layout in layouts})
    ]
    found = fastest_layout([choices], simulations, Room(room, None))
    seconds: dict[str, float] = {}
    chosen = None
    for layout in layouts:
        case = layout.case(simulations.units)
        if found is not None and found.layout == case.layout:
            chosen = layout.name

        def work(layout=layout, case=case) -> Result:
            simulated = simulations.record(case.layout)
            real = measure(layout, device, target, room, steps=steps)
            values = {
                "measured_step_seconds": None if real is None else real.returned.step_seconds,
                "predicted_step_seconds": simulated.seconds,
                "completes": real is not None,
                "predicted_to_complete": _completes(simulated.tape, room),
            }
            return Result(values, {})

        timed = setting.attempt(f"choice of {layout.name}", work).values.get("measured_step_seconds")
        if timed is not None:
            seconds[layout.name] = timed
    best = min(seconds, key=seconds.get, default=None)
    values = {"chosen": chosen, "fastest": best, "choices": len(layouts), "completed": len(seconds)}
    checks = {"the choice completes": chosen in seconds}
    if chosen in seconds:
        values["seconds_over_fastest"] = seconds[chosen] / seconds[best]
        if not setting.dry_run:
            checks["within 5% of the fastest"] = seconds[chosen] <= MOST_SLOWER * seconds[best]
    return Result(values, checks)


def measure(
    layout: ModelLayout, device: torch.device, target: Target, limit_bytes: int | None = None, *, steps: int = STEPS,
    history: bool = False,
) -> Measured[Ran] | None:  # fmt: skip
    """Runs `layout` with the kernels of `target`. Returns None if memory ran out under the cap."""

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
