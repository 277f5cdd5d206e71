"""Plans against the allocator of PyTorch's CUDA build: the cases, and what is said of their rows."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from transformers import GPT2Config

from experiments.harness.models import MODELS
from experiments.plan_accuracy import promise, promise_ram, table
from experiments.plan_accuracy.cases import CARDS, CASES, NO_CAP, PROMISED, PROMISED_RAM, TIGHT
from lowmem.core.kernels import Kernels
from lowmem.cudasim.gpus import CARDS as ALL_CARDS
from lowmem.models.build import make_decoder
from lowmem.planning import caps, fastest
from lowmem.planning.choices import choices_by_home, step_case
from lowmem.planning.question import Question
from lowmem.planning.search import Room
from lowmem.planning.simulated_step import gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.run.cli import parse_arguments
from lowmem.settings import Settings
from lowmem.units import MIB, parse_size


def row(name: str, allocated: int, reserved: int, held: bool = True, **more) -> dict:
    """Returns the row of a run that took 1,000 and 2,000 bytes."""
    predicted = {table.ALLOCATED: allocated, table.RESERVED: reserved}
    measured = {table.ALLOCATED: 1000, table.RESERVED: 2000}
    return {
        "name": name, "card": "t4", "predicted": predicted, "measured": measured, "cap_held": held, "error": None,
        "exit_code": 0, "processor_seconds": 1.0,
    } | more  # fmt: skip


def test_the_cases_are_what_the_experiment_says():
    assert len(CASES) >= 150 and max(Counter(case.name for case in CASES).values()) == 1
    assert {case.model for case in CASES} == set(MODELS) and {case.card for case in CASES} == set(CARDS)
    assert set(CARDS) <= set(ALL_CARDS)
    settings = [parse_arguments([*case.options, "--model", case.model], Settings()) for case in CASES]
    assert {one.optimizer for one in settings} == {"adamw", "adamw8bit", "sgd"}
    assert {one.residual for one in settings} == {"fp32", "16bit"}
    assert {one.clip_norm for one in settings} == {None, 1.0} and {one.document_mask for one in settings} == {
        True,
        False,
    }
    assert {case.grow for case in CASES} == {case.two_passes for case in CASES} == {True, False}
    assert {NO_CAP, TIGHT} < {case.cap for case in CASES}
    full = [one for one, case in zip(settings, CASES, strict=True) if case.script]
    assert len(full) == 30 and all((one.batch, one.seq) == (64, 1024) for one in full)


def test_the_table_counts_what_is_exact_and_lists_what_is_outside():
    rows = [
        row("exact", 1000, 2000), row("a little", 1000, 2005), row("under", 998, 1900), row("over", 1000, 2100, False),
    ]  # fmt: skip
    said = table.tables([row("exact", 1, 1), *rows])  # the newest row of a case counts
    assert "| all | 4 | 3 (75%) | -0.2000% | 1 (25%) | 2 (50%) | -5.00% | +5.00% | 3 (75%) |" in said
    outside = said.split("0.5% of reserved: ")[1]
    assert outside.startswith("2") and "| under | -2 | -5.00% |" in outside and "| over | +0 | +5.00% |" in outside
    assert "exact |" not in outside and "a little |" not in outside


def test_a_case_that_was_not_measured_is_listed_and_counts_nowhere():
    failed = {"name": "failed", "card": "t4", "exit_code": 3, "error": "no report", "processor_seconds": 1.0}
    said = table.tables([failed, row("exact", 1000, 2000)])
    assert "| all | 1 |" in said and "| failed | none | exit code 3: no report |" in said
    assert "exit code 3" in table.line(failed)


@pytest.mark.parametrize(("held", "error"), [(True, None), (False, "out of memory: []")])
def test_a_line_says_both_errors_and_what_went_wrong(held, error):
    said = table.line(row("x", 1024, 1990, held, error=error))
    assert said.startswith("x: allocated +24 B, reserved -0.500%, 1 s")
    assert ("CAP EXCEEDED" in said) == (not held) and (error or "") in said


def test_the_picture_is_drawn(tmp_path):
    table.draw([row("x", 1000, 2000)], tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 1000


# --- both ends of the promise

TINY = Settings(model="tiny", init="random", seq=32, batch=2, micro_batch=1, recompute="on")
QUICK = replace(TINY, segment_blocks=1, group=1)  # leaves a search little to look at


@pytest.fixture(scope="module")
def simulations():
    config = GPT2Config(n_layer=6, n_embd=64, n_head=2, vocab_size=1000, n_positions=32)
    decoder = partial(make_decoder, config, "bf16", TINY.residual, Kernels.ALL)
    target = gpu_target(ALL_CARDS["rtx3060"], fused_kernels=Kernels.ALL)
    return Simulations(decoder, step_case(TINY, "bf16"), target)


def test_the_cells_are_of_all_kinds():
    settings = [promise.settings_of(case) for case in PROMISED]
    assert len({case.name for case in PROMISED}) == len(PROMISED) >= 40
    assert len({case.card for case in PROMISED}) >= 3 and len({case.model for case in PROMISED}) >= 8
    assert {one.optimizer for one in settings} == {"adamw", "adamw8bit", "sgd"}
    assert {one.clip_norm for one in settings} == {None, 1.0} and {one.residual for one in settings} == {
        "fp32",
        "16bit",
    }
    assert {one.recompute for one in settings} == {"auto", "on", "products", "off"}
    assert len({case.name for case in PROMISED_RAM}) == len(PROMISED_RAM) >= 8
    assert all(parse_size(case.cap) for case in PROMISED_RAM)


def test_the_cap_that_is_named_is_planned_and_the_one_below_is_not(simulations):
    named, refused = promise.caps(QUICK, simulations)
    assert named % MIB == 0 and refused == named - MIB
    rooms = [Room(caps.room_under(cap), None) for cap in (named, refused)]
    by_home = choices_by_home(QUICK, simulations)
    planned, not_planned = (fastest.fastest_layout(by_home, simulations, room) for room in rooms)
    assert planned is not None and not_planned is None


def test_a_named_cap_that_is_not_the_smallest_is_found_out(simulations, monkeypatch):
    named, refused = promise.caps(QUICK, simulations)
    least = fastest.smallest_room(choices_by_home(QUICK, simulations), simulations, Room(0, None))
    monkeypatch.setattr(fastest, "smallest_room", lambda *arguments: Room(least.gpu + 5 * MIB, 0))
    assert promise.caps(QUICK, simulations) == (named + 5 * MIB, refused)


def test_every_small_layout_that_its_tensors_do_not_rule_out_is_run(simulations):
    """Segments of other lengths than a plan's, too."""
    by_home = choices_by_home(TINY, simulations)
    layouts = [small.layout for small in fastest.candidates(by_home, simulations, Room(None, None))]
    sizes = sorted(simulations.allocated_bytes(layout) for layout in layouts)
    (only,) = promise.layouts_to_try(TINY, simulations, 0)
    assert simulations.allocated_bytes(only) <= sizes[0]
    everything = promise.layouts_to_try(TINY, simulations, 2**40)
    assert set(layouts) < set(everything)
    some = promise.layouts_to_try(TINY, simulations, sizes[2])
    assert all(simulations.allocated_bytes(layout) <= sizes[2] for layout in some) and 3 <= len(some) < len(everything)


