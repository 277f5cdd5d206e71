"""The real scripts for a few steps: do Large and XL fit their caps, how fast are they, how good was the plan.

The script runs as a user would run it, inside this process, but for one thing: the checkpoint and the exported model at
the end (18 bytes per parameter, 28 GB for XL) are not written, since that would take longer than what is measured.
Memory while saving is therefore not measured here.

The first step also warms up, so a step's time is the median of the others. Its update is deferred into the next step,
which is where it is timed. Everything CUDA here has never run on a GPU.
"""

import json
import runpy
import shlex
import sys
from unittest.mock import patch

from experiments.gpu_acceptance.child import Result, Setting
from experiments.gpu_acceptance.rows import ROOT
from lowmem import report, train
from lowmem.log import read_metrics

FULL = ["--init", "random", "--steps", "4"]
TINY = ["--demo", "--data", str(ROOT / "lowmem"), "--steps", "2", "--seq", "64", "--batch", "4"]
ALWAYS = ["--fixed-batch", "--eval-batches", "1", "--wandb", "disabled", "--resume", "never"]


def run(setting: Setting, script: str) -> Result:
    """`script` under the setting's caps; what its run folder says."""
    folder = setting.scratch / "run"
    caps = [
        word
        for name, limit in (("--gpu-limit", setting.gpu_limit_bytes), ("--ram-limit", setting.ram_limit_bytes))
        for word in (name, "none" if limit is None else str(limit))
    ]
    arguments = [*(TINY if setting.dry_run else FULL), *ALWAYS, *caps, "--device", setting.device]
    sys.argv = [script, *arguments, "--out", str(folder)]
    try:
        with patch.object(train, "save_checkpoint"), patch.object(report, "export_model"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code or 0

    metrics = read_metrics(folder / "metrics.jsonl")
    values = {
        "script": shlex.join(["python", script, *arguments]),
        "exit_code": code,
        "step_ms": [row["step_ms"] for row in metrics],
        "losses": [row["loss"] for row in metrics],
        "metrics_last": metrics[-1] if metrics else None,
    }
    checks = {"exit code 0": code == 0}
    for name in ("plan", "report"):
        if (folder / f"{name}.json").exists():
            values[name] = json.loads((folder / f"{name}.json").read_text())
    if "report" in values:
        measured, plan = values["report"]["measured"], values.pop("plan")
        values["sequences_per_second"] = measured["sequences_per_second"]
        for name, predicted in plan["predicted"].items():
            if predicted and measured.get(name):
                values[f"{name}_predicted_over_measured"] = predicted / measured[name]
        checks["the loss falls"] = values["losses"][-1] < values["losses"][0]
        for name, limit in (
            ("gpu_reserved_peak_bytes", setting.gpu_limit_bytes),
            ("ram_peak_bytes", setting.ram_limit_bytes),
        ):
            if limit is not None and measured[name] is not None:
                checks[f"{name} under the cap"] = measured[name] <= limit
    return Result(values, checks)
