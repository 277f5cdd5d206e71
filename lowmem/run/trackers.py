"""Experiment trackers: what shows a run to people elsewhere than in its own folder. metrics.jsonl is the record.

A tracker is a guest: whatever it does (not logged in, unreachable, its process killed or frozen), the run says so once
and goes on without it. Every call runs in a thread that is left behind after 30 s, since a tracker's own limits do not
hold everywhere: wandb 0.31 waits for its service process without one, also when Python exits, and now and then that
process does not end when the server cannot be reached; it is killed then.

TensorBoard's events lie in <out>/tensorboard. Those after the step that a run goes on from are purged by the writer's
own mark, and the charts that belong together (a peak, its prediction, its cap) stand together under Custom Scalars.

wandb is never allowed to ask for a key. It costs the training process about 20 MiB of RAM and has a process of its own,
which the RAM cap does not count. What was not uploaded stays in the run folder for `wandb sync`. A run that goes on
is the same run there: its id lies in <out>/wandb-run-id, and rows of steps that are computed again come again, under
their `train/global_step`. A layout of charts is kept by wandb's server alone, so none comes with a run.
"""

import math
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from lowmem.errors import InputError, first_line
from lowmem.settings import Settings
from lowmem.units import GIB

_LIMIT_SECONDS = 30  # for one call
_WANDB_OWN_LIMIT_SECONDS = 20  # what wandb is told: so that it mostly ends by itself, and says why
_WANDB_TEARDOWN_SECONDS = 10
_SAMPLES = "samples"  # the name of what the model wrote on the way
_TOGETHER = {  # charts of several values, as patterns of their names
    "loss": {"loss": ["Multiline", ["train/loss", "eval/loss"]]},
    "memory": {"GPU (GiB)": ["Multiline", ["memory/gpu_.*"]], "RAM (GiB)": ["Multiline", ["memory/ram_.*"]]},
    "perf": {"ms per step": ["Multiline", ["perf/step_ms.*"]], "tokens/s": ["Multiline", ["perf/.*tokens_per_second"]]},
}


class Tracker(Protocol):
    """One tracker of one run. Whatever a method raises ends the tracker's part in the run, after `leave`."""

    name: str

    def start(self, first_step: int, constants: dict) -> None:
        """`first_step` steps are done already; what was shown of later ones is computed again."""

    def row(self, values: dict[str, float], step: int) -> None: ...

    def sample(self, samples: list[dict]) -> None:
        """`samples`: rows of samples.jsonl, the new one last."""

    def pictures(self, paths: list[Path], step: int) -> None: ...

    def finish(self) -> None: ...

    def leave(self) -> None:
        """Ends what there is of it, within a limit of its own; after `finish`, and after whatever failed."""


