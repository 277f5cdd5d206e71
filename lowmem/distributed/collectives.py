"""Sends data between processes that train one model, by torch.distributed. Implements Shares of core/shares.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lowmem.core.decoder import Decoder
from lowmem.core.parameters import Part, Store
from lowmem.core.ranks import Item
from lowmem.core.shares import Among, GatheredWeights, Shares, in_order
from lowmem.distributed.gathered import FsdpGatherer

_END = -1
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # in older versions


class SeveralRanks(Shares):
    """Does by torch.distributed what several processes (ranks) that train one model must do together. `device_type`:
    "cuda" or "cpu". `local_rank`: this process's number on its machine. `on_machine`: number of processes on this
    machine. If both are None, all processes are on one machine."""

    def __init__(self, device_type: str, local_rank: int | None = None, on_machine: int | None = None):
        self._device_type = device_type
        super().__init__(dist.get_world_size(), dist.get_rank())
        first = (self.rank if local_rank is None else local_rank) == 0
        self.machines = int(self.total(float(first)))
        self.on_machine = self.most(on_machine or self.count)
        self.alike = self.on_machine * self.machines == self.count
        self._store: Store | None = None
        self._stream = torch.cuda.Stream() if device_type == "cuda" else None

    def share_among(self, sharing: int) -> None:
        super().share_among(sharing)
        if sharing == self.count:
            self._mesh = init_device_mesh(self._device_type, (sharing,))
            self._groups = {}
            return
        shape, names = (self.count // sharing, sharing), ("machine", "share")
        mesh = init_device_mesh(self._device_type, shape, mesh_dim_names=names)
        self._mesh = mesh["share"]
        self._groups = {Among.SHARES: mesh.get_group("share"), Among.REPLICAS: mesh.get_group("machine")}

    # --- a step

    def window(self, decoder: Decoder, store: Store) -> GatheredWeights:
        self._store = store
        window = super().window(decoder, store)
        window.watch(decoder)
        return window

    def gatherer(self, part: Part, parameters: dict[str, Tensor]) -> FsdpGatherer:
        return FsdpGatherer(part, self._mesh, parameters)

    def exchange(self, came: Tensor, sent: Tensor, among: Among) -> None:
        dist.all_to_all_single(came, sent, group=self._groups.get(among))

    def gather(self, came: Tensor, own: Tensor, among: Among) -> None:
        _all_gather(came.view(-1), own, group=self._groups.get(among))

    def beside(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def total(self, value: float) -> float:
        came = [torch.zeros(1, dtype=torch.float64) for _ in range(self.count)]
        dist.all_gather(came, torch.tensor([value], dtype=torch.float64))
        return in_order(torch.cat(came)).item()

    # --- between steps

    def most(self, number: int) -> int:
        came = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(came, torch.tensor([number]))
        return max(map(int, came))

    def on_all(self, work: Callable[[], Item]) -> Item:
        result, error, errors = None, None, [None] * self.count
        try:
            result = work()
        except Exception as caught:
            error = caught
        dist.all_gather_object(errors, error)
        for first in filter(None, errors):
            first.said_by = 0  # only rank 0 prints the error (run/main.py)
            raise first
        return result

    def on_first(self, work: Callable[[], Item]) -> Item:
        outcome = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
            finally:
                self._ask(_END, 0, 0)
        else:
            self._answer()
        dist.broadcast_object_list(outcome, 0)
        if outcome[1] is not None:
            outcome[1].said_by = 0  # run/main.py
            raise outcome[1]
        return outcome[0]

    def range_of(self, shares: Tensor, start: int, stop: int) -> Tensor:
        # The other ranks are in `on_first`, and send their elements in `_answer`.
        number = next(number for number, each in enumerate(self._stored()) if each is shares)
        self._ask(number, start, stop)
        whole = torch.empty(stop - start, dtype=shares.dtype)
        for rank in range(self.sharing):
            first, last = self._overlap(rank, shares, start, stop)
            if first < last and rank == 0:
                whole[first - start : last - start] = shares[first:last]
            elif first < last:
                dist.recv(whole[first - start : last - start].view(torch.uint8), rank)
        return whole

    def _answer(self) -> None:
        """Sends rank 0 elements of this rank's shards, as it requests them in `range_of`, until its `on_first` ends."""
        while (request := self._ask(_END, 0, 0))[0] != _END:
            shares = self._stored()[request[0]]
            first, last = self._overlap(self.rank, shares, *request[1:])
            if first < last:
                own = self.rank * shares.numel()
                dist.send(shares[first - own : last - own].cpu().view(torch.uint8), 0)

    def _stored(self) -> list[Tensor]:
        """Returns this rank's shards of all matrices' weights and optimizer states, in the same order on all ranks."""
        parts = (part for part in self._store.parts if part.is_matrices)
        return [tensor for part in parts for tensor in (part.working, *part.state.values())]

    def _ask(self, *request: int) -> list[int]:
        """Broadcasts rank 0's `request`, three integers, and returns it in all ranks: [index in `_stored`, first
        element, last element + 1]. The `request` of other ranks is ignored, but must also be three integers."""
        asked = torch.tensor(request)
        dist.broadcast(asked, 0)
        return asked.tolist()

    @staticmethod
    def _overlap(rank: int, shares: Tensor, start: int, stop: int) -> tuple[int, int]:
        own = rank * shares.numel()
        return max(start, own), min(stop, own + shares.numel())
