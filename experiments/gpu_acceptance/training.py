"""Runs the real scripts of Large and XL for a few steps: are caps kept, how fast is a step, how good is the plan?

A run saves and exports: 18 bytes of disk per parameter (28 GB for XL) until the job ends. The row "<job>: run" is
written after the second step and again at the end; the last one counts.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from experiments.gpu_acceptance import overlap
from experiments.gpu_acceptance.scripted import remembering, run_script
from experiments.harness.child import Result, Setting, Unavailable
from experiments.harness.rows import ROOT
from lowmem.run import prepare, train
from lowmem.run.figures import build_report
from lowmem.run.log import RunLog
from lowmem.run.report import device_name, versions

# A step's time is the median of all but the first, which warms up. An update is timed in the step after. The last step
# also makes its own; a median of three keeps that from counting much.
STEPS = 4
FULL = ["--init", "random", "--steps", str(STEPS)]
TINY = ["--demo", "--data", str(ROOT / "experiments" / "harness"), "--steps", "2", "--seq", "32", "--batch", "4"]
TINY += ["--states", "streamed"]  # which are copied on the CPU too
ALWAYS = ["--fixed-batch", "--eval-batches", "1", "--wandb", "disabled", "--resume", "never"]
ENOUGH_STEPS = 2  # of which there is a row: the second one's time is a step's
SAVED_BYTES = 18  # per parameter, of a checkpoint and an exported model
DISK_BYTES_PER_SECOND = 200e6  # assumed: a slow one
DRAWN_PER_SECOND = 50e6  # random weights, assumed
PEAKS = {  # of a report, and whose cap each must keep
    "gpu_allocated_peak_bytes": "gpu",
    "gpu_reserved_peak_bytes": "gpu",
    "ram_peak_bytes": "ram",
}


def run(setting: Setting, name: str, script: str, more: Sequence[str] = (), update_cost: bool = False) -> Result:
    """Runs `script` with the options `more` under the setting's caps, and compares its figures with the plan's.
    `update_cost`: also measures the cost of the update. `name`: the job's. Raises Unavailable without the optimizer's
    package."""
    if "adamw8bit" in more and find_spec("bitsandbytes") is None:
        raise Unavailable("bitsandbytes is not installed")
    limits = {"gpu": setting.gpu_limit_bytes, "ram": setting.ram_limit_bytes}
    caps = [
        word for kind, limit in limits.items() for word in (f"--{kind}-limit", "none" if limit is None else str(limit))
    ]
    arguments = [*(TINY if setting.dry_run else FULL), *ALWAYS, *more, *caps, "--device", setting.device]
    folder = setting.scratch / "run"
    watched = _Watched(setting, {"script": shlex.join(["python", script, *arguments])}, limits)
    with patch.object(RunLog, "step", watched.step(RunLog.step)):
        code = run_script(
            script, [*arguments, "--out", str(folder)], build=remembering(prepare.build, watched.kept, watched.planned),
            TrainingStep=remembering(prepare.TrainingStep, watched.kept),
            train=remembering(train.train, watched.kept, watched.prepared),
        )  # fmt: skip
    result = watched.outcome(code, folder)
    setting.record("run", *result)
    values, checks = ({key: part[key] for key in part if key not in ("report", "step_ms", "losses")} for part in result)
    if update_cost and code == 0:
        kept = watched.kept
        trained = overlap.Trained(
            kept["question"].config, kept["plan"], kept["store"], kept["TrainingStep"], kept["data"].train.batch(0)
        )
        setting.expect(overlap.STEPS * (trained.plan.step_seconds or 0.0))
        found, held = overlap.check(setting, name, trained)
        values, checks = values | found, checks | held
    return Result(values, checks)


@dataclass
class _Watched:
    """A running training. `kept`: its objects, by name."""

    setting: Setting
    described: dict
    limits: dict[str, int | None]
    kept: dict = field(default_factory=dict)

    def planned(self) -> None:
        # Until the first row: weights, an evaluation and the first steps.
        self._expect(ENOUGH_STEPS + 1, self.kept["plan"].parameters / DRAWN_PER_SECOND)

    def prepared(self) -> None:
        session = self.kept["session"]
        self.kept |= {"log": session.log, "data": session.data}

    def step(self, write):
        """Wraps RunLog.step, `write`, so that the wrapper also writes the job's row after ENOUGH_STEPS."""

        def call(log: RunLog, row: dict) -> None:
            write(log, row)
            if len(log.rows) == ENOUGH_STEPS:
                self.setting.record("run", *self.so_far(log.rows))
                plan = self.kept["plan"]
                self._expect(self._of_steps - ENOUGH_STEPS + 1, SAVED_BYTES * plan.parameters / DISK_BYTES_PER_SECOND)

        return call

    def so_far(self, rows: list[dict]) -> tuple[dict, dict[str, bool]]:
        kept = self.kept
        peaks = {peak: max((row[peak] for row in rows), key=lambda found: found or 0) for peak in PEAKS}
        report = build_report(
            kept["plan"].to_dict(), rows, peaks, device_name(kept["budget"].device), versions(),
            kept["question"].settings.batch, None,
        )  # fmt: skip
        return self._row(report, complete=False)

    def outcome(self, code: int, folder: Path) -> tuple[dict, dict[str, bool]]:
        ended = {"exit_code": code}, {"exit code 0": code == 0}
        if (folder / "report.json").exists():
            values, checks = self._row(json.loads((folder / "report.json").read_text()), complete=True)
        elif len(rows := self.kept["log"].rows if "log" in self.kept else []) >= ENOUGH_STEPS:
            values, checks = self.so_far(rows)
        else:
            plan = self.kept.get("plan")
            values, checks = self.described | {"complete": False, "plan": plan and plan.to_dict()}, {}
        return values | ended[0], ended[1] | checks

    def _row(self, report: dict, complete: bool) -> tuple[dict, dict[str, bool]]:
        values, checks = _figures(report, self.limits)
        rows = self.kept["log"].rows
        extent = {"complete": complete, "steps": len(rows), "of_steps": self._of_steps}
        each = {"step_ms": [row["step_ms"] for row in rows], "losses": [row["loss"] for row in rows]}
        return self.described | extent | values | each | {"report": report}, checks

    @property
    def _of_steps(self) -> int:
        return self.kept["question"].settings.steps

    def _expect(self, steps: int, other_seconds: float) -> None:
        self.setting.expect(steps * (self.kept["plan"].step_seconds or 0.0) + other_seconds)


def _figures(report: dict, limits: dict[str, int | None]) -> tuple[dict, dict[str, bool]]:
    """Returns a report's speed, time and peaks, measured and predicted, with signed errors, and whether caps were
    kept."""
    measured, predicted = report["measured"], report["plan"]["predicted"]
    values = {"sequences_per_second": measured["sequences_per_second"]}
    for figure in (*PEAKS, "step_seconds"):
        values[figure] = measured[figure]
        values[f"predicted_{figure}"] = predicted[figure]
        if measured[figure] and predicted[figure]:
            values[f"{figure}_error"] = predicted[figure] / measured[figure] - 1
    values |= {name: report["plan"][name] for name in ("choice", "tokens_per_step")}
    checks = {"the loss falls": report["loss"]["last"] < report["loss"]["first"]}
    if "out_of_memory" in report:  # it would have gone on in another way than planned
        checks["never out of memory"] = not report["out_of_memory"]
    for peak, kind in PEAKS.items():
        if limits[kind] is not None and measured[peak] is not None:
            checks[f"{peak} under the cap"] = measured[peak] <= limits[kind]
    return values, checks
