"""Streams on the stand-in: the same bits in every order that streams and events allow, and no report by PyTorch's
sanitizer. tests/stream_order has the arrangements, and the missing waits that this finds."""

import json

import on_card
import pytest

from tests.stream_order.arrangements import ARRANGEMENTS
from tests.stream_order.check import ORDERS, ordered

FIRST, *OTHERS = ORDERS
FEW = ("deferred", "in backward, half streamed, saved", "streamed, fp16")


@pytest.mark.parametrize(
    "name, orders", [(name, [FIRST]) for name in ARRANGEMENTS] + [(name, OTHERS) for name in FEW], ids=str
)
def test_no_order_of_streams_changes_a_bit(name, orders):
    assert ordered(ARRANGEMENTS[name], orders) == {"races": {}, "different": []}


def test_pytorchs_sanitizer_has_nothing_to_report():
    """Without values: the sanitizer sees which operator uses which memory on which stream."""
    command = ("-m", "tests.stream_order.check", "--device", "cuda", "--races-only")
    lines = on_card.output(*command, options=("--order", "sanitize"))
    found = [json.loads(line) for line in lines.splitlines()]
    assert [line["arrangement"] for line in found] == list(ARRANGEMENTS)
    assert [line for line in found if line["error"] or line["races"]] == []


@pytest.mark.parametrize(
    "ranks, cases, count",
    [
        (2, "2-None-no and clipping or 2-None-kept or 2-None-bf16 and steps", 4),
        (4, "4-2-kept", 1),  # two machines, by name
    ],
)
def test_no_order_of_streams_changes_a_bit_of_ranks(ranks, cases, count):
    """Each rank has a card. gloo's threads wait for streams, and so compute beside the thread that trains."""
    command = ("-m", "pytest", "tests/distributed/test_bits.py", "-k", f"as_many_parts and ({cases})")
    options = ("--values", "--order", FIRST, "--devices", str(ranks))
    assert f"{count} passed" in on_card.output(*command, options=options)
