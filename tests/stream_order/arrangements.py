"""Trainings that together take every way through the code that moves states and updates weights.

Each trains the small GPT-2 of experiments/harness/trainings.py with dropout, for three steps of four micro-batches.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.harness.trainings import (
    CPU,
    IN_BACKWARD,
    LAYOUTS,
    LEARNING_RATE,
    PLAIN,
    SENT,
    STREAMED,
    TWICE,
    WEIGHTS_STREAMED,
    Outcome,
    Shape,
)
from lowmem.core import kernels
from lowmem.core import parameters as stores
from lowmem.core.batch import Batch
from lowmem.core.homes import host_tensor
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Fate
from lowmem.core.parameters import Store
from lowmem.core.step import StepResult, TrainingStep
from lowmem.run.recovery import Recovery
from tests.stream_order import kernels as plain_kernels
from tests.stream_order.checker import Trace
from tests.stream_order.recorder import Recorder

PIECE = 2**13  # elements that are updated at once, so that a block's matrices are two pieces
SHAPE = replace(Shape.of(tiny=True, dropout=0.1), steps=3)


@dataclass(frozen=True)
class Arrangement:
    """One training. `case`: its differences from PLAIN. `kernels`: with fused operators. `evaluated`, `saved`: after
    these steps. `runs_out`: {step: matrix product, counted from 1, at which memory runs out}. `fates`: {step: what
    happens to final gradients from then on}."""

    case: dict[str, int | bool | str]
    kernels: bool = True
    evaluated: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    runs_out: dict[int, int] = field(default_factory=dict)
    fates: dict[int, Fate] = field(default_factory=dict)

    def plain(self) -> dict:
        """Returns the training that has to leave the same bits: everything on the device, updated at once."""
        return PLAIN | {key: value for key, value in self.case.items() if key in COMPUTED}


COMPUTED = ("precision", "optimizer", "clip_norm")  # what may change bits
FP32, FP16, SGD, EIGHT_BIT = (
    {"precision": "fp32"},
    {"precision": "fp16"},
    {"optimizer": "sgd"},
    {"optimizer": "adamw8bit"},
)
TURNING = {1: Fate.DROPPED, 2: Fate.HELD}  # updates of one step go upwards, those of the next downwards
ARRANGEMENTS = {
    "deferred": Arrangement(STREAMED),
    "deferred, one unit streamed, evaluated and saved": Arrangement(
        LAYOUTS["one unit streamed, deferred"], evaluated=(0,), saved=(1,)
    ),
    "in backward, half streamed, saved": Arrangement(IN_BACKWARD["in backward, half streamed"], saved=(0,)),
    "updates on the stream that computes, saved": Arrangement(STREAMED, kernels=False, saved=(0,)),
    "in backward, all streamed, SGD": Arrangement(IN_BACKWARD["in backward, all streamed"] | SGD),
    "forward and backward twice, fp32": Arrangement(STREAMED | TWICE | FP32),
    "streamed, fp16": Arrangement(STREAMED | FP16),
    "groups of 2, products and whole blocks kept, half streamed": Arrangement(
        LAYOUTS["products of some kept, others whole, half streamed, groups of 2"]
    ),
    "all resident, evaluated": Arrangement({"defer": True}, evaluated=(1,)),
    "not deferred, fp16, evaluated": Arrangement({"states_on_gpu": 0} | FP16, evaluated=(0,)),
    "8-bit moments, saved": Arrangement(STREAMED | EIGHT_BIT, saved=(1,)),
    "weights streamed, evaluated and saved": Arrangement(WEIGHTS_STREAMED, evaluated=(0,), saved=(1,)),
    "weights streamed, in backward": Arrangement(IN_BACKWARD["in backward, weights streamed"]),
    "weights of some streamed, forward and backward twice, fp32": Arrangement(
        LAYOUTS["weights of some streamed, forward and backward twice"] | FP32
    ),
    "boundaries in RAM, in backward": Arrangement(IN_BACKWARD["in backward, boundaries in RAM"]),
    "boundaries and weights in RAM, products kept": Arrangement(
        LAYOUTS["boundaries and weights in RAM, products kept"]
    ),
    "gradients in RAM, evaluated and saved": Arrangement(STREAMED | SENT, evaluated=(0,), saved=(1,)),
    "gradients of some in RAM, weights and boundaries of all, fp16": Arrangement(
        LAYOUTS["gradients of some in RAM, weights and boundaries of all"] | FP16
    ),
    "gradients in RAM, on a disk, memory runs out in a backward pass": Arrangement(
        LAYOUTS["half on a disk, gradients in RAM"], runs_out={1: 60}
    ),
    "on a disk, evaluated and saved": Arrangement(LAYOUTS["on a disk"], evaluated=(0,), saved=(1,)),
    "every second unit on a disk, weights streamed, in backward": Arrangement(
        IN_BACKWARD["in backward, half on a disk, weights streamed"]
    ),
    "from the first unit to the last, then backwards": Arrangement(STREAMED | {"group": 4}, fates=TURNING),
    "from the last unit to the first, then forwards, on a disk": Arrangement(
        LAYOUTS["on a disk"] | TWICE, fates={1: Fate.HELD, 2: Fate.DROPPED}
    ),
    "memory runs out in a forward pass": Arrangement(STREAMED | {"group": 2}, runs_out={1: 9}),
    "memory runs out in a backward pass, evaluated": Arrangement(
        STREAMED | {"kept": 2.0}, runs_out={1: 20}, evaluated=(1,)
    ),
}


def run(
    arrangement: Arrangement, device: torch.device, host_tensor: Callable[[int, torch.dtype], Tensor] = host_tensor,
    disk_tensor: Callable[[int, torch.dtype], Tensor] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Trains as `arrangement` says, on "cuda" or "cpu", and returns the outcomes at each save and at the end. Raises
    RuntimeError if memory was to run out and did not."""
    case = PLAIN | arrangement.case
    step, store = _prepare(case, device, arrangement.kernels, host_tensor=host_tensor, disk_tensor=disk_tensor)
    store.page_lock()
    recovery = Recovery(step, [], lambda said: None)

    def one_step(index: int, batch: Batch) -> StepResult:
        recovery.number = index
        if index in arrangement.fates:
            step.change_layout(replace(step.layout, fate=arrangement.fates[index]))
        with MemoryRunsOut(arrangement.runs_out.get(index)):
            return step(batch, index, LEARNING_RATE)

    outcomes = _train(arrangement, step, store, one_step)
    if [measure["step"] for measure in recovery.measures] != list(arrangement.runs_out):
        raise RuntimeError(f"memory ran out in {recovery.measures}, not as in {arrangement.runs_out}")
    return outcomes


