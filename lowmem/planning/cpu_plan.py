"""Chooses how a training step is computed on the CPU: by the first layout that fits into RAM. Predicts no time.

The micro-batch changes the bits of the result, so neither free RAM nor measured time may influence it.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from lowmem.core.layout import Fate, Layout
from lowmem.cudasim.tape import most_bytes, named_at_peak
from lowmem.device import RETURNED_FROM_BYTES, chooses_freed_memory
from lowmem.errors import InputError, PlanError
from lowmem.planning.caps import cap_options, refusal
from lowmem.planning.choices import open_choices, step_case
from lowmem.planning.columns import within
from lowmem.planning.plan import Plan
from lowmem.planning.question import Question
from lowmem.planning.ram import CPU_TRAINING_BYTES, PROCESS_VARIES_BYTES, on_the_cpu
from lowmem.planning.simulated_step import cpu_target
from lowmem.planning.simulations import Simulations
from lowmem.planning.ways_out import WayOut, in_a_sentence, left_to_the_planner
from lowmem.settings import Settings

CPU_MICRO_BATCH_TOKENS = 4096
_HELD = {"working_weights", "buffers", "resident_states", "weight_slots", "staging_ring"}  # in all of a step


@dataclass(frozen=True)
class _Case:
    question: Question
    simulations: Simulations

    def plan(self, layout: Layout, keeps_freed_memory: bool = False) -> Plan:
        question, simulations, simulated = self.question, self.simulations, self.simulations.record(layout)
        train = named_at_peak(simulated.tape) | {name: size for name, size in simulated.in_ram.items() if size}
        # malloc does not reuse all memory of small activations, so their peak is added. A rule of thumb:
        # experiments/memory_estimation has figures of four models.
        small_bytes = most_bytes(simulated.tape, "live_blocks", RETURNED_FROM_BYTES)
        train["freed_and_kept"] = self._gaps_bytes(layout) if keeps_freed_memory else small_bytes
        drawn_bytes = simulations.largest_drawn_bytes(question.settings.init)
        ram = on_the_cpu(question.process.now_bytes + CPU_TRAINING_BYTES, train, drawn_bytes)
        if keeps_freed_memory:  # later evaluations and checkpoints find all of it; it is returned before the export
            ram |= dict.fromkeys(("evaluate", "save"), ram["train"])
            ram["export"] |= {"freed_and_kept": small_bytes}
        return Plan(
            question.settings, simulations.parameters, simulations.units, simulations.blocks, question.precision,
            layout, ram, gpu_limit_bytes=question.settings.gpu_limit_bytes, checkpoint_bytes=simulated.checkpoint_bytes,
            disk_state_bytes=sum(simulated.disk_bytes), sent_bytes=simulated.sent_bytes,
            keeps_freed_memory=keeps_freed_memory,
        )  # fmt: skip

    def _gaps_bytes(self, layout: Layout) -> int:
        # A rule of thumb: if all freed memory is kept, gaps between tensors take as much as a block's temporary tensors
        # and all gradients. Activations that are kept for backward leave no gaps, because the last are freed first.
        tape = self.simulations.record(replace(layout, kept=0, segment_blocks=1)).tape
        return sum(size for name, size in named_at_peak(tape).items() if name not in _HELD)

    def fits(self, plan: Plan) -> bool:
        return within(plan.ram_bytes, self.question.settings.ram_limit_bytes)

    def fits_here(self, plan: Plan) -> bool:
        return within(plan.ram_bytes, self.question.ram_here_bytes) and self.fits(plan)

    def first(self, layouts: Iterable[Layout], fits: Callable[[Plan], bool]) -> Plan | None:
        return next((plan for plan in map(self.plan, layouts) if fits(plan)), None)

    def without_gradients(self, layout: Layout) -> list[Layout]:
        """Returns [a layout like `layout` in which only a few gradients exist at a time], or [] if there is none."""
        whole = self.question.settings.batch // layout.micro_batch
        if layout.fate is not Fate.HELD or self.question.settings.group not in (None, whole):
            return []
        # Backward updates weights. If updates wait for the gradient norm, forward and backward run twice instead.
        fate = Fate.DROPPED if self.simulations.base.needs_all_gradients else Fate.APPLIED
        return [replace(layout, fate=fate, group=whole)]

    def on_disk(self, layout: Layout, units: int) -> Layout:
        # On the CPU, states that are not streamed are in RAM.
        resident = self.simulations.units - units if layout.weights_on_gpu is None else 0
        return replace(layout, states_on_gpu=resident, states_on_disk=units)


def cpu_plan(question: Question, ways_out: bool = True) -> Plan:
    """Returns the plan for training on the CPU, which may need more RAM than is free. Raises PlanError if no layout
    fits under the RAM cap. With `ways_out`, the error also names settings with which training would fit."""
    settings = question.settings
    base = step_case(settings, question.precision, question.mesh)
    simulations = Simulations(question.make_decoder, base, cpu_target())
    case = _Case(question, simulations)
    once = _layouts(settings, simulations)
    # In this order: with all gradients at once, without them, and last with optimizer states on a disk.
    layouts = once + [layout for each in once for layout in case.without_gradients(each)]
    plan = case.first(layouts, case.fits)
    if settings.states_folder is not None and (plan is None or not case.fits_here(plan)):
        layouts = [case.on_disk(layout, simulations.units) for layout in layouts]
        plan = plan or case.first(layouts, case.fits)  # the cap chooses the micro-batch; free RAM, the rest
        if plan is not None:
            same = [layout for layout in layouts if layout.micro_batch == plan.layout.micro_batch]
            plan = case.first(same, case.fits_here) or plan
            plan = plan if settings.states == "disk" else _with_fewer_on_disk(case, plan)
    if plan is None:
        least = min(case.plan(layout).ram_bytes for layout in layouts) + PROCESS_VARIES_BYTES
        least *= question.ranks_here
        found = _ways_out(question) if ways_out else []
        smallest = {"options": " ".join(cap_options(None, least)), "ram_bytes": least, "disk_bytes": 0}
        said = [smallest, *(way.to_dict() for way in found)]
        raise PlanError(refusal(question, None, None, least) + in_a_sentence(found), said)
    if not case.fits_here(plan):  # the Fate of summed gradients changes no bit, so free RAM may choose it
        plan = next((case.plan(layout) for layout in case.without_gradients(plan.layout)), plan)
    return _faster(case, plan)


def _faster(case: _Case, plan: Plan) -> Plan:
    """Returns `plan`, or one that takes more of the RAM that is free here and computes the same bits faster. For each
    of two ways to be faster, RAM grows by at most a quarter of what is free."""
    question, layout = case.question, plan.layout
    free_bytes = question.ram_free_bytes
    if free_bytes is None:
        return plan

    def affordable(plan: Plan, before: Plan) -> bool:
        return case.fits_here(plan) and plan.ram_bytes - before.ram_bytes <= free_bytes // 4

    streamed = layout.weights_on_gpu is not None or layout.boundaries_in_ram or layout.states_on_disk
    if question.settings.recompute == "auto" and not streamed:  # all activations are kept
        kept = case.plan(replace(layout, kept=2 * case.simulations.blocks, segment_blocks=1))
        plan = kept if affordable(kept, plan) else plan
    if chooses_freed_memory():
        keeping = case.plan(plan.layout, keeps_freed_memory=True)
        # Its size is a rule of thumb, so a cap must have room for it twice.
        twice_bytes = keeping.ram_bytes + keeping.ram["train"]["freed_and_kept"]
        if within(twice_bytes, question.settings.ram_limit_bytes) and affordable(keeping, plan):
            return keeping
    return plan


def _ways_out(question: Question) -> list[WayOut]:
    settings = question.settings
    given, others, shorter = left_to_the_planner(settings), {}, settings.seq // 4
    if settings.states_folder is None and question.mesh.count == 1:  # ranks have no disk
        others["--states-folder DIR"] = {"states_folder": "DIR"}
    if settings.optimizer == "adamw":
        others["--optimizer adamw8bit"] = {"optimizer": "adamw8bit"}
    if settings.seq >= 128 and settings.target_tokens is None:
        others[f"--seq {shorter}"] = {"seq": shorter}
    every = [*list(given.items())[-1:], *others.items()]
    if _way_out(question, *every) is None:
        return []
    first = next((way for one in given.items() if (way := _way_out(question, one))), None)
    found = [way for way in (first, *(_way_out(question, one) for one in others.items())) if way is not None]
    if found:
        return found
    # None of them is enough, so the fewest together are looked for.
    for count in range(1 if given else 2, len(others) + 1):
        together = list(others.items())[:count]
        for one in [*given.items()] or [None]:
            if way := _way_out(question, *filter(None, (one, *together))):
                return [way]
    return []


def _way_out(question: Question, *options: tuple[str, dict]) -> WayOut | None:
    """Returns the WayOut that names all of `options`, pairs (words, changes of settings). Returns None if training does
    not fit into RAM with them."""
    changes = {name: value for _, changed in options for name, value in changed.items()}
    with suppress(PlanError, InputError):
        other = replace(question, settings=replace(question.settings, **changes), ram_free_bytes=None)
        plan = cpu_plan(other, ways_out=False)
        words = " ".join(words for words, _ in options)
        return WayOut(words, plan.ram_bytes * question.ranks_here, disk_bytes=plan.disk_state_bytes)


def _layouts(settings: Settings, simulations: Simulations) -> list[Layout]:
    choices = open_choices(settings, simulations)
    base = Layout(
        1, segment_blocks=choices.segments[0], kept=choices.kept[0], states_on_gpu=choices.units_on_gpu[-1],
        states_on_disk=simulations.units if settings.states == "disk" else 0,
        boundaries_in_ram=settings.boundaries == "streamed",
    )  # fmt: skip
    if settings.weights == "streamed":
        base = replace(base, weights_on_gpu=1, states_on_gpu=0)
    if settings.gradients == "streamed":
        base = replace(base, fate=Fate.SENT, states_on_gpu=0)
    whole_batch = base.boundaries_in_ram or base.fate is Fate.SENT or simulations.base.mesh.count > 1
    choices = replace(choices, whole_batch=whole_batch)
    most = max(CPU_MICRO_BATCH_TOKENS // settings.seq, 1)
    groups = {size: found for size in choices.micro_batches if (found := choices.groups_of(settings.batch, size))}
    sizes = [size for size in groups if size <= most] or list(groups)[:1]
    # the largest micro-batch first
    layouts = [replace(base, micro_batch=size, group=groups[size][0]) for size in reversed(sizes)]
    if simulations.base.needs_all_gradients:
        return layouts
    whole = settings.batch
    return [replace(each, fate=Fate.APPLIED) if each.micro_batch * each.group == whole else each for each in layouts]


def _with_fewer_on_disk(case: _Case, plan: Plan) -> Plan:
    # bisects the number of units (mostly blocks) on the disk
    too_few = 0
    while plan.layout.states_on_disk - too_few > 1:
        fewer = case.plan(case.on_disk(plan.layout, (plan.layout.states_on_disk + too_few) // 2))
        if case.fits_here(fewer):
            plan = fewer
        else:
            too_few = fewer.layout.states_on_disk
    return plan
