"""What operators allocate on a card by PyTorch's own allocator, against the table of lowmem/temporaries.py.

One process per card, since a process sees one card. A release of PyTorch that allocates otherwise fails here.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem.temporaries import TEMPORARIES

ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT_BYTES = 1024  # of a call: two numbers of 8 bytes, each of which takes a block of 512
SOME_FAMILIES = ("gpt2", "bloom", "llama")
CARDS = {  # the families of decoders whose steps are compared; none named: all of them
    "a100": (),
    "rtx3060": SOME_FAMILIES,
    "rtx4090": SOME_FAMILIES,
    "h100": SOME_FAMILIES,
    "t4": SOME_FAMILIES,
}
every_card = pytest.mark.parametrize("card", CARDS)
pytestmark = pytest.mark.timeout(600)  # a card takes half a minute, or a whole one, of two processors


@functools.cache
def rows_of(card: str) -> list[dict]:
    return run(card, *(("--families", *CARDS[card]) if CARDS[card] else ()))


def run(card: str, *options: str, **environment: str) -> list[dict]:
    command = [sys.executable, "-m", "stand_in", "--gpu", card, "--", "-m", "tests.cuda.operators", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def errors(row: dict) -> list[int]:
    return [measured - simulated for measured, simulated in zip(row["measured"], row["simulated"], strict=True)]


@every_card
@pytest.mark.parametrize("kind", ["workspace", "operator", "function", "step"])
def test_the_table_has_what_the_allocator_counts(card, kind):
    rows = [row for row in rows_of(card) if row["kind"] == kind]
    wrong = [row for row in rows if any(abs(error) > LEFT_OUT_BYTES for error in errors(row))]
    assert rows and wrong == []


@every_card
def test_results_are_laid_out_as_on_meta(card):
    assert [row for row in rows_of(card) if row["difference"]] == []


@every_card
def test_workspaces_that_nobody_set_are_as_large_as_the_card_has_them(card):
    rows = run(card, "--workspaces", CUBLAS_WORKSPACE_CONFIG="")
    assert len(rows) == 2 and all(errors(row) == [0] for row in rows)


def test_every_operator_of_the_table_is_among_the_cases():
    seen = {row["operator"] for row in rows_of("a100") if row["kind"] == "operator"}
    assert {str(operator) for operator in TEMPORARIES} - seen == set()
