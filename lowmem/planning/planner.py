"""Settings and a model's config in, a plan out: how the step is laid out, what it will take, and how long.

The plan is a prediction about the code that trains, not a formula beside it: search.py tries layouts of the step in a
simulation of it (simulate/step.py) and takes the fastest whose run completes under both caps. No weights are loaded and
no GPU is needed. Where nothing fits, forward and backward run twice a step, so that gradients are never all held. The
optimizer is never another than was asked for; where RAM alone is short, a refusal says whether 8-bit moments would fit.

    GPU   the simulated run, and a margin left free (room_under)
    RAM   streamed states, and the process: what it holds now, and what training adds to that; and what loading,
          saving and export take on top (ram.py)

On the CPU there is no choice to make for speed: the largest micro-batch of at most 4,096 tokens that fits, and
recompute unless all activations fit into a quarter of the free RAM. The simulated peak is then RAM's, and beside it as
much as the blocks' activations ever take: malloc keeps what was freed in small blocks and does not find it all again.
That is a rule of thumb (experiments/memory_estimation has four models' figures beside it).

The micro-batch changes the bits of the result. So it never depends on what happens to be free or on a stopwatch: the
same command on the same machine takes the same one.
"""

import gc
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest

import torch
from transformers import PretrainedConfig

from lowmem.core.decoder import Decoder
from lowmem.core.layout import LEAST_POSITIONS, Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.device import RETURNED_FROM_BYTES
from lowmem.errors import PlanError
from lowmem.limits import CONTEXT_BYTES, OVERSHOOT_BYTES, ram_now_bytes
from lowmem.models.build import make_decoder
from lowmem.models.compatibility import architecture_blamed, compare_small_copy
from lowmem.planning.columns import within
from lowmem.planning.plan import Plan
from lowmem.planning.ram import (
    CPU_TRAINING_BYTES,
    CUDA_PROCESS_BYTES,
    PROCESS_VARIES_BYTES,
    TRAINING_BYTES,
    Process,
    largest,
    most_streamed,
    on_a_gpu,
    on_the_cpu,
)
from lowmem.planning.search import (
    SEGMENTS,
    Choices,
    Found,
    MemoryLimits,
    fastest,
    frugal,
    smallest_room,
    streaming_more,
)
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.simulate.allocator import SimulatedOutOfMemory
from lowmem.simulate.gpus import Card
from lowmem.simulate.step import (
    Recording,
    StepCase,
    cpu_target,
    gpu_target,
    most_bytes,
    named_at_peak,
    under_cap,
)
from lowmem.units import GIB, MIB, format_size

_WORTH_SAYING = 0.995  # of a step's time: what more RAM has to bring it below
MARGIN_BYTES = 64 * MIB  # of the GPU's cap, at least; with pages that are mapped beyond the allocator's own (limits.py)
MARGINS_IN_A_CAP = 200  # 0.5%: a driver's addresses decide which free block serves which request
CPU_MICRO_BATCH_TOKENS = 4096
FEW_SEQUENCES = 4  # to a micro-batch, where forward and backward run twice: those plans take long to make
SEGMENTS_OF_A_BATCH = (1, 2, 4, 6, 8)  # blocks per segment that are tried where the inputs of a whole batch are kept


