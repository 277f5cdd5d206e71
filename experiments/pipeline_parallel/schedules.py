"""Pipeline schedules as data: of each rank the list of its actions, in order.

A model is cut into S stages on R ranks, stage s on rank s mod R. With S = vR each rank has v chunks. A schedule is a
short function that orders forwards and backwards on each rank; sends and receives follow from it (`schedule`).
"""

import bisect
from collections.abc import Callable, Iterator
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
INPUT_GRADIENT, WEIGHT_GRADIENT = "input gradient", "weight gradient"  # the two parts of a backward
SEND_ACTIVATION, RECEIVE_ACTIVATION = "send activation", "receive activation"
SEND_GRADIENT, RECEIVE_GRADIENT = "send gradient", "receive gradient"
UPDATE = "update"
KINDS = (
    *(FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, UPDATE),
    *(SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT),
)
COMPUTED = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
TIMES = {FORWARD: 1.0, BACKWARD: 2.0, INPUT_GRADIENT: 1.0, WEIGHT_GRADIENT: 1.0}


class Action(NamedTuple):
    """An action of a rank. A send or receive of an activation moves an output or input of `stage`, and of a gradient
    its gradient. A receive only starts here; the user of its tensor waits. `version`: number of updates before a
    forward. An update uses the gradient of `micro_batch`, or of all (-1)."""

    kind: str
    stage: int
    micro_batch: int = -1
    version: int = 0

    def __str__(self) -> str:
        of = "" if self.micro_batch < 0 else f" of micro-batch {self.micro_batch}"
        return f"{self.kind}{of}, stage {self.stage}"


Order = Callable[[int, int, int, int], Iterator[Action]]  # rank, ranks, micro-batches, chunks -> what it computes


def gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    stages = range(rank, ranks * chunks, ranks)
    yield from (Action(FORWARD, stage, m) for stage in stages for m in range(micro_batches))
    # In the order of the forwards, not the reverse, so that gradients are summed in that order.
    yield from (Action(BACKWARD, stage, m) for stage in reversed(stages) for m in range(micro_batches))
    yield from (Action(UPDATE, stage) for stage in stages)


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1F1B (Narayanan et al. 2021, arXiv 2104.04473): as many forwards ahead as there are stages after this one."""
    yield from _alternating(
        [Action(FORWARD, rank, m) for m in range(micro_batches)],
        [Action(BACKWARD, rank, m) for m in range(micro_batches)],
        ahead=ranks - rank - 1,
    )
    yield Action(UPDATE, rank)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """1F1B with chunks (same paper): as many micro-batches as ranks pass through a chunk, then through the next. Other
    numbers of micro-batches leave out some of the next multiple's."""
    stages = range(rank, ranks * chunks, ranks)
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    forwards = [Action(FORWARD, stage, m) for group in groups for stage in stages for m in group]
    backwards = [Action(BACKWARD, stage, m) for group in groups for stage in reversed(stages) for m in group]
    for action in _alternating(forwards, backwards, ahead=2 * (ranks - rank - 1) + (chunks - 1) * ranks):
        if action.micro_batch < micro_batches:
            yield action
    yield from (Action(UPDATE, stage) for stage in stages)


