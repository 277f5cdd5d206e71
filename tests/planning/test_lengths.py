"""Plans and the data's lengths: full rows decide what fits, the rows that there are how long a step takes."""

import dataclasses
import random

import pytest
from transformers import GPT2Config

from lowmem.cudasim.gpus import CARDS
from lowmem.models.build import make_decoder
from lowmem.planning.choices import step_case
from lowmem.planning.planner import make_plan, timed_with
from lowmem.planning.question import Question
from lowmem.planning.simulated_step import gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.units import GIB, MIB

CONFIG = GPT2Config(n_layer=4, n_embd=2048, n_head=16, vocab_size=5_000, n_positions=1024)
SETTINGS = Settings(model="wide", init="random", seq=1024, batch=16, gpu_limit_bytes=10 * GIB, micro_batch=4)
CARD = CARDS["rtx3090"]
PAGE_BYTES = 2 * MIB


def drawn_lengths(kind: str) -> tuple[int, ...]:
    drawn = random.Random(kind)
    most = {"short": 120, "any": 1024, "all but full": 1024, "few long": 160}[kind]
    least = {"all but full": 960}.get(kind, 1)
    lengths = [drawn.randint(least, most) for _ in range(SETTINGS.batch)]
    if kind == "few long":
        lengths[3] = lengths[9] = 1024
    return tuple(lengths)


LENGTHS = ["short", "any", "all but full", "few long"]


@pytest.fixture(scope="module")
def plan():
    return make_plan(Question(SETTINGS, CONFIG, "bf16", CARD))


def test_the_seconds_and_the_tokens_are_those_of_the_data_and_the_rest_is_that_of_full_rows(plan):
    lengths = drawn_lengths("any")
    timed = timed_with(plan, CONFIG, lengths)
    assert timed.typical_tokens == sum(lengths) and plan.typical_tokens is None
    share = sum(lengths) / (16 * 1024)
    assert share * 0.8 < timed.step_seconds / plan.step_seconds < share * 1.5
    seconds = {"step_seconds": plan.step_seconds, "waiting_seconds": plan.waiting_seconds}
    assert dataclasses.replace(timed, typical_tokens=None, **seconds) == plan
    assert timed.to_dict()["typical_tokens_per_step"] == sum(lengths)
    assert f" s with the data's {sum(lengths):,} tokens on " in " ".join(timed.describe().split())
    assert timed_with(plan, CONFIG, [1024] * 16).step_seconds == pytest.approx(plan.step_seconds, rel=1e-3)


def test_the_faster_plan_with_more_ram_is_timed_with_the_data_too(plan):
    """Seen to fail: its seconds were those of full rows, and more than the step's."""
    timed = timed_with(dataclasses.replace(plan, faster_with_ram=(7, 0.8 * plan.step_seconds)), CONFIG, [64] * 16)
    assert timed.faster_with_ram == (7, pytest.approx(0.8 * timed.step_seconds))


def test_on_the_cpu_nobody_knows_seconds():
    plan = make_plan(Question(SETTINGS, CONFIG, "fp32", None))
    timed = timed_with(plan, CONFIG, [3, 2])
    assert (timed.step_seconds, timed.typical_tokens) == (None, 5)


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(
    "layout",
    [{}, {"group": 4}, {"group": 4, "segment_blocks": 2, "states_on_gpu": 0}, {"kept": 99}, {"kept": 5},
     {"group": 4, "fate": "dropped"}],
    ids=lambda layout: " ".join(layout) or "plain",
)  # fmt: skip
def test_no_lengths_take_more_memory_than_full_rows(plan, layout, kind):
    """What is allocated is never more. What is reserved may be, by a few pages of 2 MiB, for holes are other ones; the
    margin that plans leave (caps.MARGIN_BYTES) is an order wider."""
    target = gpu_target(CARD, plan.fused_kernels)
    case = step_case(SETTINGS, "bf16")
    case = dataclasses.replace(case, layout=dataclasses.replace(plan.layout, **layout))

    def simulations(lengths=None):
        decoder = make_decoder(CONFIG, "bf16", "fp32", plan.fused_kernels)
        return Simulations(lambda: decoder, dataclasses.replace(case, lengths=lengths), target)

    full, ragged = simulations(), simulations(drawn_lengths(kind))
    assert ragged.allocated_bytes(case.layout) <= full.allocated_bytes(case.layout)
    assert ragged.smallest_cap_bytes(case.layout) <= full.smallest_cap_bytes(case.layout) + 4 * PAGE_BYTES
