"""Proves that a schedule is complete and cannot deadlock, and computes its cost.

All ranks' lists are simulated twice: with sends that return at once, and with sends that wait for the receive to begin.
A schedule has to end in both.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.pipeline_parallel.schedules import (
    BACKWARD,
    COMPUTED,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    TIMES,
    UPDATE,
    WEIGHT_GRADIENT,
    Action,
    matching,
    needed,
)

Span = tuple[float, float, Action]  # begin, end


@dataclass(frozen=True)
class Checked:
    """A schedule that holds.

    Args:
        bubble: share of the ranks' time, from first forward to last backward, in which they wait.
        peak_in_flight: of each rank, the most activations held for backward.
        weight_versions: of each rank, the most versions of a stage's weights held.
        in_order: every stage takes micro-batches in their order, forward and backward.
    """

    actions: list[list[Action]]
    spans: list[list[Span]]
    bubble: float
    peak_in_flight: list[int]
    weight_versions: list[int]
    in_order: bool


def check(actions: Sequence[Sequence[Action]], stages: int, micro_batches: int, updates: int = 1) -> Checked:
    """Checks a schedule, whose stages have `updates` updates each. Raises ValueError if it fails."""
    ranks = len(actions)
    if micro_batches < 1:
        raise ValueError("there is no micro-batch")
    if ranks < 1 or stages % ranks:
        raise ValueError(f"{stages} stages do not lie evenly on {ranks} ranks")
    lists = [list(of_rank) for of_rank in actions]
    _check_contents(lists, stages, micro_batches, updates)
    _walk(lists, stages, sends_wait=True)
    spans = _walk(lists, stages, sends_wait=False)
    return Checked(
        lists,
        spans,
        bubble_of(spans),
        [_peak_in_flight(of_rank) for of_rank in lists],
        [_weight_versions(of_rank) for of_rank in lists],
        all(_in_order(of_rank) for of_rank in lists),
    )


def bubble_of(spans: Iterable[Iterable[Span]]) -> float:
    """Returns the share of the ranks' time, from the first span to the last, that has no span."""
    spans = [list(of_rank) for of_rank in spans]
    times = [(begin, end) for of_rank in spans for begin, end, _ in of_rank]
    whole = max(end for _, end in times) - min(begin for begin, _ in times)
    return 1 - sum(end - begin for begin, end in times) / (len(spans) * whole)


def steady_bubble_of(spans: Sequence[Sequence[Span]]) -> float | None:
    """Returns the bubble from the last rank's first backward to the first rank's last forward. None if there is no such
    time."""
    begin = max(next(b for b, _, action in of_rank if action.kind != FORWARD) for of_rank in spans)
    end = min(max(e for _, e, action in of_rank if action.kind == FORWARD) for of_rank in spans)
    if end <= begin:
        return None
    busy = sum(max(0.0, min(e, end) - max(b, begin)) for of_rank in spans for b, e, _ in of_rank)
    return 1 - busy / (len(spans) * (end - begin))


