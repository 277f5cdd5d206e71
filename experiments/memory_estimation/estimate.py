"""Makes predicted rows: does a training complete under a cap of GPU memory, and what are its peaks?

If plain training does not complete, its peaks are those without a cap.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch
from transformers import PretrainedConfig

from experiments.memory_estimation.plain import record_plain
from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.device_model import TORCH_VERSION, gpu_model
from lowmem.cudasim.gpus import Card
from lowmem.cudasim.tape import Memory, Tape, under_cap
from lowmem.limits import OVERSHOOT_BYTES
from lowmem.models.build import make_decoder
from lowmem.planning.caps import room_under, smallest_cap
from lowmem.planning.choices import choices_by_home
from lowmem.planning.fastest import fastest_layout, smallest_room
from lowmem.planning.search import Room
from lowmem.planning.simulated_step import StepCase, Target, gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings

LOWMEM, SMALLEST = "lowmem", "lowmem smallest"
LARGEST_BATCH = 64


def plain_target(card: Card, version: tuple[int, int] = TORCH_VERSION) -> Target:
    """Returns `card` as plain training finds it under a version of PyTorch."""
    return Target(gpu_model(card, plain=True, torch_version=version))


# Plain training has the allocator's default segments, lowmem the expandable ones that it sets for itself.
def plain_rows(
    config: PretrainedConfig, seq: int, recipe: str, card: Card, limit_bytes: int, largest_batch: int = LARGEST_BATCH
) -> Iterator[dict]:
    """Yields rows for batches of 1, 2, 4, ..., up to the first that does not fit."""
    target, batch = plain_target(card), 1
    while batch <= largest_batch:
        row = _row(record_plain(config, seq, batch, recipe, target), limit_bytes, expandable_segments=False)
        yield {"batch": batch} | row
        if not row["fits"]:
            return
        batch *= 2


def lowmem_row(config: PretrainedConfig, seq: int, batch: int, limit_bytes: int, card: Card) -> dict:
    """Returns the row of the planner's choice under the cap, without a limit on RAM; of the smallest cap if nothing
    fits. Raises InputError for an architecture that lowmem cannot train."""
    settings, simulations = _lowmem(config, seq, batch, card)
    # as in a plan (planning/gpu_plan.py): the search leaves a margin free, and segments may exceed the allocator's cap
    room, cap = room_under(limit_bytes), limit_bytes - OVERSHOOT_BYTES
    found = fastest_layout(choices_by_home(settings, simulations), simulations, Room(room, None))
    if found is None:
        smallest = smallest_room(choices_by_home(settings, simulations), simulations, Room(room, None))
        smallest_bytes = {"smallest_cap_bytes": smallest_cap(smallest.gpu), "streamed_bytes": smallest.ram}
        return {"batch": batch, "fits": False} | smallest_bytes
    choice = asdict(found.layout) | {
        "recompute": found.layout.recomputes(simulations.blocks),
        "blocks": simulations.blocks,
        "units": simulations.units,
        "streamed_bytes": found.simulated.streamed_bytes,
    }
    memory, _ = simulations.memory_under(found.layout, cap, room)
    return {"batch": batch, "fits": True} | figures_of(memory) | {"choice": choice}


def smallest_row(config: PretrainedConfig, seq: int, batch: int, card: Card) -> dict:
    """Returns the smallest cap under which lowmem trains, and the bytes of states in RAM then. Raises InputError as
    `lowmem_row` does."""
    settings, simulations = _lowmem(config, seq, batch, card)
    smallest = smallest_room(choices_by_home(settings, simulations), simulations, Room(0, None))
    return {"batch": batch, "smallest_cap_bytes": smallest_cap(smallest.gpu), "streamed_bytes": smallest.ram}


def _lowmem(config: PretrainedConfig, seq: int, batch: int, card: Card) -> tuple[Settings, Simulations]:
    settings = Settings(seq=seq, batch=batch)
    case = StepCase(seq, batch, Layout(micro_batch=1), torch.bfloat16, OPTIMIZERS["adamw"])
    target = gpu_target(card)
    return settings, Simulations(partial(make_decoder, config, "bf16", "fp32", target.fused_kernels), case, target)


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
