"""Finds the fastest layout of a training step under caps of GPU memory and RAM, or the smallest sufficient caps.

A layout fits if its allocated bytes do, and if its step completes in a model of PyTorch's caching allocator. The
smallest caps are those of layouts that the search for the fastest tries, too. So there is a plan for a user who sets
the caps that an error names.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowmem.core.layout import Fate, Layout
from lowmem.planning.choices import ByHome
from lowmem.planning.columns import Column, Columns, within
from lowmem.planning.search import Found, Room, Search
from lowmem.planning.simulations import Simulations

_WORTH_STREAMING = 0.995  # Weights leave the GPU only if a step then takes less than this share of the time.
_MUCH_SLOWER = 1.03  # A layout is much slower than a failed one (Search.failed) if it takes this many times as long.


def fastest_layout(by_home: ByHome, simulations: Simulations, room: Room) -> Found | None:
    """Returns the fastest of the layouts `by_home` that fits into `room` (limits of GPU memory and RAM), or None. A
    layout (way to compute a step) fits only if its step completes in the model of PyTorch's caching allocator."""
    search = Search(Columns(simulations), room)
    while (found := _fastest(by_home, search)) is not None:
        if simulations.completes(found.layout, room.gpu):
            return found
        search = replace(search, failed=(*search.failed, (found, _too_much(simulations, found, room))))
    # The layouts that need the least memory may complete under a smaller cap, because the allocator then frees its
    # cache at another moment.
    fitting = [
        Found(small.layout, simulations.record(small.layout), small.column)
        for small in candidates(by_home, simulations, room)
        if within(small.ram_bytes, room.ram) and small.fits(simulations, room.gpu)
    ]
    return min(fitting, key=lambda found: found.seconds, default=None)


def _too_much(simulations: Simulations, found: Found, room: Room) -> int:
    """Returns a `kept` (how much blocks save for backward), at most that of `found`, with which layouts like `found`
    run out of memory in the caching allocator's model. Must be called only if `found` itself runs out."""

    def fails(kept: int) -> bool:
        return not simulations.completes(found.column.layout(kept, found.units_on_gpu), room.gpu)

    least, kept = found.column.least_kept, found.layout.kept
    # First the two values below that of `found`, then bisection. One value less than the result completes, unless it is
    # the column's smallest.
    for fewer in range(kept - 1, max(kept - 3, least - 1), -1):
        if not fails(fewer):
            return fewer + 1
    beyond = max(kept - 2, least)  # fails: either `found`, or the last amount tried
    failing = bisect_left(range(beyond), True, lo=least, key=fails)
    more = 1
    # A larger value may complete although this one fails. Then bisects again above it.
    while failing + more < beyond:
        if not fails(failing + more):
            failing, more = bisect_left(range(beyond), True, lo=failing + more + 1, key=fails), 0
        more = 2 * more + 1
    return failing


def _fastest(by_home: ByHome, search: Search) -> Found | None:
    """Returns the fastest of the layouts `by_home` whose allocated bytes fit into `search.room`, or None."""
    best: Found | None = None
    most_kept = max((choices.kept[-1] for of_home in by_home for choices in of_home), default=0)
    enough = min(search.columns.simulations.blocks, most_kept)
    for of_home in by_home:
        disk = of_home[0].units_on_disk is not None
        # A disk is tried only if nothing else fits, or if forward and backward would run twice.
        if disk and best is not None and best.layout.fate is not Fate.DROPPED:
            break
        for choices in reversed(of_home) if disk else of_home:  # on a disk, those that need the least RAM first
            if choices.base.gathered and (best is None or not best.waits):
                continue  # weights that stay would not fit, or save no time
            on_disk = best is not None and best.layout.states_on_disk and best.layout.weights_on_gpu is None
            if on_disk and choices.base.weights_on_gpu is not None:
                continue  # RAM is short, and weights there would take more of it
            found = search.fastest(choices, best)
            leaves = choices.base.weights_on_gpu is not None and best is not None and best.layout.weights_on_gpu is None
            if not leaves or found.seconds < _WORTH_STREAMING * best.seconds:
                best = found
        # Weights and gradients are on the GPU, and blocks save their matrix products, or as much as the settings allow:
        # the search ends, unless a layout that ran out of memory was much faster.
        here = best is not None and best.layout.weights_on_gpu is None and best.layout.fate in (Fate.HELD, Fate.APPLIED)
        much_slower = (best.seconds > _MUCH_SLOWER * failed.seconds for failed, _ in search.failed)
        if here and best.layout.kept >= enough and not any(much_slower):
            break
    return best


def smallest_room(by_home: ByHome, simulations: Simulations, room: Room) -> Room:
    """Returns the smallest limit of GPU memory under which one of the layouts `by_home` fits, with the least RAM that
    one of them then needs. Must be called only if none fits into `room`. Keeps its GPU limit if a higher RAM limit is
    enough with weights on the GPU."""
    small_layouts = candidates(by_home, simulations, room)
    for small in sorted(small_layouts, key=lambda small: small.ram_bytes):
        # Weights in RAM are no help if RAM is short.
        if small.layout.weights_on_gpu is None and small.fits(simulations, room.gpu):
            return Room(room.gpu, small.ram_bytes)
    in_ram = [small for small in small_layouts if within(small.ram_bytes, room.ram)]
    smallest = Room(math.inf, math.inf)
    for small in sorted(in_ram or small_layouts, key=lambda small: small.least_gpu_bytes):
        if small.least_gpu_bytes >= smallest.gpu:
            break
        if simulations.allocated_bytes(small.layout) < smallest.gpu:
            cap = simulations.smallest_cap_bytes(small.layout)
            smallest = min(smallest, Room(cap, small.ram_bytes), key=lambda room: room.gpu)
    least = least_ram(by_home, simulations, smallest.gpu)
    return Room(smallest.gpu, min(smallest.ram, simulations.record(least).streamed_bytes))


