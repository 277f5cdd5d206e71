"""Plans training on a GPU: finds the fastest layout of a step that fits under the caps of GPU memory and RAM."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from lowmem.core.kernels import fused, used_in
from lowmem.core.layout import Fate, Layout
from lowmem.cudasim.tape import Memory
from lowmem.errors import PlanError
from lowmem.limits import CONTEXT_BYTES, OVERSHOOT_BYTES
from lowmem.planning.caps import cap_options, described, margins, refusal, room_under, smallest_cap
from lowmem.planning.choices import ByHome, choices_by_home, step_case, with_fates
from lowmem.planning.columns import Columns
from lowmem.planning.fastest import fastest_layout, smaller_layouts, smallest_room
from lowmem.planning.plan import Plan
from lowmem.planning.question import Question
from lowmem.planning.ram import (
    CUDA_PROCESS_BYTES,
    PROCESS_VARIES_BYTES,
    TRAINING_BYTES,
    Ram,
    largest,
    most_streamed,
    on_a_gpu,
)
from lowmem.planning.search import Found, Room, Search, faster
from lowmem.planning.simulated_step import gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.planning.ways_out import WaysOut, in_a_sentence
from lowmem.units import GIB, format_size

_WORTH_SAYING = 0.995  # The plan names more RAM only if a step then takes less than this share of its time.
_SMALLER = (0.95, 0.85, 0.7, 0.5)  # Smaller layouts allocate at most these shares of the plan's GPU memory.


@dataclass(frozen=True)
class _Case:
    question: Question
    simulations: Simulations
    gpu_limit: int  # cap of GPU memory in bytes, at most the memory that the card has for PyTorch

    @property
    def process_bytes(self) -> int:
        # RAM of the training process, without tensors that are copied to the GPU when needed
        process = self.question.process
        return CUDA_PROCESS_BYTES if process is None else process.now_bytes + TRAINING_BYTES

    def room(self, ram_limit: int | None, margins: int) -> Room:
        """Returns the limits of GPU memory and RAM for the search. `ram_limit`: cap of the process's RAM in bytes;
        None: no cap. `margins`: how many safety margins stay free under the cap of GPU memory."""
        base = self.simulations.base
        gpu = room_under(self.gpu_limit, margins)
        if ram_limit is not None:
            # of the process's RAM, the part for tensors that are copied to the GPU when needed
            ram_limit = most_streamed(ram_limit, self.process_bytes, self.drawn_bytes, base.optimizer, base.dtype)
        return Room(gpu, ram_limit)

    @property
    def margins(self) -> int:
        return margins(self.simulations.base.needs_all_gradients)

    @property
    def drawn_bytes(self) -> int:
        return self.simulations.largest_drawn_bytes(self.question.settings.init)

    def fastest(self, by_home: ByHome, ram_limit: int | None) -> tuple[Found | None, Room]:
        """Returns the fastest of the layouts `by_home` (None if none fits), and the memory limits for which it was
        searched. `ram_limit`: cap of the process's RAM in bytes, or None."""
        room = self.room(ram_limit, self.margins)
        found = fastest_layout(by_home, self.simulations, room)
        if self.margins == 1:
            return found, room
        # A step that does not update weights in backward can be made again, so one margin is enough.
        wider = self.room(ram_limit, margins=1)
        other = fastest_layout(with_fates(by_home, set(Fate) - {Fate.APPLIED}), self.simulations, wider)
        applied = found is not None and found.layout.fate is Fate.APPLIED
        if other is None or (applied and faster(found, other) is found):
            return found, room
        return other, wider

    def plan(self, found: Found) -> Plan:
        question, simulations = self.question, self.simulations
        simulated = simulations.record(found.layout, whole_first_step=True)
        memory, smaller_cap = self._memory(found.layout)
        second_step = [
            (seconds - simulated.began, allocated, reserved)
            for seconds, allocated, reserved in memory.timeline
            if 0 <= seconds - simulated.began <= simulated.seconds
        ]
        return Plan(
            question.settings, simulations.parameters, simulations.units, simulations.blocks, question.precision,
            found.layout, self.ram(simulations, simulated.in_ram), question.card, self.gpu_limit,
            memory.allocated_peak_bytes, memory.reserved_peak_bytes, memory.at_peak,
            step_seconds=simulated.seconds, waiting_seconds=simulated.waiting_seconds, timeline=second_step,
            fused_kernels=simulations.target.fused_kernels, checkpoint_bytes=simulated.checkpoint_bytes,
            disk_state_bytes=sum(simulated.disk_bytes), sent_bytes=simulated.sent_bytes, allocator_bytes=smaller_cap,
        )  # fmt: skip

    def plan_with_smaller(self, found: Found, room: Room) -> Plan:
        """Returns the plan for the layout `found`, with smaller layouts to which training changes if GPU memory runs
        out. They fit into the RAM of `room`. Plans without training, or for several ranks, have none."""
        plan, alone = self.plan(found), self.question.mesh.count == 1
        # Several ranks cannot change their layout.
        if plan.settings.plan_only or not alone:
            return plan
        return replace(plan, smaller_layouts=tuple(smaller_layouts(self.simulations, found, room, _SMALLER)))

    def ram(self, simulations: Simulations, in_ram: dict[str, int]) -> Ram:
        base = simulations.base
        return on_a_gpu(self.process_bytes, in_ram, self.drawn_bytes, base.optimizer, base.dtype)

    def _memory(self, layout: Layout) -> tuple[Memory, int | None]:
        """Simulates `layout` in the caching allocator's model, under the cap that training sets. Returns the memory
        figures and None. If only a smaller cap suffices, returns the figures under it, and its bytes."""
        # a little larger than the memory that the search fills
        cap = self.gpu_limit - OVERSHOOT_BYTES
        searched = (room_under(self.gpu_limit, left_free) for left_free in {1, self.margins})
        memory, found = self.simulations.memory_under(layout, cap, *searched)
        return memory, found if found < cap else None