def _check_contents(lists: list[list[Action]], stages: int, micro_batches: int, updates: int) -> None:
    ranks = len(lists)
    for rank, actions in enumerate(lists):
        done: set[Action] = set()
        versions: Counter[int] = Counter()
        for action in actions:
            action_of_all = action._replace(version=0)
            is_transfer = action.kind not in (*COMPUTED, UPDATE)
            if (
                action.kind not in KINDS
                or (is_transfer and ranks == 1)
                or not 0 <= action.stage < stages
                or action.stage % ranks != rank
            ):
                raise ValueError(f"rank {rank} has no such action: {action}")
            if action.kind == UPDATE:
                versions[action.stage] += 1
                continue
            if not 0 <= action.micro_batch < micro_batches:
                raise ValueError(f"rank {rank}: there is no micro-batch {action.micro_batch}: {action}")
            if action_of_all in done:
                raise ValueError(f"rank {rank} does this twice: {action}")
            for other in _before(action, ranks, stages):
                if other not in done:
                    raise ValueError(f"rank {rank}: {action} comes before {other}")
            of = (action.stage, action.micro_batch)
            if action.kind == SEND_GRADIENT and done.isdisjoint((Action(BACKWARD, *of), Action(INPUT_GRADIENT, *of))):
                raise ValueError(f"rank {rank}: {action} comes before it is computed")
            if action.kind == FORWARD and not 0 <= action.version <= versions[action.stage]:
                raise ValueError(
                    f"rank {rank}: {action} uses weights of {action.version} updates, after {versions[action.stage]}"
                )
            done.add(action_of_all)
        for stage in range(rank, stages, ranks):
            if versions[stage] != updates:
                raise ValueError(f"rank {rank}: stage {stage} has {versions[stage]} updates, and not {updates}")
            for micro_batch in range(micro_batches):
                of = (stage, micro_batch)
                if Action(FORWARD, *of) not in done:
                    raise ValueError(f"rank {rank} lacks {Action(FORWARD, *of)}")
                parts = [Action(kind, *of) in done for kind in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)]
                if parts not in ([True, False, False], [False, True, True]):
                    raise ValueError(f"rank {rank} lacks a backward, or has more than one: {Action(BACKWARD, *of)}")
        _check_updates(rank, actions, micro_batches)


def _check_updates(rank: int, actions: list[Action], micro_batches: int) -> None:
    pending: dict[int, set[int]] = {}
    for place, action in enumerate(actions):
        of_stage = pending.setdefault(action.stage, set())
        if action.kind in (BACKWARD, WEIGHT_GRADIENT):
            of_stage.add(action.micro_batch)
        if action.kind != UPDATE:
            continue
        if of_stage != (set(range(micro_batches)) if action.micro_batch < 0 else {action.micro_batch}):
            raise ValueError(f"rank {rank}: {action} comes when there are the gradients of {sorted(of_stage)}")
        of_stage.clear()
        # Ranks meet at an update of all (to clip, and for tied weights): only such updates may follow.
        if action.micro_batch < 0 and (later := [a for a in actions[place:] if a.kind != UPDATE]):
            raise ValueError(f"rank {rank}: {later[0]} comes after an update, for which the ranks meet")
    last_gradient = {action.stage: action for action in actions if action.kind in (BACKWARD, WEIGHT_GRADIENT)}
    last = {action.stage: action for action in actions if action.kind in (BACKWARD, WEIGHT_GRADIENT, UPDATE)}
    for stage, action in last.items():
        if action.kind != UPDATE:
            raise ValueError(f"rank {rank}: {last_gradient[stage]} comes after the last update of its stage")


def _before(action: Action, ranks: int, stages: int) -> list[Action]:
    """Returns the rank's own actions that must come before an action."""
    stage, micro_batch = action.stage, action.micro_batch
    inputs = []
    for receive in needed(action, stages):
        of_activation = receive.kind == RECEIVE_ACTIVATION
        neighbour = stage - 1 if of_activation else stage + 1
        if ranks > 1:
            inputs.append(receive)
        elif of_activation:
            inputs.append(Action(FORWARD, neighbour, micro_batch))
    if action.kind in (BACKWARD, INPUT_GRADIENT):
        inputs.append(Action(FORWARD, stage, micro_batch))
    if action.kind == WEIGHT_GRADIENT:
        inputs.append(Action(INPUT_GRADIENT, stage, micro_batch))
    if action.kind == SEND_ACTIVATION:
        inputs.append(Action(FORWARD, stage, micro_batch))
    return inputs


