"""Finds the fastest layout under the caps of GPU memory and RAM. If none fits, finds the smallest caps that would do.

The search counts allocated bytes, but the allocator may need more. So the layout that the search finds is run through
the model of the allocator. If memory runs out there, the search is repeated without this layout. If the search finds
nothing, the layouts that take the least memory are tried. The smallest caps, which a refusal names, are computed from
these layouts, too. So there is a plan under each cap that is named.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from lowmem.core.layout import Fate, Layout
from lowmem.planning.choices import Choices
from lowmem.planning.columns import Columns, within
from lowmem.planning.search import Found, Room, Search
from lowmem.planning.simulations import Simulations

_MUCH_SLOWER = 1.03  # A layout is much slower than a failed one (Search.failed) if it takes this many times as long.

Ways = Sequence[Sequence[Choices]]  # choices.ways: lists to try one after the other


def fastest_layout(ways: Ways, simulations: Simulations, room: Room) -> Found | None:
    """Returns the fastest layout of all `ways` that fits into `room`, None if nothing fits."""
    search = Search(Columns(simulations), room)
    while (found := _fastest(ways, search)) is not None:
        if simulations.completes(found.layout, room.gpu):
            return found
        search = replace(search, failed=(*search.failed, replace(found, kept=_too_much(simulations, found, room))))
    fitting = [
        found
        for found in _frugal(ways, simulations, room)
        if within(found.simulated.streamed_bytes, room.ram) and simulations.fits(found.layout, room.gpu)
    ]
    return min(fitting, key=lambda found: found.seconds, default=None)


def _too_much(simulations: Simulations, found: Found, room: Room) -> int:
    """Returns an index `kept` at which the column of `found` runs out of memory in the model of the allocator. It is 0,
    or the index before it completes. `found` itself fails. Tries the two indices before that of `found`, then bisects.
    Then tries indices after the result: a layout may complete although one that keeps less fails."""

    def fails(kept: int) -> bool:
        return not simulations.completes(found.column.layout(kept, found.on_gpu), room.gpu)

    for kept in range(found.kept - 1, max(found.kept - 3, -1), -1):
        if not fails(kept):
            return kept + 1
    beyond = max(found.kept - 2, 0)  # it fails
    failing = bisect_left(range(beyond), True, key=fails)
    more = 1
    while failing + more < beyond:
        if not fails(failing + more):
            failing, more = bisect_left(range(beyond), True, lo=failing + more + 1, key=fails), 0
        more = 2 * more + 1
    return failing


def _fastest(ways: Ways, search: Search) -> Found | None:
    """Returns the fastest layout whose allocated bytes fit, None if none does. Tries the lists of `ways` until the
    fastest so far has weights and gradients on the GPU. Goes on if a layout that failed (Search.failed) was much
    faster. Tries a disk only if nothing else fits, or if the fastest so far runs forward and backward twice."""
    best: Found | None = None
    for fates in ways:
        if fates[0].disk and best is not None and best.layout.fate is not Fate.DROPPED:
            break
        for choices in reversed(fates) if fates[0].disk else fates:  # those that need the least RAM first
            if choices.base.gathered and (best is None or not best.waits):
                continue  # weights that stay would not fit, or save no time
            on_disk = best is not None and best.layout.states_on_disk and best.layout.weights_on_gpu is None
            if on_disk and choices.base.weights_on_gpu is not None:
                continue  # RAM is short, and weights there would take more of it
            best = search.fastest(choices, best)
        on_gpu = best is not None and best.layout.weights_on_gpu is None
        as_fast = on_gpu and all(best.seconds <= _MUCH_SLOWER * failed.seconds for failed in search.failed)
        if as_fast and best.layout.fate in (Fate.HELD, Fate.APPLIED):
            break
    return best


def smallest_room(ways: Ways, simulations: Simulations, room: Room) -> Room:
    """Returns the smallest limits under which a layout fits. Assumes that none fits into `room`. If only RAM is short,
    raises the RAM limit alone. Otherwise raises the GPU limit, and also the RAM limit if every layout exceeds it."""
    frugal = _frugal(ways, simulations, room)
    for found in sorted(frugal, key=lambda found: found.simulated.streamed_bytes):
        # Weights in RAM are no help if RAM is short.
        if found.layout.weights_on_gpu is None and simulations.fits(found.layout, room.gpu):
            return Room(room.gpu, found.simulated.streamed_bytes)
    in_ram = [found for found in frugal if within(found.simulated.streamed_bytes, room.ram)]
    smallest: Room | None = None
    for found in sorted(in_ram or frugal, key=lambda found: simulations.allocated_bytes(found.layout)):
        if smallest is not None and simulations.allocated_bytes(found.layout) >= smallest.gpu:
            break
        cap = simulations.smallest_cap_bytes(found.layout)
        if smallest is None or cap < smallest.gpu:
            smallest = Room(cap, found.simulated.streamed_bytes)
    return smallest


def least_ram(ways: Ways, simulations: Simulations, gpu: int | None) -> Found | None:
    """Returns the layout that needs the least RAM of those that fit into `gpu` bytes, None if none does."""
    frugal = sorted(_frugal(ways, simulations, Room(gpu, None)), key=lambda found: found.simulated.streamed_bytes)
    return next((found for found in frugal if simulations.fits(found.layout, gpu)), None)


def frugal_layouts(ways: Ways, simulations: Simulations) -> list[Layout]:
    """Returns candidates for the layout that needs the least GPU memory, whatever RAM they need."""
    return [found.layout for found in _frugal(ways, simulations, Room(None, None))]


def _frugal(ways: Ways, simulations: Simulations, room: Room) -> list[Found]:
    """Returns layouts with the smallest micro-batch and group that keep as little for backward as allowed, up to six in
    a column (columns.py). One has the fewest units on the GPU that RAM allows, one has all units there. The others have
    the most that the GPU allows, or up to three fewer, because the allocator may need more."""
    found, columns = [], Columns(simulations)
    every = [choices for fates in ways for choices in fates]
    dropped = any(choices.base.fate is Fate.DROPPED for choices in every)
    for choices in every:
        if choices.base.gathered or (choices.base.fate is Fate.SENT and dropped):
            continue  # other entries take less memory: they gather weights twice, or compute gradients twice
        ram = None if choices.disk else room.ram
        for segment in choices.segments:
            column = replace(columns.frugal(choices), segment=segment)
            places, fitting = (Search(columns, each).places(column) for each in (Room(None, ram), Room(room.gpu, None)))
            for place in sorted({*places[:1], *fitting[-4:], len(choices.on_gpu) - 1}):
                layout = column.layout(0, place)
                if choices.disk:
                    layout = replace(layout, states_on_disk=simulations.units)
                found.append(Found(layout, simulations.record(layout), column))
    return found


def smaller_layouts(simulations: Simulations, found: Found, room: Room, shares: Sequence[float]) -> list[Layout]:
    """Returns layouts to go on with if memory runs out, in the order of `shares`. For each share, searches for the
    fastest that allocates at most this share of the GPU bytes of `found`. A run can change to it: the micro-batch and
    `fixed_homes` are the same, and no more units have states on the GPU."""
    choices, layout = found.column.choices, found.layout
    numbers = (layout.weights_on_gpu,)
    if layout.weights_on_gpu is None:
        numbers = tuple(each for each in choices.on_gpu if each <= layout.states_on_gpu)
    base = replace(choices.base, states_on_disk=found.layout.states_on_disk)
    fixed = replace(choices, base=base, disk=0, micro_batches=(found.layout.micro_batch,))
    fixed = replace(fixed, on_gpu=numbers)
    columns, allocated = Columns(simulations), simulations.allocated_bytes(found.layout)
    smaller = (Search(columns, Room(int(share * allocated), room.ram)).fastest(fixed) for share in shares)
    return list(dict.fromkeys(each.layout for each in smaller if each is not None and each.layout != found.layout))
