"""The search against trying everything: nothing that it leaves out would have been faster, or would have fitted.

The grid is small, the card is made up: fast enough that a slow bus matters, so that groups and residency are worth
something.
"""

import dataclasses
from itertools import product

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import under_cap
from lowmem.models.build import make_decoder
from lowmem.planning.gpu_plan import fastest_layout, least_room
from lowmem.planning.search import Choices, MemoryLimits, fastest, smallest_room, streaming_more
from lowmem.planning.simulated_step import StepCase, gpu_target, record_step
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.units import MIB

BATCH, SEQ = 4, 128
CONFIG = GPT2Config(n_layer=3, n_embd=256, n_head=4, vocab_size=1_000, n_positions=SEQ)
SLOW_BUS = dataclasses.replace(CARDS["rtx3090"], bus_bytes_per_second=1e9)
CASE = StepCase(SEQ, BATCH, Layout(micro_batch=1), torch.bfloat16, OPTIMIZERS["adamw"])
CHOICES = Choices((1, 2, 4), None, (1, 2), (0, 1, 3, 4, 6), (0, 2, 5))


def decoder():
    return make_decoder(CONFIG, "bf16", "fp32", fused_kernels=True)


@pytest.fixture(scope="module")
def everything(simulations) -> list:
    """(layout, recording) of the whole grid, blocks run each for itself."""
    target, made = gpu_target(SLOW_BUS), decoder()
    kinds = product((1, 2, 4), (1, 2, 4), (1, 2), CHOICES.states_on_gpu)
    layouts = {
        simulations.keeping(Layout(micro_batch, group, segment, states_on_gpu=resident), kept): None
        for micro_batch, group, segment, resident in kinds
        for kept in CHOICES.kept
        if group <= BATCH // micro_batch
    }
    known: dict = {}
    return [(layout, record_step(made, simulations.case(layout), target, known)) for layout in layouts]


@pytest.fixture(scope="module")
def simulations() -> Simulations:
    return Simulations(decoder, CASE, gpu_target(SLOW_BUS))


def completes(recording, limit_bytes: int | None) -> bool:
    try:
        under_cap(recording.tape, limit_bytes)
    except SimulatedOutOfMemory:
        return False
    return True


def rooms(everything) -> list[MemoryLimits]:
    peaks = sorted(recording.tape.peak_bytes(512) for _, recording in everything)
    streamed = sorted({recording.streamed_bytes for _, recording in everything})
    gpu = [None, *(peaks[round(share * (len(peaks) - 1))] + 3 * MIB for share in (0, 0.1, 0.3, 0.5, 0.8, 1))]
    return [MemoryLimits(limit, ram) for limit in gpu for ram in (None, streamed[1])]


@pytest.mark.parametrize("number", range(14))
def test_the_choice_is_the_best_of_an_exhaustive_run(everything, simulations, number):
    room = rooms(everything)[number]
    fitting = [
        (recording.seconds, layout)
        for layout, recording in everything
        if (room.ram is None or recording.streamed_bytes <= room.ram) and completes(recording, room.gpu)
    ]
    found = fastest(simulations, CHOICES, room)
    assert (found is None) == (not fitting)
    if fitting:
        best = min(seconds for seconds, _ in fitting)
        assert best * (1 - 1e-9) <= found.recording.seconds <= best * 1.001, min(fitting, key=lambda f: f[0])
        assert found.layout in [layout for _, layout in fitting]


def test_the_grid_has_layouts_that_differ_in_what_matters(everything):
    """Otherwise the test above would compare nothing."""
    seconds = {round(recording.seconds, 9) for _, recording in everything}
    waiting = [recording.waiting_seconds / recording.seconds for _, recording in everything]
    assert len(seconds) > 20 and min(waiting) == 0 and max(waiting) > 0.05


def test_blocks_that_are_made_alike_are_simulated_as_if_each_had_been_run(everything, simulations):
    for layout, recording in everything:
        alike = simulations.record(layout)
        assert alike.seconds == pytest.approx(recording.seconds, rel=1e-9)
        assert alike.tape.peak_bytes(512) == recording.tape.peak_bytes(512)
        assert (alike.state_bytes, alike.streamed_bytes) == (recording.state_bytes, recording.streamed_bytes)