def make_plan(
    settings: Settings, config: PretrainedConfig, device: str, precision: str, card: Card | None,
    ram_free_bytes: int | None = None, fused_kernels: bool | None = None,
    process: Process | None = None,
) -> Plan:  # fmt: skip
    """The plan for the model of `config` on `device` ("cuda", with a `card`, or "cpu"); PlanError, naming the smallest
    caps that would do, where nothing fits; InputError for an architecture that cannot be trained in pieces.
    `ram_free_bytes`: what this machine has, if the plan is for this machine. `fused_kernels`: whether operators.py's
    can be had, None: as is to be expected of the card. `process`: what the process that is going to train has taken,
    where that is not this one."""
    if process is None and (device == "cpu" or torch.cuda.is_initialized()):
        process = Process(ram_now_bytes(), 0)
    not_compared = compare_small_copy(config, settings.masks_documents, precision, settings.residual)
    decoder = partial(make_decoder, config, precision, settings.residual)
    with architecture_blamed(settings.model, precision), _what_is_there_left_to_itself():
        if device == "cpu":
            plan = _cpu_plan(settings, decoder, precision, ram_free_bytes, process)
        else:
            plan = _gpu_plan(settings, decoder, precision, card, fused_kernels, process)
    if ram_free_bytes is not None and process is not None and plan.ram_bytes - process.now_bytes > ram_free_bytes:
        raise PlanError(
            f"{_what(settings)} needs {format_size(plan.ram_bytes)} of RAM in "
            f"this plan, and {format_size(ram_free_bytes)} are free here; free some, or lower --micro-batch or --seq."
        )
    ram_limit = settings.ram_limit_bytes
    if process is not None and ram_limit is not None and process.peak_bytes > ram_limit:
        raise PlanError(
            f"{_what(settings)}: reading the data has taken {format_size(process.peak_bytes)} of RAM already, which is "
            f"over the cap of {format_size(ram_limit)}; give --ram-limit {math.ceil(process.peak_bytes / MIB)}MiB or "
            "more, or less text."
        )
    if process is not None and process.peak_bytes:
        plan = replace(plan, ram={"prepare": {"process": process.peak_bytes}} | plan.ram)
    return replace(plan, not_compared=not_compared)


