"""Schedules the pieces of a model (a block's weights, for example) on the GPU under a limit, and counts the bytes
moved.

A pass is a list of accesses, each of which uses some pieces. The most frequently used pieces are kept. The others are
streamed through a window: the pieces of an access and of those `ahead`. If passes repeat and pieces have one size, none
moves less but for one window's pieces (Belady 1966).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from lowmem.errors import InputError
from lowmem.units import MIB, format_size

PAGE_BYTES = 2 * MIB  # in which the driver moves managed memory at most
Access = tuple[int, ...]  # numbers of the pieces that are used
BY_DRIVER, BY_FAULTS, PREFETCHED = "managed, left to the driver", "managed, by faults", "managed, prefetched"
COPIED = "explicit copies"


@dataclass(frozen=True)
class Schedule:
    """A schedule. `sizes`: bytes by piece; `kept`: pieces that stay on the GPU; `ahead`: accesses that the window looks
    ahead; `in_slots`: streamed pieces come into permanent slots, each for pieces of one size."""

    sizes: tuple[int, ...]
    accesses: tuple[Access, ...]
    kept: frozenset[int]
    ahead: int
    in_slots: bool = False

    def window(self, number: int) -> frozenset[int]:
        """Returns the streamed pieces on the GPU during an access; numbers go on in later passes."""
        places = range(number, number + self.ahead + 1)
        used = {piece for place in places for piece in self.accesses[place % len(self.accesses)]}
        return frozenset(used - self.kept)

    def before(self, number: int) -> tuple[list[int], list[int]]:
        """Returns the pieces that leave before an access, and those that are then fetched, the soonest used first."""
        old = self.window(number - 1) if number else frozenset()
        new = self.window(number)
        order = [piece for place in range(number, number + self.ahead + 1) for piece in self._access(place)]
        return sorted(old - new), [piece for piece in dict.fromkeys(order) if piece in new - old]

    def resident_bytes(self, number: int) -> int:
        kept = sum(self.sizes[piece] for piece in self.kept)
        return kept + sum(self.slots if self.in_slots else (self.sizes[piece] for piece in self.window(number)))

    @cached_property
    def slots(self) -> list[int]:
        """Returns the bytes of each slot, so that every window has room."""
        counts: Counter[int] = Counter()
        for number in range(len(self.accesses)):
            counts |= Counter(self.sizes[piece] for piece in self.window(number))
        return sorted(counts.elements())

    @cached_property
    def peak_bytes(self) -> int:
        return max(map(self.resident_bytes, range(len(self.accesses))))

    def _access(self, number: int) -> Access:
        return self.accesses[number % len(self.accesses)]


def schedule(
    sizes: Sequence[int], accesses: Sequence[Access], limit_bytes: int, ahead: int = 1, in_slots: bool = False
) -> Schedule:
    """Returns the schedule that keeps most. Looks less far `ahead` if the window would exceed the limit. Raises
    InputError if one access does."""
    nothing = Schedule(tuple(sizes), tuple(map(tuple, accesses)), frozenset(), 0, in_slots)
    if nothing.peak_bytes > limit_bytes:
        least = "a slot of each size" if in_slots else "one layer"
        raise InputError(
            f"--physical-limit {format_size(limit_bytes)} is less than {least} needs: {format_size(nothing.peak_bytes)}"
        )
    uses = Counter(piece for access in accesses for piece in access)
    narrow = _keeping_most(nothing, limit_bytes, uses)
    most = max(uses.values())
    # GPT-2's tied embeddings are used most: a window for which they would have to leave is made narrower.
    needed = {piece for piece in narrow.kept if uses[piece] == most > min(uses.values())}
    for window in range(min(ahead, len(accesses) - 1), 0, -1):  # a wider one than a pass looks at nothing else
        found = replace(nothing, ahead=window)
        if found.peak_bytes <= limit_bytes:
            found = _keeping_most(found, limit_bytes, uses)
            if needed <= found.kept:
                return found
    return narrow


def _keeping_most(found: Schedule, limit_bytes: int, uses: Mapping[int, int]) -> Schedule:
    for piece in sorted(range(len(found.sizes)), key=lambda piece: (-uses[piece], piece)):
        more = replace(found, kept=found.kept | {piece})
        if more.peak_bytes <= limit_bytes:
            found = more
    return found


@dataclass(frozen=True)
class Traffic:
    """Bytes of one pass, once passes repeat. `faults`: moves of a page that a kernel waits for."""

    to_device: int
    to_host: int
    faults: int = 0


def prefetched(of: Schedule) -> Traffic:
    """Returns the traffic of the schedule."""
    passes = len(of.accesses)
    moves = [of.before(number) for number in range(passes, 2 * passes)]
    fetched, evicted = (sum(of.sizes[piece] for move in moves for piece in move[side]) for side in (1, 0))
    return Traffic(fetched, evicted)


def evicted_only(of: Schedule) -> Traffic:
    """Returns the traffic of a schedule without look-ahead, with pieces that come by faults."""
    moved = prefetched(of)
    return Traffic(moved.to_device, moved.to_host, moved.to_device // PAGE_BYTES)


def streamed(of: Schedule) -> Traffic:
    """Returns the traffic of copies from host memory; weights do not go back. Only for forwards."""
    return Traffic(prefetched(of).to_device, 0)


def by_faults(sizes: Sequence[int], accesses: Sequence[Access], limit_bytes: int) -> Traffic:
    """Returns the traffic of managed memory without a schedule. The least recently used page leaves, as in the
    driver."""
    room = limit_bytes // PAGE_BYTES
    resident: OrderedDict[tuple[int, int], None] = OrderedDict()
    for _ in range(2):  # the first pass fills the memory
        faults = evictions = 0
        for access in accesses:
            for page in ((piece, n) for piece in access for n in range(-(-sizes[piece] // PAGE_BYTES))):
                if page in resident:
                    resident.move_to_end(page)
                    continue
                faults += 1
                if len(resident) >= room:
                    resident.popitem(last=False)
                    # A page has one place, so each that leaves is copied, changed or not.
                    evictions += 1
                resident[page] = None
    return Traffic(faults * PAGE_BYTES, evictions * PAGE_BYTES, faults)


def traffic(
    sizes: Sequence[int], accesses: Sequence[Access], limit_bytes: int, ahead: int, backward: bool
) -> dict[str, dict[str, int]]:
    """Returns bytes and faults of a pass for each placement; explicit copies only if their slots fit into the limit."""
    plan = partial(schedule, sizes, accesses, limit_bytes)
    found = {
        BY_DRIVER: by_faults(sizes, accesses, limit_bytes),
        BY_FAULTS: evicted_only(plan(ahead=0)),
        PREFETCHED: prefetched(plan(ahead=ahead)),
    }
    with suppress(InputError):
        if not backward:
            found[COPIED] = streamed(plan(ahead=ahead, in_slots=True))
    return {name: vars(of) for name, of in found.items()}
