"""Gathers the weights of blocks from all ranks before the blocks run, by PyTorch's FSDP2.

FSDP2 gets one flat parameter per unit: all matrices of a block, say, of which each rank stores an equal share. So a
unit is one all-gather, whatever its matrices are, and the model's parameters are views of the gathered one. FSDP2 frees
that memory and fills it again; the views stay.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lowmem.core.parameters import Part


class _Flat(nn.Module):
    """Holds all matrices of one unit as one parameter [ranks x share]."""

    def __init__(self, part: Part, mesh: DeviceMesh):
        super().__init__()
        size = part.working.numel() * mesh.size()
        self.flat = nn.Parameter(torch.empty(size, dtype=part.working.dtype, device="meta"), requires_grad=False)
        fully_shard(self, mesh=mesh)
        # The store's own memory becomes this rank's share; FSDP2 takes it when it gathers for the first time.
        self.flat = nn.Parameter(DTensor.from_local(part.working, mesh, [Shard(0)], run_check=False), False)


class GatheredUnit:
    """Gathers one unit's matrices, `part` (core/shares.py). `parameters`: those of the model, by name."""

    def __init__(self, part: Part, mesh: DeviceMesh, parameters: dict[str, Tensor]):
        self._part, self._parameters, self._module = part, parameters, _Flat(part, mesh)
        self._bound = False
        self._coming = None
        self.updates: int | None = None  # of the gathered weights; None if they are not gathered

    @property
    def is_here(self) -> bool:
        return self.updates == self._part.updates and self._coming is None

    def start(self) -> None:
        if self.updates == self._part.updates:
            return
        self.let_go()
        self._coming, self.updates = self._module.unshard(async_op=True), self._part.updates

    def wait(self) -> None:
        if self._coming is None:
            return
        self._coming.wait()
        self._coming = None
        for name, parameter in () if self._bound else self._parameters.items():
            parameter.data = self._part.view(self._module.flat.data, name)
        self._bound = True

    def let_go(self) -> None:
        if self.updates is not None:
            self.wait()
            self._module.reshard()
            self.updates = None
