"""All-gathers the sharded weights of a block before the block runs, by PyTorch's FSDP2.

FSDP2 gets one flat parameter per unit (the matrices of a block, for example), so a unit takes one all-gather.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lowmem.core.parameters import Part
from lowmem.core.shares import Gatherer


class _Flat(nn.Module):
    def __init__(self, part: Part, mesh: DeviceMesh):
        super().__init__()
        size = part.working.numel() * mesh.size()
        self.flat = nn.Parameter(torch.empty(size, dtype=part.working.dtype, device="meta"), requires_grad=False)
        fully_shard(self, mesh=mesh)
        # The store's own memory becomes this rank's share; FSDP2 takes it when it gathers for the first time.
        self.flat = nn.Parameter(DTensor.from_local(part.working, mesh, [Shard(0)], run_check=False), False)


class FsdpGatherer(Gatherer):
    """All-gathers the weights of `part`, all matrices of one block or other unit. `parameters`: {name: the model's
    parameter}, each of which becomes a view of the gathered weights."""

    def __init__(self, part: Part, mesh: DeviceMesh, parameters: dict[str, Tensor]):
        super().__init__(part)
        self._parameters, self._module, self._bound = parameters, _Flat(part, mesh), False

    def _gather(self) -> UnshardHandle:
        return self._module.unshard(async_op=True)

    def _arrive(self, coming: UnshardHandle) -> None:
        coming.wait()
        # Once is enough: FSDP2 frees the gathered tensor's memory and fills it again, so the views stay valid.
        for name, parameter in () if self._bound else self._parameters.items():
            parameter.data = self._part.view(self._module.flat.data, name)
        self._bound = True

    def _free(self) -> None:
        self._module.reshard()
