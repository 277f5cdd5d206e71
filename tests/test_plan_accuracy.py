"""Plans against the allocator of PyTorch's CUDA build: the cases, and what is said of their rows."""

from collections import Counter

import pytest

from experiments.harness.tables import written
from experiments.memory_estimation.models import MODELS
from experiments.plan_accuracy import table
from experiments.plan_accuracy.cases import CARDS, CASES, NO_CAP, TIGHT
from lowmem.cards import CARDS as ALL_CARDS
from lowmem.cli import parse_arguments
from lowmem.settings import Settings


def row(name: str, allocated: int, reserved: int, held: bool = True, **more) -> dict:
    """Of a run that took 1,000 and 2,000 bytes."""
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


def test_the_readme_says_what_the_committed_rows_say():
    assert written(table.README, table.BEGIN) == table.tables(table.committed_rows())


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
