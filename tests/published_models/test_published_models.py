"""All cases are run again: each comes to what its committed row says."""

import pytest

from experiments.harness import rows as row_file
from experiments.harness.tables import written
from tests.published_models import runs, table
from tests.published_models.__main__ import PYTHON_4
from tests.published_models.cases import all_cases

CASES = {(case.kind, case.name): case for case in all_cases()}
ROWS = {(row["kind"], row["name"]): row for row in row_file.read(table.RESULTS)}


@pytest.fixture(scope="module")
def ask_4():
    with runs.transformers_4(PYTHON_4) as ask:
        yield ask


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_published_folder_comes_to_what_its_row_says(kind, name, tmp_path, ask_4):
    found = runs.run(CASES[kind, name], tmp_path, ask_4)
    assert found["outcome"] == ROWS[kind, name]["outcome"], found["said"]
    assert all(found["checks"].values()), found


def test_every_case_has_a_row_and_every_row_is_right():
    assert list(ROWS) == list(CASES) and all(row["ok"] for row in ROWS.values())
    kinds = [kind for kind, _ in CASES]
    assert kinds.count("config") >= 50 and kinds.count("tokenizer") >= 30


def test_the_readme_shows_the_rows():
    assert written(table.README, table.BEGIN) == table.tables(list(ROWS.values()))
