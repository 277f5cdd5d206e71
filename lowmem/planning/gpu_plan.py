"""The plan for a GPU: the fastest layout that fits under both caps, and what that takes as it runs."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from lowmem.core.decoder import Decoder
from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import Card
from lowmem.cudasim.tape import under_cap
from lowmem.errors import PlanError
from lowmem.limits import CONTEXT_BYTES, OVERSHOOT_BYTES
from lowmem.planning.alternatives import all_choices, choices_of, in_order, largest_drawn_bytes, step_case, twice
from lowmem.planning.caps import refusal, room_under, smallest_cap, what
from lowmem.planning.columns import Choices, MemoryLimits, within
from lowmem.planning.plan import Plan
from lowmem.planning.ram import (
    CUDA_PROCESS_BYTES,
    PROCESS_VARIES_BYTES,
    TRAINING_BYTES,
    Process,
    largest,
    most_streamed,
    on_a_gpu,
)
from lowmem.planning.search import Found, fastest, frugal, smallest_room, streaming_more
from lowmem.planning.simulated_step import Recording, StepCase, gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.units import GIB, format_size

_WORTH_SAYING = 0.995  # of a step's time: what more RAM has to bring it below


def gpu_plan(
    settings: Settings, decoder: Callable[[], Decoder], precision: str, card: Card,
    fused_kernels: bool | None, process: Process | None, roomy: Plan | None = None,
) -> Plan:  # fmt: skip
    """make_plan's, for a GPU; PlanError where nothing fits. `roomy`: the plan without this cap of RAM, where that is
    known to be the faster one."""
    target = gpu_target(card, fused_kernels, settings.disk_rate_bytes)
    decoder = partial(decoder, fused_kernels=target.fused_kernels)
    gpu_limit, card_limit = settings.gpu_limit_bytes, None
    if settings.gpu is not None or (gpu_limit is None and (process is not None or torch.cuda.is_available())):
        card_limit = card.memory_bytes - CONTEXT_BYTES  # what CUDA's context takes of a card is not for us
        gpu_limit = min(gpu_limit or card_limit, card_limit)
    process_bytes = CUDA_PROCESS_BYTES if process is None else process.now_bytes + TRAINING_BYTES
    case = step_case(settings, precision)
    simulations = Simulations(decoder, case, target)
    drawn_bytes = largest_drawn_bytes(settings, simulations)

    def room_for(case: StepCase) -> MemoryLimits:
        gpu, ram = (None if gpu_limit is None else room_under(gpu_limit)), settings.ram_limit_bytes
        if ram is not None:
            ram = most_streamed(ram, process_bytes, drawn_bytes, case.optimizer, case.dtype)
        return MemoryLimits(gpu, ram)

    room = room_for(case)
    found = fastest_layout(settings, simulations, room)
    if found is None:
        smallest = least_room(settings, simulations, room)
        ram = sum(largest(on_a_gpu(process_bytes, smallest.ram, drawn_bytes, case.optimizer, case.dtype)).values())
        ram += 0 if process is None else PROCESS_VARIES_BYTES
        if card_limit is not None and smallest_cap(smallest.gpu) > card_limit:
            raise PlanError(
                f"{card.name} has {format_size(card_limit)} for us; {what(settings)} needs "
                f"{format_size(smallest_cap(smallest.gpu))}, even with {format_size(ram)} of RAM: "
                "no plan for this card."
            )
        sentence = refusal(settings, gpu_limit, smallest.gpu, ram)
        only_ram_is_short = room.ram is not None and smallest.gpu == room.gpu
        if only_ram_is_short and settings.optimizer == "adamw":
            smaller = Simulations(decoder, replace(case, optimizer=OPTIMIZERS["adamw8bit"]), target)
            if fastest(smaller, choices_of(settings, smaller), room_for(smaller.base)) is not None:
                sentence += " It fits as it is with --optimizer adamw8bit, whose moments are not exact."
        raise PlanError(sentence)
    run = _as_it_runs(simulations, found, gpu_limit)
    plan = _plan(settings, simulations, "cuda", precision, card, gpu_limit, run, process_bytes)
    plan = replace(plan, fused_kernels=target.fused_kernels)
    may_wait_in_ram = settings.gradients == "auto" and settings.states != "resident"
    if roomy is None and found.layout.fate is Fate.DROPPED and room.ram is not None and may_wait_in_ram:
        streamed = replace(settings, gradients="streamed")
        faster = fastest_layout(streamed, simulations, MemoryLimits(room.gpu, None))
        if faster is not None and faster.recording.seconds < _WORTH_SAYING * plan.step_seconds:
            roomy = _plan(settings, simulations, "cuda", precision, card, gpu_limit, faster, process_bytes)
    if roomy is not None:
        return replace(plan, faster_with_ram=(roomy.ram_bytes, roomy.step_seconds))
    return replace(plan, seconds_with_more_ram=_seconds_with_more_ram(settings, simulations, room, found))


def _as_it_runs(simulations: Simulations, found: Found, gpu_limit: int | None) -> Found:
    """A layout with a first step as long as a run's, and what that takes where the allocator has the run's cap
    (limits.py), which is wider than the room that was searched: it keeps more of what is free before it gives that
    back."""
    recording = simulations.record_run(found.layout)
    try:
        memory = under_cap(recording.tape, None if gpu_limit is None else gpu_limit - OVERSHOOT_BYTES)
    except SimulatedOutOfMemory:  # what is given back earlier may leave fewer holes
        return found
    return replace(found, recording=recording, memory=memory)


def fastest_layout(settings: Settings, simulations: Simulations, room: MemoryLimits) -> Found | None:
    """The fastest of all that the settings leave open, list by list: everything that computes is on the GPU; working
    weights are streamed; boundaries are in RAM; both; and then the same with states on a disk, as few as may be. What
    comes later takes more RAM, or a disk. It is looked at until something fits whose weights are on the GPU with all
    gradients, and a disk is used only where nothing fits without, or nothing but what runs forward and backward twice.
    What a disk costs is no part of the search, since all that streams as much waits for it as long."""
    best = None
    for alternatives in in_order(settings, simulations):
        on_disk = bool(alternatives[0].states_on_disk)
        if best is not None:
            if on_disk and best.layout.fate is not Fate.DROPPED:
                break
            alternatives = _possibly_faster(alternatives, best)
        below_seconds = math.inf if best is None else best.recording.seconds
        if on_disk:
            found = _fastest_with_disk(settings, simulations, alternatives, room, below_seconds)
        else:
            found = _fastest_of(simulations, alternatives, room, below_seconds)[0]
        best = found or best
        if best is not None and not best.layout.whole_batch and best.layout.weights_on_gpu is None:
            break
    return best


def _possibly_faster(alternatives: Sequence[Choices], best: Found) -> list[Choices]:
    """Those that may be faster than `best`, which earlier ones have come to. Forward and backward twice save nothing
    but waiting then; and boundaries in RAM save time by larger micro-batches alone, for their blocks keep nothing."""
    left = []
    for which in alternatives:
        if which.boundaries_in_ram and best.layout.fate is not Fate.DROPPED:
            larger = [size for size in which.micro_batches if size > best.layout.micro_batch]
            which = replace(which, micro_batches=larger)
        if which.micro_batches and which.fate is not Fate.DROPPED:
            left.append(which)
    return left


def _fastest_with_disk(
    settings: Settings, simulations: Simulations, alternatives: Sequence[Choices], room: MemoryLimits,
    below_seconds: float,
) -> Found | None:  # fmt: skip
    """The fastest layout of several choices that fits with states on a disk, of as few units as RAM asks for. Gradients
    in RAM leave more for a disk, which may take longer than what they save; so the rest is looked at, too."""
    best, units = None, simulations.units
    states_on_disk = range(units if settings.states == "disk" else 1, units + 1)
    for in_ram in (True, False):
        remaining = [replace(which, states_on_disk=0) for which in alternatives if (which.fate is Fate.SENT) == in_ram]
        while remaining:
            found, chosen = _fastest_of(simulations, remaining, MemoryLimits(room.gpu, None), below_seconds)
            if found is None:
                break
            found = _with_states_on_disk(simulations, found, room, states_on_disk)
            if found is not None:
                if found.recording.seconds < below_seconds:
                    best, below_seconds = found, found.recording.seconds
                break
            remaining.remove(chosen)  # its weights and boundaries leave no room in RAM; others may have fewer there
    return best


def _fastest_of(
    simulations: Simulations, alternatives: Sequence[Choices], room: MemoryLimits, below_seconds: float
) -> tuple[Found | None, Choices | None]:
    """The fastest layout of several choices, if it takes less than `below_seconds`, and of which of them it is; None
    twice where there is none. Where working weights are streamed as many are on the GPU as it has room for."""
    found, chosen = None, None
    for which in alternatives:
        faster = fastest(simulations, which, room, below_seconds)
        if faster is not None:
            found, chosen, below_seconds = faster, which, faster.recording.seconds
    if found is not None and chosen.weights_on_gpu is not None:
        found = _with_more_weights(simulations, found, room)
    return found, chosen


def _with_states_on_disk(
    simulations: Simulations, found: Found, room: MemoryLimits, states_on_disk: range
) -> Found | None:
    """The same with the states of as few units on a disk as RAM has room for the others'; None where it has not even
    room for what is left with all of them there."""

    def on_disk(units: int) -> Found:
        layout = replace(found.layout, states_on_disk=units)
        return replace(found, layout=layout, recording=simulations.record(layout))

    place = bisect_left(
        states_on_disk, True, key=lambda units: within(on_disk(units).recording.streamed_bytes, room.ram)
    )
    return None if place == len(states_on_disk) else on_disk(states_on_disk[place])


def _with_more_weights(simulations: Simulations, found: Found, room: MemoryLimits) -> Found:
    """The same with the working weights of as many units on the GPU as it has room for: each takes its bytes there, and
    leaves less to be brought."""
    fits, beyond = found.layout.weights_on_gpu, simulations.units - 1
    while beyond - fits > 1:
        layout = replace(found.layout, weights_on_gpu=(fits + beyond) // 2)
        runs = simulations.runs(layout)
        if runs.fits(room.gpu):
            fits, found = layout.weights_on_gpu, Found(layout, simulations.record(layout), runs.memory)
        else:
            beyond = layout.weights_on_gpu
    return found


def _seconds_with_more_ram(
    settings: Settings, simulations: Simulations, room: MemoryLimits, found: Found
) -> float | None:
    """How long a step takes with 1 GiB more of RAM, or less; None where RAM is not what decides, or where that changes
    little. It is the time of one layout, which fits then: that of `found`, but streaming and keeping more."""
    recording, resident = found.recording, found.layout.states_on_gpu
    if (
        room.ram is None
        or not resident
        or found.layout.states_on_disk
        or recording.streamed_bytes + recording.state_bytes[resident - 1] <= room.ram
    ):
        return None
    choices = choices_of(settings, simulations)
    if found.layout.fate is Fate.DROPPED:
        choices = twice(choices)
    more = streaming_more(simulations, choices, MemoryLimits(room.gpu, room.ram + GIB), found)
    if more is None or more.recording.seconds >= _WORTH_SAYING * recording.seconds:
        return None
    return more.recording.seconds


def least_room(settings: Settings, simulations: Simulations, room: MemoryLimits) -> MemoryLimits:
    """The smallest caps that would do where nothing fits into `room`."""
    every = all_choices(settings, simulations)
    rooms = [(smallest_room(simulations, which, room), which.weights_on_gpu is not None) for which in every]
    # Streamed weights take more RAM: where its cap does not allow that, they are no help with the GPU's.
    helping = [found for found, streamed in rooms if not streamed or room.ram is None or found.ram <= room.ram]
    rooms = helping or [found for found, _ in rooms]
    return min(rooms, key=lambda room: (room.gpu or 0, room.ram))


def frugal_layouts(settings: Settings, simulations: Simulations) -> list[Layout]:
    """Layouts with no cap for RAM, one of which takes least of the GPU."""
    room = MemoryLimits(None, None)
    every = all_choices(settings, simulations)
    return [layout for choices in every for layout in frugal(simulations, choices, room)]


def _plan(
    settings: Settings, simulations: Simulations, device: str, precision: str, card: Card | None,
    gpu_limit: int | None, found: Found, process_bytes: int,
) -> Plan:  # fmt: skip
    recording, case = found.recording, simulations.base
    drawn_bytes = largest_drawn_bytes(settings, simulations)
    ram = on_a_gpu(
        process_bytes, recording.streamed_bytes, drawn_bytes, case.optimizer, case.dtype,
        recording.streamed_weight_bytes, recording.boundary_bytes, recording.gradient_bytes,
        recording.disk_buffer_bytes,
    )  # fmt: skip
    return Plan(
        settings.model, simulations.parameters, simulations.units, simulations.blocks, settings, device, precision,
        card, found.layout, gpu_limit,
        found.memory.allocated_peak_bytes, found.memory.reserved_peak_bytes, found.memory.at_peak, ram,
        recording.seconds, recording.waiting_seconds, _one_step(recording, found.memory.timeline),
        checkpoint_bytes=recording.checkpoint_bytes, disk_state_bytes=sum(recording.disk_bytes),
    )  # fmt: skip


def _one_step(recording: Recording, timeline: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """The part of a timeline that belongs to the second step, from 0 seconds on."""
    return [
        (seconds - recording.began, allocated, reserved)
        for seconds, allocated, reserved in timeline
        if 0 <= seconds - recording.began <= recording.seconds
    ]
