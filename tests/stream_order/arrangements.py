"""Trainings that together take every way through the code that moves states and updates weights.

Each is the small GPT-2 of gpu_acceptance/bitwise.py, dropout on, three steps of four micro-batches, so that the update
of one step meets the forward pass of the next twice, and eleven pieces pass through three slots. `run` takes the
project's own TrainingStep, Store and windows through it: on "cuda", on the CPU, or, inside `Recorder.imitating`, on
the CPU with imitated streams."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.gpu_acceptance.bitwise import PLAIN, UNCLIPPED, UPDATED_IN_BACKWARD, Outcome, Shape, make_step
from lowmem.core import kernels
from lowmem.core import parameters as stores
from lowmem.core.batch import Batch
from lowmem.core.homes import host_tensor
from lowmem.core.parameters import Store
from lowmem.core.step import StepResult, TrainingStep
from lowmem.run.recovery import Recovery
from lowmem.run.smaller_layouts import Sizes
from tests.stream_order import kernels as plain_kernels
from tests.stream_order.checker import Trace
from tests.stream_order.recorder import Recorder

PIECE = 2**13  # elements that are updated at once, so that a block's matrices are two pieces
SHAPE = replace(Shape.of(tiny=True, dropout=0.1), steps=3)
LEARNING_RATE = 1e-3
CPU = torch.device("cpu")
STREAMED = {"resident_units": 0, "defer": True}
WEIGHTS_STREAMED = STREAMED | {"resident_weights": 1}


@dataclass(frozen=True)
class Arrangement:
    """`placement`: what is not PLAIN in it, of Layout's fields and `defer`; it may not change a bit.

    `kernels`: whether with fused operators; unless the moments are in 8 bit, updates then run beside what computes.
    `evaluated`, `saved`: after which steps; `runs_out`: {step: the matrix product, counted from 1, at which memory runs
    out}, after which that step is begun again.
    """

    placement: dict[str, int | bool]
    precision: str = "bf16"
    optimizer: str = "adamw"
    clip_norm: float | None = 0.1
    kernels: bool = True
    evaluated: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    runs_out: dict[int, int] = field(default_factory=dict)


ARRANGEMENTS = {
    "deferred": Arrangement(STREAMED),
    "deferred, one unit streamed, evaluated and saved": Arrangement(
        STREAMED | {"resident_units": 4}, evaluated=(0,), saved=(1,)
    ),
    "in backward, half streamed, saved": Arrangement(
        UPDATED_IN_BACKWARD | {"group": UNCLIPPED["group"]}, clip_norm=None, saved=(0,)
    ),
    "in backward, all streamed, SGD": Arrangement(
        STREAMED | {"group": UNCLIPPED["group"]}, clip_norm=None, optimizer="sgd"
    ),
    "forward and backward twice, fp32": Arrangement(STREAMED | {"norm_first": True, "group": 4}, precision="fp32"),
    "the first group larger, fp16": Arrangement(STREAMED | {"first_group": 3}, precision="fp16"),
    "groups of 2, products and whole blocks kept, half streamed": Arrangement(
        STREAMED | {"resident_units": 3, "group": 2, "product_blocks": 1, "whole_blocks": 1}
    ),
    "all resident, evaluated": Arrangement({"defer": True}, evaluated=(1,)),
    "not deferred, fp16, evaluated": Arrangement({"resident_units": 0}, precision="fp16", evaluated=(0,)),
    "updates on the stream that computes, saved": Arrangement(STREAMED, kernels=False, saved=(0,)),
    "8-bit moments, saved": Arrangement(STREAMED, optimizer="adamw8bit", saved=(1,)),
    "weights streamed, evaluated and saved": Arrangement(WEIGHTS_STREAMED, evaluated=(0,), saved=(1,)),
    "weights streamed, in backward": Arrangement(WEIGHTS_STREAMED | {"group": UNCLIPPED["group"]}, clip_norm=None),
    "weights of some streamed, forward and backward twice, fp32": Arrangement(
        WEIGHTS_STREAMED | {"resident_weights": 2, "norm_first": True, "group": 4, "segment_blocks": 2},
        precision="fp32",
    ),
    "boundaries in RAM, in backward": Arrangement(
        STREAMED | {"group": UNCLIPPED["group"], "boundaries_in_ram": True}, clip_norm=None
    ),
    "boundaries and weights in RAM, products kept": Arrangement(
        WEIGHTS_STREAMED | {"group": 2, "product_blocks": 1, "boundaries_in_ram": True}
    ),
    "gradients in RAM, evaluated and saved": Arrangement(
        STREAMED | {"group": 4, "gradients_in_ram": True}, evaluated=(0,), saved=(1,)
    ),
    "gradients of some in RAM, weights and boundaries of all, fp16": Arrangement(
        WEIGHTS_STREAMED | {"group": 4, "gradients_in_ram": True, "boundaries_in_ram": True, "resident_units": 1},
        precision="fp16",
    ),
    "gradients in RAM, on a disk, memory runs out in a backward pass": Arrangement(
        STREAMED | {"group": 4, "gradients_in_ram": True, "disk_units": 3}, runs_out={1: 60}
    ),
    "on a disk, evaluated and saved": Arrangement(STREAMED | {"disk_units": 99}, evaluated=(0,), saved=(1,)),
    "every second unit on a disk, weights streamed, in backward": Arrangement(
        WEIGHTS_STREAMED | {"group": UNCLIPPED["group"], "disk_units": 3}, clip_norm=None
    ),
    "memory runs out in a forward pass": Arrangement(STREAMED | {"group": 2}, runs_out={1: 9}),
    "memory runs out in a backward pass, evaluated": Arrangement(
        STREAMED | {"recompute": False}, runs_out={1: 20}, evaluated=(1,)
    ),
}


def run(
    arrangement: Arrangement, device: torch.device, host_tensor: Callable[[int, torch.dtype], Tensor] = host_tensor,
    disk_tensor: Callable[[int, torch.dtype], Tensor] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Trains as `arrangement` says; what is there at each save, and at the end. RuntimeError where memory was to run
    out and did not."""
    step, store = _prepare(arrangement, device, host_tensor, disk_tensor)
    store.page_lock()
    config = SHAPE.config
    sizes = Sizes(config.n_layer, SHAPE.batch, SHAPE.seq * config.n_embd * 4, 0, arrangement.clip_norm is not None)
    recovery = Recovery(step, store, sizes, lambda said: None)

    def one_step(index: int, batch: Batch) -> StepResult:
        recovery.number = index
        with MemoryRunsOut(arrangement.runs_out.get(index)):
            return step(batch, index, LEARNING_RATE)

    outcomes = _train(arrangement, step, store, one_step)
    if [measure["step"] for measure in recovery.measures] != list(arrangement.runs_out):
        raise RuntimeError(f"memory ran out in {recovery.measures}, not as in {arrangement.runs_out}")
    return outcomes