@contextmanager
def _what_is_there_left_to_itself() -> Iterator[None]:
    """Python's cycle collector passes over the objects that there are now, those of all that has been imported: a plan
    makes so many that it would look at them again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _gpu_plan(
    settings: Settings, decoder: Callable[[], Decoder], precision: str, card: Card,
    fused_kernels: bool | None, process: Process | None,
) -> Plan:  # fmt: skip
    target = gpu_target(card, fused_kernels, settings.disk_rate_bytes)
    decoder = partial(decoder, fused_kernels=target.fused_kernels)
    gpu_limit, card_limit = settings.gpu_limit_bytes, None
    if settings.gpu is not None or (gpu_limit is None and (process is not None or torch.cuda.is_available())):
        card_limit = card.memory_bytes - CONTEXT_BYTES  # what CUDA's context takes of a card is not for us
        gpu_limit = min(gpu_limit or card_limit, card_limit)
    process_bytes = CUDA_PROCESS_BYTES if process is None else process.now_bytes + TRAINING_BYTES
    case = step_case(settings, precision)
    simulations = Simulations(decoder, case, target)
    drawn_bytes = _drawn_bytes(settings, simulations)

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
                f"{card.name} has {format_size(card_limit)} for us; {_what(settings)} needs "
                f"{format_size(smallest_cap(smallest.gpu))}, even with {format_size(ram)} of RAM: "
                "no plan for this card."
            )
        refusal = _refusal(settings, gpu_limit, smallest.gpu, ram)
        only_ram_is_short = room.ram is not None and smallest.gpu == room.gpu
        if only_ram_is_short and settings.optimizer == "adamw":
            smaller = Simulations(decoder, replace(case, optimizer=OPTIMIZERS["adamw8bit"]), target)
            if fastest(smaller, _choices(settings, smaller), room_for(smaller.base)) is not None:
                refusal += " It fits as it is with --optimizer adamw8bit, whose moments are not exact."
        raise PlanError(refusal)
    run = _as_it_runs(simulations, found, gpu_limit)
    plan = _plan(settings, simulations, "cuda", precision, card, gpu_limit, run, process_bytes)
    plan = replace(plan, fused_kernels=target.fused_kernels)
    plan = replace(plan, seconds_with_more_ram=_seconds_with_more_ram(settings, simulations, room, found))
    return plan


def room_under(gpu_limit: int) -> int:
    """What a layout may take, simulated, under a cap of the GPU's memory."""
    return gpu_limit - max(MARGIN_BYTES, gpu_limit // MARGINS_IN_A_CAP)


def smallest_cap(room: int) -> int:
    """The smallest cap that leaves so much room."""
    return max(room + MARGIN_BYTES, (room - 1) * MARGINS_IN_A_CAP // (MARGINS_IN_A_CAP - 1) + 1)


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
    """Of all that the settings leave open, in this order: everything that computes is on the GPU; working weights are
    streamed; boundaries are in RAM; both; and then the same with states on a disk, as few as may be. What comes later
    takes more RAM, or a disk, and is tried where nothing before it fits, or only what runs forward and backward twice:
    of these it is the fastest. What a disk costs is no part of the search, since all that streams as much waits for it
    as long."""
    best = None
    for alternatives in _in_order(settings, simulations):
        below_seconds = math.inf if best is None else best.recording.seconds
        if alternatives[0].disk_units:
            found = _fastest_with_disk(settings, simulations, alternatives, room, below_seconds)
        else:
            found = _fastest_of(simulations, alternatives, room, below_seconds)[0]
        best = found or best
        if best is not None and not best.layout.norm_first:
            break
    return best


def _fastest_with_disk(
    settings: Settings, simulations: Simulations, alternatives: Sequence[Choices], room: MemoryLimits,
    below_seconds: float,
) -> Found | None:  # fmt: skip
    """The fastest layout of several choices that fits with states on a disk, of as few units as RAM asks for. Gradients
    in RAM leave more for a disk, which may take longer than what they save; so the rest is looked at, too."""
    best, units = None, alternatives[0].disk_units
    disk_units = range(units if settings.states == "disk" else 1, units + 1)
    for in_ram in (True, False):
        remaining = [replace(which, disk_units=0) for which in alternatives if which.gradients_in_ram == in_ram]
        while remaining:
            found, chosen = _fastest_of(simulations, remaining, MemoryLimits(room.gpu, None), below_seconds)
            if found is None:
                break
            found = _with_states_on_disk(simulations, found, room, disk_units)
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
    if found is not None and chosen.resident_weights is not None:
        found = _with_more_weights(simulations, found, room)
    return found, chosen


def _with_states_on_disk(simulations: Simulations, found: Found, room: MemoryLimits, disk_units: range) -> Found | None:
    """The same with the states of as few units on a disk as RAM has room for the others'; None where it has not even
    room for what is left with all of them there."""

    def on_disk(units: int) -> Found:
        layout = replace(found.layout, disk_units=units)
        return replace(found, layout=layout, recording=simulations.record(layout))

    place = bisect_left(disk_units, True, key=lambda units: within(on_disk(units).recording.streamed_bytes, room.ram))
    return None if place == len(disk_units) else on_disk(disk_units[place])


def _with_more_weights(simulations: Simulations, found: Found, room: MemoryLimits) -> Found:
    """The same with the working weights of as many units on the GPU as it has room for: each takes its bytes there, and
    leaves less to be brought."""
    fits, beyond = found.layout.resident_weights, simulations.units - 1
    while beyond - fits > 1:
        layout = replace(found.layout, resident_weights=(fits + beyond) // 2)
        runs = simulations.runs(layout)
        if runs.fits(room.gpu):
            fits, found = layout.resident_weights, Found(layout, simulations.record(layout), runs.memory)
        else:
            beyond = layout.resident_weights
    return found


def _seconds_with_more_ram(
    settings: Settings, simulations: Simulations, room: MemoryLimits, found: Found
) -> float | None:
    """How long a step takes with 1 GiB more of RAM, or less; None where RAM is not what decides, or where that changes
    little. It is the time of one layout, which fits then: that of `found`, but streaming and keeping more."""
    recording, resident = found.recording, found.layout.resident_units
    if (
        room.ram is None
        or not resident
        or found.layout.disk_units
        or recording.streamed_bytes + recording.state_bytes[resident - 1] <= room.ram
    ):
        return None
    choices = _choices(settings, simulations)
    if found.layout.norm_first:
        choices = _twice(choices)
    more = streaming_more(simulations, choices, MemoryLimits(room.gpu, room.ram + GIB), found)
    if more is None or more.recording.seconds >= _WORTH_SAYING * recording.seconds:
        return None
    return more.recording.seconds


def least_room(settings: Settings, simulations: Simulations, room: MemoryLimits) -> MemoryLimits:
    """The smallest caps that would do where nothing fits into `room`."""
    every = _all_choices(settings, simulations)
    rooms = [(smallest_room(simulations, which, room), which.resident_weights is not None) for which in every]
    # Streamed weights take more RAM: where its cap does not allow that, they are no help with the GPU's.
    helping = [found for found, streamed in rooms if not streamed or room.ram is None or found.ram <= room.ram]
    rooms = helping or [found for found, _ in rooms]
    return min(rooms, key=lambda room: (room.gpu or 0, room.ram))


def frugal_layouts(settings: Settings, simulations: Simulations) -> list[Layout]:
    """Layouts with no cap for RAM, one of which takes least of the GPU."""
    room = MemoryLimits(None, None)
    every = _all_choices(settings, simulations)
    return [layout for choices in every for layout in frugal(simulations, choices, room)]


def timed_with(plan: Plan, config: PretrainedConfig, lengths: Sequence[int]) -> Plan:
    """`plan` with the seconds of a step whose rows have these lengths, which takes no more memory than full rows do;
    where nobody knows seconds, on the CPU, with its tokens alone. With more RAM it is taken to be as much faster as a
    step of full rows."""
    settings = plan.settings
    plan = replace(plan, typical_tokens=sum(lengths))
    if plan.card is None:
        return plan
    decoder = partial(make_decoder, config, plan.precision, settings.residual, plan.fused_kernels)
    case = replace(step_case(settings, plan.precision), lengths=tuple(lengths))
    target = gpu_target(plan.card, plan.fused_kernels, settings.disk_rate_bytes)
    recording = Simulations(decoder, case, target).record(plan.layout)
    more_ram = plan.seconds_with_more_ram
    return replace(
        plan,
        step_seconds=recording.seconds,
        waiting_seconds=recording.waiting_seconds,
        seconds_with_more_ram=more_ram and more_ram * recording.seconds / plan.step_seconds,
    )


def step_case(settings: Settings, precision: str, device: str = "cuda") -> StepCase:
    """What all layouts of these settings share, in one of them."""
    layout = Layout(micro_batch=1, least_positions=LEAST_POSITIONS[device])
    return StepCase(
        settings.seq, settings.batch, layout, WORKING_DTYPES[precision],
        OPTIMIZERS[settings.optimizer], settings.clip_norm, settings.masks_documents,
        target_tokens=settings.target_tokens,
    )  # fmt: skip


def _choices(settings: Settings, simulations: Simulations) -> Choices:
    """All that the settings leave open."""
    units, blocks = simulations.units, simulations.blocks
    micro_batches = [size for size in range(1, settings.batch + 1) if settings.batch % size == 0]
    if settings.micro_batch is not None:
        micro_batches = [settings.micro_batch]
    if settings.group is not None:
        micro_batches = [size for size in micro_batches if (settings.batch // size) % settings.group == 0]
    return Choices(
        micro_batches=micro_batches,
        groups=None if settings.group is None else [settings.group],
        segments=SEGMENTS if settings.segment_blocks is None else [settings.segment_blocks],
        kept={"auto": range(2 * blocks + 1), "on": [0], "products": [blocks], "off": [2 * blocks]}[settings.recompute],
        resident_units={"auto": range(units + 1), "resident": [units]}.get(settings.states, [0]),
    )


def _placements(settings: Settings, simulations: Simulations) -> list[Choices]:
    """Choices with all working weights on the GPU, and with those of all blocks streamed; and, where there is a folder
    for them, with all streamed states on a disk."""
    choices = _choices(settings, simulations)
    streamed = replace(
        choices, resident_weights=1, resident_units=[0],
        kept=[kept for kept in choices.kept if kept <= simulations.blocks],
    )  # fmt: skip
    possible = settings.states != "resident" and settings.recompute != "off"
    placed = {"auto": [choices, streamed] if possible else [choices], "resident": [choices], "streamed": [streamed]}[
        settings.weights
    ]
    if settings.states_folder is None:
        return placed
    on_disk = [replace(choices, disk_units=simulations.units) for choices in placed]
    return on_disk if settings.states == "disk" else placed + on_disk


def _in_order(settings: Settings, simulations: Simulations) -> Iterator[list[Choices]]:
    """All that the settings leave open, as fastest_layout tries it: lists of choices, none of them empty."""
    placed = _placements(settings, simulations)
    for on_disk in (False, True):
        of_each = [_alternatives(settings, choices) for choices in placed if bool(choices.disk_units) == on_disk]
        yield from filter(None, chain.from_iterable(zip_longest(*of_each)))


def _all_choices(settings: Settings, simulations: Simulations) -> list[Choices]:
    """The same in one list, but for gradients in RAM where these need not be there: forward and backward twice take
    less of everything but time."""
    if settings.gradients == "auto":
        settings = replace(settings, gradients="resident")
    return list(chain.from_iterable(_in_order(settings, simulations)))


def _alternatives(settings: Settings, choices: Choices) -> list[list[Choices]]:
    """The same with gradients in RAM, or with forward and backward twice, too, where that saves something. And, where a
    step has the whole batch as one group, these with boundaries in RAM, for each length of segments."""
    whole = _whole_batch(settings, choices)
    once = whole if settings.gradients == "streamed" else [choices, *whole]
    if not whole and settings.clip_norm is not None and settings.boundaries == "auto":
        return [once]  # gradients are held, so that inputs of one micro-batch at a time are enough
    lengths = SEGMENTS_OF_A_BATCH if settings.segment_blocks is None else choices.segments
    in_ram = [
        replace(which, boundaries_in_ram=True, segments=[length], kept=which.kept[:1])
        for which in whole or [choices]
        for length in lengths
    ]
    possible = {"auto": [once, in_ram], "resident": [once], "streamed": [in_ram]}[settings.boundaries]
    return possible if settings.recompute != "off" else [once]


def _whole_batch(settings: Settings, choices: Choices) -> list[Choices]:
    """The choices that need never hold all gradients at once on the GPU, where gradients are clipped: they wait in RAM,
    or forward and backward run twice a step."""
    one_group = settings.group in (None, settings.batch // choices.micro_batches[0])
    if settings.clip_norm is None or not one_group:
        return []
    segments = SEGMENTS_OF_A_BATCH if settings.segment_blocks is None else choices.segments
    smallest, *larger = choices.micro_batches
    few = [smallest, *(size for size in larger if size <= FEW_SEQUENCES)]
    fewer = replace(choices, micro_batches=few, segments=segments)
    in_ram = replace(fewer, gradients_in_ram=True, resident_units=[0])
    ways = {"auto": [in_ram, _twice(fewer)], "resident": [_twice(fewer)], "streamed": [in_ram]}[settings.gradients]
    return [_twice(fewer)] if settings.states == "resident" else ways


def _twice(choices: Choices) -> Choices:
    return replace(choices, norm_first=True)


def _plan(
    settings: Settings, simulations: Simulations, device: str, precision: str, card: Card | None,
    gpu_limit: int | None, found: Found, process_bytes: int,
) -> Plan:  # fmt: skip
    recording, case = found.recording, simulations.base
    drawn_bytes = _drawn_bytes(settings, simulations)
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


def _drawn_bytes(settings: Settings, simulations: Simulations) -> int:
    """The largest tensor that is whole in RAM while the weights are loaded."""
    return 4 * simulations.largest_parameter if settings.init == "random" else 0


def _one_step(recording: Recording, timeline: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """The part of a timeline that belongs to the second step, from 0 seconds on."""
    return [
        (seconds - recording.began, allocated, reserved)
        for seconds, allocated, reserved in timeline
        if 0 <= seconds - recording.began <= recording.seconds
    ]


def _cpu_plan(
    settings: Settings, decoder: Callable[[], Decoder], precision: str, ram_free_bytes: int | None, process: Process
) -> Plan:
    case = step_case(settings, precision, "cpu")
    simulations = Simulations(decoder, case, cpu_target())
    choices = _placements(settings, simulations)[0]  # in RAM they are in any case, and so are boundaries

    def plan_of(layout: Layout) -> Plan:
        recording = simulations.record(layout)
        beside = {
            "streamed_weights": recording.streamed_weight_bytes,
            "streamed_boundaries": recording.boundary_bytes,
            "streamed_gradients": recording.gradient_bytes,
        }
        states = recording.streamed_bytes - sum(beside.values())
        train = named_at_peak(recording.tape) | {"streamed_states": states}
        train |= {name: size for name, size in beside.items() if size}
        train["freed_and_kept"] = most_bytes(recording.tape, "live_blocks", RETURNED_FROM_BYTES)
        ram = on_the_cpu(process.now_bytes + CPU_TRAINING_BYTES, train, _drawn_bytes(settings, simulations))
        return Plan(
            settings.model, simulations.parameters, simulations.units, simulations.blocks, settings, "cpu", precision,
            None, layout, settings.gpu_limit_bytes, None, None, {}, ram, None,
            None, [], checkpoint_bytes=recording.checkpoint_bytes, disk_state_bytes=sum(recording.disk_bytes),
        )  # fmt: skip

    def fits(plan: Plan) -> bool:
        return settings.ram_limit_bytes is None or plan.ram_bytes <= settings.ram_limit_bytes

    def fits_here(plan: Plan) -> bool:
        return ram_free_bytes is None or plan.ram_bytes - process.now_bytes <= ram_free_bytes

    def on_disk(layout: Layout, disk_units: int) -> Layout:
        return replace(layout, resident_units=simulations.units - disk_units, disk_units=disk_units)

    def with_fewer_on_disk(plan: Plan) -> Plan:
        too_few = 0
        while plan.layout.disk_units - too_few > 1:
            fewer = plan_of(on_disk(plan.layout, (plan.layout.disk_units + too_few) // 2))
            if fits(fewer) and fits_here(fewer):
                plan = fewer
            else:
                too_few = fewer.layout.disk_units
        return plan

    def twice(layout: Layout) -> Layout:
        return replace(layout, norm_first=True, group=settings.batch // layout.micro_batch)

    def groups_of(micro_batch: int) -> int:
        whole = settings.gradients == "streamed"
        return settings.batch // micro_batch if whole else choices.groups_of(settings.batch, micro_batch)[0]

    most = max(CPU_MICRO_BATCH_TOKENS // settings.seq, 1)
    sizes = [size for size in choices.micro_batches if size <= most] or choices.micro_batches[:1]
    layouts = [
        Layout(
            size, groups_of(size), choices.segments[0],
            resident_units=choices.resident_units[-1], resident_weights=choices.resident_weights,
            boundaries_in_ram=settings.boundaries == "streamed", disk_units=choices.disk_units,
            gradients_in_ram=settings.gradients == "streamed",
            least_positions=case.layout.least_positions,
        )
        for size in reversed(sizes)
    ]  # fmt: skip
    layouts = [simulations.keeping(layout, choices.kept[0]) for layout in layouts]
    may_run_twice = settings.clip_norm is not None and settings.group is None and settings.gradients != "streamed"
    if may_run_twice:
        layouts += map(twice, list(layouts))
    plan = next((plan for plan in map(plan_of, layouts) if fits(plan)), None)
    if settings.states_folder is not None and (plan is None or not fits_here(plan)):
        layouts = [on_disk(layout, simulations.units) for layout in layouts]
        plan = next((plan for plan in map(plan_of, layouts) if fits(plan) and fits_here(plan)), plan)
        if plan is not None and settings.states != "disk":
            plan = with_fewer_on_disk(plan)
    if plan is None:
        least = plan_of(layouts[-1]).ram_bytes + PROCESS_VARIES_BYTES
        raise PlanError(_refusal(settings, None, None, least))
    if may_run_twice and not fits_here(plan):  # which changes no bit, so what is free may decide it
        plan = plan_of(twice(plan.layout))
    streamed = choices.resident_weights is not None or settings.boundaries == "streamed" or plan.layout.disk_units
    if settings.recompute == "auto" and ram_free_bytes is not None and not streamed:
        kept = plan_of(replace(plan.layout, recompute=False, segment_blocks=1))
        activations = kept.ram_bytes - plan.ram_bytes
        if fits(kept) and fits_here(kept) and activations <= ram_free_bytes // 4:
            plan = kept
    return plan


def _refusal(settings: Settings, gpu_limit: int | None, room: int | None, ram: int) -> str:
    """`room`: what the allocator has to have (None: it has enough); `ram`: what the whole run takes of RAM then, and
    where that was measured, what the next process may hold more than this one."""
    caps = [
        f"{format_size(limit)} of {what}"
        for what, limit in (("GPU memory", gpu_limit), ("RAM", settings.ram_limit_bytes))
        if limit is not None
    ]
    wants = [f"--ram-limit {math.ceil(ram / MIB)}MiB"]
    if room is not None:
        wants.insert(0, f"--gpu-limit {math.ceil(smallest_cap(room) / MIB)}MiB")
    return (
        f"{_what(settings)} does not fit in {' and '.join(caps)}; the smallest that would do is {' with '.join(wants)}."
    )


def _what(settings: Settings) -> str:
    return f"{settings.model} at {settings.batch} x {settings.seq} tokens"
