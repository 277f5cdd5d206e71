"""Measures the GPU memory that a function takes. One process measures many functions, each from an empty allocator.

On the CPU (a dry run), the profiler's memory events go through the model of the caching allocator, caps included.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from experiments.harness.at_peak import tape_of_cpu, tape_of_history
from experiments.harness.child import Setting
from lowmem import device as devices
from lowmem.core.batch import Batch
from lowmem.core.decoder import Decoder
from lowmem.core.deferred_updates import UpdateInterrupted
from lowmem.core.kernels import Kernels, fused
from lowmem.core.optimizers import Hyperparameters
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale, resolve_precision
from lowmem.core.step import TrainingStep
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import Card
from lowmem.cudasim.tape import Tape, under_cap
from lowmem.limits import Budget
from lowmem.planning.question import card_for
from lowmem.planning.simulated_step import StepCase, Target, cpu_target, gpu_target
from lowmem.settings import Settings

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Measured(Generic[Returned]):
    """Holds the memory peaks of a function. `returned`: its result. `left_bytes`: reserved before it was called.
    `tape`: its allocations and frees, or None if they were not recorded."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    returned: Returned
    left_bytes: int = 0
    tape: Tape | None = None


@dataclass(frozen=True)
class Ran:
    """Describes a training. `step_seconds`: median from the third step on. `updates`: steps that updated weights."""

    step_seconds: float
    updates: int


def capped_device(setting: Setting) -> torch.device:
    """Sets training's environment and the job's GPU memory cap, and returns the device. Call it before CUDA starts."""
    devices.set_environment()
    device = torch.device(setting.device)
    Budget(device, setting.gpu_limit_bytes, None).apply()
    return device


def kernels_of(device: torch.device) -> Kernels:
    return fused.running(device) if device.type == "cuda" else Kernels.NONE


def sixteen_bit(device: torch.device) -> str:
    """Returns the 16-bit precision of this device: "bf16", or "fp16" on cards below sm_80, which have no bf16."""
    return resolve_precision("auto", device) if device.type == "cuda" else "bf16"


def precisions(device: torch.device) -> dict[str, torch.dtype]:
    return {name: dtype for name, dtype in WORKING_DTYPES.items() if name != "bf16" or sixteen_bit(device) == "bf16"}


def prepared(setting: Setting) -> tuple[torch.device, Card | None, Target]:
    """Sets up the job's device as for training. Returns it, its card (None on the CPU) and its simulation's Target."""
    devices.set_environment()
    if setting.device == "cpu":
        return torch.device("cpu"), None, cpu_target()
    device = devices.select_device("cuda")
    devices.make_deterministic(device)
    card = card_for(Settings())
    return device, card, gpu_target(card, fused.running(device))


def measure(
    work: Callable[[], Returned], device: torch.device, limit_bytes: int | None = None, *, history: bool = False
) -> Measured[Returned] | None:
    """Empties the allocator, calls `work` and returns its memory peaks. Returns None if memory ran out under the cap
    `limit_bytes` (None: no cap). `history`: also records allocations and frees, as always on the CPU."""
    _empty(device)
    if device.type == "cpu":
        tape, returned = tape_of_cpu(work)
        try:
            taken = under_cap(tape, limit_bytes)
        except SimulatedOutOfMemory:
            return None
        return Measured(taken.allocated_peak_bytes, taken.reserved_peak_bytes, returned, tape=tape)
    left = torch.cuda.memory_reserved(device)
    # The cap of the case before would hold on.
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    Budget(device, limit_bytes, None).apply()
    if history:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
    try:
        returned = work()
        torch.cuda.synchronize(device)
        peaks = Budget(device, None, None).peaks()
        tape = tape_of_history(torch.cuda.memory._snapshot()["device_traces"][device.index]) if history else None
    except (torch.OutOfMemoryError, UpdateInterrupted):
        torch.cuda.synchronize(device)  # while the tensors that are being copied still live
        return None
    finally:
        if history:
            torch.cuda.memory._record_memory_history(None)
    allocated, reserved = peaks["gpu_allocated_peak_bytes"], peaks["gpu_reserved_peak_bytes"]
    return Measured(allocated, reserved, returned, left, tape)


def train(decoder: Decoder, case: StepCase, batch: Batch, device: torch.device, steps: int) -> Ran:
    devices.take_workspaces(device)
    step = random_step(decoder, case, device)
    seconds = []
    for number in range(steps):
        started = time.perf_counter()
        step(batch, number, 1e-4)  # which ends with a number read back
        seconds.append(time.perf_counter() - started)
    step.flush()
    return Ran(statistics.median(seconds[2:] or seconds), step.updates)


def random_step(decoder: Decoder, case: StepCase, device: torch.device) -> TrainingStep:
    store = Store(decoder, device, case.dtype, case.optimizer, case.layout)
    for part in store.parts:
        part.working.normal_(0, 0.02)
    store.page_lock()
    return TrainingStep(
        decoder, store, Hyperparameters(weight_decay=0.01), clip_norm=case.clip_norm, seed=0,
        loss_scale=LossScale(case.dtype is torch.float16, scale=1024.0),
    )  # fmt: skip


def error(predicted: int, measured: int) -> float:
    """Returns the signed relative error, below 0 if the prediction was too low."""
    return predicted / measured - 1


def _empty(device: torch.device) -> None:
    # A training holds itself by reference cycles, and cuBLAS a workspace per thread. Segments that grow can be given
    # back whole.
    devices.collect_garbage()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        devices.forget_allocations(device)
