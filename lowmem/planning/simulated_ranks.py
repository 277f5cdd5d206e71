"""Simulates one of several ranks that train together: memory and time of all-gathering weights and summing gradients.

PyTorch's FSDP2 gathers the weights of a unit (such as a block) into a buffer. It copies them into a tensor whose views
are the model's parameters, and frees the buffer. Here the tape (the list of allocations) has the buffer and that
tensor. The parameters are views of a third tensor, which is not on the tape.

A rank's link to other ranks makes one transfer after the other. Without NVLink every byte goes through the machine's
RAM: it is written there and read again, for all GPUs at once. So the link is as fast as a copy over the bus or, if that
is slower, the GPU's share of half the RAM's speed. A second link, which all GPUs of a machine share, leads to other
machines.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.core.parameters import Part
from lowmem.core.ranks import Item, Ranks
from lowmem.core.shares import Among, Gatherer, Shares
from lowmem.cudasim.recorder import Recorder

RAM_BYTES_PER_SECOND = 40e9  # of two channels of DDR4-3200, whose limit is 51.2e9; assumed


@dataclass(frozen=True)
class Mesh:
    """Describes the ranks that train together. One copy of the model is sharded over `sharing` ranks, and there are
    `replicas` copies. `network`: bytes per second that each of the `machines` receives from the others."""

    sharing: int = 1
    replicas: int = 1
    machines: int = 1
    network: float = math.inf

    @property
    def count(self) -> int:
        return self.sharing * self.replicas

    def rates(self, bus: float, link: float | None) -> dict[Among, float]:
        """Returns {Among: bytes per second that a rank receives in a collective}. Among.SHARES are the ranks that shard
        one copy of the model, and Among.REPLICAS those with the same shard. `bus`: bytes per second of a copy from RAM
        to a GPU. `link`: bytes per second between GPUs of a machine, None if they send through RAM."""
        on_each = self.count // self.machines
        inside = link or min(bus, RAM_BYTES_PER_SECOND / (2 * on_each))
        outside = min(inside, self.network / on_each)
        return {Among.SHARES: inside if self.replicas == self.machines else outside, Among.REPLICAS: outside}


ALONE = Mesh()


class SimulatedRanks(Shares):
    """Simulates the collectives of the first rank of `mesh`, the ranks that train together. `rates`: bytes per second
    of the rank's links (Mesh.rates), None if sending takes no time. `exposed_seconds`: seconds in which its GPU was
    idle only because of transfers between ranks. `sent_bytes`: bytes that it has sent so far."""

    def __init__(self, mesh: Mesh, recorder: Recorder, rates: dict[Among, float] | None):
        super().__init__(mesh.count, 0)
        self.share_among(mesh.sharing)
        self.exposed_seconds, self.sent_bytes = 0.0, 0
        self._recorder, self._rates = recorder, rates
        self._free = dict.fromkeys(Among, 0.0)  # when each link will have made the transfers so far
        self._beside: float | None = None  # inside `beside`: when its transfers end
        self._sums_end = 0.0

    def gatherer(self, part: Part, parameters: dict[str, Tensor]) -> "_SimulatedGatherer":
        return _SimulatedGatherer(part, self, self._recorder, parameters)

    own, total = Ranks.own, Ranks.total

    def rounds(self, micro_batches: Sequence[Item]) -> list[tuple[Item, bool]]:
        # An evaluation gathers each block when it runs. It needs memory for two blocks: one runs, and one arrives.
        self._weights.bring(range(-1, 0))
        self._weights.bring(range(1), range(1, 2))
        return [(each, True) for each in micro_batches]

    def exchange(self, came: Tensor, sent: Tensor, among: Among) -> None:
        self.send(sent.nbytes - sent[0].nbytes, among)

    def gather(self, came: Tensor, own: Tensor, among: Among) -> None:
        arrived = self.send(came.nbytes - own.nbytes, among)
        if self._beside is None:
            self.wait(arrived)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._beside = 0.0
        yield
        self._sums_end, self._beside = self._beside, None

    def mark(self) -> float:
        return self._sums_end

    def wait(self, event: float) -> None:
        clock = self._recorder.clock
        self.exposed_seconds += max(0.0, event - max(clock.gpu, clock.host))
        clock.wait(event)

    def send(self, size_bytes: int, among: Among = Among.SHARES) -> float:
        """Simulates a transfer of `size_bytes` in each direction, on the link that connects the ranks `among`. The
        transfer begins when the link is idle and the GPU has done its earlier work. Transfers inside one `with`
        statement of `beside` (a second stream) follow each other. Does not wait. Returns the simulated time, in
        seconds, at which the transfer ends."""
        clock = self._recorder.clock
        self.sent_bytes += size_bytes
        began = max(self._free[among], self._beside or 0.0, clock.gpu, clock.host)
        self._free[among] = began + (size_bytes / self._rates[among] if self._rates else 0.0)
        if self._beside is not None:
            self._beside = self._free[among]
        return self._free[among]


class _SimulatedGatherer(Gatherer):
    """Simulates the memory and time of an all-gather of `part`, the matrices of one unit (such as a block). Records the
    buffer and the gathered copy on the tape (the list of allocations), and the transfer on the rank's link.
    `parameters`: {name: the model's parameter} of `part`. Makes these parameters views of a tensor that takes no
    simulated memory."""

    def __init__(self, part: Part, ranks: SimulatedRanks, recorder: Recorder, parameters: dict[str, Tensor]):
        super().__init__(part)
        self._ranks, self._size = ranks, part.working.numel() * ranks.sharing
        self._buffer: Tensor | None = None
        self._gathered: Tensor | None = None
        with recorder.paused():
            weights = torch.empty(self._size, dtype=part.working.dtype, device="meta")
        recorder.leave_out(weights)  # takes no simulated memory
        for name, parameter in parameters.items():
            parameter.data = part.view(weights, name)

    def _gather(self) -> float:
        working = self._part.working
        self._buffer = working.new_empty(self._size)
        self._buffer[: working.numel()].copy_(working)
        return self._ranks.send(working.nbytes * (self._ranks.sharing - 1))

    def _arrive(self, coming: float) -> None:
        self._ranks.wait(coming)
        self._gathered = torch.empty_like(self._buffer).copy_(self._buffer)
        self._buffer = None

    def _free(self) -> None:
        self._gathered = None


BESIDE = "gradient_sums"  # name of the storages that are made on a second stream
STREAMS = {BESIDE: 1}
NAMES = {  # names of storages that are allocated in these functions, or in functions that they call
    _SimulatedGatherer._gather.__code__: "gathered_weights",
    _SimulatedGatherer._arrive.__code__: "gathered_weights",
    Shares._sum_slices.__code__: BESIDE,
    Shares.summed.__code__: "gradients",
}
