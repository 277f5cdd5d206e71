"""A plan's tape has the requests to the allocator of PyTorch's CUDA build, in the same order, on which reserved memory
depends. Seen to fail: with the results of dropout in their order, with temporaries freed in the order of their births,
with sums of two gradients never or always in place, with workspaces at each thread's first product, with one step in
fp16 without clipping."""

import json

import on_card
import pytest

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("card", ["rtx3060", "t4"])  # flash attention, and efficient attention alone
def test_a_run_asks_for_what_its_plan_says_in_the_same_order(card):
    lines = on_card.output("-m", "tests.cuda.step_requests", options=("--gpu", card)).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(rows) == {"rtx3060": 238, "t4": 160}[card] and all(row["requests"] > 1000 for row in rows)
    assert [row for row in rows if row["differences"]] == []