def test_the_smallest_cap_of_ram_is_read_from_the_sentence_that_names_it():
    question = Question(TINY, GPT2Config(), "fp32", None)
    sentence = caps.refusal(question, 100 * MIB, caps.smallest_cap(90 * MIB), 1234 * MIB)
    assert promise_ram.cap_named(f"train.py: {sentence}") == 1234 * MIB
    assert promise_ram.cap_named("train.py: out of memory") is None


def test_slack_is_what_was_not_needed_of_the_largest_refused_cap():
    assert promise_ram.slack(101 * MIB, 98 * MIB) == pytest.approx(0.02)
    assert promise_ram.slack(101 * MIB, 102 * MIB) < 0


def test_the_table_of_both_ends_counts_and_lists_what_did_not_hold():
    held = {
        "name": "held", "card": "t4", "ok": True, "completes": True, "named_bytes": 4000 * MIB,
        "reserved_bytes": 3960 * MIB, "refused_bytes": 3992 * MIB, "tried": 2, "tried_bytes": 900,
        "least_allocated_bytes": 909,
        "completed_though_refused": [], "completed_in_the_margin": False,
    }  # fmt: skip
    wrong = held | {
        "name": "wrong", "card": "h100", "ok": False, "completed_though_refused": ["Layout(1)"],
        "completed_in_the_margin": True, "named_bytes": 1000 * MIB, "reserved_bytes": 900 * MIB,
        "refused_bytes": 999 * MIB,
    }  # fmt: skip
    unplanned = {"name": "unplanned", "card": "h100", "ok": False, "completes": False, "why": "no plan"}
    said = table.promise_table([held, wrong, unplanned])
    assert "| t4 | 1 | 1 | 99.0% | 99.8% or more | 2 | 2 | 101.0% to 101.0% | 1 of 1 | 0 of 0 |" in said
    assert "| all | 3 | 2 | 99.0% | 99.8% or more | 4 | 3 | 101.0% to 101.0% | 1 of 1 | 0 of 1 |" in said
    assert "| wrong |  | ['Layout(1)'] |" in said and "| unplanned | no plan |  |" in said
    assert "did not hold" not in table.promise_table([held])


def test_the_table_of_ram_says_what_was_not_needed():
    row = {
        "name": "x", "ok": True, "named_bytes": 101 * MIB, "measured_bytes": 98 * MIB, "slack": 0.02,
        "ram_breakdown": {"streamed_states": 50 * MIB}, "refused": {"exit_code": 3}, "completed": {"exit_code": 0},
    }  # fmt: skip
    assert "| x | 101 | 50 | 98 | 2 | 2.0% | 3, 0 |" in table.promise_ram_table([row])
    assert "| x |  |  | not measured |" in table.promise_ram_table([{"name": "x", "refused": {"exit_code": 1}}])
