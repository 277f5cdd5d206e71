"""torchrun on the stand-in: two processes, each with a card, whose memory is that of the plan."""

import json

import on_card
import pytest

from experiments.harness import rows
from runs import ROOT

# gloo's thread drops a tensor a moment after it was sent, on a busy machine too late for the next allocation. NCCL has
# no such thread.
UNHURRIED = """
import sys, time
sys.path[:0] = [{root!r}]
import torch.distributed as dist
from lowmem.run.main import main
from train_gpt2_large import SETTINGS

wait = dist.Work.wait


def slowly(*arguments):
    done = wait(*arguments)
    time.sleep(0.01)
    return done


dist.Work.wait = slowly
if __name__ == "__main__":
    sys.exit(main(SETTINGS))
"""


@pytest.mark.parametrize(
    "options", [(), ("--states", "streamed", "--gradients", "streamed")], ids=["resident", "in RAM"]
)
def test_a_ranks_memory_is_its_plans(tmp_path, options):
    """Seen to fail: the plan was that of one process with the whole model, and NCCL, which the stand-in lacks, was
    asked for."""
    (tmp_path / "text.txt").write_text("one two three four five six\n" * 400)
    (tmp_path / "train.py").write_text(UNHURRIED.format(root=str(ROOT)))
    out = tmp_path / "run"
    on_card.output(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "train.py"),
        "--demo", "--data", str(tmp_path / "text.txt"), "--seq", "64", "--batch", "8", "--micro-batch", "2", "--steps",
        "3", "--eval-fraction", "0", "--gpu-limit", "4GiB", "--out", str(out), *options,
        options=("--values", "--devices", "2"), OMP_NUM_THREADS="1",
    )  # fmt: skip
    plan = json.loads((out / "plan.json").read_text())
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert plan["ranks"] == 2 and last["step"] == 3
    assert last["gpu_allocated_peak_bytes"] == pytest.approx(plan["predicted"]["gpu_allocated_peak_bytes"], rel=0.001)
    assert last["gpu_reserved_peak_bytes"] == plan["predicted"]["gpu_reserved_peak_bytes"]


@pytest.mark.timeout(600)
def test_the_acceptance_command_trains_on_two_cards(tmp_path):
    command = ("-m", "experiments.gpu_acceptance", "--dry-run", "--minutes", "9", "--out", str(tmp_path))
    on_card.output(*command, "--only", "correctness/two cards", options=("--values", "--devices", "2"))
    cases = {row["name"]: row for row in rows.read(tmp_path / "rows.jsonl")}
    assert list(cases) == ["two cards: resident", "two cards: in RAM", "two cards: killed", "two cards"]
    assert all(row["ok"] and row["checks"].get("memory as planned", True) for row in cases.values())
    assert "memory as planned" in cases["two cards: in RAM"]["checks"]
