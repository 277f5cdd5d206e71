"""The real scripts for a few steps: do Large and XL fit their caps, how fast are they, how good was the plan.

The script runs as a user would run it, inside this process, but for one thing: the checkpoint and the exported model at
the end (18 bytes per parameter, 28 GB for XL) are not written, since that would take longer than what is measured.
Memory while saving is therefore not measured here.

The first step also warms up, so a step's time is the median of the others. Its update is deferred into the next step,
which is where it is timed; the last step, which makes its own too, counts only as far as a median of three lets it.

What the run was is a row ("<job>: run") before anything else is done; then, where the job asks for it, what the update
adds to a step (overlap.py).
"""

import inspect
import json
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from experiments.gpu_acceptance import overlap
from experiments.harness.child import Result, Setting, Unavailable
from experiments.harness.rows import ROOT
from lowmem import report, train
from lowmem.log import read_metrics

FULL = ["--init", "random", "--steps", "4"]
TINY = ["--demo", "--data", str(ROOT / "experiments" / "harness"), "--steps", "2", "--seq", "32", "--batch", "4"]
TINY += ["--states", "streamed"]  # which are copied on the CPU too
ALWAYS = ["--fixed-batch", "--eval-batches", "1", "--wandb", "disabled", "--resume", "never"]
PEAKS = {  # of a report, and whose cap each must keep
    "gpu_allocated_peak_bytes": "gpu",
    "gpu_reserved_peak_bytes": "gpu",
    "ram_peak_bytes": "ram",
}


def run(setting: Setting, name: str, script: str, more: Sequence[str] = (), update_cost: bool = False) -> Result:
    """`script` with the options `more` under the setting's caps: its figures beside the plan's and, with `update_cost`,
    what the update adds. `name`: the job's. Unavailable where the optimizer's package is missing."""
    if "adamw8bit" in more and find_spec("bitsandbytes") is None:
        raise Unavailable("bitsandbytes is not installed")
    limits = {"gpu": setting.gpu_limit_bytes, "ram": setting.ram_limit_bytes}
    caps = [
        word for kind, limit in limits.items() for word in (f"--{kind}-limit", "none" if limit is None else str(limit))
    ]
    arguments = [*(TINY if setting.dry_run else FULL), *ALWAYS, *more, *caps, "--device", setting.device]
    folder = setting.scratch / "run"
    code, kept = _run_script(script, [*arguments, "--out", str(folder)])
    values = {"script": shlex.join(["python", script, *arguments]), "exit_code": code}
    checks = {"exit code 0": code == 0}
    if (folder / "report.json").exists():
        found, held = _figures(json.loads((folder / "report.json").read_text()), limits)
        values, checks = values | found, checks | held
    setting.record("run", values | _everything(folder), checks)
    if update_cost and code == 0:
        trained = overlap.Trained(
            kept["config"], kept["plan"], kept["store"], kept["Step"], kept["data"].train.batch(0)
        )
        found, held = overlap.check(setting, name, trained)
        values, checks = values | found, checks | held
    return Result(values, checks)


def _run_script(script: str, arguments: list[str]) -> tuple[int, dict]:
    """Its exit code, and what it had in its hands, by the names in lowmem/train.py; its Step under "Step"."""
    kept: dict = {}
    code = 0
    with (
        patch.object(sys, "argv", [script, *arguments]),
        patch.object(train, "save_checkpoint"),
        patch.object(report, "export_model"),
        patch.object(train, "train", _remembering(train.train, kept)),
        patch.object(train, "Step", _remembering(train.Step, kept)),
    ):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as exit:
            code = exit.code or 0
    return code, kept


def _remembering(function: Callable, kept: dict) -> Callable:
    """`function`, which leaves its arguments and what it returns in `kept`."""

    def call(*arguments, **keywords):
        kept.update(inspect.signature(function).bind(*arguments, **keywords).arguments)
        kept[function.__name__] = function(*arguments, **keywords)
        return kept[function.__name__]

    return call


def _figures(report: dict, limits: dict[str, int | None]) -> tuple[dict, dict[str, bool]]:
    """Of a run's report.json: speed, time and peaks, measured beside predicted, with signed errors; whether the caps
    were kept."""
    measured, predicted = report["measured"], report["plan"]["predicted"]
    values = {"sequences_per_second": measured["sequences_per_second"]}
    for figure in (*PEAKS, "step_seconds"):
        values[figure] = measured[figure]
        values[f"predicted_{figure}"] = predicted[figure]
        if measured[figure] and predicted[figure]:
            values[f"{figure}_error"] = predicted[figure] / measured[figure] - 1
    values |= {name: report["plan"][name] for name in ("choice", "tokens_per_step")}
    checks = {
        "the loss falls": report["loss"]["last"] < report["loss"]["first"],
        "never out of memory": not report["out_of_memory"],  # it would have gone on in smaller micro-batches
    }
    for peak, kind in PEAKS.items():
        if limits[kind] is not None and measured[peak] is not None:
            checks[f"{peak} under the cap"] = measured[peak] <= limits[kind]
    return values, checks


def _everything(folder: Path) -> dict:
    """What else a run folder says: the report whole, every step, and the plan where there was no report."""
    metrics = read_metrics(folder / "metrics.jsonl")
    found: dict = {"step_ms": [row["step_ms"] for row in metrics], "losses": [row["loss"] for row in metrics]}
    for name in ("report", "plan"):
        if (folder / f"{name}.json").exists() and "report" not in found:
            found[name] = json.loads((folder / f"{name}.json").read_text())
    return found
