"""Runs the actions of one rank, one after the other, without knowing schedules. Memory depends on the micro-batches in
flight, not on their number."""

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.harness import group
from experiments.harness.group import peer_errors
from experiments.pipeline_parallel import schedules
from experiments.pipeline_parallel.schedules import Action, matching
from experiments.pipeline_parallel.stage import Stage

PENDING = 2


class ProcessTransfers:
    """Passes tensors between neighbours, in the order of the sends of a kind. `shapes`: shape and dtype of a row of
    each stage's output. `pipelines`: processes by rank, for each pipeline; every process has to make all of them."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        device: torch.device,
        pipelines: Sequence[Sequence[int]] | None = None,
    ):
        self._rank, self._ranks, self._shapes, self._device = rank, ranks, shapes, device
        self.sent_bytes = 0
        self._groups = {}
        # A group for each direction of each kind, since a group of NCCL does one thing after the other.
        for processes in pipelines or [range(ranks)]:
            groups = {}
            for source in range(ranks if ranks > 1 else 0):
                for kind, step in ((schedules.RECEIVE_ACTIVATION, 1), (schedules.RECEIVE_GRADIENT, -1)):
                    to = (source + step) % ranks
                    groups[kind, source, to] = group.new([processes[source], processes[to]])
            if ranks > 1 and processes[rank] == dist.get_rank():
                self._groups, self._processes = groups, processes
        self._begun: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._pending: dict[str, deque[tuple[dist.Work, Tensor]]] = {}

    def begin(self, receive: Action, rows: int) -> None:
        """Starts to receive `rows` rows; `wait` returns them."""
        of_activation = receive.kind == schedules.RECEIVE_ACTIVATION
        shape, dtype = self._shapes[receive.stage - of_activation]
        source = (receive.stage + (-1 if of_activation else 1)) % self._ranks
        buffer = torch.empty((rows, *shape), dtype=dtype, device=self._device)
        with peer_errors():
            work = dist.irecv(buffer, self._processes[source], group=self._groups[receive.kind, source, self._rank])
        self._begun[receive] = (work, buffer)

    def wait(self, receive: Action) -> Tensor:
        work, buffer = self._begun.pop(receive)
        with peer_errors():
            work.wait()
        return buffer

    def send(self, send: Action, tensor: Tensor) -> None:
        receive = matching(send)
        to = receive.stage % self._ranks
        # A sent tensor is held until the network has taken it. With more than PENDING of a kind the rank waits for the
        # oldest, which ends as the checker has proved.
        pending = self._pending.setdefault(send.kind, deque())
        tensor = tensor.contiguous()
        self.sent_bytes += tensor.nbytes
        of = self._groups[receive.kind, self._rank, to]
        with peer_errors():
            pending.append((dist.isend(tensor, self._processes[to], group=of), tensor))
            while len(pending) > PENDING:
                pending.popleft()[0].wait()

    def finish(self) -> None:
        with peer_errors():
            for pending in self._pending.values():
                while pending:
                    pending.popleft()[0].wait()


@dataclass
class MicroBatches:
    """The micro-batches of one step. `input_of(m)` is the input of micro-batch m. `loss_of(m, output)` is its share of
    the step's loss. `rows`: of each micro-batch."""

    input_of: Callable[[int], Tensor]
    loss_of: Callable[[int, Tensor], Tensor]
    rows: Sequence[int]


@dataclass
class Done:
    """A rank's results: losses by micro-batch, if it has the last stage; start and end of each computation, in seconds
    of a clock that all processes of a machine share."""

    losses: dict[int, float] = field(default_factory=dict)
    times: array = field(default_factory=lambda: array("d"))


class Rank:
    """Runs the actions of one rank, with its `stages`. `before_updates` is called once a step, with all gradients
    complete. `padded_to`: the least seconds of each kind of action; the rest is slept."""

    def __init__(
        self,
        stages: dict[int, Stage],
        stage_count: int,
        transfers: ProcessTransfers,
        before_updates: Callable[[], None] = lambda: None,
        padded_to: dict[str, float] | None = None,
    ):
        self._stages, self._last, self._transfers = stages, stage_count - 1, transfers
        self._before_updates, self._padded_to = before_updates, padded_to or {}
        self._split = False
        self._results: dict[tuple[str, int, int], Tensor] = {}  # what a send, or a stage of the same rank, will take

    def run(self, actions: Iterable[Action], batch: MicroBatches, step: int) -> Done:
        """Runs `actions`, which it iterates over twice."""
        done, updated = Done(), False
        named: dict[int, Counter[int]] = {number: Counter() for number in self._stages}
        self._split = False
        for action in actions:
            self._split |= action.kind == schedules.WEIGHT_GRADIENT
            if action.kind == schedules.FORWARD:
                named[action.stage][action.version] += 1
        for number, stage in self._stages.items():
            stage.begin(named[number])
        for action in actions:
            kind = action.kind
            if kind in (schedules.RECEIVE_ACTIVATION, schedules.RECEIVE_GRADIENT):
                self._transfers.begin(action, batch.rows[action.micro_batch])
            elif kind in (schedules.SEND_ACTIVATION, schedules.SEND_GRADIENT):
                receive = matching(action)
                self._transfers.send(action, self._results.pop(receive[:3]))
            elif kind == schedules.UPDATE:
                if not updated:
                    self._before_updates()
                updated = True
                self._stages[action.stage].update()
            else:
                given = self._input(action)
                began = time.monotonic()
                self._compute(action, given, batch, step, done)
                if kind in self._padded_to:
                    time.sleep(max(0.0, began + self._padded_to[kind] - time.monotonic()))
                done.times.extend((began, time.monotonic()))
        self._transfers.finish()
        return done

    def _input(self, action: Action) -> Tensor | None:
        for receive in schedules.needed(action, self._last + 1):
            local = self._results.pop(receive[:3], None)
            return self._transfers.wait(receive) if local is None else local
        return None

    def _compute(self, action: Action, given: Tensor | None, batch: MicroBatches, step: int, done: Done) -> None:
        stage, m = self._stages[action.stage], action.micro_batch
        is_last = action.stage == self._last
        loss_of = partial(batch.loss_of, m) if is_last else None
        if action.kind == schedules.FORWARD:
            x = batch.input_of(m) if action.stage == 0 else given
            output = stage.forward(m, x, step, action.version, loss_of, self._split)
            if is_last:
                done.losses[m] = float(output)
            else:
                self._results[schedules.RECEIVE_ACTIVATION, action.stage + 1, m] = output
        elif action.kind == schedules.WEIGHT_GRADIENT:
            stage.weight_gradient(m)
        else:
            whole = action.kind == schedules.BACKWARD
            gradient = (stage.backward if whole else stage.input_gradient)(m, given, loss_of)
            if action.stage > 0:
                self._results[schedules.RECEIVE_GRADIENT, action.stage - 1, m] = gradient