@pytest.mark.parametrize("ram", [None, 10 * MIB, 1])
def test_the_smallest_caps_are_enough_and_a_page_less_is_not(everything, simulations, ram):
    smallest = smallest_room(simulations, CHOICES, MemoryLimits(8 * MIB, ram))
    assert fastest(simulations, CHOICES, MemoryLimits(smallest.gpu, smallest.ram)) is not None
    assert fastest(simulations, CHOICES, MemoryLimits(smallest.gpu - 20 * MIB, smallest.ram)) is None
    allowed = [recording for _, recording in everything if recording.streamed_bytes <= smallest.ram]
    assert not any(completes(recording, smallest.gpu - 20 * MIB) for recording in allowed)


@pytest.mark.parametrize("gpu", [None, 200 * MIB])
def test_where_only_ram_is_short_the_gpus_cap_stays_as_it_is(simulations, gpu):
    few_resident = dataclasses.replace(CHOICES, states_on_gpu=range(2))
    assert fastest(simulations, few_resident, MemoryLimits(gpu, 1 * MIB)) is None
    smallest = smallest_room(simulations, few_resident, MemoryLimits(gpu, 1 * MIB))
    assert smallest.gpu == gpu
    assert fastest(simulations, few_resident, smallest) is not None
    assert fastest(simulations, few_resident, MemoryLimits(gpu, smallest.ram - 1)) is None


def test_a_layout_that_streams_more_fits_and_the_search_finds_none_that_is_slower(everything, simulations):
    streamed = 0
    for room in rooms(everything):
        found = fastest(simulations, CHOICES, room)
        larger = MemoryLimits(room.gpu, None)
        more = None if found is None or room.ram is None else streaming_more(simulations, CHOICES, larger, found)
        if more is not None:
            streamed += more.recording.streamed_bytes > found.recording.streamed_bytes
            assert more.layout.micro_batch == found.layout.micro_batch
            assert completes(more.recording, room.gpu)
            assert fastest(simulations, CHOICES, larger).recording.seconds <= more.recording.seconds
    assert streamed


# --- the caps that are named, and those above them


SWEPT = {  # where the smallest cap is that of long segments
    "long sequences": (GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=200, n_positions=512), 512),
    "llama": (
        LlamaConfig(
            hidden_size=192, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1, intermediate_size=512,
            vocab_size=500, tie_word_embeddings=True,
        ),
        256,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=[("long sequences", 1.0), ("long sequences", None), ("llama", 1.0)], ids=str)
def question(request) -> tuple[Settings, Simulations]:
    name, clip_norm = request.param
    config, seq = SWEPT[name]
    case = dataclasses.replace(CASE, seq=seq, clip_norm=clip_norm)
    simulations = Simulations(
        lambda: make_decoder(config, "bf16", "fp32", fused_kernels=True), case, gpu_target(CARDS["rtx3090"])
    )
    micro_batch = 1 if name == "llama" else None  # the search over micro-batches is that of the other questions
    return Settings(seq=seq, batch=BATCH, clip_norm=clip_norm, micro_batch=micro_batch), simulations


def never_slower(question, rooms: list[MemoryLimits]) -> None:
    """Every room is planned for, and none slower than the one before."""
    seconds = []
    for room in rooms:
        found = fastest_layout(*question, room)
        assert found is not None, f"{room} is refused, {rooms[0]} was named"
        assert room.gpu is None or found.memory.reserved_peak_bytes < room.gpu + 20 * MIB
        assert room.ram is None or found.recording.streamed_bytes <= room.ram
        seconds.append(found.recording.seconds)
    assert seconds == sorted(seconds, reverse=True)


STEPS = (0, 1, 2, 5, 13, 34, 144)


@pytest.mark.parametrize("ram", [None, 4 * MIB])
def test_a_cap_of_the_gpu_that_was_named_is_planned_and_a_larger_one_gives_no_less(question, ram):
    named = least_room(*question, MemoryLimits(1 * MIB, ram))
    assert fastest_layout(*question, MemoryLimits(named.gpu - 20 * MIB, named.ram)) is None  # a page of the allocator
    never_slower(question, [MemoryLimits(named.gpu + step * MIB, named.ram) for step in STEPS])


def test_a_cap_of_ram_that_was_named_is_planned_and_a_larger_one_gives_no_less(question):
    gpu = least_room(*question, MemoryLimits(1 * MIB, None)).gpu + 4 * MIB
    named = least_room(*question, MemoryLimits(gpu, 1))
    assert named.gpu == gpu
    never_slower(question, [MemoryLimits(gpu, named.ram + step * MIB) for step in STEPS])
