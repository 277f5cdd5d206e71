"""Computes the learning rate of each optimizer step, also if training is extended to more steps.

Training may be extended beyond its last step if its schedule was constant, or is constant from then on. A constant rate
stays, or falls to 0 from the step at which training resumes (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395).
After a cosine or linear schedule for fewer steps, the rate would have to rise again. So extending such a run is
refused, and the message names alternatives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lowmem.errors import InputError

COURSE = ("steps", "schedule", "lr")  # settings that an extended run may change


@dataclass(frozen=True)
class Course:
    """Represents the learning-rate schedule of a training run. The rate rises linearly to `peak` during
    `warmup_updates`, and stays there until `decay_from`. Then it falls to 0 at `updates` (`schedule` "cosine" or
    "linear"), or stays ("constant"). The last three fields count optimizer updates from the start."""

    peak: float
    schedule: str
    updates: int
    warmup_updates: int
    decay_from: int

    def rate(self, update: int) -> float:
        """Returns the learning rate of update number `update`, counted from 0. The rate of the first and of the last
        update is never 0."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        progress = min(max(update - self.decay_from, 0) / max(self.updates - self.decay_from, 1), 1.0)
        if self.schedule == "cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (1.0 - progress) if self.schedule == "linear" else self.peak


def course_of(identity: dict, saved: dict | None = None) -> Course:
    """Returns the learning-rate schedule of a training run. `identity`: {name: value} of the run's settings
    (identity.py). `saved`: content of state.json of the checkpoint that training resumes from, None for a new start."""
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
    """Checks whether a training run may be extended to more steps. `saved`, `wanted`: {name: value} of the run's old
    and new settings (identity.py); `wanted` may have more steps, or no "steps" yet. If the run may be extended, returns
    the values of `saved` that may change: {name: value} of steps, schedule and lr (COURSE). Returns {} if `wanted` has
    no more steps than `saved`, or if `saved` lacks one of these values. Raises InputError if `wanted` has more steps
    and neither schedule is constant."""
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
    """Tells the user how the learning rate goes on in a run that was extended to more steps. `course`: the extended
    run's learning-rate schedule. `saved`: content of state.json of the checkpoint that the run goes on from."""
    before = course_of(saved["identity"], saved)
    falls = {"constant": "stays there", "linear": "falls to 0 in a line", "cosine": "falls to 0 in a cosine"}
    say(
        f"this run was to end after {before.updates} steps and is extended to {course.updates}: its learning rate, "
        f"{before.rate(max(saved['updates'] - 1, 0)):.3g} so far, is {course.rate(saved['updates']):.3g} from here and "
        f"{falls[course.schedule]}"
    )


def warmup_updates(warmup: float, updates: int) -> int:
    """Returns the number of warm-up updates. `warmup`: this number or, if below 1, a share of all `updates`."""
    return math.ceil(warmup * updates) if warmup < 1 else int(warmup)
