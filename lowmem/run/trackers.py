"""Shows a training run in TensorBoard and wandb (trackers). A tracker never ends training: if one fails, a message says
so once, and training goes on without it."""

import math
import os
import re
import shlex
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

from lowmem.errors import InputError, first_line
from lowmem.settings import Settings
from lowmem.units import GIB

_LIMIT_SECONDS = 30  # for one call: wandb 0.31 waits for its service process without a limit
_WANDB_OWN_LIMIT_SECONDS = 20  # wandb's own limit, so that it usually ends first and says why
_WANDB_TEARDOWN_SECONDS = 10
_WANDB_MODES = "online", "offline", "disabled", "shared", "run", "dryrun"
_SAMPLES = "samples"  # the tag of samples
_TOGETHER = {  # charts with several values, by section: their titles, and patterns of the values' names
    "loss": {"training and held-out loss": ["train/loss", "eval/loss.*"]},
    "memory": {"GPU memory in GiB": ["memory/gpu_.*"], "RAM in GiB": ["memory/ram_.*"]},
    "perf": {"ms per step": ["perf/step_ms.*"], "tokens per second": ["perf/.*tokens_per_second"]},
}
_POINTS_TOGETHER = 500  # per line in such a chart, because wandb gets the whole chart each time


class Trackers:
    """Passes values to TensorBoard and wandb. Drops a tracker that fails or takes too long. Raises InputError if
    TensorBoard is asked for and not installed, and for an unknown WANDB_MODE."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], None]):
        self._say = say
        self._active: list[_TensorBoard | _Wandb] = []
        if settings.reports_to("tensorboard"):
            self._active.append(_TensorBoard(folder))
        mode = wandb_mode(settings)
        self._unused: list[str] = []  # sentences on options that wandb would need
        if mode != "disabled":
            self._active.append(_Wandb(folder, settings.run_name, mode))
        elif settings.reports_to("wandb") and settings.wandb is None:
            self._unused.append("wandb is off, because the variable WANDB_MODE says so; --wandb online overrules it")
        elif settings.run_name is not None:
            self._unused.append("--run-name does nothing: it names a run in wandb, which is off")

    def start(self, first_step: int, constants: dict) -> None:
        """Starts the trackers when `first_step` steps are done. `constants`: settings and plan of the run, {name:
        value}."""
        for sentence in self._unused:
            self._say(sentence)
        self._each("could not start", lambda tracker: tracker.start(first_step, constants))
        for tracker in self._active:
            self._say(f"{tracker.name}: {tracker.where}")

    def show(self, what: str, *values) -> None:
        """Passes `values` to the method `what` of each tracker: "row", "together", "sample" or "pictures"."""
        self._each("failed", lambda tracker: getattr(tracker, what)(*values))

    def close(self) -> None:
        self._each("did not finish", lambda tracker: tracker.finish())
        for tracker in self._active:
            if tracker.afterwards is not None:
                self._say(f"{tracker.name}: {tracker.afterwards}")
        while self._active:
            self._active.pop().leave()

    def _each(self, failure: str, act: Callable) -> None:
        for tracker in list(self._active):
            try:
                _in_time(partial(act, tracker), _LIMIT_SECONDS)
            except Exception as error:  # a logging service must never end a training run
                self._active.remove(tracker)
                tracker.leave()  # without a time limit here, so it has its own
                without = "the run goes on without it, its rows are in metrics.jsonl"
                self._say(f"{tracker.name} {failure} ({first_line(error)}); {without}")


def wandb_mode(settings: Settings) -> str:
    """Returns the mode of wandb: the value of --wandb, else that of WANDB_MODE. If neither is given, returns "online"
    if --report-to names wandb, else "disabled". WANDB_MODE is ignored if --report-to leaves wandb out, or if
    WANDB_DISABLED is set and --report-to is not given. Raises InputError for an unknown WANDB_MODE."""
    named = settings.reports_to("wandb")
    if settings.wandb is not None:
        return settings.wandb
    disabled = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")  # of Hugging Face's Trainer
    if not named and (disabled or settings.report_to is not None):
        return "disabled"
    mode = os.environ.get("WANDB_MODE", "").strip().lower() or ("online" if named else "disabled")
    if mode not in _WANDB_MODES:
        raise InputError(f"the variable WANDB_MODE is {mode!r}: it may be {', '.join(_WANDB_MODES)}")
    return mode


def charts(row: dict, tokens: int) -> dict[str, float]:
    """Returns the values of a metrics.jsonl `row` for TensorBoard and wandb, {name: value}. `tokens`: number of tokens
    trained so far."""
    values = {f"train/{name}": row[name] for name in ("epoch", "loss", "grad_norm", "learning_rate")}
    values["train/num_input_tokens_seen"] = tokens
    values |= {f"perf/{name}": row[name] for name in ("tokens_per_second", "computed_tokens_per_second", "step_ms")}
    values |= _in_gib({name: row[f"{name}_bytes"] for name in ("gpu_allocated_peak", "gpu_reserved_peak", "ram_peak")})
    return values | (eval_charts(row) if "eval_loss" in row else {})


def eval_charts(row: dict) -> dict[str, float]:
    """Returns the held-out losses of a metrics.jsonl `row` for TensorBoard and wandb, {name: value}."""
    loss = row["eval_loss"]
    values = {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}
    return values | {f"eval/loss of {name}": loss for name, loss in row.get("eval_losses", {}).items()}


def lines_together(rows: list[dict], constants: dict[str, float]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Returns the charts that have several lines each: {title: {name of a line: [(step, value)]}}. Leaves out values
    that are not finite, and most steps of a long run. `constants`: {name: value} of lines that have this value at each
    step."""
    every = math.ceil(len(rows) / _POINTS_TOGETHER) or 1
    lines: dict[str, list[tuple[int, float]]] = {}
    if rows and rows[0].get("eval_first") is not None:
        lines["eval/loss"] = [(0, rows[0]["eval_first"])]
    for row in (row for index, row in enumerate(rows) if index % every == 0 or "eval_loss" in row):
        for name, value in (charts(row, 0) | constants).items():
            if value is not None and math.isfinite(value):
                lines.setdefault(name, []).append((row["step"], value))
    found = {}
    for title, patterns in (item for section in _TOGETHER.values() for item in section.items()):
        found[title] = {name: lines[name] for name in lines if any(re.fullmatch(text, name) for text in patterns)}
    return {title: chart for title, chart in found.items() if chart}


