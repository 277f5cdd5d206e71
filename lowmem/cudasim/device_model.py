"""A `DeviceModel` says what a device adds to the operations that a `Recorder` sees."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from lowmem import device
from lowmem.cudasim import cuda_ops, roofline, temporaries
from lowmem.cudasim.gpus import Card


@dataclass(frozen=True)
class DeviceModel:
    """A device, as far as a `Recorder` has to know it. An operation is (func, args, kwargs, result).

    functions:          a mode that replaces the generic functions by the device's.
    hidden_bytes:       sizes of an operation's temporaries. It allocates them after its results.
    copied_first:       the operations that allocate their temporaries before their results.
    products:           matrix products. A thread's first one takes `workspace_bytes` for good.
    allocated:          an operation's results that are allocated on the device, in order.
    seconds:            time on the device.
    host_seconds:       time to launch an operation, in forward and in backward.
    more_host_seconds:  more time, by operator.
    """

    functions: Callable[[], AbstractContextManager] = nullcontext
    hidden_bytes: Callable = lambda *_: ()
    copied_first: frozenset = frozenset()
    products: frozenset = frozenset()
    workspace_bytes: int = 0
    allocated: Callable = lambda func, args, kwargs, results: results
    seconds: Callable = lambda *_: 0.0
    host_seconds: tuple[float, float] = (0.0, 0.0)
    more_host_seconds: dict = field(default_factory=dict)


TORCH_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
_more_host_seconds: dict[torch._ops.OpOverload, float] = {}


def register_product(packet: torch._ops.OpOverloadPacket, first_factor: int, host_seconds: float = 0.0) -> None:
    """Makes a custom operator known that multiplies two matrices through cuBLAS. `first_factor`: the first matrix's
    place among the arguments, the second follows; `host_seconds`: more time that a call takes on the host."""
    cuda_ops.MATRIX_PRODUCTS[packet] = first_factor
    cuda_ops.PRODUCTS.add(packet.default)
    temporaries.TEMPORARIES[packet.default] = temporaries.matrix_product
    _more_host_seconds[packet.default] = host_seconds


def gpu_model(card: Card, *, plain: bool = False, torch_version: tuple[int, int] = TORCH_VERSION) -> DeviceModel:
    """A GPU of this kind, set up as lowmem/device.py does it; `plain`: as PyTorch finds it, with sums in any order."""
    workspaces = None if plain else os.environ.get("CUBLAS_WORKSPACE_CONFIG", device.CUBLAS_WORKSPACES)
    gpu = temporaries.Gpu(card.capability, card.multiprocessors, deterministic=not plain)
    return DeviceModel(
        functions=partial(cuda_ops.CudaFunctions, card.capability, torch_version),
        hidden_bytes=partial(temporaries.hidden_bytes, gpu=gpu),
        copied_first=temporaries.COPIED_FIRST,
        products=frozenset(cuda_ops.PRODUCTS),
        workspace_bytes=cuda_ops.workspace_bytes(card.capability, workspaces, torch_version),
        allocated=cuda_ops.allocated,
        seconds=partial(roofline.operation_seconds, card),
        host_seconds=(roofline.HOST_SECONDS_PER_OPERATION, roofline.HOST_SECONDS_PER_BACKWARD_OPERATION),
        more_host_seconds=dict(_more_host_seconds),
    )