class Trackers:
    """Those that a run was asked to report to; each is there until it fails. InputError where TensorBoard is asked for
    and not installed."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], None]):
        self._say = say
        self._active: list[Tracker] = []
        if settings.reports_to("tensorboard"):
            self._active.append(_TensorBoard(folder))
        mode = wandb_mode(settings)
        if mode != "disabled":
            self._active.append(_Wandb(folder, settings.run_name, mode))

    def start(self, first_step: int, constants: dict) -> None:
        self._each("could not start", lambda tracker: tracker.start(first_step, constants))

    def row(self, values: dict[str, float], step: int) -> None:
        self._each("failed", lambda tracker: tracker.row(values, step))

    def sample(self, samples: list[dict]) -> None:
        self._each("failed", lambda tracker: tracker.sample(samples))

    def pictures(self, paths: list[Path], step: int) -> None:
        self._each("failed", lambda tracker: tracker.pictures(paths, step))

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


def wandb_mode(settings: Settings) -> str:
    """What was typed for it; else WANDB_MODE, unless the trackers were typed and wandb is not among them."""
    named = settings.reports_to("wandb")
    if settings.wandb is not None:
        return settings.wandb
    if settings.report_to is not None and not named:
        return "disabled"
    disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")  # as Hugging Face's Trainer
    if disabled and not named:
        return "disabled"
    return os.environ.get("WANDB_MODE", "").lower() or ("online" if named else "disabled")


def charts(row: dict, tokens: int) -> dict[str, float]:
    """What trackers show of a row of metrics.jsonl, by name. `tokens`: trained in the run so far."""
    values = {
        "train/epoch": row["epoch"],
        "train/loss": row["loss"],
        "train/grad_norm": row["grad_norm"],
        "train/learning_rate": row["learning_rate"],
        "train/num_input_tokens_seen": tokens,
        "perf/tokens_per_second": row["tokens_per_second"],
        "perf/computed_tokens_per_second": row["computed_tokens_per_second"],
        "perf/step_ms": row["step_ms"],
    }
    for key in ("gpu_allocated_peak", "gpu_reserved_peak", "ram_peak"):
        if row[f"{key}_bytes"] is not None:
            values[f"memory/{key}_gib"] = row[f"{key}_bytes"] / GIB
    return values | (evaluated(row) if "eval_loss" in row else {})


def evaluated(row: dict) -> dict[str, float]:
    """What trackers show of the held-out losses in a row."""
    loss = row["eval_loss"]
    values = {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}
    return values | {f"eval/loss of {name}": loss for name, loss in row.get("eval_losses", {}).items()}


def planned(plan: dict) -> dict[str, float]:
    """The lines that a plan (plan.json's content) draws beside what is measured: what it predicts, and the caps."""
    predicted, limits = plan["predicted"], plan["limits"]
    sizes = {f"{name}_predicted": predicted[f"{name}_peak_bytes"] for name in ("gpu_allocated", "gpu_reserved", "ram")}
    if predicted["gpu_reserved_peak_bytes"] is not None:
        sizes["gpu_cap"] = limits["gpu_bytes"]
    sizes["ram_cap"] = limits["ram_bytes"]
    values = {f"memory/{name}_gib": size / GIB for name, size in sizes.items() if size is not None}
    if predicted["step_seconds"] is not None:
        values["perf/step_ms_predicted"] = predicted["step_seconds"] * 1000
    return values


def _but_not_of_tensorboard(hook: Callable, problem: threading.ExceptHookArgs) -> None:
    """Gives `hook` what ended a thread, unless it is the one that writes for TensorBoard: the next call of its writer
    raises the same, which is said in a sentence."""
    if not type(problem.thread).__module__.startswith("tensorboard"):
        hook(problem)


class _TensorBoard:
    """Event files that `tensorboard --logdir <out>` reads, this run's and those of every other folder below."""

    name = "tensorboard"

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            said = f"--report-to tensorboard needs that package ({first_line(error)}): pip install tensorboard"
            raise InputError(said) from None
        self._open = partial(SummaryWriter, str(folder / "tensorboard"))
        threading.excepthook = partial(_but_not_of_tensorboard, threading.excepthook)

    def start(self, first_step: int, constants: dict) -> None:
        # What was measured before the first step is that of a run which goes on, too, and not of a new one.
        self._writer = self._open(purge_step=first_step + 1 if first_step else 0)
        self._writer.add_custom_scalars(_TOGETHER)

    def row(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run's charts end where its rows do

    def sample(self, samples: list[dict]) -> None:
        text = textwrap.indent(samples[-1]["text"], "    ", lambda line: True)  # Markdown for: exactly as it stands
        self._writer.add_text(_SAMPLES, text, samples[-1]["step"])
        self._writer.flush()

    def pictures(self, paths: list[Path], step: int) -> None:
        from matplotlib.image import imread  # which drew them

        for path in paths:
            self._writer.add_image(f"pictures/{path.stem}", imread(path), step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()

    def leave(self) -> None:
        """Its thread does not keep Python from exiting."""


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
        kept = self._folder / "wandb-run-id"
        known = kept.read_text(encoding="utf-8").strip() if first_step and kept.exists() else None
        self._run = wandb.init(
            id=os.environ.get("WANDB_RUN_ID") or known,
            resume=os.environ.get("WANDB_RESUME", "allow"),
            allow_val_change=True,  # of what a run that goes on was told otherwise
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
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step")

    def row(self, values: dict[str, float], step: int) -> None:
        self._run.log({"train/global_step": step} | values)

    def sample(self, samples: list[dict]) -> None:
        import wandb

        table = wandb.Table(columns=["step", "text"], data=[[row["step"], row["text"]] for row in samples])
        self.row({_SAMPLES: table}, samples[-1]["step"])

    def pictures(self, paths: list[Path], step: int) -> None:
        import wandb

        self.row({f"pictures/{path.stem}": wandb.Image(str(path)) for path in paths}, step)

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
