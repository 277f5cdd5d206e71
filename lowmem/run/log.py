"""Writes the output of a training run: progress bar, log.txt, metrics.jsonl, and if asked for, TensorBoard and wandb. A
step's row is written when the step is done, so a killed run keeps every finished row."""

import statistics
import sys
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

from tqdm import tqdm

from lowmem.run.figures import short_names
from lowmem.run.metrics import as_line, as_lines, read_metrics, recorded, replace_file
from lowmem.run.trackers import Trackers, charts, eval_charts, planned
from lowmem.settings import Settings
from lowmem.terminal import beside, for_terminal, has_room_for_a_bar, output
from lowmem.units import counted, format_size

_MOST_LINES = 50  # about steps, unless --log-every is given
_ETA_OVER = 101  # steps in the median, which ignores single slow steps, such as those that compiled


def continuation(row: dict) -> str:
    """Returns the text that the model wrote, without the prompt. `row`: a row of samples.jsonl."""
    return row["text"].removeprefix("sample: ").removeprefix(row.get("prompt", ""))


def _when(step: int) -> str:
    return f"step {step}" if step else "before training"


class RunLog:
    """Writes the progress bar, log.txt, metrics.jsonl and samples.jsonl of a run into `folder`. Call `start` when the
    steps begin, and `close` at the end, even after an error. `rows`, `samples`: all rows of metrics.jsonl and
    samples.jsonl, also from before a resume."""

    def __init__(self, folder: Path, settings: Settings):
        self.rows: list[dict] = []
        self.samples: list[dict] = []
        self._folder, self._settings = folder, settings
        self._said: list[str] = []  # sentences before `start`, because a refused run must leave no file
        self._file = self._text = self._bar = None
        self._trackers = Trackers(folder, settings, self.say)

    def resume(self, state: dict) -> None:
        """Restores `rows` and `samples` up to a checkpoint. `state`: the result of load_checkpoint."""
        self.rows, same_run = recorded(state, self._folder)
        samples = read_metrics(self._folder / "samples.jsonl") if same_run else []
        self.samples = [sample for sample in samples if sample["step"] <= state["step"]]
        before = state.get("eval_batches", self._settings.eval_batches)
        if before != self._settings.eval_batches and any("eval_loss" in row for row in self.rows):
            self.say(f"warning: --eval-batches was {before}, so held-out losses until now are of other texts")
        if unknown := sum(row["step_ms"] is None for row in self.rows):
            self.say(f"times and memory of {counted(unknown, 'earlier steps')} are not in {self._folder}/metrics.jsonl")

    def start(self, first_step: int, last_step: int, plan: dict, held_out: dict | None = None) -> None:
        """Opens files, progress bar and trackers. `first_step`: number of steps done. `plan`: content of plan.json.
        `held_out`: held-out losses after `first_step`, as in a row of metrics.jsonl, or None."""
        metrics, samples = self._folder / "metrics.jsonl", self._folder / "samples.jsonl"
        replace_file(metrics, as_lines(self.rows))
        replace_file(samples, as_lines(self.samples)) if self.samples else samples.unlink(missing_ok=True)
        self._file, self._text = _Lines(metrics), _Lines(self._folder / "log.txt")
        self._text.write("".join(f"{sentence}\n" for sentence in self._said))
        self._tokens = sum(row["tokens"] for row in self.rows)
        self._last_step = last_step
        self._every = self._settings.log_every or _round_interval(last_step)
        self._predicted, self._planned = plan["predicted"], planned(plan)
        self._step_ms: deque[float] = deque(maxlen=_ETA_OVER)
        self._bar = tqdm(
            total=last_step, initial=first_step, file=sys.stderr, disable=not has_room_for_a_bar(), dynamic_ncols=True,
            bar_format="{desc}", desc=f"{first_step}/{last_step}",
        )  # fmt: skip
        self._trackers.start(first_step, asdict(self._settings) | _flat("plan", plan))
        if held_out:
            self._trackers.show("row", eval_charts(held_out), first_step)
            self.say(f"{_when(first_step)}: {_held_out(held_out)}")

    def say(self, sentence: str, at_length: str | None = None) -> None:
        """Writes a sentence to stderr, above the progress bar, and to log.txt. `at_length`: if given, log.txt gets this
        text instead."""
        with output():
            tqdm.write(for_terminal(sentence, sys.stderr), file=sys.stderr)
        if self._text is None:
            self._said.append(at_length or sentence)
        elif not self._text.closed:
            self._text.write(f"{at_length or sentence}\n")

    def step(self, row: dict) -> None:
        """Records a training step. `row`: from step_row (metrics.py), with held-out losses if there are any."""
        self.rows.append(row)
        if (problem := self._file.write(as_line(row))) is not None:
            self.say(f"{problem}; training goes on, and writes the missing rows when there is room")
        self._tokens += row["tokens"]
        first_of_run = not self._step_ms
        self._step_ms.append(row["step_ms"])
        shown = first_of_run or row["step"] % self._every == 0 or row["step"] == self._last_step
        line = self._summary(row) if shown else None
        if line is not None:
            self._text.write(f"{line}\n")
        with output():
            if not self._bar.disable:
                self._bar.set_description_str(self._short_summary(row), refresh=False)
                self._bar.update()
            elif line is not None:
                print(for_terminal(line, sys.stderr), file=sys.stderr, flush=True)
        if "eval_loss" in row:
            self.say(f"step {row['step']}: {_held_out(row)}")
        self._trackers.show("row", charts(row, self._tokens) | self._planned, row["step"])
        if "eval_loss" in row or row["step"] == self._last_step:
            self._trackers.show("together", self.rows, self._planned)

    def sample(self, step: int, text: str, last: bool, prompt: str = "") -> None:
        """Shows and records `text`, the model's continuation of `prompt` after `step` steps. `last`: True after
        training, to show also the first sample of this prompt again."""
        row = {"step": step, "prompt": prompt, "text": text}
        others = [kept for kept in self.samples if kept["step"] != step or kept.get("prompt", "") != prompt]
        first = [kept for kept in others if last and kept["step"] == 0 and kept.get("prompt", "") == prompt]
        lines = [f"{_when(shown['step'])}, {shown['text']}" for shown in (*first, row)]
        if first and sys.stderr is not None and sys.stderr.isatty():
            columns = {_when(shown["step"]): continuation(shown) for shown in (*first, row)}
            self.say(f"\n{prompt}\n{beside(columns)}", "\n".join(lines))
        else:
            for line in lines:
                self.say(line)
        self.samples = [*others, row]
        try:
            replace_file(self._folder / "samples.jsonl", as_lines(self.samples))
        except OSError as error:  # a full disk; the next sample writes all of them again
            self.say(f"warning: samples.jsonl cannot be written: {error.strerror}")
        self._trackers.show("sample", self.samples)

    def end_bar(self) -> None:
        if self._bar is not None:
            with output():
                self._bar.close()

    def pictures(self, paths: list[Path]) -> None:
        """Shows the picture files `paths` in TensorBoard and wandb."""
        self._trackers.show("pictures", paths, self.rows[-1]["step"] if self.rows else self._last_step)

    def close(self) -> None:
        if self._file is None or self._file.closed:
            return
        self.end_bar()
        try:
            self._trackers.close()
        finally:
            self._file.close()
            self._text.close()

    def _short_summary(self, row: dict) -> str:
        share = f"{row['step']}/{self._last_step} {row['step'] / self._last_step:.0%}"
        speed = f"{_number(row['tokens_per_second'])} tok/s {self._left(row)}"
        # fits into 80 columns
        return f"{share} loss {row['loss']:.2f} {_rate_and_norm(row, ' ')} {speed}"

    def _summary(self, row: dict) -> str:
        parts = [f"step {row['step']}/{self._last_step}", f"loss {row['loss']:.4f}", _rate_and_norm(row, "  ")]
        parts.append(_speed(row["tokens_per_second"], row["computed_tokens_per_second"]))
        for name, key in (("GPU", "gpu_reserved_peak_bytes"), ("RAM", "ram_peak_bytes")):
            if row[key] is not None:
                predicted = self._predicted.get(key)
                of_plan = f" ({100 * row[key] / predicted:.0f}% of the plan)" if predicted else ""
                parts.append(f"{name} {format_size(row[key])}{of_plan}")
        return "  ".join([*parts, self._left(row)])

    def _left(self, row: dict) -> str:
        seconds_left = statistics.median(self._step_ms) / 1000 * (self._last_step - row["step"])
        return f"{tqdm.format_interval(round(seconds_left)).removeprefix('0')} left"