def _walk(lists: list[list[Action]], stages: int, sends_wait: bool) -> list[list[Span]]:
    """Returns the times of each rank's computations. Raises ValueError for deadlocks, and for messages that are not
    received, or in another order."""
    ranks = len(lists)
    place, clock = [0] * ranks, [0.0] * ranks
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    there: dict[Action, float] = {}  # by receive, when what it receives has been sent
    posted: dict[tuple[str, int, int], list[Action]] = {}  # by kind, from rank and to rank: receives begun
    arrived: Counter[tuple[str, int, int]] = Counter()

    def advance(rank: int) -> bool:
        action = lists[rank][place[rank]]
        if action.kind in (RECEIVE_ACTIVATION, RECEIVE_GRADIENT):
            source = (action.stage + (-1 if action.kind == RECEIVE_ACTIVATION else 1)) % ranks
            posted.setdefault((action.kind, source, rank), []).append(action)
        elif action.kind in (SEND_ACTIVATION, SEND_GRADIENT):
            receive = matching(action)
            key = (receive.kind, rank, receive.stage % ranks)
            number = arrived[key]
            # Messages of a network like NCCL's have no names, so between two ranks their order has to be the same.
            expected = posted.get(key, [])
            if number < len(expected) and expected[number] != receive:
                raise ValueError(f"rank {rank}: {action} meets {expected[number]}")
            if sends_wait and number >= len(expected):
                return False
            arrived[key] += 1
            there[receive] = clock[rank]
            sent_in_order.setdefault(key, []).append(receive)
        elif action.kind in COMPUTED:
            inputs = needed(action, stages) if ranks > 1 else []
            if any(receive not in there for receive in inputs):
                return False
            begin = max([clock[rank], *(there[receive] for receive in inputs)])
            clock[rank] = begin + TIMES[action.kind]
            spans[rank].append((begin, clock[rank], action))
        place[rank] += 1
        return True

    sent_in_order: dict[tuple[str, int, int], list[Action]] = {}
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while place[rank] < len(lists[rank]) and advance(rank):
                moved = True
    waiting = [f"rank {rank} at {lists[rank][place[rank]]}" for rank in range(ranks) if place[rank] < len(lists[rank])]
    if waiting:
        raise ValueError(f"a deadlock{' where sends wait' if sends_wait else ''}: {'; '.join(waiting)}")
    for key in posted.keys() | sent_in_order.keys():
        sends, receives = sent_in_order.get(key, []), posted.get(key, [])
        if sends != receives:
            kind, source, to = key
            raise ValueError(f"from rank {source} to rank {to}: what is sent is not what is received ({kind})")
    return spans


def _peak_in_flight(actions: list[Action]) -> int:
    count = most = 0
    for action in actions:
        count += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT_GRADIENT))
        most = max(most, count)
    return most


def _weight_versions(actions: list[Action]) -> int:
    """Returns the most versions of a stage's weights: the newest, those in flight, and those that a forward will still
    use."""
    last_use: dict[tuple[int, int], int] = {}
    version_of: dict[tuple[int, int], int] = {}
    for place, action in enumerate(actions):
        of = (action.stage, action.micro_batch)
        if action.kind == FORWARD:
            version_of[of] = action.version
        if action.kind in COMPUTED:
            last_use[action.stage, version_of[of]] = place
    ends: dict[int, list[tuple[int, int]]] = {}
    for (stage, version), place in last_use.items():
        ends.setdefault(place, []).append((stage, version))
    held: dict[int, set[int]] = {}
    updates: Counter[int] = Counter()
    most = 1
    for place, action in enumerate(actions):
        stage = action.stage
        held.setdefault(stage, {0})
        if action.kind == UPDATE:
            newest = updates[stage]
            if last_use.get((stage, newest), -1) < place:
                held[stage].discard(newest)
            updates[stage] += 1
            held[stage].add(updates[stage])
        most = max(most, len(held[stage]))
        for stage, version in ends.get(place, []):
            if version != updates[stage]:
                held[stage].discard(version)
    return most


def _in_order(actions: list[Action]) -> bool:
    last: dict[tuple[int, bool], int] = {}
    for action in actions:
        if action.kind in (FORWARD, BACKWARD, WEIGHT_GRADIENT):
            key = (action.stage, action.kind == FORWARD)
            if action.micro_batch < last.get(key, 0):
                return False
            last[key] = action.micro_batch
    return True
