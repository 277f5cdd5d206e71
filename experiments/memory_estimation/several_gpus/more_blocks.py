"""Derives the allocations of a decoder with many blocks from a recording of the same decoder with four.

Blocks are alike, so a recording falls into *phases*, in which every block in turn does the same, and stretches between
them. The third block is repeated for all further blocks; the first two and the last may differ in the work around them.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from lowmem.cudasim.tape import FREED

# fully_shard fetches the next block's parameters early, and there is none below the first block.
BLOCKS = 4  # of the model that is recorded: two, the one that is repeated, the last
_REPEATED = 2


class Operation(NamedTuple):
    """An operation on a storage: `size` in bytes, or FREED."""

    stream: int
    storage: int
    size: int
    name: str


class Placed(NamedTuple):
    """An operation and its place. `section`: how often the block changed before it. `block`: None outside of the
    blocks."""

    operation: Operation
    section: int
    block: int | None


@dataclass(frozen=True)
class _Phase:
    """Operations of every block, in the order of their turns; of None alone between blocks."""

    turns: dict[int | None, list[Operation]]

    def order(self, blocks: int) -> list[int | None]:
        if None in self.turns:
            return [None]
        return list(range(blocks)) if next(iter(self.turns)) == 0 else list(reversed(range(blocks)))


def numbered(operations: list[Operation]) -> list[Operation]:
    """Returns the operations with storages numbered in the order of their birth."""
    numbers: dict[int, int] = {}
    return [
        operation._replace(
            storage=numbers.pop(operation.storage)
            if operation.size == FREED
            else numbers.setdefault(operation.storage, index)
        )
        for index, operation in enumerate(operations)
    ]


def stretched(placed: list[Placed], blocks: int) -> list[Operation] | None:
    """Returns the operations, `numbered`, of a model of `blocks` blocks from those of a model of BLOCKS. None if the
    recording does not fall into phases."""
    phases = _phases(placed)
    if phases is None:
        return None
    births = _births(phases)
    alive: dict[tuple, int] = {}
    operations: list[Operation] = []
    for phase in phases:
        for block in phase.order(blocks):
            turn = _template(block, blocks)
            own = []
            for operation in phase.turns[turn]:
                if operation.size == FREED:
                    # A block frees its own storages, or a neighbour's at the same distance for every block.
                    place = _moved(births[operation.storage], turn, block, blocks)
                    if place not in alive:
                        return None
                    own.append(operation._replace(storage=alive.pop(place)))
                else:
                    phase_born, _, index = births[operation.storage]
                    alive[phase_born, block, index] = len(operations) + len(own)
                    own.append(operation._replace(storage=len(operations) + len(own)))
            operations += own
    return operations


def _phases(placed: list[Placed]) -> list[_Phase] | None:
    groups = [
        (block, [one.operation for one in group])
        for (_, block), group in groupby(placed, key=lambda one: (one.section, one.block))
    ]
    upwards = list(range(BLOCKS))
    phases = []
    while groups:
        turns = groups[:BLOCKS]
        if [block for block, _ in turns] in (upwards, upwards[::-1]):
            phases.append(_Phase(dict(turns)))
            del groups[:BLOCKS]
            continue
        block, operations = groups.pop(0)
        if block == _REPEATED:
            return None
        phases.append(_Phase({None: operations}))
    return phases


def _births(phases: list[_Phase]) -> dict[int, tuple[int, int | None, int]]:
    """Returns {storage: (phase, block, index)} at its birth."""
    births = {}
    for number, phase in enumerate(phases):
        for block, operations in phase.turns.items():
            born = [one for one in operations if one.size != FREED]
            # Workspaces are made once and kept, so the first block would have one more than the others.
            born.sort(key=lambda one: one.name == "workspaces")  # stable
            births |= {one.storage: (number, block, index) for index, one in enumerate(born)}
    return births


def _template(block: int | None, blocks: int) -> int | None:
    """Returns the block of the recording that stands for `block` of `blocks`."""
    if block is None or block < _REPEATED:
        return block
    return BLOCKS - 1 if block == blocks - 1 else _REPEATED


def _moved(birth: tuple[int, int | None, int], turn: int | None, block: int | None, blocks: int) -> tuple:
    """Returns the birth of the storage that `block` frees when the recording's block `turn` frees the storage of
    `birth`."""
    phase, born_by, index = birth
    if born_by is None:
        return birth
    if turn is None:  # freed between blocks: what one of the first or the last one made
        return phase, born_by if born_by < _REPEATED else blocks - BLOCKS + born_by, index
    return phase, block + born_by - turn, index
