"""Weights in managed memory on the stand-in: the bits of weights that are all on the card, and no page too many."""

import json

import pytest
import torch
from on_card import output

from experiments.unified_memory.schedule import schedule
from experiments.unified_memory.shapes import Pieces, config_of, pieces_of
from lowmem.models.build import build_model
from lowmem.units import MIB

SHAPE = "6x256x4"
PROGRAM = """
import sys
from experiments.unified_memory import run_gpt2
from stand_in.card_library import counts
assert run_gpt2.main(sys.argv[1:]) == 0
found = counts()
print(found["peak_managed_resident_bytes"], found["prefetched_to_device_bytes"], found["prefetched_to_host_bytes"])
"""


def run(tmp_path, *words: str, order: str = "issue") -> tuple[dict, list[int]]:
    """The report, and of the card: the most managed memory on it, and what was prefetched to it and back; bytes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    common = ["--model", SHAPE, "--seq", "48", "--runs", "2", "--out", str(tmp_path)]
    said = output(str(program), *common, *words, options=["--values", "--order", order])
    return json.loads((tmp_path / "report.json").read_text()), [*map(int, said.splitlines()[-1].split())]


@pytest.mark.parametrize("words", [["--physical-limit", "60MiB"], ["--physical-limit", "130MiB", "--backward"]])
@pytest.mark.parametrize("order", ["issue", "adversarial"])
def test_managed_weights_compute_the_resident_ones_bits(words, order, tmp_path):
    """With prefetch, by faults alone, and by copies; in an order of streams that finds missing waits. What the card
    holds and moves is what the schedule says, over three passes and the pieces that are kept."""
    limit = int(words[1].removesuffix("MiB")) * MIB
    resident, _ = run(tmp_path, "--placement", "resident", *words[2:], order=order)
    by_faults, _ = run(tmp_path, *words, order=order)
    found, (peak, to_device, to_host) = run(tmp_path, *words, "--enable-prefetch", "--num-streams", "2", order=order)
    assert found["digest"] == by_faults["digest"] == resident["digest"]
    assert (
        peak
        == max(found["planned_resident_bytes"])
        <= limit
        < sum(pieces().sizes) * (2 if "--backward" in words else 1)
    )
    fetched = sum(move["size_bytes"] for move in found["moves"] if move["kind"] == "fetch")
    assert (to_device, to_host) == (fetched, sum(m["size_bytes"] for m in found["moves"] if m["kind"] == "evict"))
    assert {move["stream"] for move in found["moves"]} == {0, 1, 2}
    if "--backward" not in words:
        copied, _ = run(tmp_path, *words, "--placement", "explicit", order=order)
        assert copied["digest"] == resident["digest"]
        assert copied["memory"]["peak_allocated_bytes"] < limit + 16 * MIB


def test_moves_are_those_of_the_schedule_in_its_order(tmp_path):
    found, _ = run(tmp_path, "--physical-limit", "60MiB", "--enable-prefetch")
    accesses = pieces().accesses(False)
    planned = schedule(pieces().sizes, accesses, 60 * MIB)
    expected = [("fetch", piece) for piece in sorted(planned.kept)]
    for number in range(3 * len(accesses)):
        leaving, coming = planned.before(number)
        expected += [("evict", piece) for piece in leaving] + [("fetch", piece) for piece in coming]
    assert [(move["kind"], move["piece"]) for move in found["moves"]] == expected


def test_more_than_is_free_is_refused(tmp_path):
    program = "from experiments.unified_memory.library import managed_tensor; managed_tensor(13 << 30)"
    with pytest.raises(AssertionError, match="are free on the GPU"):
        output("-c", program)


def pieces() -> Pieces:
    return pieces_of(build_model(config_of(SHAPE)), torch.float32)
