"""Makes report.json, finds the best evaluation, and makes the remarks printed before training."""

import math
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata

import torch
from transformers import PretrainedConfig

from lowmem.config_switches import remarks
from lowmem.data.tokenizer import is_byte_level


def opening_remarks(init: str, config: PretrainedConfig, tokenizer, device: torch.device) -> list[str]:
    """Returns sentences on what a user might not expect. `init`: the value of --init."""
    said = [f"training on {device_name(device)}"]
    if init == "random":
        said.append("weights are random (--init random), not pretrained")
    if is_byte_level(tokenizer):
        said.append("the tokenizer is the byte-level one: a token is a byte (256, and one for the end of a text)")
    return said + remarks(config)


def device_name(device: torch.device) -> str:
    """Returns the name of the card or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"


def build_report(
    plan: dict, rows: list[dict], peaks: dict, device: str, sequences_per_step: int, eval_first: float | None,
    exported_step: int | None = None,
) -> dict:  # fmt: skip
    """Returns the content of report.json. A step's time is the median without the first step, which also warms up.
    `exported_step`: the step whose weights are in model/, None for the last. The key `diverged` says whether the
    held-out loss of these weights is higher than before training."""
    step_ms = [row["step_ms"] for row in rows]
    seconds = statistics.median(step_ms[1:] or step_ms) / 1000 if rows else None
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    last = list(evaluated.values())[-1] if evaluated else eval_first
    exported = evaluated.get(exported_step, last)
    best = best_evaluation(rows, eval_first)
    return {
        "plan": plan,
        "measured": peaks
        | {"step_seconds": seconds, "sequences_per_second": sequences_per_step / seconds if seconds else None},
        "loss": {
            "first": rows[0]["loss"] if rows else None,
            "last": rows[-1]["loss"] if rows else None,
            "eval_first": eval_first,
            "eval_last": last,
            "eval_best": best.loss,
            "eval_best_step": best.step,
            "eval_exported": exported,
            "exported_step": exported_step if exported_step is not None or not rows else rows[-1]["step"],
            "diverged": bool(evaluated) and eval_first is not None and not exported <= eval_first,
        },
        "steps": len(rows),
        "device": device,
        "versions": versions(),
    }


@dataclass(frozen=True)
class Best:
    """Holds the evaluation with the lowest held-out loss: its step (0: before the first), and the number of later
    evaluations."""

    step: int
    loss: float
    since: int

    def __str__(self) -> str:
        return f"{self.loss:.4f} after step {self.step}"


def best_evaluation(rows: list[dict], eval_first: float | None) -> Best:
    """Returns the evaluation with the lowest held-out loss, the first if several are equal. `rows`: of metrics.jsonl.
    `eval_first`: the loss before the first step."""
    losses = [(0, math.nan if eval_first is None else eval_first)]
    losses += [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    index = min(range(len(losses)), key=lambda index: math.inf if math.isnan(losses[index][1]) else losses[index][1])
    return Best(*losses[index], len(losses) - 1 - index)


def versions() -> dict[str, str]:
    """Returns the versions of Python, the platform and the installed packages that a result depends on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "transformers", "safetensors", "bitsandbytes"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with its build: +cpu, +cu130
