"""Describes a device to the simulation: its operators, their temporary memory, and its speed."""

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
    """Describes a simulated device. `hidden_bytes`, `allocated` and `seconds` are functions that are called for each
    operation (func, args, kwargs, results)."""

    functions: Callable[[], AbstractContextManager] = nullcontext  # where the device's operators replace generic ones
    hidden_bytes: Callable = lambda *_: ()  # returns the bytes of each temporary of an operation
    # At its first matrix product, the forward thread allocates all of these, the backward thread the first one only.
    workspace_bytes: tuple[int, ...] = ()
    allocated: Callable = lambda func, args, kwargs, results: results  # returns the results on the device, in order
    seconds: Callable = lambda *_: 0.0  # returns how long the device works on an operation
    host_seconds: tuple[float, float] = (0.0, 0.0)  # to launch an operation, in forward and in backward
    more_host_seconds: dict = field(default_factory=dict)  # {operator: seconds in addition to `host_seconds`}


TORCH_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
_more_host_seconds: dict[torch._ops.OpOverload, float] = {}


def register_product(packet: torch._ops.OpOverloadPacket, first_factor: int, host_seconds: float = 0.0) -> None:
    """Registers a custom operator that multiplies its arguments number `first_factor` and `first_factor` + 1 through
    cuBLAS. Each call takes `host_seconds` more on the host than other operators."""
    cuda_ops.MATRIX_PRODUCTS[packet] = first_factor
    cuda_ops.CUBLAS_OPERATORS.add(packet.default)
    temporaries.TEMPORARIES[packet.default] = temporaries.matrix_product
    _more_host_seconds[packet.default] = host_seconds


def gpu_model(card: Card, *, plain: bool = False, torch_version: tuple[int, int] = TORCH_VERSION) -> DeviceModel:
    """Returns the model of a card. With `plain`, PyTorch's settings are its defaults: kernels need not be
    deterministic, and cuBLAS chooses its workspaces. Otherwise the settings are those that training makes
    (device.py)."""
    workspaces = None if plain else os.environ.get("CUBLAS_WORKSPACE_CONFIG", device.CUBLAS_WORKSPACES)
    gpu = temporaries.Gpu(card.capability, card.multiprocessors, deterministic=not plain)
    return DeviceModel(
        functions=partial(cuda_ops.CudaFunctions, card.capability, torch_version),
        hidden_bytes=partial(temporaries.hidden_bytes, gpu=gpu),
        workspace_bytes=cuda_ops.workspace_bytes(card.capability, workspaces, torch_version),
        allocated=cuda_ops.allocated,
        seconds=partial(roofline.operation_seconds, card),
        host_seconds=(roofline.HOST_SECONDS_PER_OPERATION, roofline.HOST_SECONDS_PER_BACKWARD_OPERATION),
        more_host_seconds=dict(_more_host_seconds),
    )
