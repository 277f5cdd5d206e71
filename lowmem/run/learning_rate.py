"""Computes the learning rate of each optimizer step, also if training is extended to more steps.

Only a run whose old or new schedule is constant may be extended (warm-up, stable, decay: Hu et al. 2024,
arXiv:2404.06395). Otherwise the rate would have to rise again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lowmem.errors import InputError

COURSE = ("steps", "schedule", "lr")  # settings that an extended run may change


@dataclass(frozen=True)
class Course:
    """Represents a learning-rate schedule: linear warm-up to `peak`, constant until `decay_from`, then a fall to 0 at
    `updates`, unless `schedule` is "constant". The last three fields count optimizer updates."""

    peak: float
    schedule: str
    updates: int
    warmup_updates: int
    decay_from: int

    def rate(self, update: int) -> float:
        """Returns the learning rate of update `update`, counted from 0. Neither the first nor the final rate is 0."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        progress = min(max(update - self.decay_from, 0) / max(self.updates - self.decay_from, 1), 1.0)
        if self.schedule == "cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (1.0 - progress) if self.schedule == "linear" else self.peak


def course_of(identity: dict, saved: dict | None = None) -> Course:
    """Returns the learning-rate schedule of a run. `identity`: {name: value} of its settings (identity.py). `saved`:
    content of state.json in the checkpoint to resume from, None for a new start."""
    warmup = warmup_updates(identity["warmup_steps"], identity["steps"])
    decay_from = warmup
    if saved is not None:
        before = saved["identity"]
        kept = saved.get("course", {})  # missing in old checkpoints
        warmup = kept.get("warmup_updates", warmup_updates(before["warmup_steps"], before["steps"]))
        decay_from = kept.get("decay_from", warmup)
        if longer(before, identity):
            decay_from = max(saved["updates"], warmup)
    return Course(identity["lr"], identity["schedule"], identity["steps"], warmup, decay_from)


def longer(saved: dict, wanted: dict) -> dict:
    """Tests if a run with the settings `saved` may be extended to the settings `wanted`. If so, or if `wanted` lacks
    "steps", returns the steps, schedule and lr in `saved`. Returns {} if `wanted` does not have more steps, or if
    `saved` lacks one of the three. Raises InputError if `wanted` has more steps and neither schedule is constant."""
    known = {name: saved[name] for name in COURSE if name in saved}
    if len(known) < len(COURSE) or "steps" in wanted and wanted["steps"] <= saved["steps"]:
        return {}
    if "steps" not in wanted or saved["schedule"] == "constant" or wanted["schedule"] == "constant":
        return known
    raise InputError(
        f"the {saved['schedule']} schedule of that run was made for {saved['steps']} steps; for "
        f"{wanted['steps']} steps, extending it would raise the learning rate again. Give --schedule constant and a "
        "suitable --lr, or start another run from its weights: --model with its model/ folder, and another --out"
    )


def say_longer(course: Course, saved: dict, say: Callable[[str], None]) -> None:
    """Tells the user how the learning rate goes on in an extended run. `course`: its new schedule. `saved`: content of
    its checkpoint's state.json."""
    before = course_of(saved["identity"], saved)
    falls = {"constant": "stays there", "linear": "falls to 0 in a line", "cosine": "falls to 0 in a cosine"}
    say(
        f"this run was to end after {before.updates} steps and is extended to {course.updates}: its learning rate, "
        f"{before.rate(max(saved['updates'] - 1, 0)):.3g} so far, is {course.rate(saved['updates']):.3g} from here and "
        f"{falls[course.schedule]}"
    )


def warmup_updates(warmup: float, updates: int) -> int:
    """Returns the number of warm-up updates. `warmup`: a number or, if below 1, a share of all `updates`."""
    return math.ceil(warmup * updates) if warmup < 1 else int(warmup)