def gpu_plan(question: Question) -> Plan:
    """Returns the plan for training on a GPU, with the fastest layout that is found. If that needs more RAM than is
    free, returns a plan with the same micro-batch for the free RAM, if there is one. Raises PlanError if nothing fits
    under the memory caps."""
    settings, card = question.settings, question.card
    kernels = fused.expected(card.capability) if question.fused_kernels is None else question.fused_kernels
    target = gpu_target(card, kernels & used_in(question.precision), settings.disk_rate_bytes)
    card_is_known = settings.gpu is not None or question.process is not None or torch.cuda.is_available()
    usable_bytes = card.memory_bytes - CONTEXT_BYTES  # CUDA's context takes the rest of the card
    gpu_limit = min(settings.gpu_limit_bytes or usable_bytes, usable_bytes)
    decoder = partial(question.make_decoder, fused_kernels=target.fused_kernels)
    simulations = Simulations(decoder, step_case(settings, question.precision, question.mesh), target)
    case = _Case(question, simulations, gpu_limit)
    by_home = choices_by_home(settings, simulations)
    found, room = case.fastest(by_home, settings.ram_limit_bytes)
    if found is None:
        raise _refused(case, room, usable_bytes if card_is_known else None)
    plan = case.plan_with_smaller(found, room)
    free_bytes = question.ram_here_bytes
    if free_bytes is not None and plan.ram_bytes > free_bytes:
        same = replace(settings, micro_batch=found.layout.micro_batch)
        less, room = case.fastest(choices_by_home(same, simulations), free_bytes)
        return plan if less is None else _with_more_ram_hint(case.plan_with_smaller(less, room), plan)
    if plan.disk_state_bytes and settings.states != "disk":
        layout = replace(found.layout, states_on_disk=0)
        without = replace(found, layout=layout, simulated=simulations.record(layout))
        if without.seconds < _WORTH_SAYING * found.seconds and simulations.completes(layout, room.gpu):
            return _with_more_ram_hint(plan, case.plan(without))
    dropped = found.layout.fate is Fate.DROPPED
    if room.ram is not None and not found.layout.states_on_disk and (dropped or not found.layout.states_on_gpu):
        fates = {Fate.SENT} if dropped else set(Fate)  # to let gradients wait in RAM saves the most time
        more = fastest_layout(with_fates(by_home, fates), simulations, replace(room, ram=None))
        if more is not None and more.seconds < _WORTH_SAYING * found.seconds:
            return _with_more_ram_hint(plan, case.plan(more))
    return replace(plan, faster_with_ram=_more_ram_hint(case, room, found, plan.gpu_reserved_peak_bytes))


