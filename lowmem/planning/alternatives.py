"""What a user's settings leave open: choices for search.py, and in which order these are tried."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest

from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.planning.columns import Choices
from lowmem.planning.search import SEGMENTS
from lowmem.planning.simulated_step import StepCase
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings

FEW_SEQUENCES = 4  # to a micro-batch, where the whole batch is one group: those plans take long to make
SEGMENTS_OF_A_BATCH = (1, 2, 4, 6, 8)  # blocks per segment that are tried where the inputs of a whole batch are kept


def step_case(settings: Settings, precision: str) -> StepCase:
    """What all layouts of these settings share, in one of them."""
    return StepCase(
        settings.seq, settings.batch, Layout(micro_batch=1), WORKING_DTYPES[precision],
        OPTIMIZERS[settings.optimizer], settings.clip_norm, settings.masks_documents,
        target_tokens=settings.target_tokens,
    )  # fmt: skip


def largest_drawn_bytes(settings: Settings, simulations: Simulations) -> int:
    """The largest tensor that is whole in RAM while the weights are loaded."""
    return 4 * simulations.largest_parameter if settings.init == "random" else 0


def in_order(settings: Settings, simulations: Simulations) -> Iterator[list[Choices]]:
    """All that the settings leave open, as fastest_layout tries it: lists of choices, none of them empty."""
    placed = placements(settings, simulations)
    for on_disk in (False, True):
        of_each = [
            _alternatives(settings, choices, simulations.base.needs_all_gradients)
            for choices in placed
            if bool(choices.states_on_disk) == on_disk
        ]
        yield from filter(None, chain.from_iterable(zip_longest(*of_each)))


def all_choices(settings: Settings, simulations: Simulations) -> list[Choices]:
    """The same in one list, but for gradients in RAM where these need not be there: forward and backward twice take
    less of everything but time."""
    if settings.gradients == "auto":
        settings = replace(settings, gradients="resident")
    return list(chain.from_iterable(in_order(settings, simulations)))


def choices_of(settings: Settings, simulations: Simulations) -> Choices:
    """All that the settings leave open."""
    units, blocks = simulations.units, simulations.blocks
    micro_batches = [size for size in range(1, settings.batch + 1) if settings.batch % size == 0]
    if settings.micro_batch is not None:
        micro_batches = [settings.micro_batch]
    if settings.group is not None:
        micro_batches = [size for size in micro_batches if (settings.batch // size) % settings.group == 0]
    return Choices(
        micro_batches=micro_batches,
        groups=None if settings.group is None else [settings.group],
        segments=SEGMENTS if settings.segment_blocks is None else [settings.segment_blocks],
        kept={"auto": range(2 * blocks + 1), "on": [0], "products": [blocks], "off": [2 * blocks]}[settings.recompute],
        states_on_gpu={"auto": range(units + 1), "resident": [units]}.get(settings.states, [0]),
    )


def placements(settings: Settings, simulations: Simulations) -> list[Choices]:
    """Choices with all working weights on the GPU, and with those of all blocks streamed; and, where there is a folder
    for them, with all streamed states on a disk."""
    choices = choices_of(settings, simulations)
    streamed = replace(
        choices, weights_on_gpu=1, states_on_gpu=[0],
        kept=[kept for kept in choices.kept if kept <= simulations.blocks],
    )  # fmt: skip
    possible = settings.states != "resident" and settings.recompute != "off"
    placed = {"auto": [choices, streamed] if possible else [choices], "resident": [choices], "streamed": [streamed]}[
        settings.weights
    ]
    if settings.states_folder is None:
        return placed
    on_disk = [replace(choices, states_on_disk=simulations.units) for choices in placed]
    return on_disk if settings.states == "disk" else placed + on_disk


def _alternatives(settings: Settings, choices: Choices, needs_all_gradients: bool) -> list[list[Choices]]:
    """The same with gradients in RAM, or with forward and backward twice, too, where that saves something. And, where a
    step has the whole batch as one group, these with boundaries in RAM, for each length of segments."""
    whole = _whole_batch(settings, choices) if needs_all_gradients else []
    once = whole if settings.gradients == "streamed" else [choices, *whole]
    if not whole and needs_all_gradients and settings.boundaries == "auto":
        return [once]  # gradients are held, so that inputs of one micro-batch at a time are enough
    lengths = SEGMENTS_OF_A_BATCH if settings.segment_blocks is None else choices.segments
    in_ram = [
        replace(which, boundaries_in_ram=True, segments=[length], kept=which.kept[:1])
        for which in whole or [choices]
        for length in lengths
    ]
    possible = {"auto": [once, in_ram], "resident": [once], "streamed": [in_ram]}[settings.boundaries]
    return possible if settings.recompute != "off" else [once]


def _whole_batch(settings: Settings, choices: Choices) -> list[Choices]:
    """The choices that need never hold all gradients at once on the GPU, where the first update waits for all of them:
    they do so in RAM, or forward and backward run twice a step."""
    one_group = settings.group in (None, settings.batch // choices.micro_batches[0])
    if not one_group:
        return []
    segments = SEGMENTS_OF_A_BATCH if settings.segment_blocks is None else choices.segments
    smallest, *larger = choices.micro_batches
    few = [smallest, *(size for size in larger if size <= FEW_SEQUENCES)]
    fewer = replace(choices, micro_batches=few, segments=segments)
    in_ram = replace(fewer, fate=Fate.SENT, states_on_gpu=[0])
    ways = {"auto": [in_ram, twice(fewer)], "resident": [twice(fewer)], "streamed": [in_ram]}[settings.gradients]
    return [twice(fewer)] if settings.states == "resident" else ways


def twice(choices: Choices) -> Choices:
    """The same with forward and backward twice."""
    return replace(choices, fate=Fate.DROPPED)
