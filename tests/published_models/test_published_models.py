"""The committed rows are those of all cases, and right; a few cases are run again."""

import pytest

from experiments.harness import rows as row_file
from experiments.harness.tables import written
from tests.published_models import runs, table
from tests.published_models.__main__ import PYTHON_4
from tests.published_models.cases import all_cases
from tests.published_models.shapes import POSITIONS, published, shrunk

CASES = {(case.kind, case.name): case for case in all_cases()}
AGAIN = {  # case: its outcome
    ("config", "openai-community/gpt2"): "trained",  # names without a prefix, old buffers
    ("config", "meta-llama/Llama-3.1-8B-Instruct"): "trained",
    ("config", "microsoft/Phi-3.5-mini-instruct"): "trained",  # longrope
    ("config", "internlm/internlm3-8b-instruct"): "trained",  # dynamic
    ("config", "google/gemma-3-4b-it"): "refused",
    ("config", "openbmb/MiniCPM-2B-sft-bf16"): "refused",
    ("config", "mistralai/Mixtral-8x7B-v0.1"): "refused",
    ("tokenizer", "Llama 2 with tokens as words, LlamaTokenizerFast, legacy true"): "trained",
    ("tokenizer", "XGLM without tokenizer.json"): "refused",
    ("tokenizer", "truncation and padding in tokenizer.json"): "trained",
    ("tokenizer", "Llama 1 as first converted: LLaMATokenizer"): "refused",
}


@pytest.mark.parametrize(("kind", "name"), AGAIN)
def test_a_published_folder_comes_to_what_its_row_says(kind, name, tmp_path):
    with runs.transformers_4(PYTHON_4) as later:
        found = runs.run(CASES[kind, name], tmp_path, later)
    assert found["outcome"] == AGAIN[kind, name], found["said"]
    assert all(found["checks"].values()), found


def test_every_case_has_a_row_and_every_row_is_right():
    rows = row_file.read(table.RESULTS)
    assert [(row["kind"], row["name"]) for row in rows] == list(CASES)
    assert [row["name"] for row in rows if not row["ok"]] == []
    kinds = [kind for kind, _ in CASES]
    assert kinds.count("config") >= 50 and kinds.count("tokenizer") >= 30


def test_the_readme_shows_the_rows():
    assert written(table.README, table.BEGIN) == table.tables(row_file.read(table.RESULTS))


def test_a_small_config_has_every_key_of_the_published_one():
    for row in published().values():
        small = shrunk(row["config"])
        assert list(small) == list(row["config"])
        assert small.get("max_position_embeddings", POSITIONS) in (POSITIONS, POSITIONS + 2)
