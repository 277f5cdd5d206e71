"""The plan on the CPU.

There is no choice to make for speed: the largest micro-batch of at most 4,096 tokens that fits, and recompute unless
all activations fit into a quarter of the free RAM. The simulated peak is RAM's, and beside it as much as the blocks'
activations ever take: malloc keeps what was freed in small blocks and does not find it all again. That is a rule of
thumb (experiments/memory_estimation has four models' figures beside it).

The micro-batch changes the bits of the result. So it never depends on what happens to be free or on a stopwatch: the
same command on the same machine takes the same one.
"""

from collections.abc import Callable
from dataclasses import replace

from lowmem.core.decoder import Decoder
from lowmem.core.layout import Fate, Layout
from lowmem.cudasim.tape import most_bytes, named_at_peak
from lowmem.device import RETURNED_FROM_BYTES
from lowmem.errors import PlanError
from lowmem.planning.alternatives import largest_drawn_bytes, placements, step_case
from lowmem.planning.caps import refusal
from lowmem.planning.plan import Plan
from lowmem.planning.ram import CPU_TRAINING_BYTES, PROCESS_VARIES_BYTES, Process, on_the_cpu
from lowmem.planning.simulated_step import cpu_target
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings

CPU_MICRO_BATCH_TOKENS = 4096


def cpu_plan(
    settings: Settings, decoder: Callable[[], Decoder], precision: str, ram_free_bytes: int | None, process: Process
) -> Plan:
    """make_plan's, for the CPU; PlanError where nothing fits."""
    case = step_case(settings, precision)
    simulations = Simulations(decoder, case, cpu_target())
    choices = placements(settings, simulations)[0]  # in RAM they are in any case, and so are boundaries
    if settings.gradients == "streamed":
        choices = replace(choices, fate=Fate.SENT, states_on_gpu=[0])

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
        ram = on_the_cpu(process.now_bytes + CPU_TRAINING_BYTES, train, largest_drawn_bytes(settings, simulations))
        return Plan(
            settings.model, simulations.parameters, simulations.units, simulations.blocks, settings, "cpu", precision,
            None, layout, settings.gpu_limit_bytes, None, None, {}, ram, None,
            None, [], checkpoint_bytes=recording.checkpoint_bytes, disk_state_bytes=sum(recording.disk_bytes),
        )  # fmt: skip

    def fits(plan: Plan) -> bool:
        return settings.ram_limit_bytes is None or plan.ram_bytes <= settings.ram_limit_bytes

    def fits_here(plan: Plan) -> bool:
        return ram_free_bytes is None or plan.ram_bytes - process.now_bytes <= ram_free_bytes

    def on_disk(layout: Layout, states_on_disk: int) -> Layout:
        return replace(layout, states_on_gpu=simulations.units - states_on_disk, states_on_disk=states_on_disk)

    def with_fewer_on_disk(plan: Plan) -> Plan:
        too_few = 0
        while plan.layout.states_on_disk - too_few > 1:
            fewer = plan_of(on_disk(plan.layout, (plan.layout.states_on_disk + too_few) // 2))
            if fits(fewer) and fits_here(fewer):
                plan = fewer
            else:
                too_few = fewer.layout.states_on_disk
        return plan

    def twice(layout: Layout) -> Layout:
        return replace(layout, fate=Fate.DROPPED, group=settings.batch // layout.micro_batch)

    most = max(CPU_MICRO_BATCH_TOKENS // settings.seq, 1)
    sizes = [size for size in choices.micro_batches if size <= most] or choices.micro_batches[:1]
    layouts = [
        Layout(
            size, choices.groups_of(settings.batch, size)[0], choices.segments[0],
            states_on_gpu=choices.states_on_gpu[-1], weights_on_gpu=choices.weights_on_gpu,
            boundaries_in_ram=settings.boundaries == "streamed", states_on_disk=choices.states_on_disk,
            fate=choices.fate,
        )
        for size in reversed(sizes)
    ]  # fmt: skip
    layouts = [simulations.keeping(layout, choices.kept[0]) for layout in layouts]
    may_run_twice = case.needs_all_gradients and settings.group is None and choices.fate is Fate.HELD
    if may_run_twice:
        layouts += map(twice, list(layouts))
    plan = next((plan for plan in map(plan_of, layouts) if fits(plan)), None)
    if settings.states_folder is not None and (plan is None or not fits_here(plan)):
        layouts = [on_disk(layout, simulations.units) for layout in layouts]
        plan = next((plan for plan in map(plan_of, layouts) if fits(plan) and fits_here(plan)), plan)
        if plan is not None and settings.states != "disk":
            plan = with_fewer_on_disk(plan)
    if plan is None:
        least = min(plan_of(layout).ram_bytes for layout in layouts) + PROCESS_VARIES_BYTES
        raise PlanError(refusal(settings, None, None, least))
    if may_run_twice and not fits_here(plan):  # which changes no bit, so what is free may decide it
        plan = plan_of(twice(plan.layout))
    streamed = choices.weights_on_gpu is not None or settings.boundaries == "streamed" or plan.layout.states_on_disk
    if settings.recompute == "auto" and ram_free_bytes is not None and not streamed:
        kept = plan_of(simulations.keeping(plan.layout, 2 * simulations.blocks))
        activations = kept.ram_bytes - plan.ram_bytes
        if fits(kept) and fits_here(kept) and activations <= ram_free_bytes // 4:
            plan = kept
    return plan
