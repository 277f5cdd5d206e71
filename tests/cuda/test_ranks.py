"""torchrun on the stand-in: two processes, each with a card, whose memory is that of the plan."""

import json

import on_card
import pytest

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
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert plan["ranks"] == 2 and last["step"] == 3
    assert last["gpu_allocated_peak_bytes"] == pytest.approx(plan["predicted"]["gpu_allocated_peak_bytes"], rel=0.001)
    assert last["gpu_reserved_peak_bytes"] == plan["predicted"]["gpu_reserved_peak_bytes"]
