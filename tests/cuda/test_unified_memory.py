"""Weights in managed memory on the stand-in: the bits of weights that are all on the card, and no page too many."""

import json

import pytest
import torch
from on_card import output

from experiments.unified_memory.run_gpt2 import PROGRAM
from experiments.unified_memory.schedule import schedule
from experiments.unified_memory.shapes import Pieces, config_of, pieces_of
from lowmem.models.build import build_model
from lowmem.units import MIB

SHAPE = "6x256x4"


def run(tmp_path, *words: str, order: str = "issue") -> dict:
    """Returns the report; under `memory` it has the card's counts."""
    common = ["-m", PROGRAM, "--model", SHAPE, "--seq", "48", "--runs", "2", "--out", str(tmp_path)]
    output(*common, *words, options=["--values", "--order", order])
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("words", [["--physical-limit", "60MiB"], ["--physical-limit", "130MiB", "--backward"]])
@pytest.mark.parametrize("order", ["issue", "adversarial"])
def test_managed_weights_compute_the_resident_ones_bits(words, order, tmp_path):
    """Compares prefetch, page faults and copies, in an order of streams that finds missing waits. Over three passes the
    card holds and moves the schedule's pieces."""
    limit = int(words[1].removesuffix("MiB")) * MIB
    resident = run(tmp_path, "--placement", "resident", *words[2:], order=order)
    by_faults = run(tmp_path, *words, order=order)
    found = run(tmp_path, *words, "--enable-prefetch", "--num-streams", "2", order=order)
    assert found["digest"] == by_faults["digest"] == resident["digest"]
    beside = {used - planned for used, planned in zip(
        found["used_bytes_by_access"], found["planned_resident_bytes"], strict=True)}  # fmt: skip
    assert len(beside) == 1 and beside.pop() > 0, "what CUDA counts goes up and down with the schedule"
    assert found["advice"] == dict(read_mostly=0, preferred_location=-1, accessed_by=0, last_prefetch_location=-2)
    assert by_faults["advice"] == found["advice"] | dict(preferred_location=-2, accessed_by=-2)
    card, total = found["memory"], sum(pieces().sizes) * (2 if "--backward" in words else 1)
    assert card["peak_managed_resident_bytes"] == max(found["planned_resident_bytes"]) <= limit < total
    for kind, where in (("fetch", "device"), ("evict", "host")):
        asked = sum(move["size_bytes"] for move in found["moves"] if move["kind"] == kind)
        assert card[f"prefetched_to_{where}_bytes"] == asked > 0
    assert {move["stream"] for move in found["moves"]} == {0, 1, 2}
    if "--backward" not in words:
        copied = run(tmp_path, *words, "--placement", "explicit", order=order)
        assert copied["digest"] == resident["digest"]
        beside = resident["memory"]["peak_allocated_bytes"] - total  # activations, workspaces
        assert copied["memory"]["peak_allocated_bytes"] <= max(copied["planned_resident_bytes"]) + beside + MIB


def test_a_copy_waits_until_its_slot_is_read_no_more(tmp_path):
    """Runs copies before work that was launched earlier. The adversarial order runs them after it, so the other tests
    here do not find a missing wait."""
    words = ["--physical-limit", "60MiB", "--placement", "explicit"]
    assert run(tmp_path, *words, order="highest")["digest"] == run(tmp_path, *words)["digest"]


def test_moves_are_those_of_the_schedule_in_its_order(tmp_path):
    found = run(tmp_path, "--physical-limit", "60MiB", "--enable-prefetch")
    accesses = pieces().accesses(False)
    planned = schedule(pieces().sizes, accesses, 60 * MIB)
    expected = [("fetch", piece) for piece in sorted(planned.kept)]
    for number in range(3 * len(accesses)):
        leaving, coming = planned.before(number)
        expected += [("evict", piece) for piece in leaving] + [("fetch", piece) for piece in coming]
    assert [(move["kind"], move["piece"]) for move in found["moves"]] == expected


def test_what_is_refused_leaves_the_report_of_another_run(tmp_path):
    """Refuses more managed memory than is free, and compiled groups on the stand-in. Before, the report was gone, and
    the compiler's error had 78 lines."""
    (tmp_path / "report.json").write_text("older")
    with pytest.raises(AssertionError, match="are free on the GPU"):
        run(tmp_path, "--model", "gpt3-6.7b")
    with pytest.raises(AssertionError, match="error: --fusion mlp: the stand-in computes no values"):
        run(tmp_path, "--fusion", "mlp")
    assert (tmp_path / "report.json").read_text() == "older"


ADVICE = """
import torch
from experiments.unified_memory import library
from lowmem.errors import LowmemError
tensor = library.managed_tensor(1 << 21)
for name, advice in [("read_mostly", 1), ("preferred_location", 3), ("accessed_by", 5)]:
    before = library.attributes(tensor)
    library.advise(tensor, advice, 0)
    given = library.attributes(tensor)
    assert given == before | {name: int(advice == library.READ_MOSTLY)}, given
    library.advise(tensor, advice + 1, 0)
    assert library.attributes(tensor) == before
try:
    library.prefetch(tensor, 7, torch.cuda.current_stream())
except LowmemError as error:
    print(error)
"""


def test_each_advice_is_given_and_taken_back():
    assert "managed memory: CUDA says: invalid argument" in output("-c", ADVICE)


def pieces() -> Pieces:
    return pieces_of(build_model(config_of(SHAPE)), torch.float32)
