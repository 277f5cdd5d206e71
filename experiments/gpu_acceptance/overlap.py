"""Measures what the update adds to a training step, and records a timeline of copies and computations.

Steps as trained alternate with steps without update: no copy of a state, no update kernel.
"""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from transformers import PretrainedConfig

from experiments.gpu_acceptance import timeline
from experiments.harness.child import Setting
from lowmem.core.batch import Batch
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES
from lowmem.core.step import TrainingStep
from lowmem.core.transfers import Transfers
from lowmem.models.build import make_decoder
from lowmem.planning.plan import Plan
from lowmem.planning.simulated_step import StepCase, gpu_target
from lowmem.units import GIB

MOST_ADDED = 0.03  # to a step, by its update: issue 4's bar, for 64k tokens
PAIRS = 3
STEPS = 2 * PAIRS + 4  # that `check` makes at most, one of them simulated
FASTEST_BUS = 500e9  # bytes per second: what copies faster has not copied the states
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Trained:
    """The objects of a finished run, still in memory."""

    config: PretrainedConfig
    plan: Plan
    store: Store
    step: TrainingStep
    batch: Batch


def check(setting: Setting, name: str, trained: Trained) -> tuple[dict, dict[str, bool]]:
    """Writes a row each for the update's cost and for the timeline. Returns their summary for the last row of the job
    `name`."""
    cost, checks = update_cost(trained, pairs=1 if setting.dry_run else PAIRS)
    held = {"update": setting.record("update", cost, {} if setting.dry_run else checks)}
    values, checks = record_timeline(setting, name, trained)
    held["timeline"] = setting.record("timeline", values, checks)
    return {
        "update_adds": cost["update_adds"],
        "copies_hidden_share": values.get("recorded", {}).get("hidden_share"),
        "streamed_gib_each_way": _streamed_bytes(trained.store) / GIB,
    }, held


def update_cost(trained: Trained, pairs: int) -> tuple[dict, dict[str, bool]]:
    """Compares the median seconds of `pairs` steps as trained and of as many without update. Returns values and {bar:
    met}."""
    step, rows = trained.step, {"with": [], "without": []}

    def seconds() -> float:
        started = time.perf_counter()
        step(trained.batch, 0, LEARNING_RATE)  # which ends with a number read back
        return time.perf_counter() - started

    with _update_left_out(step):
        seconds()  # warms up, and leaves gradients for the first step that is timed
    for _ in range(pairs):
        # A deferred update: this step makes that of the step before, and the next step makes none.
        rows["with"].append(seconds())
        with _update_left_out(step):
            rows["without"].append(seconds())
    medians = {kind: statistics.median(found) for kind, found in rows.items()}
    added = medians["with"] / medians["without"] - 1
    values = {f"step_seconds_{kind}_update": medians[kind] for kind in rows}
    values |= {f"all_seconds_{kind}_update": rows[kind] for kind in rows}
    values |= {"update_adds": added, "streamed_bytes": _streamed_bytes(trained.store)}
    return values, {f"the update adds less than {MOST_ADDED:.0%}": added < MOST_ADDED}


@contextmanager
def _update_left_out(step: TrainingStep) -> Iterator[None]:
    with (
        patch.object(step.operations, "update", lambda *arguments: None),
        patch.object(step.state_window._window, "transfers", _NoCopies()),
    ):
        yield


class _NoCopies(Transfers):
    def copy(self, lane, pairs, *after):
        return None


def record_timeline(setting: Setting, name: str, trained: Trained) -> tuple[dict, dict[str, bool]]:
    """Records and simulates one step; on the stand-in, only simulates. Returns the figures, and checks."""
    timelines, reason = [], {}
    if setting.stand_in:
        reason = {"not_recorded": "the stand-in's card takes no time, and reports no event to a profiler"}
    else:
        work = partial(trained.step, trained.batch, 0, LEARNING_RATE)
        timelines.append(timeline.recorded(work, trained.store.device, _streamed_bytes(trained.store)))
    if trained.plan.card is not None:
        timelines.append(simulated(trained))
    values: dict = reason | {found.title: found.figures() for found in timelines}
    if setting.kept is not None:
        path = setting.kept / f"timeline_{name.replace(' ', '_')}.json"
        contents = [timeline.content(found) for found in timelines]
        path.write_text(json.dumps(contents) + "\n", encoding="utf-8")
        values["file"] = path.name
        with suppress(ImportError):  # the figures are there without a picture
            timeline.draw(contents, f"{name}: one step with its update", path.with_suffix(".png"))
            values["picture"] = path.with_suffix(".png").name
    if setting.stand_in:
        return values, {}
    checks = {"kernels were seen": bool(timelines[0].lanes[timeline.COMPUTE])}
    if trained.store.device.type == "cuda" and _streamed_bytes(trained.store):
        least = _streamed_bytes(trained.store) / FASTEST_BUS
        figures = values["recorded"]
        checks["copies both ways were seen"] = min(figures[f"copies_{way}_seconds"] for way in ("in", "out")) > least
    return values, checks


def simulated(trained: Trained) -> timeline.Timeline:
    """Returns the timeline of the step that the run's plan predicts."""
    plan = trained.plan
    settings = plan.settings
    case = StepCase(
        settings.seq, settings.batch, plan.layout, WORKING_DTYPES[plan.precision], OPTIMIZERS[settings.optimizer],
        settings.clip_norm, settings.document_mask,
    )  # fmt: skip
    decoder = make_decoder(trained.config, plan.precision, settings.residual, plan.fused_kernels)
    return timeline.simulated(decoder, case, gpu_target(plan.card, plan.fused_kernels))


def _streamed_bytes(store: Store) -> int:
    return sum(tensor.nbytes for part in store.parts if part.streamed for tensor in part.state.values())
