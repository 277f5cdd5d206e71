"""Continues training if GPU memory runs out. Repeats the failed work, first with the allocator's cache emptied, then
with layouts that take less memory (docs/training.md). If the system refuses page-locked memory, tensors in RAM are
copied from and to pageable memory, slower and without overlap."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

import torch

from lowmem import device as devices
from lowmem.core.layout import Layout
from lowmem.core.step import EVALUATION, HALFWAY, STEP, UPDATES, TrainingStep
from lowmem.errors import CapExceeded
from lowmem.limits import ram_available_bytes, ram_now_bytes
from lowmem.planning.plan import Plan, kept_in_words
from lowmem.run.loaded_model import LoadedModel
from lowmem.units import format_size

PAGEABLE_SHARE = 0.5  # the share of the bus's speed that copies from pageable memory reach; assumed
CACHE, LAYOUT, STATES = "cache", "layout", "states"
MICRO_BATCH, EVALUATION_ROWS = "micro_batch", "evaluation_rows"
_WHERE = {HALFWAY: " after its first updates", UPDATES: " in updates", EVALUATION: " in the evaluation"}
_NOTHING_LEFT = {
    STEP: "even for single sequences, with every block recomputed and no states on the GPU that RAM has room for",
    EVALUATION: "even for single sequences, with no states on the GPU that RAM has room for",
    HALFWAY: "and a step cannot be made again once it has updated some of the weights",
    UPDATES: "and RAM has no room for more states",
}


class OutOfRoom(CapExceeded):
    """Says that GPU memory ran out, and that no change of the layout can help any more."""


class Recovery:
    """Makes room when a TrainingStep runs out of GPU memory. `number`: the current optimizer step, from 1. `measures`:
    all changes made so far, for checkpoints and the report."""

    def __init__(
        self, step: TrainingStep, smaller_layouts: Sequence[Layout], say: Callable[[str], None],
        ram_refuses: Callable[[int, int], str | None] = lambda moving, moved: None,
    ):  # fmt: skip
        """Registers this object as the out-of-memory handler of `step`, unless several ranks (processes) train.
        `smaller_layouts`: in the order to try. `say` gets a sentence on each change. `ram_refuses(moving, moved)`:
        returns why `moving` bytes of optimizer states cannot move to RAM, or None. `moved`: bytes moved since the plan
        was made, these included."""
        self.number, self.measures = 0, []
        self._step, self._say, self._ram_refuses = step, say, ram_refuses
        self._planned = step.layout
        self._blocks = sum(len(segment.blocks) for segment in step.segments)
        # Only states can change their home while the run goes on.
        smaller = [layout for layout in smaller_layouts if layout.fixed_homes == step.layout.fixed_homes]
        last = (smaller or [step.layout])[-1]
        self._smaller = [*smaller, replace(last, kept=0, states_on_gpu=0)]
        self._freed: set[Layout] = set()  # layouts that were tried again after freeing the cache
        self._at = (0, "", 0)  # (step, `where`, number of earlier measures) of the last failure
        if step.store.ranks.count == 1:  # one rank cannot repeat a step without the others
            step.make_room = self

    def __call__(self, where: str, reason: str) -> None:
        """Frees GPU memory after an OutOfMemoryError with the message `reason`: empties the allocator's cache and,
        unless that alone may help, changes the layout. `where`: the work that failed: STEP, HALFWAY (a step that has
        begun updates), UPDATES or EVALUATION. Raises OutOfRoom if nothing is left to change, and always for HALFWAY."""
        said = f"step {self.number}: out of memory{_WHERE.get(where, '')} ({reason})"
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if (self.number, where) != self._at[:2]:
            self._at = (self.number, where, len(self.measures))
        now = self._step.layout
        just_now = bool(self.measures) and self.measures[-1]["step"] == self.number
        if where != HALFWAY and not just_now and now not in self._freed:
            self._freed.add(now)
            self._note(CACHE, now, reason)
            self._say(f"{said}; the allocator's cache was freed, and it is tried again with the same layout")
            return
        for name, layout in self._less(where):
            try:
                locked = self._step.change_layout(layout)
            except torch.OutOfMemoryError:  # no room for the slots of streamed states
                if self._step.layout == now:
                    raise
                continue
            self._note(name, layout, reason)
            words = f"{said}; it is tried again, and training goes on, {self._in_words(name, now, layout)}"
            self._say(words if locked else f"{words}; page-locked memory was refused for them, so copies are slower")
            return
        del self.measures[self._at[2] :]  # these did not help
        mixed = "some weights are new and some old by now, so they are not saved; "
        raise OutOfRoom(
            f"{said}. That is out of GPU memory, {_NOTHING_LEFT[where]}; {mixed if where in (HALFWAY, UPDATES) else ''}"
            "the same command goes on from the newest checkpoint"
        )

    def resume(self, measures: list[dict]) -> None:
        """Restores the layout to which the resumed run had changed when memory ran out. `measures`: its changes, as
        saved in the checkpoint. If the plan is not the same as then, restores only a smaller micro-batch."""
        self.measures += measures
        if not measures:
            return
        last = measures[-1]
        if "planned" in last and asdict(Layout(1)) | last["planned"] == asdict(self._planned):
            layout = Layout(**last["layout"])
            del self._smaller[: sum(measure["measure"] == LAYOUT for measure in measures)]
        else:
            # The plan has changed since, for example with other caps. Only equal micro-batches give equal bits.
            layout = self._planned
            if last["micro_batch"] < layout.micro_batch:
                layout = with_micro_batch(layout, last["micro_batch"])
        if layout.micro_batch < self._planned.micro_batch:  # layouts with larger micro-batches would take more memory
            self._smaller = [replace(layout, kept=0, states_on_gpu=0)]
        if layout != self._planned:
            self._step.change_layout(layout)
            self._say(
                f"memory ran out before, last in step {last['step']}, so this goes on with micro-batches of "
                f"{layout.micro_batch}, {kept_in_words(layout, self._blocks)}, and the states of "
                f"{layout.states_on_gpu} units on the device"
            )

    def _less(self, where: str) -> Iterator[tuple[str, Layout]]:
        """Yields (name of a change, layout that takes less memory), in the order to try. `where`: the work that failed,
        such as STEP or EVALUATION."""
        while where == STEP and self._smaller:
            now, layout = self._step.layout, self._smaller.pop(0)
            units = self._fewest_states(layout)
            kept = layout.kept if units <= layout.states_on_gpu else min(layout.kept, now.kept)
            layout = replace(layout, states_on_gpu=units, kept=kept, evaluation_rows=now.evaluation_rows)
            if layout != now:
                yield LAYOUT, layout
        # In pending updates and evaluations, only optimizer states can move.
        for layout in self._smaller if where in (UPDATES, EVALUATION) else ():
            now, units = self._step.layout, self._fewest_states(layout)
            if units < now.states_on_gpu:
                yield STATES, replace(now, states_on_gpu=units)
        now = self._step.layout
        if where == STEP and now.micro_batch > 1:
            yield MICRO_BATCH, with_micro_batch(now, _smaller_divisor(now.micro_batch))
        rows = min(now.evaluation_rows or now.micro_batch, now.micro_batch)
        if where == EVALUATION and rows > 1:
            yield EVALUATION_ROWS, replace(now, evaluation_rows=_smaller_divisor(rows))

    def _fewest_states(self, layout: Layout) -> int:
        """Returns how many units (mostly blocks) keep their optimizer states on the GPU if training changes to
        `layout`. This is its `states_on_gpu`, or more if RAM lacks room for the others, but never more than now."""
        now, store = self._step.layout.states_on_gpu, self._step.store
        for units in range(layout.states_on_gpu, now):
            moving = store.state_bytes(range(units, now))
            refused = self._ram_refuses(moving, store.state_bytes(range(units, self._planned.states_on_gpu)))
            if refused is None:
                return units
        if layout.states_on_gpu < now:
            self._say(f"states stay on the GPU: {refused}")
        return now

    def _note(self, name: str, layout: Layout, reason: str) -> None:
        what = {"step": self.number, "measure": name, "reason": reason, "micro_batch": layout.micro_batch}
        self.measures.append(what | {"layout": asdict(layout), "planned": asdict(self._planned)})

    def _in_words(self, name: str, before: Layout, after: Layout) -> str:
        if name == MICRO_BATCH:
            sizes = f"with micro-batches of {after.micro_batch} instead of {before.micro_batch} and the same batch"
            return f"{sizes}, which changes roundings and dropout masks from here on"
        if name == EVALUATION_ROWS:
            rows = f"with micro-batches of {after.evaluation_rows} in evaluations"
            return f"{rows}, which may change the last digits of their loss"
        groups = f"groups of {after.group} instead of {before.group} micro-batches, "
        states = f"the states of {after.states_on_gpu} instead of {before.states_on_gpu} units on the GPU"
        return (
            f"with less: {groups if after.group != before.group else ''}{kept_in_words(after, self._blocks)}"
            + (f", {states}" if after.states_on_gpu != before.states_on_gpu else "")
        )  # fmt: skip


def with_micro_batch(layout: Layout, micro_batch: int) -> Layout:
    """Returns `layout` with micro-batches of `micro_batch` sequences, a divisor of the old size. A group is the
    micro-batches that pass a segment of blocks together. If it has several, or must be the whole batch, it keeps its
    number of sequences. Else it becomes one micro-batch."""
    several = layout.group > 1 or layout.whole_batch
    group = layout.group * (layout.micro_batch // micro_batch) if several else 1
    return replace(layout, micro_batch=micro_batch, group=group)


def _smaller_divisor(number: int) -> int:
    return next(divisor for divisor in range(number - 1, 0, -1) if number % divisor == 0)


def recovery_of(step: TrainingStep, plan: Plan, say: Callable[[str], None]) -> Recovery:
    """Returns a Recovery: if GPU memory runs out in `step`, it changes to the smaller layouts in `plan`. It moves
    optimizer states to RAM only if --ram-limit and the free RAM have room for them. `say` gets a sentence on each
    change."""

    def ram_refuses(moving: int, moved: int) -> str | None:
        limit, free = plan.settings.ram_limit_bytes, ram_available_bytes()[0]
        needed = max(plan.ram_bytes + moved, ram_now_bytes() + moving)
        if limit is not None and needed > limit:
            return f"RAM would then hold {format_size(needed)}, and --ram-limit allows {format_size(limit)}"
        return f"they take {format_size(moving)} and {format_size(free)} of RAM are free" if moving > free else None

    return Recovery(step, plan.smaller_layouts, say, ram_refuses)


def page_locked(model: LoadedModel, say: Callable[[str], None]) -> LoadedModel:
    """Page-locks the tensors in RAM that are copied to and from the GPU, and returns the model. If the system refuses,
    the returned model has a plan with slower steps, and `say` gets a sentence."""
    store = model.step.store
    if store.device.type == "cuda":
        devices.release_freed_memory()  # before states take up their room
    if store.page_lock():
        return model
    plan = with_pageable_copies(model.plan)
    say(
        "page-locked memory was refused, so numbers in RAM are copied from pageable memory: a step now takes about "
        f"{plan.step_seconds:.3g} s, {plan.waiting_seconds:.2g} s of it waiting for copies"
    )
    return replace(model, plan=plan)


def with_pageable_copies(plan: Plan) -> Plan:
    """Returns `plan` with the longer step time of copies from and to pageable memory, for which computing waits."""
    layout, held = plan.layout, plan.ram["train"]
    groups = math.ceil(plan.settings.batch / plan.ranks / (layout.micro_batch * layout.group))
    copied = 2 * (held.get("streamed_states", 0) + held.get("streamed_gradients", 0))
    # Weights in RAM are copied for each pass of each group of micro-batches, too.
    copied += (layout.passes * groups + 2) * held.get("streamed_weights", 0)
    copying = copied / (plan.card.bus_bytes_per_second * PAGEABLE_SHARE)
    computing = plan.step_seconds - plan.waiting_seconds
    return replace(plan, step_seconds=computing + copying, waiting_seconds=copying)
