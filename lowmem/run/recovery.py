"""Recovery from less memory than was planned.

GPU memory can run out because another process took it, because it is fragmented, or because the plan was wrong. The
work is then done again (core/step.py says which part of it) with the first of these measures that helps:

    1. the allocator's unused memory is freed, and the layout stays; once for each layout
    2. a smaller layout (smaller_layouts.py), which changes no bit of the result
    3. smaller micro-batches, which change the bits from that step on

An evaluation gets smaller micro-batches of its own, which change the last digits of its loss, and no bit of training.
The run says each measure, and checkpoints store it, so a resumed run starts with the same layout. If no measure is
left, the run saves its last whole state and ends with exit code 4. A state with half of its updates is not saved.

If the system refuses to page-lock memory, states are copied from pageable memory, slower and without overlap.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from lowmem.core.layout import Layout
from lowmem.core.parameters import Store
from lowmem.core.segment_windows import WEIGHT_SLOTS
from lowmem.core.step import EVALUATION, PART, STEP, UPDATES, TrainingStep
from lowmem.errors import CapExceeded
from lowmem.limits import ram_available_bytes, ram_now_bytes
from lowmem.planning.plan import Plan, kept_in_words
from lowmem.run.smaller_layouts import Sizes, smaller_layouts, with_micro_batch
from lowmem.units import format_size

PAGEABLE_SHARE = 0.5  # of the bus's speed, for copies from pageable memory; assumed
CACHE = "cache"
_WHERE = {PART: " after updates had begun", UPDATES: " in updates", EVALUATION: " in the evaluation"}
_NOTHING_LEFT = {
    STEP: "even for single sequences, with every block recomputed and no states on the GPU that RAM has room for",
    EVALUATION: "even for single sequences, with no states on the GPU that RAM has room for",
    PART: "and once updates have begun nothing else can be given up",
    UPDATES: "and RAM has no room for more states",
}


class OutOfRoom(CapExceeded):
    """Memory ran out, and nothing is left to give up."""


class Recovery:
    """Makes room for a step. `number`: the current optimizer step, from 1; `measures`: every measure so far, as
    checkpoints and the report store them."""

    def __init__(
        self, step: TrainingStep, store: Store, sizes: Sizes, say: Callable[[str], None],
        ram_refuses: Callable[[int, int], str | None] = lambda moving, moved: None,
    ):  # fmt: skip
        """`ram_refuses(moving, moved)`: the reason why RAM has no room for `moving` more bytes of states, `moved` more
        than planned in all; None if it has room."""
        self.number, self.measures = 0, []
        self._step, self._store, self._sizes, self._say, self._ram_refuses = step, store, sizes, say, ram_refuses
        self._planned = step.layout
        self._freed: set[Layout] = set()  # layouts for which the allocator's cache was freed
        step.make_room = self

    def __call__(self, where: str, reason: str) -> None:
        """Makes room after an OutOfMemoryError; OutOfRoom if no measure is left."""
        if where == PART and not self._step.keeps_activations:
            where = UPDATES  # only states can be moved, as in updates
        said = f"step {self.number}: out of memory{_WHERE.get(where, '')} ({reason})"
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        now = self._step.layout
        just_now = bool(self.measures) and self.measures[-1]["step"] == self.number
        if not just_now and now not in self._freed:
            self._freed.add(now)
            self._note(CACHE, now, reason)
            self._say(f"{said}; what the allocator kept was freed, and it is tried again as it was")
            return
        while (found := self._next(where)) is not None:
            name, layout = found
            try:
                locked = self._step.change_layout(layout)
            except torch.OutOfMemoryError:  # no room for the windows' slots: move more states
                if self._step.layout == now:
                    raise
                continue
            self._note(name, layout, reason)
            words = f"{said}; it is tried again, and training goes on, {self._in_words(name, now, layout)}"
            self._say(words if locked else f"{words}; page-locked memory was refused for them, so copies are slower")
            return
        self.measures = [measure for measure in self.measures if measure["step"] < self.number]  # these did not help
        mixed = self._step.halfway or where == UPDATES
        raise OutOfRoom(
            f"{said}. That is out of GPU memory, {_NOTHING_LEFT[where]}; "
            + ("some weights are new and some old by now, so they are not saved; " if mixed else "")
            + "the same command goes on from the newest checkpoint"
        )

    def resume(self, measures: list[dict]) -> None:
        """Takes the last layout of `measures`, those of a checkpoint. If today's plan is another one, for other caps,
        only the size of micro-batches is taken, because the bits depend on it."""
        self.measures += measures
        if not measures:
            return
        last = measures[-1]
        if last.get("planned") == asdict(self._planned):
            layout = Layout(**last["layout"])
        else:
            layout = self._planned
            if last["micro_batch"] < layout.micro_batch:
                layout = with_micro_batch(layout, last["micro_batch"], self._sizes)
        if layout != self._planned:
            self._step.change_layout(layout)
            self._say(
                f"memory ran out before, last in step {last['step']}, so this goes on with micro-batches of "
                f"{layout.micro_batch}, {kept_in_words(layout, self._sizes.blocks)}, and the states "
                f"of {layout.states_on_gpu} units on the device"
            )

    def _next(self, where: str) -> tuple[str, Layout] | None:
        refused = None
        for name, layout in smaller_layouts(self._planned, self._step.layout, where, self._sizes):
            if name == "states":
                refused = self._refusal(layout.states_on_gpu)
                if refused is not None:
                    continue
            if refused is not None:
                self._say(f"{'other ' if name == 'states' else ''}states stay on the GPU: {refused}")
            return name, layout
        if refused is not None:
            self._say(f"states stay on the GPU: {refused}")
        return None

    def _refusal(self, states_on_gpu: int) -> str | None:
        """The reason why RAM has no room for the states of the units from the `states_on_gpu`-th on, if it has none."""
        now = self._step.layout.states_on_gpu
        return self._ram_refuses(
            self._store.state_bytes(range(states_on_gpu, now)),
            self._store.state_bytes(range(states_on_gpu, self._planned.states_on_gpu)),
        )

    def _note(self, name: str, layout: Layout, reason: str) -> None:
        self.measures.append(
            {
                "step": self.number,
                "measure": name,
                "reason": reason,
                "micro_batch": layout.micro_batch,
                "layout": asdict(layout),
                "planned": asdict(self._planned),
            }
        )

    def _in_words(self, name: str, before: Layout, after: Layout) -> str:
        return {
            "kept": f"keeping less: {kept_in_words(after, self._sizes.blocks)}",
            "groups": f"in groups of {after.group} instead of {before.group} micro-batches",
            "segments": f"in segments of {after.segment_blocks} instead of {before.segment_blocks} blocks",
            "states": f"with the states of {after.states_on_gpu} instead of {before.states_on_gpu} units on the GPU",
            "micro_batch": f"with micro-batches of {after.micro_batch} instead of {before.micro_batch} and the same "
            "batch, which changes roundings and dropout masks from here on",
            "evaluation_rows": f"with micro-batches of {after.evaluation_rows} in evaluations, which may change the "
            "last digits of their loss",
        }[name]


def recovery_of(step: TrainingStep, store: Store, width: int, plan: Plan, say: Callable[[str], None]) -> Recovery:
    """The recovery of a run within its cap for RAM and the machine's free RAM. `width`: of hidden states."""

    def ram_refuses(moving: int, moved: int) -> str | None:
        limit, free = plan.settings.ram_limit_bytes, ram_available_bytes()[0]
        needed = max(plan.ram_bytes + moved, ram_now_bytes() + moving)
        if limit is not None and needed > limit:
            return f"with them RAM would be at {format_size(needed)} of the {format_size(limit)} of --ram-limit"
        return f"they take {format_size(moving)} and {format_size(free)} of RAM are free" if moving > free else None

    settings = plan.settings
    bytes_per_number = 4 if settings.residual == "fp32" or plan.precision == "fp32" else 2
    return Recovery(
        step,
        store,
        Sizes(
            blocks=plan.blocks,
            batch=settings.batch,
            row_bytes=settings.seq * width * bytes_per_number,
            gradient_bytes=4 * store.parameter_count,
            clips=settings.clip_norm is not None or plan.precision == "fp16",
            slot_bytes=WEIGHT_SLOTS
            * max((part.working.nbytes for part in store.parts if part.weights_streamed), default=0),
        ),
        say,
        ram_refuses,
    )


def with_pageable_copies(plan: Plan) -> Plan:
    """`plan` with a step's time for states in pageable memory: the computation, then copies in and out at
    PAGEABLE_SHARE of the bus's speed, without overlap."""
    copying = 2 * plan.ram_breakdown["streamed_states"] / (plan.card.bus_bytes_per_second * PAGEABLE_SHARE)
    computing = plan.step_seconds - plan.waiting_seconds
    return replace(plan, step_seconds=computing + copying, waiting_seconds=copying)
