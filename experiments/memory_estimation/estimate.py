"""Predicted rows: what a way to train takes of a GPU whose allocator is capped.

A row says whether the simulated run completes under the cap and what it takes then; where it does not complete, what
it would take without a cap. Plain training runs with the allocator's default segments, lowmem with the expandable ones
that it sets for itself (lowmem/device.py).
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from transformers import PretrainedConfig

from experiments.memory_estimation.plain import record_plain
from lowmem import cuda_ops
from lowmem.adam import OPTIMIZERS
from lowmem.allocator import SimulatedOutOfMemory
from lowmem.blocks import Decoder
from lowmem.cards import Card
from lowmem.models import build_model
from lowmem.precision import cast_explicitly
from lowmem.recompute import fuse_gelu
from lowmem.simulate import Memory, StepCase, Target, record_step, under_cap
from lowmem.step import Schedule
from lowmem.trace import Machine, Tape

LOWMEM = "lowmem"
LARGEST_BATCH = 64
_LOWMEM_WORKSPACES = ":4096:8"  # lowmem.device.set_environment
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def target_of(card: Card, *, lowmem: bool) -> Target:
    """`card` as plain training finds it, or as lowmem sets it up: sums in a fixed order, and their workspaces."""
    gpu = cuda_ops.Gpu(card.capability, card.multiprocessors, deterministic=lowmem)
    workspaces = cuda_ops.blas_workspace_bytes(card.capability, _LOWMEM_WORKSPACES if lowmem else None, _TORCH)
    machine = Machine(
        hidden_bytes=functools.partial(cuda_ops.hidden_bytes, gpu=gpu),
        products=cuda_ops.PRODUCTS,
        workspace_bytes=workspaces + cuda_ops.blaslt_workspace_bytes(_TORCH),
    )
    speed = card.copy_bytes_per_second if lowmem else None
    return Target(machine, functools.partial(cuda_ops.CudaFunctions, card.capability), speed, speed)


def plain_rows(
    config: PretrainedConfig, seq: int, recipe: str, card: Card, limit_bytes: int, largest_batch: int = LARGEST_BATCH
) -> Iterator[dict]:
    """Batches 1, 2, 4, ... to the first that does not fit, which is the last row."""
    target, batch = target_of(card, lowmem=False), 1
    while batch <= largest_batch:
        row = _row(record_plain(config, seq, batch, recipe, target), limit_bytes, expandable_segments=False)
        yield {"batch": batch} | row
        if not row["fits"]:
            return
        batch *= 2


class LowmemRows:
    """lowmem's rows of one model and sequence length, which share what has been simulated once.

    InputError, with what is missing, for an architecture that lowmem cannot train.
    """

    def __init__(self, config: PretrainedConfig, seq: int, card: Card):
        model = build_model(config)
        fuse_gelu(model)
        cast_explicitly(model, torch.float32)
        self._decoder, self._seq = Decoder(model), seq
        self._target, self._known = target_of(card, lowmem=True), {}

    def row(self, batch: int, limit_bytes: int) -> dict:
        """The largest micro-batch (a power of two) that fits, recomputed block by block, with as many units resident as
        the cap leaves room for. Stands in for the planner's choice."""
        units = len(self._decoder.units)
        sizes = [2**power for power in range(batch.bit_length()) if batch % 2**power == 0]
        for micro_batch in reversed(sizes):
            row, state_bytes = self._try(batch, micro_batch, 0, limit_bytes)
            if row["fits"]:
                break
        else:
            return row
        room = limit_bytes - row["reserved_peak_bytes"]
        resident = sum(total <= room for total in itertools.accumulate(state_bytes))  # about; the next lines settle it
        while resident and not (tried := self._try(batch, micro_batch, resident, limit_bytes)[0])["fits"]:
            resident -= 1
        row = tried if resident else row
        while resident < units and (tried := self._try(batch, micro_batch, resident + 1, limit_bytes)[0])["fits"]:
            row, resident = tried, resident + 1
        return row

    def _try(self, batch: int, micro_batch: int, resident_units: int, limit_bytes: int) -> tuple[dict, Sequence[int]]:
        """The row, and the bytes of optimizer state by unit."""
        schedule = Schedule(micro_batch, group=1, segment_blocks=1, recompute=True)
        case = StepCase(self._seq, batch, schedule, torch.bfloat16, OPTIMIZERS["adamw"], resident_units)
        recording = record_step(self._decoder, case, self._target, self._known, alike=True)
        choice = {
            "micro_batch": micro_batch,
            "resident_units": resident_units,
            "units": len(self._decoder.units),
            "streamed_bytes": recording.streamed_bytes,
        }
        row = _row(recording.tape, limit_bytes, expandable_segments=True)
        return {"batch": batch} | row | {"choice": choice}, recording.state_bytes


def lowmem_row(config: PretrainedConfig, seq: int, batch: int, limit_bytes: int, card: Card) -> dict:
    """One of lowmem's rows by itself."""
    return LowmemRows(config, seq, card).row(batch, limit_bytes)


def _row(tape: Tape, limit_bytes: int, *, expandable_segments: bool) -> dict:
    try:
        memory = under_cap(tape, limit_bytes, expandable_segments=expandable_segments)
        fits = memory.reserved_peak_bytes <= limit_bytes
    except SimulatedOutOfMemory:
        memory, fits = under_cap(tape, expandable_segments=expandable_segments), False
    return {"fits": fits} | figures_of(memory)


def figures_of(memory: Memory) -> dict:
    return {
        "allocated_peak_bytes": memory.allocated_peak_bytes,
        "reserved_peak_bytes": memory.reserved_peak_bytes,
        "at_peak": memory.at_peak,
    }