def recorded(arrangement: Arrangement) -> tuple[list[Outcome], Trace]:
    """`run` on the CPU with imitated streams, and what these were given."""
    recorder = Recorder()
    with with_plain_kernels(), recorder.imitating() as trace:
        return run(arrangement, CPU, recorder.host_tensor, recorder.host_tensor), trace


def plain(arrangement: Arrangement, device: torch.device = CPU) -> list[Outcome]:
    """The same training with everything on the device and updated at once. Memory does not run out."""
    with with_plain_kernels() if device.type == "cpu" else nullcontext():
        step, store = _prepare(replace(arrangement, placement={}), device, host_tensor)

        return _train(arrangement, step, store, lambda index, batch: step(batch, index, LEARNING_RATE))


def differences(outcomes: list[Outcome], others: list[Outcome]) -> list[str]:
    """Names of what is not bitwise equal."""
    return [name for one, other in zip(outcomes, others, strict=True) for name in one.differences(other)]


def _prepare(
    arrangement: Arrangement, device: torch.device, host_tensor: Callable[[int, torch.dtype], Tensor],
    disk_tensor: Callable[[int, torch.dtype], Tensor] | None = None,
) -> tuple[TrainingStep, Store]:  # fmt: skip
    with patch.object(stores, "PIECE", PIECE):
        return make_step(
            SHAPE, device, arrangement.precision, arrangement.kernels, clip_norm=arrangement.clip_norm,
            optimizer=arrangement.optimizer, host_tensor=host_tensor, disk_tensor=disk_tensor,
            **PLAIN | arrangement.placement,
        )  # fmt: skip


def _train(
    arrangement: Arrangement, step: TrainingStep, store: Store, one_step: Callable[[int, Batch], StepResult]
) -> list[Outcome]:
    """The outcome at each save and at the end; the losses of evaluations are among those of steps."""
    outcomes, results = [], []
    for index, batch in enumerate(SHAPE.batches()):
        results.append(one_step(index, batch))
        if index in arrangement.evaluated:
            loss, _ = step.evaluate(batch)
            results.append(StepResult(loss, 0.0, False, batch.labels.numel()))
        if index in arrangement.saved:
            step.flush()
            outcomes.append(Outcome.of(results, store, page_locked=True))
    step.flush()
    return [*outcomes, Outcome.of(results, store, page_locked=True)]


class MemoryRunsOut(TorchDispatchMode):
    """Once, at matrix product number `product`: products are in forward and backward passes, never in updates, which
    allocate nothing."""

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
    """On the stand-in the project's operators launch their kernels, and kernels.py of this folder computes them."""
    from stand_in import counterparts, interpreted

    plain = {kernel: getattr(plain_kernels, kernel.name().split("::")[1]) for kernel in interpreted.COUNTERPARTS}
    with patch.dict(counterparts.COUNTERPARTS, plain):
        yield


@contextmanager
def with_plain_kernels() -> Iterator[None]:
    """The project's operators compute with kernels.py of this folder on the CPU."""
    name = f"{kernels.__name__}.triton_kernels"
    before = sys.modules.get(name)  # patch.dict would also forget what is imported meanwhile
    sys.modules[name] = plain_kernels
    try:
        with patch.object(kernels, "triton_kernels", plain_kernels, create=True):
            yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
