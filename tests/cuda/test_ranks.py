"""torchrun on the stand-in: two processes, each with a card, whose memory is that of the plan."""

import json

import on_card
import pytest

from experiments.harness import rows
from runs import ROOT


@pytest.mark.parametrize(
    "options", [(), ("--states", "streamed", "--gradients", "streamed")], ids=["resident", "in RAM"]
)
def test_a_ranks_memory_is_its_plans(tmp_path, options):
    """Seen to fail: the plan was that of one process with the whole model, and NCCL, which the stand-in lacks, was
    asked for."""
    (tmp_path / "text.txt").write_text("one two three four five six\n" * 400)
    out = tmp_path / "run"
    on_card.output(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "train_gpt2_large.py"),
        "--demo", "--data", str(tmp_path / "text.txt"), "--seq", "64", "--batch", "8", "--micro-batch", "2", "--steps",
        "3", "--eval-fraction", "0", "--gpu-limit", "4GiB", "--out", str(out), *options,
        options=("--values", "--devices", "2"), OMP_NUM_THREADS="1",
    )  # fmt: skip
    plan = json.loads((out / "plan.json").read_text())
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert plan["ranks"] == 2 and [each["step"] for each in steps] == [1, 2, 3]
    planned, peak = plan["predicted"], steps[-1]["gpu_allocated_peak_bytes"]
    late = 2 * 12 * 128**2  # a block's matrices in bf16; on a busy machine, gloo's thread drops them a moment late
    assert -0.001 <= (peak - planned["gpu_allocated_peak_bytes"]) / peak <= 0.001 + late / peak
    assert steps[-1]["gpu_reserved_peak_bytes"] == planned["gpu_reserved_peak_bytes"]


@pytest.mark.timeout(600)
def test_the_acceptance_command_trains_on_two_cards(tmp_path):
    """Every arrangement with the same bits, memory as planned; a machine with one card leaves it out."""
    command = ("-m", "experiments.gpu_acceptance", "--dry-run", "--minutes", "9", "--out", str(tmp_path))
    on_card.output(*command, "--only", "correctness/two cards", options=("--values", "--devices", "2"))
    cases = {row["name"]: row for row in rows.read(tmp_path / "rows.jsonl")}
    assert list(cases) == ["two cards: resident", "two cards: in RAM", "two cards: killed", "two cards"]
    assert all(row["ok"] and row["checks"].get("memory as planned", True) for row in cases.values())
    assert "memory as planned" in cases["two cards: in RAM"]["checks"]