def planned(plan: dict) -> dict[str, float]:
    """Returns {name: value} of a plan's predictions and caps, for charts. `plan`: content of plan.json."""
    predicted, limits = plan["predicted"], plan["limits"]
    sizes = {f"{name}_predicted": predicted[f"{name}_peak_bytes"] for name in ("gpu_allocated", "gpu_reserved", "ram")}
    if predicted["gpu_reserved_peak_bytes"] is not None:
        sizes["gpu_cap"] = limits["gpu_bytes"]
    values = _in_gib(sizes | {"ram_cap": limits["ram_bytes"]})
    if predicted["step_seconds"] is not None:
        values["perf/step_ms_predicted"] = predicted["step_seconds"] * 1000
    return values


def _in_gib(sizes: dict[str, int | None]) -> dict[str, float]:
    return {f"memory/{name}_gib": size / GIB for name, size in sizes.items() if size is not None}


def _ignore_tensorboard(hook: Callable, problem: threading.ExceptHookArgs) -> None:
    """Passes an uncaught error to `hook`, the former threading.excepthook, unless TensorBoard's thread raised it."""
    # TensorBoard's writer raises the thread's error again in its next call.
    if not type(problem.thread).__module__.startswith("tensorboard"):
        hook(problem)


class _TensorBoard:
    """Writes event files that `tensorboard --logdir <out>` reads."""

    name, afterwards = "tensorboard", None

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            said = f"--report-to tensorboard needs that package ({first_line(error)}): pip install tensorboard"
            raise InputError(said) from None
        self._open = partial(SummaryWriter, str(folder / "tensorboard"))
        self.where = f"tensorboard --logdir {shlex.quote(str(folder))} shows this run"
        if getattr(threading.excepthook, "func", None) is not _ignore_tensorboard:
            threading.excepthook = partial(_ignore_tensorboard, threading.excepthook)

    def start(self, first_step: int, constants: dict) -> None:
        # Removes values of later steps, which an interrupted run has left. The evaluation before the first step is kept
        # for a resumed run, and purged for a new one.
        self._writer = self._open(purge_step=first_step + 1 if first_step else 0)
        layout = {
            section: {title: ["Multiline", patterns] for title, patterns in titles.items()}
            for section, titles in _TOGETHER.items()
        }
        self._writer.add_custom_scalars(layout)

    def row(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run's charts end where its rows do

    def together(self, rows: list[dict], constants: dict[str, float]) -> None:
        """Does nothing: TensorBoard draws the charts with several lines itself, from the layout of `start` and the
        values of `row`."""

    def sample(self, samples: list[dict]) -> None:  # rows of samples.jsonl, the new one last
        text = textwrap.indent(samples[-1]["text"], "    ", lambda line: True)  # a code block in Markdown
        self._writer.add_text(_SAMPLES, text, samples[-1]["step"])
        self._writer.flush()

    def pictures(self, paths: list[Path], step: int) -> None:
        from matplotlib.image import imread  # the package that drew them

        for path in paths:
            self._writer.add_image(f"pictures/{path.stem}", imread(path), step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()

    def leave(self) -> None:
        """Does nothing: Python does not wait for TensorBoard's thread on exit, because it is a daemon."""


class _Wandb:
    """Logs to Weights & Biases. WANDB_* variables apply unless an option of lowmem sets the same value."""

    name, afterwards = "wandb", None

    def __init__(self, folder: Path, run_name: str | None, mode: str):
        self._folder, self._run_name, self._mode = folder, run_name, mode
        with suppress(Exception):  # `start` will report it
            # wandb takes 20 MiB of RAM here, and starts a process that the RAM cap does not count.
            import wandb  # noqa: F401 - the plan, which is made next, counts the RAM that the process holds

    def start(self, first_step: int, constants: dict) -> None:
        import wandb

        self._wandb = wandb
        wandb.setup(settings=wandb.Settings(silent=True))
        if self._mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: set WANDB_API_KEY, or run `wandb login` before the next run")
        kept = self._folder / "wandb-run-id"
        known = kept.read_text(encoding="utf-8").strip() if first_step and kept.exists() else None
        self._run = wandb.init(
            id=os.environ.get("WANDB_RUN_ID") or known,
            resume=os.environ.get("WANDB_RESUME", "allow"),
            allow_val_change=True,  # a resumed run may have other options
            project=os.environ.get("WANDB_PROJECT", "lowmem"),
            name=self._run_name or os.environ.get("WANDB_NAME") or self._folder.resolve().name,
            dir=os.environ.get("WANDB_DIR", str(self._folder)),
            mode=self._mode,
            config=constants,
            settings=wandb.Settings(
                silent=True,
                console="off",  # else it wraps the stderr of the progress bar
                init_timeout=_WANDB_OWN_LIMIT_SECONDS,
                finish_timeout=_WANDB_OWN_LIMIT_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")
        if self._run.offline:
            inside = os.path.relpath(self._run.sync_dir)
            place = shlex.quote(self._run.sync_dir if inside.startswith("..") else inside)
            self.where, self.afterwards = f"offline, in {place}", f"to upload this run:\n  wandb sync {place}"
        else:
            self.where = self._run.url
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step")

    def row(self, values: dict[str, float], step: int) -> None:
        # After a resume, steps that are computed again appear again under their train/global_step.
        self._run.log({"train/global_step": step} | values)

    def together(self, rows: list[dict], constants: dict[str, float]) -> None:
        # wandb's layouts (wandb-workspaces) need its server, so the whole chart is drawn and sent.
        drawn = {}
        for title, lines in lines_together(rows, constants).items():
            columns = [list(zip(*points, strict=True)) for points in lines.values()]
            steps, values = [column[0] for column in columns], [column[1] for column in columns]
            drawn[f"charts/{title}"] = self._wandb.plot.line_series(
                steps, values, list(lines), title, "optimizer step", split_table=True
            )
        self.row(drawn, rows[-1]["step"])

    def sample(self, samples: list[dict]) -> None:
        table = self._wandb.Table(columns=["step", "text"], data=[[row["step"], row["text"]] for row in samples])
        self.row({_SAMPLES: table}, samples[-1]["step"])

    def pictures(self, paths: list[Path], step: int) -> None:
        self.row({f"pictures/{path.stem}": self._wandb.Image(str(path)) for path in paths}, step)

    def finish(self) -> None:
        self._run.finish()

    def leave(self) -> None:
        """Ends wandb's service process within a time limit. Otherwise, Python would wait for it on exit without one."""
        teardown = getattr(sys.modules.get("wandb"), "teardown", None)
        with suppress(Exception):  # its failure has been reported already
            try:
                if teardown is not None:
                    _in_time(teardown, _WANDB_TEARDOWN_SECONDS)
            except TimeoutError:
                _kill_wandbs_process()


def _in_time(action: Callable[[], object], limit_seconds: float) -> None:
    """Runs `action` in a thread, and raises its error. Raises TimeoutError after `limit_seconds`; the thread keeps
    running."""
    outcome: Future = Future()

    def work() -> None:
        try:
            outcome.set_result(action())
        except Exception as error:
            outcome.set_exception(error)
        except BaseException as error:  # wandb calls sys.exit if its service process has failed
            outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=work, daemon=True).start()
    if not wait([outcome], limit_seconds).done:
        raise TimeoutError(f"no answer in {limit_seconds} s")
    outcome.result()


def _kill_wandbs_process() -> None:
    import psutil

    # The process would keep training's output open: `train ... | tee` would not end.
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name().startswith("wandb"):
                child.kill()
