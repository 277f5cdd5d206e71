"""The learning rate of each optimizer step, and of a run that is made longer than it was to be.

A run may go on beyond its last step where that is a course of learning rates that somebody would choose: a constant
rate stays, or falls to 0 from where the run goes on (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395). A
cosine or a line that was made for fewer steps has no such course: its rate would jump back, so it is refused, with the
ways out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lowmem.errors import InputError

COURSE = ("steps", "schedule", "lr")  # what a longer run may have otherwise than the one that it goes on from


@dataclass(frozen=True)
class Course:
    """Linear warm-up to `peak`, which holds until `decay_from`; then `cosine` or `linear` to 0 at `updates`, or
    `constant`. All but `peak` and `schedule` in optimizer updates."""

    peak: float
    schedule: str
    updates: int
    warmup_updates: int
    decay_from: int

    def rate(self, update: int) -> float:
        """Of update number `update`, from 0. The first update already moves the weights, and the last one still
        does."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        progress = min(max(update - self.decay_from, 0) / max(self.updates - self.decay_from, 1), 1.0)
        if self.schedule == "cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (1.0 - progress) if self.schedule == "linear" else self.peak


def course_of(identity: dict, saved: dict | None = None) -> Course:
    """The course of a run of that identity (report.py); `saved`: the state of the checkpoint that it goes on from."""
    warmup = warmup_updates(identity["warmup_steps"], identity["steps"])
    decay_from = warmup
    if saved is not None:
        before = saved["identity"]
        kept = saved.get("course", {})  # absent where the run was never made longer
        warmup = kept.get("warmup_updates", warmup_updates(before["warmup_steps"], before["steps"]))
        decay_from = kept.get("decay_from", warmup)
        if longer(before, identity):
            decay_from = max(saved["updates"], warmup)
    return Course(identity["lr"], identity["schedule"], identity["steps"], warmup, decay_from)


def longer(saved: dict, wanted: dict) -> dict:
    """What `wanted`, a run's identity or as much of it as is known, may have otherwise than `saved`, which it goes on
    from with more steps: the names of COURSE, as they were saved. Empty where the run has no more steps; InputError
    where there is no course of the learning rate for more."""
    known = {name: saved[name] for name in COURSE if name in saved}
    if len(known) < len(COURSE) or "steps" in wanted and wanted["steps"] <= saved["steps"]:
        return {}
    if "steps" not in wanted or saved["schedule"] == "constant" or wanted["schedule"] == "constant":
        return known
    raise InputError(
        f"the {saved['schedule']} schedule of that run was made for {saved['steps']} steps, and ends with them: for "
        f"{wanted['steps']} its rate would jump back. Go on at a constant rate (--schedule constant, and the --lr that "
        "suits), or begin another run from its weights: --model with its model/ folder, and another --out"
    )


def say_longer(course: Course, saved: dict, say: Callable[[str], None]) -> None:
    """What is done about the learning rate where the run goes on for longer than it was to be."""
    before = course_of(saved["identity"], saved)
    falls = {"constant": "stays there", "linear": "falls to 0 in a line", "cosine": "falls to 0 in a cosine"}
    say(
        f"this run was to end after {before.updates} steps and goes on to {course.updates}: its learning rate, "
        f"{before.rate(saved['updates']):.3g} so far, is {course.rate(saved['updates']):.3g} from here and "
        f"{falls[course.schedule]}"
    )


def warmup_updates(warmup: float, updates: int) -> int:
    """`warmup` in updates; below 1 it is a share of all `updates`."""
    return math.ceil(warmup * updates) if warmup < 1 else int(warmup)