def _round_interval(steps: int) -> int:
    """Returns the number of steps between two lines of the log. It is the smallest of 1, 2, 5, 10, 20, 50, ... with
    which a run of `steps` steps has at most _MOST_LINES lines."""
    intervals = (first * 10**power for power in count() for first in (1, 2, 5))
    return next(every for every in intervals if steps <= _MOST_LINES * every)


def _rate_and_norm(row: dict, between: str) -> str:
    mantissa, exponent = f"{row['learning_rate']:.2e}".split("e")
    return f"lr {float(mantissa):g}e{int(exponent)}{between}norm {row['grad_norm']:.3g}"  # lr 9.87e-4 norm 0.512


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _held_out(row: dict) -> str:
    losses = row.get("eval_losses", {})
    names = short_names(losses)
    each = ", ".join(f"{names[name]} {loss:.4f}" for name, loss in losses.items())
    return f"held-out loss {row['eval_loss']:.4f}" + (f" ({each})" if each else "")


def _speed(trained: float, computed: float) -> str:
    of_computed = f" trained of {_number(computed)}" if computed - trained > 0.01 * computed else ""
    return f"{_number(trained)}{of_computed} tokens/s"


def _flat(name: str, content: dict) -> dict:
    """Flattens nested dicts: for "plan", {"choice": {"group": 1}} becomes {"plan/choice/group": 1}."""
    flat = {}
    for key, value in content.items():
        flat |= _flat(f"{name}/{key}", value) if isinstance(value, dict) else {f"{name}/{key}": value}
    return flat


class _Lines:
    """Appends lines to a file without a buffer. Lines that could not be written are written with the next ones."""

    def __init__(self, path: Path):
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""
        self.closed = False

    def write(self, lines: str) -> str | None:
        """Appends `lines` to the file. Returns a message if this fails and the write before did not, else None."""
        before, self._waiting = self._waiting, self._waiting + lines.encode(errors="backslashreplace")
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return None if before else f"{self._file.name} cannot be written: {error.strerror}"
        return None

    def close(self) -> None:
        self.write("")  # tries once more
        self.closed = True
        with suppress(OSError):
            self._file.close()
