"""Trains on two GPUs with torchrun, and compares bits, memory and time.

    resident   a small model, everything on the GPUs: the reference for the next two
    in RAM     states and gradients in RAM: every bit equal
    killed     SIGKILL to one process, and both are started again: every bit equal
    large      64 x 1,024 tokens: peaks and seconds next to the plan's

No pair of GPUs has run this yet; the CPU and the stand-in have.
"""

import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import torch

from experiments.gpu_acceptance.life import differences
from experiments.harness.child import Result, Setting, Unavailable
from experiments.harness.rows import ROOT
from experiments.harness.torchrun import ranks_of, start
from lowmem.run.metrics import read_metrics

RANKS = 2
ALWAYS = ("--eval-batches", "1", "--wandb", "disabled", "--resume", "auto")
SMALL = (
    *("--demo", "--data", str(ROOT / "experiments" / "harness"), "--seq", "64", "--batch", "8", "--micro-batch", "2"),
    *("--steps", "6", "--save-every", "2"),
)
LARGE = ("--init", "random", "--steps", "4", "--fixed-batch")
MEMORY_TOLERANCE = 0.01  # of the planned allocated bytes
SECONDS = (60.0, 300.0)  # of a small case and of the large one: starting two processes, planning, training, saving


def check(setting: Setting) -> Result:
    """Runs these cases, a row for each. Raises Unavailable with fewer than two GPUs."""
    on_gpus = setting.device == "cuda"
    if on_gpus and torch.cuda.device_count() < RANKS:
        raise Unavailable("this needs two GPUs")
    in_ram = ("--states", "streamed", "--gradients", "streamed")
    cases = {
        "resident": lambda: _trained(setting, "resident"),
        "in RAM": lambda: _compared(setting, _trained(setting, "in RAM", *in_ram), "in RAM"),
        "killed": lambda: _compared(setting, _trained(setting, "killed", kill=True), "killed"),
    }
    if not setting.dry_run:
        cases["large"] = lambda: _trained(setting, "large")
    done = {name: setting.attempt(name, work, SECONDS[name == "large"]).held for name, work in cases.items()}
    return Result({"cases": len(done)}, done)


def _trained(setting: Setting, name: str, *more: str, kill: bool = False) -> Result:
    out = setting.scratch / name
    shape = LARGE if name == "large" else SMALL
    limit = "none" if setting.gpu_limit_bytes is None else str(setting.gpu_limit_bytes)
    options = [*shape, *ALWAYS, *more, "--gpu-limit", limit, "--device", setting.device, "--out", str(out)]
    process = start([str(ROOT / "train_gpt2_large.py"), *options], RANKS, restarts=int(kill), stdout=subprocess.DEVNULL)
    was_killed = kill and _killed(process, out)
    code = process.wait()
    rows = read_metrics(out / "metrics.jsonl")
    if code or len(rows) < 2:
        return Result({"exit_code": code, "steps": len(rows)}, {"exit code 0": False})
    plan = json.loads((out / "plan.json").read_text())
    seconds = statistics.median(row["step_ms"] / 1e3 for row in rows[1:])
    values = {"ranks": plan["ranks"], "losses": [row["loss"] for row in rows], "step_seconds": seconds}
    values |= {"planned": plan["predicted"], "sent_bytes": plan["sent_bytes"]}
    checks = {"two ranks": plan["ranks"] == RANKS} | ({"was killed": was_killed} if kill else {})
    if setting.device == "cuda":
        peaks = ("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes")
        values |= {peak: max(row[peak] for row in rows) for peak in peaks}
        planned = plan["predicted"]["gpu_allocated_peak_bytes"]
        checks["memory as planned"] = abs(values[peaks[0]] - planned) <= MEMORY_TOLERANCE * planned
    return Result(values, checks)


def _killed(process: subprocess.Popen, out: Path) -> bool:
    """Kills the last process after the third step. Returns False if the run had ended before."""
    while process.poll() is None and len(read_metrics(out / "metrics.jsonl")) < 3:
        time.sleep(0.01)
    last = ranks_of(process).get(RANKS - 1) if process.poll() is None else None
    if last is not None:
        os.kill(last, signal.SIGKILL)
    return last is not None


def _compared(setting: Setting, result: Result, name: str) -> Result:
    different = differences(setting.scratch / "resident", setting.scratch / name)
    return Result(result.values | {"different": different[:5]}, result.checks | {"every bit equal": not different})
