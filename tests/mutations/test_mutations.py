"""Every mutation has a place and a row, and the command reports mutations that live or cannot be tried."""

import pytest

from experiments.harness import rows as row_file
from experiments.harness.tables import written
from tests.mutations import __main__ as program
from tests.mutations import table
from tests.mutations.mutation_list import MUTATIONS, Mutation
from tests.stream_order.mutation_list import without_effect

OVERFLOW = "core/precision.py", "no overflow halves", "self.scale = max(self.scale / 2, 1.0)"
LATE = "core/test_precision.py::test_loss_scale_halves_on_overflow_and_doubles_after_an_interval_of_good_steps"


def test_every_mutation_changes_the_one_place_that_it_means_and_names_tests_that_are_there():
    for package in {mutation.package for mutation in MUTATIONS}:
        its_own = [mutation for mutation in MUTATIONS if mutation.package == package]
        assert without_effect(its_own, row_file.ROOT / package) == []
    for test in {test for mutation in MUTATIONS for test in mutation.tests}:
        assert (row_file.ROOT / "tests" / test.split("::")[0]).is_file(), test


def test_a_mutation_without_effect_is_told():
    same = Mutation(*OVERFLOW, OVERFLOW[2] + "  # the same")
    assert without_effect([same], row_file.ROOT / "lowmem") == [same.name]


def test_the_readme_says_what_the_rows_say_and_nothing_lives():
    rows = row_file.read(table.RESULTS)
    found = table.table(rows)
    assert written(table.README, table.BEGIN) == found
    assert table.LIVES not in found and table.NOT_RUN not in found


@pytest.mark.exhaustive
def test_a_mutation_that_is_found_one_that_lives_and_one_that_has_no_place(tmp_path, capsys):
    found = Mutation(*OVERFLOW, "pass", tests=(LATE,))
    lives = Mutation(*OVERFLOW, OVERFLOW[2] + "  # the same", tests=(LATE,))
    nowhere = Mutation("core/precision.py", "no such text", "no such text", "", tests=(LATE,))
    rows = tmp_path / "rows.jsonl"
    assert program.main(["--out", str(rows)], [found, lives, nowhere]) == 1
    assert [row["caught_by"] for row in row_file.read(rows)] == [LATE, None]
    said = capsys.readouterr().out
    assert "found      no overflow halves" in said and "LIVES      no overflow halves" in said
    assert "NOT TRIED  no such text: no such text: 0 places in core/precision.py" in said and "WORTHLESS" not in said
    assert "3 mutations, 2 not as expected" in said


def test_what_pytest_says_has_failed_is_read():
    said = "F\nFAILED tests/core/test_optimizers.py::test_x[a b-True] - assert 1 == 2\n1 failed\n"
    assert program.FAILED.search(said)[1] == "core/test_optimizers.py::test_x[a b-True]"
    assert program.FAILED.search("ERROR tests/faults/test_y.py - ImportError: no\n")[1] == "faults/test_y.py"
