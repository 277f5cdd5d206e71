"""Compares allocations of operators by PyTorch's own allocator with the table of lowmem/cudasim/temporaries.py. A
release of PyTorch that allocates otherwise fails here."""

import json

import on_card
import pytest

from lowmem.cudasim.temporaries import TEMPORARIES

LEFT_OUT_BYTES = 1024  # of a call: two numbers of 8 bytes, each of which takes a block of 512
SOME_FAMILIES = ("gpt2", "bloom", "llama")
CARDS = {  # the families of decoders whose steps are compared; none named: all of them
    "a100": (),
    "rtx3060": SOME_FAMILIES,
    "rtx4090": SOME_FAMILIES,
    "h100": SOME_FAMILIES,
    "t4": SOME_FAMILIES,
}
pytestmark = pytest.mark.timeout(600)  # a card takes half a minute, or a whole one, of two processors


def run(card: str, *options: str, **environment: str) -> list[dict]:
    lines = on_card.output("-m", "tests.cuda.operators", *options, options=("--gpu", card), **environment).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def errors(row: dict) -> list[int]:
    return [measured - simulated for measured, simulated in zip(row["measured"], row["simulated"], strict=True)]


@pytest.mark.parametrize("card", CARDS)
def test_the_table_has_what_the_allocator_counts(card):
    rows = run(card, *(("--families", *CARDS[card]) if CARDS[card] else ()))
    assert {row["kind"] for row in rows} == {"workspace", "operator", "function", "step"}
    assert [row for row in rows if any(abs(error) > LEFT_OUT_BYTES for error in errors(row))] == []
    assert [row for row in rows if row["difference"]] == []  # results are laid out as on meta
    if card == "a100":
        seen = {row["operator"] for row in rows if row["kind"] == "operator"}
        assert {str(operator) for operator in TEMPORARIES} - seen == set()  # every operator of the table is a case


@pytest.mark.parametrize("card", CARDS)
def test_workspaces_that_nobody_set_are_as_large_as_the_card_has_them(card):
    rows = run(card, "--workspaces", CUBLAS_WORKSPACE_CONFIG="")
    assert len(rows) == 2 and all(errors(row) == [0] for row in rows)