def least_ram(by_home: ByHome, simulations: Simulations, gpu: int | None) -> Layout | None:
    """Looks at the layouts `by_home` that fit into `gpu` bytes of GPU memory (None: no limit). Returns the one that
    needs the least RAM, or None if none fits."""
    least_first = sorted(candidates(by_home, simulations, Room(gpu, None)), key=lambda small: small.ram_bytes)
    return next((small.layout for small in least_first if small.fits(simulations, gpu)), None)


def least_gpu(by_home: ByHome, simulations: Simulations) -> Layout:
    """Returns the one of the layouts `by_home` that needs the least GPU memory, whatever RAM it needs."""
    least: Layout | None = None
    small_layouts = candidates(by_home, simulations, Room(None, None))
    for small in sorted(small_layouts, key=lambda small: small.least_gpu_bytes):
        if least is not None and small.least_gpu_bytes >= simulations.allocated_bytes(least):
            break
        least = min(filter(None, (least, small.layout)), key=simulations.allocated_bytes)
    return least


@dataclass(frozen=True)
class Candidate:
    """Holds a layout (way to compute a step) that may take the least memory, and its column (similar layouts)."""

    layout: Layout
    column: Column
    least_gpu_bytes: int  # a lower bound: the slots may be smaller than those of the layout that was simulated
    ram_bytes: int  # of tensors in RAM that are copied to the GPU when needed

    def fits(self, simulations: Simulations, limit_bytes: int | None) -> bool:
        return within(self.least_gpu_bytes, limit_bytes) and simulations.fits(self.layout, limit_bytes)


def candidates(by_home: ByHome, simulations: Simulations, room: Room) -> list[Candidate]:
    """Returns those of the layouts `by_home` that may need the least memory. They have the smallest micro-batch and the
    smallest group (micro-batches that pass each block together), and save the least for backward. They need not fit
    into `room`, which only decides how many units (mostly blocks) are on the GPU."""
    found, columns = [], Columns(simulations)
    every = [choices for of_home in by_home for choices in of_home]
    dropped = any(choices.base.fate is Fate.DROPPED for choices in every)
    for choices in every:
        if choices.base.gathered or (choices.base.fate is Fate.SENT and dropped):
            continue  # other entries take less memory: they gather weights twice, or compute gradients twice
        disk = choices.units_on_disk is not None
        ram = None if disk else room.ram
        for segment in choices.segments:
            column = replace(columns.smallest(choices), segment=segment)
            fitting_ram = Search(columns, Room(None, ram)).fitting(column)
            fitting_gpu = Search(columns, Room(room.gpu, None)).fitting(column)
            # The fewest that RAM allows, the most of all, and the most that GPU memory allows. Up to three fewer, too,
            # because the allocator may need more memory.
            for units in sorted({*fitting_ram[:1], *fitting_gpu[-4:], choices.units_on_gpu[-1]}):
                # Bytes come from another layout of the column, because simulating each layout would take longer.
                layout, ram_bytes = column.layout(column.least_kept, units), columns.streamed_bytes(column, units)
                if disk:
                    layout = replace(layout, states_on_disk=simulations.units)
                    ram_bytes = simulations.record(layout).streamed_bytes
                gpu_bytes = columns.allocated_bytes(column, column.least_kept, units)
                if units != column.fewest_on_gpu:
                    gpu_bytes -= simulations.slots_bytes
                found.append(Candidate(layout, column, gpu_bytes, ram_bytes))
    return found


def smaller_layouts(simulations: Simulations, found: Found, room: Room, shares: Sequence[float]) -> list[Layout]:
    """Returns layouts to which a training run can change if GPU memory runs out. For each of `shares`, in order, it
    finds the fastest that allocates at most this share of the GPU bytes of `found`. Leaves out duplicates, `found`
    itself, and shares into which nothing fits. All have the micro-batch and `Layout.fixed_homes` (places of tensors) of
    `found`, and no more units (mostly blocks) on the GPU."""
    choices, layout = found.column.choices, found.layout
    fewest = found.column.fewest_on_gpu if layout.weights_on_gpu is None else layout.weights_on_gpu
    fixed = replace(
        choices, base=replace(choices.base, states_on_disk=layout.states_on_disk), units_on_disk=None,
        micro_batches=(layout.micro_batch,), units_on_gpu=range(fewest, found.units_on_gpu + 1),
    )  # fmt: skip
    columns, allocated = Columns(simulations), simulations.allocated_bytes(layout)
    smaller = (Search(columns, Room(int(share * allocated), room.ram)).fastest(fixed) for share in shares)
    return list(dict.fromkeys(each.layout for each in smaller if each is not None and each.layout != layout))
