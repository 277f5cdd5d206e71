"""Simulates one of several ranks that train together: memory and time of gathered weights and summed gradients."""

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
    """Describes the ranks that train together: `replicas` copies of the model, each sharded over `sharing` ranks.
    `network`: bytes per second that each of the `machines` receives from the others."""

    sharing: int = 1
    replicas: int = 1
    machines: int = 1
    network: float = math.inf

    @property
    def count(self) -> int:
        return self.sharing * self.replicas

    def rates(self, bus: float, link: float | None) -> dict[Among, float]:
        """Returns {Among: bytes per second that a rank receives in a collective}. Among.SHARES are the ranks that shard
        one copy of the model, and Among.REPLICAS those with the same shard. `bus`: bytes per second from RAM to a GPU.
        `link`: bytes per second between GPUs of a machine; None if they send through RAM."""
        on_each = self.count // self.machines
        # Without NVLink, every byte goes through RAM: it is written there and read again, for all GPUs at once.
        inside = link or min(bus, RAM_BYTES_PER_SECOND / (2 * on_each))
        # All GPUs of a machine share its link to other machines.
        outside = min(inside, self.network / on_each)
        return {Among.SHARES: inside if self.replicas == self.machines else outside, Among.REPLICAS: outside}


ALONE = Mesh()


class SimulatedRanks(Shares):
    """Simulates memory and time of the collectives that the first rank of `mesh` makes. `rates`: bytes per second that
    this rank receives (Mesh.rates); None: sending takes no time."""

    def __init__(self, mesh: Mesh, recorder: Recorder, rates: dict[Among, float] | None):
        super().__init__(mesh.count, 0)
        self.share_among(mesh.sharing)
        # seconds in which the GPU was idle only because of transfers; bytes sent so far
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
        """Simulates that this rank sends `size_bytes` to other ranks, and receives as many. Does not wait. Returns the
        simulated second at which the transfer ends. `among`: SHARES for the ranks that shard one copy of the model,
        REPLICAS for those with the same shard."""
        clock = self._recorder.clock
        self.sent_bytes += size_bytes
        # Begins when the link is idle and the GPU has done its earlier work. Transfers inside one `beside` (a second
        # stream) follow each other.
        began = max(self._free[among], self._beside or 0.0, clock.gpu, clock.host)
        self._free[among] = began + (size_bytes / self._rates[among] if self._rates else 0.0)
        if self._beside is not None:
            self._beside = self._free[among]
        return self._free[among]


class _SimulatedGatherer(Gatherer):
    """Simulates memory and time of an all-gather of `part`, the matrices of one unit (mostly a block). Makes the unit's
    `parameters` views of a tensor without data."""

    def __init__(self, part: Part, ranks: SimulatedRanks, recorder: Recorder, parameters: dict[str, Tensor]):
        super().__init__(part)
        self._ranks, self._size = ranks, part.working.numel() * ranks.sharing
        self._buffer: Tensor | None = None
        self._gathered: Tensor | None = None
        # FSDP2 gathers into a buffer, copies that into a tensor whose views are the parameters, and frees the buffer.
        # Here the tape has the buffer and that tensor, but the parameters are views of a third one.
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