def recorded(arrangement: Arrangement) -> tuple[list[Outcome], Trace]:
    """Returns the outcomes of `run` on the CPU with imitated streams, and the trace of their work."""
    recorder = Recorder()
    with with_plain_kernels(), recorder.imitating() as trace:
        return run(arrangement, CPU, recorder.host_tensor, recorder.host_tensor), trace


def plain(arrangement: Arrangement, device: torch.device = CPU) -> list[Outcome]:
    """Returns the same training with everything on the device and updated at once. Memory does not run out."""
    with with_plain_kernels() if device.type == "cpu" else nullcontext():
        step, store = _prepare(arrangement.plain(), device, arrangement.kernels)
        return _train(arrangement, step, store, lambda index, batch: step(batch, index, LEARNING_RATE))


def differences(outcomes: list[Outcome], others: list[Outcome]) -> list[str]:
    """Returns the names of values that are not bitwise equal."""
    return [name for one, other in zip(outcomes, others, strict=True) for name in one.differences(other)]


def _prepare(case: dict, device: torch.device, kernels: bool, **memory) -> tuple[TrainingStep, Store]:
    with patch.object(stores, "PIECE", PIECE):
        return SHAPE.make_step(
            **{"precision": "bf16"} | case,
            device=device,
            fused_kernels=Kernels.ALL if kernels else Kernels.NONE,
            **memory,
        )


def _train(
    arrangement: Arrangement, step: TrainingStep, store: Store, one_step: Callable[[int, Batch], StepResult]
) -> list[Outcome]:
    outcomes, results = [], []
    for index, batch in enumerate(SHAPE.batches()):
        results.append(one_step(index, batch))
        if index in arrangement.evaluated:
            # The losses of evaluations are among those of steps.
            loss, _ = step.evaluate(batch)
            results.append(StepResult(loss, 0.0, False, batch.labels.numel()))
        if index in arrangement.saved:
            step.flush()
            outcomes.append(Outcome.of(results, store, page_locked=True))
    step.flush()
    return [*outcomes, Outcome.of(results, store, page_locked=True)]


class MemoryRunsOut(TorchDispatchMode):
    """Raises an out-of-memory error once, at matrix product number `product`; updates have no products."""

    def __init__(self, product: int | None):
        super().__init__()
        self._product, self._count = product, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._count += 1
            if self._count == self._product:
                raise torch.OutOfMemoryError("out of memory, as the test says")
        return func(*args, **kwargs or {})


@contextmanager
def computed_by_plain_kernels() -> Iterator[None]:
    """Makes the stand-in compute the project's operators by kernels.py of this folder."""
    from stand_in import counterparts, interpreted

    plain = {kernel: getattr(plain_kernels, kernel.name().split("::")[1]) for kernel in interpreted.COUNTERPARTS}
    with patch.dict(counterparts.COUNTERPARTS, plain):
        yield


@contextmanager
def with_plain_kernels() -> Iterator[None]:
    """Makes the project's operators compute by kernels.py of this folder on the CPU."""
    plain = {name: plain_kernels for name in ("triton_kernels", "layer_kernels")}
    before = {name: sys.modules.get(f"{kernels.__name__}.{name}") for name in plain}  # patch.dict would forget imports
    sys.modules.update({f"{kernels.__name__}.{name}": module for name, module in plain.items()})
    try:
        with patch.multiple(kernels, create=True, **plain):
            yield
    finally:
        for name, module in before.items():
            del sys.modules[f"{kernels.__name__}.{name}"]
            if module is not None:
                sys.modules[f"{kernels.__name__}.{name}"] = module
