"""The next smaller layouts of a step that has run out of memory, the cheapest first. Only the last one changes bits.

    measure                                                   its cost
    kept          fewer blocks keep what backward needs       they run again
    groups        fewer micro-batches in a group              the step waits for states
    segments      longer or shorter, whichever keep less      little
    states        fewer units have theirs on the GPU          more copies, more RAM
    micro_batch   the next smaller divisor                    smaller products; other bits

Blocks and states are moved in doubling steps (1, 2, 4, ...): a failed attempt costs a step, and each move costs time in
every later step. The functions here compare layouts by rough sizes, because a run in trouble simulates nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowmem.core.layout import Layout
from lowmem.core.recompute import INPUT
from lowmem.core.step import EVALUATION, PART, STEP

SEGMENTS = range(1, 13)  # lengths that are tried, in blocks
LIVE_BOUNDARIES = 8.5  # a block in backward has 34 D bytes per token, a boundary 4 D (recompute.py)


@dataclass(frozen=True)
class Sizes:
    """A run's sizes that layouts depend on. `row_bytes`: of a boundary, for each sequence; `gradient_bytes`: of
    all accumulators; `clips`: whether the first update waits for all gradients (StepCase.needs_all_gradients);
    `slot_bytes`: of a streamed block's weights in all slots."""

    blocks: int
    batch: int
    row_bytes: int
    gradient_bytes: int
    clips: bool
    slot_bytes: int = 0


def smaller_layouts(planned: Layout, now: Layout, where: str, sizes: Sizes) -> Iterator[tuple[str, Layout]]:
    """(measure, layout) in the order in which they are tried. `planned`: the run's first layout; `where`: the part of
    the step that ran out of memory (core/step.py)."""
    kept, planned_kept = kept_things(now, sizes.blocks), kept_things(planned, sizes.blocks)
    if where in (STEP, PART) and kept:
        yield "kept", keeping_less(now, sizes.blocks, max(planned_kept - kept, 0) + 1)
    if where == STEP:
        yield from _other_groups_and_segments(now, sizes)
    most = min(max(planned.states_on_gpu - now.states_on_gpu, 0) + 1, now.states_on_gpu)
    for units in range(most, 0, -1):  # fewer, if RAM has no room for more
        yield "states", replace(now, states_on_gpu=now.states_on_gpu - units)
    if where == STEP and now.micro_batch > 1:
        yield "micro_batch", with_micro_batch(now, _smaller_divisor(now.micro_batch), sizes)
    rows = min(now.evaluation_rows or now.micro_batch, now.micro_batch)
    if where == EVALUATION and rows > 1:
        yield "evaluation_rows", replace(now, evaluation_rows=_smaller_divisor(rows))


def with_micro_batch(layout: Layout, micro_batch: int, sizes: Sizes) -> Layout:
    """`layout` with smaller micro-batches, a divisor of its own. A group of several micro-batches keeps its number of
    sequences. A group of one keeps one, unless updates are made during backward."""
    ratio = layout.micro_batch // micro_batch
    several = layout.recomputes(sizes.blocks) and (layout.group > 1 or not sizes.clips)
    group = layout.group * ratio if several or layout.whole_batch else 1
    return replace(layout, micro_batch=micro_batch, group=group)


def kept_things(layout: Layout, blocks: int) -> int:
    """`layout.kept`, at most 2 x blocks."""
    return min(layout.kept, 2 * blocks)


def keeping_less(layout: Layout, blocks: int, less: int) -> Layout:
    """`layout` with `kept_things` smaller by `less`, or 0."""
    return replace(layout, kept=max(kept_things(layout, blocks) - less, 0))


def activation_bytes(layout: Layout, sizes: Sizes) -> float:
    """About the peak of a step: boundaries, accumulators, and the segment in backward, with its weights if they are
    streamed."""
    micro_batches = sizes.batch // layout.micro_batch
    group = min(layout.group, micro_batches)
    segments = layout.segments(sizes.blocks)
    longest = max(len(segment.blocks) for segment in segments)
    boundary = layout.micro_batch * sizes.row_bytes
    held = group * len(segments) * boundary
    live = longest * (LIVE_BOUNDARIES * boundary + sizes.slot_bytes)
    if group < micro_batches:
        return sizes.gradient_bytes + held + live
    if layout.whole_batch or not sizes.clips:  # gradients live as long as their segment's backward
        return held + sizes.gradient_bytes * longest / sizes.blocks + live
    return max(held, sizes.gradient_bytes) + live  # boundaries are freed while gradients are made


def _other_groups_and_segments(layout: Layout, sizes: Sizes) -> Iterator[tuple[str, Layout]]:
    now = activation_bytes(layout, sizes)
    count = sizes.batch // layout.micro_batch
    groups = [group for group in range(layout.group - 1, 0, -1) if count % group == 0 and not layout.whole_batch]
    for other in (replace(layout, group=group) for group in groups):
        if activation_bytes(other, sizes) < now:
            yield "groups", other
            break
    if any(segment.keep == INPUT for segment in layout.segments(sizes.blocks)):
        others = [replace(layout, segment_blocks=length) for length in SEGMENTS if length <= sizes.blocks]
        best = min(others, key=lambda other: activation_bytes(other, sizes))
        if activation_bytes(best, sizes) < now:
            yield "segments", best


def _smaller_divisor(number: int) -> int:
    return next(divisor for divisor in range(number - 1, 0, -1) if number % divisor == 0)
