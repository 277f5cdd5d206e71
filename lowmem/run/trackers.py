"""Experiment trackers: what shows a run to people elsewhere than in its own folder. metrics.jsonl is the record.

A tracker is a guest: whatever it does (not logged in, unreachable, its process killed or frozen), the run says so once
and goes on without it. Every call runs in a thread that is left behind after 30 s, since a tracker's own limits do not
hold everywhere: wandb 0.31 waits for its service process without one, also when Python exits, and now and then that
process does not end when the server cannot be reached; it is killed then.

wandb is never allowed to ask for a key. It costs the training process about 20 MiB of RAM and has a process of its own,
which the RAM cap does not count. What was not uploaded stays in the run folder for `wandb sync`.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from lowmem.errors import first_line
from lowmem.settings import Settings
from lowmem.units import GIB

_LIMIT_SECONDS = 30  # for one call
_WANDB_OWN_LIMIT_SECONDS = 20  # what wandb is told: so that it mostly ends by itself, and says why
_WANDB_TEARDOWN_SECONDS = 10


class Tracker(Protocol):
    """One tracker of one run. Whatever a method raises ends the tracker's part in the run, after `leave`."""

    name: str

    def start(self, first_step: int, constants: dict) -> None:
        """`first_step` steps are done already; what was shown of later ones is computed again."""

    def row(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...

    def leave(self) -> None:
        """Ends what there is of it, within a limit of its own; after `finish`, and after whatever failed."""


class Trackers:
    """Those that a run was asked to report to; each is there until it fails."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], None]):
        self._say = say
        self._active: list[Tracker] = []
        mode = settings.wandb or os.environ.get("WANDB_MODE") or "disabled"
        if mode != "disabled":
            self._active.append(_Wandb(folder, settings.run_name, mode))

    def start(self, first_step: int, constants: dict) -> None:
        self._each("could not start", lambda tracker: tracker.start(first_step, constants))

    def row(self, values: dict[str, float], step: int) -> None:
        self._each("failed", lambda tracker: tracker.row(values, step))

    def close(self) -> None:
        self._each("did not finish", lambda tracker: tracker.finish())
        while self._active:
            self._active.pop().leave()

    def _each(self, failure: str, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                _in_time(partial(act, tracker), _LIMIT_SECONDS)
            except Exception as error:  # a logging service must never end a training run
                self._active.remove(tracker)
                tracker.leave()
                without = "the run goes on without it, its rows are in metrics.jsonl"
                self._say(f"{tracker.name} {failure} ({first_line(error)}); {without}")


def charts(row: dict, tokens: int) -> dict[str, float]:
    """What trackers show of a row of metrics.jsonl, by name. `tokens`: trained in the run so far."""
    values = {
        "train/epoch": row["epoch"],
        "train/loss": row["loss"],
        "train/grad_norm": row["grad_norm"],
        "train/learning_rate": row["learning_rate"],
        "train/num_input_tokens_seen": tokens,
        "perf/tokens_per_second": row["tokens_per_second"],
        "perf/step_ms": row["step_ms"],
    }
    for key in ("gpu_allocated_peak", "gpu_reserved_peak", "ram_peak"):
        if row[f"{key}_bytes"] is not None:
            values[f"memory/{key}_gib"] = row[f"{key}_bytes"] / GIB
    if "eval_loss" in row:
        values["eval/loss"] = row["eval_loss"]
        values["eval/perplexity"] = math.exp(row["eval_loss"]) if row["eval_loss"] < 700 else math.inf
    return values


class _Wandb:
    """A run of Weights & Biases. Where nothing was typed its WANDB_* variables hold."""

    name = "wandb"

    def __init__(self, folder: Path, run_name: str | None, mode: str):
        self._folder, self._run_name, self._mode = folder, run_name, mode

    def start(self, first_step: int, constants: dict) -> None:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        if self._mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: set WANDB_API_KEY, or run `wandb login` before the next run")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lowmem"),
            name=self._run_name or os.environ.get("WANDB_NAME") or self._folder.resolve().name,
            dir=os.environ.get("WANDB_DIR", str(self._folder)),
            mode=self._mode,
            config=constants,
            settings=wandb.Settings(
                silent=True,
                console="off",  # what it would wrap is the stderr that the progress bar writes to
                init_timeout=_WANDB_OWN_LIMIT_SECONDS,
                finish_timeout=_WANDB_OWN_LIMIT_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step")

    def row(self, values: dict[str, float], step: int) -> None:
        self._run.log({"train/global_step": step} | values)

    def finish(self) -> None:
        self._run.finish()

    def leave(self) -> None:
        """Left alone it would be ended when Python exits, without a limit."""
        teardown = getattr(sys.modules.get("wandb"), "teardown", None)
        if teardown is None:
            return
        try:
            _in_time(teardown, _WANDB_TEARDOWN_SECONDS)
        except TimeoutError:
            _kill_wandbs_process()
        except Exception:  # what failed has been said already
            pass


def _in_time(action: Callable[[], object], limit_seconds: float) -> None:
    """Raises what `action` raises, or TimeoutError after `limit_seconds`, when it goes on alone, in a thread that does
    not keep Python from exiting."""
    outcome: SimpleQueue = SimpleQueue()

    def work() -> None:
        try:
            action()
            outcome.put(None)
        except BaseException as error:  # wandb calls sys.exit if its service process has failed
            outcome.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        error = outcome.get(timeout=limit_seconds)
    except Empty:
        raise TimeoutError(f"no answer in {limit_seconds} s") from None
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _kill_wandbs_process() -> None:
    """Left alone it would outlive the run and hold on to its output: `train ... | tee` would not end."""
    import psutil

    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name().startswith("wandb"):
                child.kill()
