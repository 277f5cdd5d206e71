"""The real scripts for a few steps: do Large and XL fit their caps, how fast are they, how good was the plan.

The script runs as a user would run it, inside this process, to its very end: with the checkpoint and the exported model
of the last step, 18 bytes per parameter of disk (28 GB for XL), which are removed after the job.

The first step also warms up, so a step's time is the median of the others. Its update is deferred into the next step
and timed there. The last step makes its own update, too; a median of three keeps it from counting much.

What the run was is a row, "<job>: run". It is written after the second step, and again, complete, at the end of the
run. The last row of a name counts. If the run was interrupted, that is the first one, which says so ("complete": false,
and "steps" of "of_steps"). Then, where the job asks for it, what the update adds to a step (overlap.py).

How long the run may take follows from its own plan on this card (progress.py), with assumed speeds for the rest.
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
    `update_cost`: also measures the cost of the update. `name`: the job's. Unavailable if the optimizer's package is
    missing."""
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
        """Announces the time until the first row, once the plan is made: weights, an evaluation and the first steps."""
        self._expect(ENOUGH_STEPS + 1, self.kept["plan"].parameters / DRAWN_PER_SECOND)

    def prepared(self) -> None:
        session = self.kept["session"]
        self.kept |= {"log": session.log, "data": session.data}

    def step(self, write):
        """Wraps RunLog.step, `write`, so that it also writes the job's row after enough steps."""

        def call(log: RunLog, row: dict) -> None:
            write(log, row)
            if len(log.rows) == ENOUGH_STEPS:
                self.setting.record("run", *self.so_far(log.rows))
                plan = self.kept["plan"]
                self._expect(self._of_steps - ENOUGH_STEPS + 1, SAVED_BYTES * plan.parameters / DISK_BYTES_PER_SECOND)

        return call

    def so_far(self, rows: list[dict]) -> tuple[dict, dict[str, bool]]:
        """Returns values and checks of a run up to the last of `rows`."""
        kept = self.kept
        peaks = {peak: max((row[peak] for row in rows), key=lambda found: found or 0) for peak in PEAKS}
        report = build_report(
            kept["plan"].to_dict(), rows, peaks, device_name(kept["budget"].device), versions(),
            kept["question"].settings.batch, None,
        )  # fmt: skip
        return self._row(report, complete=False)

    def outcome(self, code: int, folder: Path) -> tuple[dict, dict[str, bool]]:
        """Returns values and checks of a run that has ended with exit code `code`."""
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
    """Reads a run's report.json: speed, time and peaks, measured and predicted, with signed errors, and whether the
    caps were kept."""
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