def _with_more_ram_hint(plan: Plan, other: Plan) -> Plan:
    return replace(plan, faster_with_ram=(other.ram_bytes, other.step_seconds))


def _more_ram_hint(case: _Case, room: Room, found: Found, reserved_bytes: int) -> tuple[int, float] | None:
    """Returns (the user's RAM cap plus 1 GiB, in bytes; seconds of a step under it). Returns None without a RAM cap, if
    states are on a disk, or if a step would be less than 0.5% faster. `found`: the layout under the present cap.
    `reserved_bytes`: its GPU memory."""
    simulations = case.simulations
    simulated, units = found.simulated, found.layout.states_on_gpu
    # no limit, all states in RAM already, or some on a disk
    if room.ram is None or not units or found.layout.states_on_disk:
        return None
    # RAM has room for the states of another unit, so it is not short.
    if simulated.streamed_bytes + simulated.state_bytes[units - 1] <= room.ram:
        return None
    wasted = reserved_bytes - simulations.allocated_bytes(found.layout)
    more = Room(room.gpu - wasted, room.ram + GIB)
    other = Search(Columns(simulations), more).fastest_in(found.column)
    if other is None or other.seconds >= _WORTH_SAYING * found.seconds:
        return None
    return case.question.settings.ram_limit_bytes + GIB, other.seconds


def _refused(case: _Case, room: Room, card_limit: int | None) -> PlanError:
    """Returns the error to raise if nothing fits into `room`. It names the smallest sufficient caps, and settings that
    fit. `card_limit`: usable bytes of the GPU, None if the kind of GPU is only assumed."""
    question, simulations = case.question, case.simulations
    settings = question.settings
    varies = 0 if question.process is None else PROCESS_VARIES_BYTES

    def ram_bytes(simulations: Simulations, streamed_bytes: int) -> int:
        one = sum(largest(case.ram(simulations, {"streamed_states": streamed_bytes})).values()) + varies
        return one * question.ranks_here

    smallest = smallest_room(choices_by_home(settings, simulations), simulations, room)
    gpu_cap = smallest_cap(smallest.gpu, case.margins)
    ram = ram_bytes(simulations, smallest.ram)
    found = WaysOut(settings, simulations, room, ram_bytes).found()
    said = [way.to_dict() for way in found]
    if card_limit is None or gpu_cap <= card_limit:
        only_ram = smallest.gpu == room.gpu  # whether RAM alone is too small
        named = None if only_ram and settings.gpu_limit_bytes is None else gpu_cap
        options = " ".join(cap_options(named, ram))
        first = {"options": options, "gpu_bytes": gpu_cap, "ram_bytes": ram, "disk_bytes": 0}
        said = [first, *(way for way in said if way["options"] != first["options"])]
        others = [way for way in found if way.changes or not only_ram]  # RAM alone is named already, as `first`
        return PlanError(refusal(question, named and case.gpu_limit, named, ram) + in_a_sentence(others), said)
    said.append({"options": "", "gpu_bytes": gpu_cap, "ram_bytes": ram, "disk_bytes": 0})
    ram_cap = "" if question.ram_limit_bytes is None else f" and {format_size(question.ram_limit_bytes)} of RAM"
    capped = f"{format_size(case.gpu_limit)}, nor in " if case.gpu_limit < card_limit else ""
    card = f"the {format_size(card_limit)} of {question.card.name}"
    sentence = f"{described(question)} does not fit in {capped}{card}{ram_cap}."
    needed = [format_size(size, rounded_up=True) for size in (gpu_cap, ram)]
    larger = f" A larger GPU needs {needed[0]}, with {needed[1]} of RAM."
    return PlanError(sentence + in_a_sentence(found) + larger, said)
