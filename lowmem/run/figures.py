"""Computes the numbers that describe a training run, from the files in its output folder.

`rows` are the rows of metrics.jsonl. `plan` and `report` are the content of plan.json and report.json. Imports no
third-party packages, so that `python -m lowmem report` starts at once.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lowmem.units import format_seconds, format_size

MEDIAN_OVER = 25  # steps in the median of a smoothed loss; only runs of four times as many steps are smoothed


@dataclass(frozen=True)
class Best:
    """Holds the evaluation with the lowest held-out loss."""

    step: int  # 0 for before training
    loss: float  # in nats per token
    since: int  # number of later evaluations

    def __str__(self) -> str:
        return f"{self.loss:.4f} after step {self.step}"


def evaluations(rows: list[dict], eval_first: float | None) -> list[tuple[int, float]]:
    """Returns [(step, held-out loss)] from rows of metrics.jsonl. `eval_first`: the loss at step 0, or None."""
    before = [] if eval_first is None else [(0, eval_first)]
    return before + [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]


def best_evaluation(rows: list[dict], eval_first: float | None) -> Best:
    """Returns the earliest evaluation with the lowest held-out loss. `eval_first`: the held-out loss at step 0, or
    None; it counts as an evaluation. Without any evaluation, returns step 0 with the loss NaN."""
    found = evaluations(rows, math.nan if eval_first is None else eval_first)
    index = min(range(len(found)), key=lambda index: math.inf if math.isnan(found[index][1]) else found[index][1])
    return Best(*found[index], len(found) - 1 - index)


def losses(rows: list[dict], eval_first: float | None, exported_step: int | None) -> dict:
    """Returns the content of "loss" in report.json, with None or NaN for unknown losses. `eval_first`: the held-out
    loss before training, or None. `exported_step`: the step of the exported weights; None: the final step. `diverged`:
    True if the exported weights' held-out loss (if unknown, the last one) is NaN or above `eval_first`."""
    evaluated = dict(evaluations(rows, None))
    last = list(evaluated.values())[-1] if evaluated else eval_first
    exported = evaluated.get(exported_step, last)
    best = best_evaluation(rows, eval_first)
    return {
        "first": rows[0]["loss"] if rows else None,
        "last": rows[-1]["loss"] if rows else None,
        "eval_first": eval_first,
        "eval_last": last,
        "eval_best": best.loss,
        "eval_best_step": best.step,
        "eval_exported": exported,
        "exported_step": exported_step if exported_step is not None or not rows else rows[-1]["step"],
        "diverged": bool(evaluated) and eval_first is not None and not exported <= eval_first,
    }


def build_report(
    plan: dict, rows: list[dict], peaks: dict, device: str, versions: dict[str, str], sequences_per_step: int,
    eval_first: float | None, exported_step: int | None = None,
) -> dict:  # fmt: skip
    """Returns the content of report.json, without the summary. `peaks`: {name: peak of memory in bytes, or None}.
    `sequences_per_step`: --batch. `eval_first`: the held-out loss before training, or None. `exported_step`: the step
    of the exported weights; None: the final step."""
    step_ms = [row["step_ms"] for row in rows if row["step_ms"] is not None]
    seconds = statistics.median(step_ms[1:] or step_ms) / 1000 if step_ms else None  # the first step warms up
    # An earlier process of this run may have had the higher peak.
    highest = {name: max(size or 0, *(row.get(name) or 0 for row in rows), 0) or None for name, size in peaks.items()}
    speed = sequences_per_step / seconds if seconds else None
    return {
        "plan": plan,
        "measured": highest | {"step_seconds": seconds, "sequences_per_second": speed},
        "loss": losses(rows, eval_first, exported_step),
        "steps": len(rows),
        "device": device,
        "versions": versions,
    }


def is_report_of(report: dict, rows: list[dict]) -> bool:
    """Returns True if `report` (report.json) was made from `rows` (metrics.jsonl), not by an earlier run."""
    loss = report.get("loss")
    last = loss.get("last") if isinstance(loss, dict) else None
    return bool(rows) and (report.get("steps"), last) == (len(rows), rows[-1]["loss"])


