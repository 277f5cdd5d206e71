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
from lowmem.cudasim.outcomes import is_simulated

_aten = torch.ops.aten


@dataclass(frozen=True)
class DeviceModel:
    """Describes a simulated device. For an operation without cached costs, the recorder calls `hidden_bytes` and
    `seconds` with (func, args, kwargs, result), and `allocated` with (func, args, kwargs, list of results). The
    functions in `storage_bytes` get (func, args, kwargs), and return the least bytes of the result's storage, or None
    if it has its usual size."""

    functions: Callable[[], AbstractContextManager] = nullcontext  # returns a context with the device's operators
    hidden_bytes: Callable = lambda *_: ()  # returns the bytes of each temporary
    workspace_bytes: tuple[int, ...] = ()  # allocated at forward's first matrix product; at backward's, only the first
    allocated: Callable = lambda func, args, kwargs, results: results  # returns the results on the device, in order
    storage_bytes: dict[Callable, Callable] = field(default_factory=dict)  # {operator: function}
    seconds: Callable = lambda *_: 0.0  # returns how long the device works on an operation
    host_seconds: tuple[float, float] = (0.0, 0.0)  # to launch an operation, in forward and in backward
    more_host_seconds: dict = field(default_factory=dict)  # {operator: seconds in addition to `host_seconds`}

    def run(self, func, args: tuple, kwargs: dict):
        """Runs the operation `func` on tensors without data. The storages of its results have the device's sizes."""
        if func is _aten._grouped_mm.default and args[0].is_meta:  # on meta only for bf16, on CUDA for every dtype
            factors = (factor.to(torch.bfloat16) for factor in args[:2])
            return func(*factors, *args[2:], **kwargs).to(args[0].dtype)
        result = func(*args, **kwargs)
        if (larger := self.storage_bytes.get(func)) and is_simulated(result):
            if (size := larger(func, args, kwargs)) is not None:
                result.untyped_storage().resize_(max(size, result.untyped_storage().nbytes()))
        return result


TORCH_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
_more_host_seconds: dict[torch._ops.OpOverload, float] = {}


def register_product(packet: torch._ops.OpOverloadPacket, first_factor: int, host_seconds: float = 0.0) -> None:
    """Tells the simulation that the custom operator `packet` multiplies two matrices through cuBLAS. `first_factor`:
    index of the left matrix among its arguments; the right one follows. `host_seconds`: CPU time of a call in addition
    to that of other operators."""
    cuda_ops.MATRIX_PRODUCTS[packet] = first_factor
    cuda_ops.CUBLAS_OPERATORS.add(packet.default)
    temporaries.TEMPORARIES[packet.default] = temporaries.matrix_product
    _more_host_seconds[packet.default] = host_seconds


def gpu_model(card: Card, *, plain: bool = False, torch_version: tuple[int, int] = TORCH_VERSION) -> DeviceModel:
    """Returns the model of the GPU `card` under training's settings of PyTorch (device.py): deterministic kernels, and
    cuBLAS workspaces of a fixed size. With `plain`, PyTorch has its default settings instead."""
    workspaces = None if plain else os.environ.get("CUBLAS_WORKSPACE_CONFIG", device.CUBLAS_WORKSPACES)
    gpu = temporaries.Gpu(card.capability, card.multiprocessors, deterministic=not plain)
    return DeviceModel(
        functions=partial(cuda_ops.CudaFunctions, card.capability, torch_version),
        hidden_bytes=partial(temporaries.hidden_bytes, gpu=gpu),
        workspace_bytes=cuda_ops.workspace_bytes(card.capability, workspaces, torch_version),
        allocated=cuda_ops.allocated,
        storage_bytes=cuda_ops.STORAGE_BYTES,
        seconds=partial(roofline.operation_seconds, card, deterministic=not plain),
        host_seconds=(roofline.HOST_SECONDS_PER_OPERATION, roofline.HOST_SECONDS_PER_BACKWARD_OPERATION),
        more_host_seconds=dict(_more_host_seconds),
    )