def zero_bubble(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al. 2024, arXiv 2401.10241): 1F1B with backwards in two parts. Weight gradients come `rank`
    micro-batches later, so every rank holds as many activations as the first."""
    ahead = min(ranks - rank - 1, micro_batches)
    yield from (Action(FORWARD, rank, m) for m in range(ahead))
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield Action(FORWARD, rank, m + ahead)
        yield Action(INPUT_GRADIENT, rank, m)
        if m >= rank:
            yield Action(WEIGHT_GRADIENT, rank, m - rank)
    yield from (Action(WEIGHT_GRADIENT, rank, m) for m in range(max(0, micro_batches - rank), micro_batches))
    yield Action(UPDATE, rank)


def pipedream(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """PipeDream (Harlap et al. 2018, arXiv 1806.03377): an update after every backward. Forwards use the newest weights
    of their stage, and backwards those of their forward."""
    yield from _updated_each_time(rank, ranks, micro_batches, behind=ranks - rank - 1)


def pipedream_with_vertical_sync(rank: int, ranks: int, micro_batches: int, chunks: int) -> Iterator[Action]:
    """PipeDream with vertical sync: all forwards of a micro-batch use the version that is newest in the first stage
    when the micro-batch enters."""
    yield from _updated_each_time(rank, ranks, micro_batches, behind=ranks - 1)


def _updated_each_time(rank: int, ranks: int, micro_batches: int, behind: int) -> Iterator[Action]:
    forwards = [Action(FORWARD, rank, m, version=max(0, m - behind)) for m in range(micro_batches)]
    backwards = [Action(BACKWARD, rank, m) for m in range(micro_batches)]
    for action in _alternating(forwards, backwards, ahead=ranks - rank - 1):
        yield action
        if action.kind == BACKWARD:
            yield Action(UPDATE, rank, action.micro_batch)


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for place, backward in enumerate(backwards):
        yield from forwards[ahead + place : ahead + place + 1]
        yield backward


SCHEDULES: dict[str, Order] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "pipedream": pipedream,
    "pipedream-vs": pipedream_with_vertical_sync,
}
ASYNCHRONOUS = ("pipedream", "pipedream-vs")
WITH_CHUNKS = ("gpipe", "interleaved")


def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """Returns each rank's actions, with sends and receives. Raises ValueError for sizes that the schedule does not
    have."""
    if ranks < 1 or micro_batches < 1 or chunks < 1:
        raise ValueError("ranks, micro-batches and chunks are at least 1")
    if chunks > 1 and name not in WITH_CHUNKS:
        raise ValueError(f"{name} has one stage per rank, and not {chunks} chunks; {' and '.join(WITH_CHUNKS)} have")
    order = SCHEDULES[name]
    return with_transfers([list(order(rank, ranks, micro_batches, chunks)) for rank in range(ranks)], ranks * chunks)


def with_transfers(computed: list[list[Action]], stages: int) -> list[list[Action]]:
    """Returns the orders `computed` with sends and receives. A result is sent at once."""
    ranks = len(computed)
    ends = _ends(computed, stages)
    receives: list[dict[int, list[Action]]] = [{} for _ in computed]  # by rank and place
    messages = [
        (ends[action], matching(send)) for order in computed for action in order for send in _sends(action, stages)
    ]
    for sent, receive in sorted(messages, key=lambda message: message[0]):
        order = computed[receive.stage % ranks]
        # A receive is begun before what its rank computes at the moment of the send (by TIMES). So ranks that send to
        # each other have both begun to receive, and receives come in the order of the sends.
        place = bisect.bisect_left(order, sent, key=ends.__getitem__)
        receives[receive.stage % ranks].setdefault(place, []).append(receive)
    found: list[list[Action]] = []
    for rank, order in enumerate(computed):
        found.append([])
        for place, action in enumerate(order):
            found[rank] += [receive for receive in receives[rank].get(place, []) if ranks > 1]
            found[rank].append(action)
            found[rank] += [send for send in _sends(action, stages) if ranks > 1]
    return found


def _ends(computed: list[list[Action]], stages: int) -> dict[Action, float]:
    """Returns the end of each action, if ranks never wait needlessly."""
    ends: dict[Action, float] = {}
    clock, place = [0.0] * len(computed), [0] * len(computed)
    produced: dict[Action, float] = {}  # by receive
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(computed):
            while place[rank] < len(order):
                action = order[place[rank]]
                inputs = needed(action, stages)
                if any(receive not in produced for receive in inputs):
                    break
                clock[rank] = max([clock[rank], *map(produced.__getitem__, inputs)]) + TIMES.get(action.kind, 0.0)
                ends[action] = clock[rank]
                produced.update((matching(send), clock[rank]) for send in _sends(action, stages))
                place[rank] += 1
                moved = True
    if any(place[rank] < len(order) for rank, order in enumerate(computed)):
        raise ValueError("these orders wait for one another: no sends and receives make a schedule of them")
    return ends


def _sends(action: Action, stages: int) -> list[Action]:
    if action.kind == FORWARD and action.stage < stages - 1:
        return [Action(SEND_ACTIVATION, action.stage, action.micro_batch)]
    if action.kind in (BACKWARD, INPUT_GRADIENT) and action.stage > 0:
        return [Action(SEND_GRADIENT, action.stage, action.micro_batch)]
    return []


def needed(action: Action, stages: int) -> list[Action]:
    """Returns the receive of an action's input from another stage, if any."""
    if action.kind == FORWARD and action.stage > 0:
        return [Action(RECEIVE_ACTIVATION, action.stage, action.micro_batch)]
    if action.kind in (BACKWARD, INPUT_GRADIENT) and action.stage < stages - 1:
        return [Action(RECEIVE_GRADIENT, action.stage, action.micro_batch)]
    return []


def matching(send: Action) -> Action:
    """Returns the receive on the other end of a send."""
    if send.kind == SEND_ACTIVATION:
        return Action(RECEIVE_ACTIVATION, send.stage + 1, send.micro_batch)
    return Action(RECEIVE_GRADIENT, send.stage - 1, send.micro_batch)