def summary(report: dict, rows: list[dict]) -> dict[str, str]:
    """Returns a summary of a training run for people: ten lines, {name: text}."""
    plan, choice = report["plan"], report["plan"].get("choice", {})
    tokens, timed = sum(row["tokens"] for row in rows), [row for row in rows if row["step_ms"] is not None]
    seconds = sum(row["step_ms"] for row in timed) / 1000
    speed = f", {sum(row['tokens'] for row in timed) / seconds:,.0f} a second" if seconds else ""
    each, planned = report["measured"]["step_seconds"], plan["predicted"]["step_seconds"]
    about = "" if each is None else f"; a step took {each:.3g} s"
    versions = report["versions"]
    model = str(plan.get("model"))
    name = Path(model).name if Path(model).is_absolute() else model  # a folder of the cache has a long path
    return {
        "model": f"{name}, {plan.get('parameters', 0):,} parameters, all trained by "
        f"{choice.get('optimizer')} in {choice.get('precision')}",
        "device": report["device"],
        "duration": f"{format_seconds(seconds)} in steps{about}"
        + ("" if planned is None else f", planned {planned:.3g} s"),
        "steps": f"{len(rows):,} of {plan['steps']:,}" + (f", {rows[-1]['epoch']:.3g} epochs" if rows else ""),
        "tokens": f"{tokens:,} trained{speed}",
        "training loss": _change(report["loss"]["first"], report["loss"]["last"], "in the first step", "in the last"),
        "held-out loss": _held_out(report["loss"]),
        "GPU memory": _memory(plan, report["measured"], "gpu_reserved_peak_bytes", "gpu_bytes"),
        "RAM": _memory(plan, report["measured"], "ram_peak_bytes", "ram_bytes"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in versions if name != "platform"),
    }


def smoothed(rows: list[dict]) -> dict[int, float]:
    """Returns {step: median loss of the MEDIAN_OVER steps around it}, without losses that are not finite. Returns {} if
    fewer than 4 x MEDIAN_OVER losses are finite."""
    finite = {row["step"]: row["loss"] for row in rows if math.isfinite(row["loss"])}
    if len(finite) < 4 * MEDIAN_OVER:
        return {}
    values, half = list(finite.values()), MEDIAN_OVER // 2
    return {step: statistics.median(values[max(i - half, 0) : i + half + 1]) for i, step in enumerate(finite)}


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Returns {path: its last part}, as labels. If two last parts are equal, all labels are whole paths."""
    short = {path: Path(path).name or Path(path).resolve().name or path for path in paths}  # "." has no name
    return short if len(set(short.values())) == len(short) else {path: path for path in short}


def memory_kinds(plan: dict, measured: dict | None) -> list[tuple[str, dict[str, int], int | None, int | None]]:
    """Returns a tuple for "GPU", if it is used, and one for "RAM": (kind, {part of the memory: predicted size},
    measured peak or None, cap or None), in bytes. `measured`: {name in report.json: bytes}, None before training."""
    measured, limits, reserved = measured or {}, plan["limits"], plan["predicted"]["gpu_reserved_peak_bytes"]
    kinds = [("RAM", plan["ram_breakdown"], measured.get("ram_peak_bytes"), limits["ram_bytes"])]
    if reserved is not None:
        parts = plan["breakdown"] | {"reserved, not allocated": reserved - sum(plan["breakdown"].values())}
        kinds.insert(0, ("GPU", parts, measured.get("gpu_reserved_peak_bytes"), limits["gpu_bytes"]))
    return kinds


def _change(first: float | None, last: float | None, when_first: str, when_last: str) -> str:
    if first is None or last is None:
        return "none"
    share = f" ({last / first - 1:+.0%})" if math.isfinite(first + last) and first > 0 else ""
    return f"{first:.4f} {when_first}, {last:.4f} {when_last}{share}"


def _held_out(loss: dict) -> str:
    if loss["eval_last"] is None:
        return "nothing was held out"
    if loss["eval_first"] is None:
        return f"{loss['eval_last']:.4f}"
    best, last = loss["eval_best"], loss["eval_last"]
    lowest = "" if best is None or best == last else f"; lowest {best:.4f} after step {loss['eval_best_step']}"
    return _change(loss["eval_first"], loss["eval_last"], "before training", "in the last evaluation") + lowest


def _memory(plan: dict, measured: dict, peak: str, cap: str) -> str:
    if measured[peak] is None:
        return "not used"
    predicted, limit = plan["predicted"][peak], plan["limits"][cap]
    planned = "" if predicted is None else f", planned {format_size(predicted)}"
    capped = "no cap" if limit is None else f"cap {format_size(limit)}"
    return f"{format_size(measured[peak])} at most{planned}, {capped}"
