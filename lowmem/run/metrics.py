"""Reads and writes metrics.jsonl, which has one row (a JSON object) per training step, and its copy in each checkpoint.
NaN and infinity are null in a file, and NaN when read back."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem.run_folder import json_object

if TYPE_CHECKING:  # importing PyTorch takes seconds
    from lowmem.core.batch import Batch
    from lowmem.core.step import StepResult

PEAKS = ("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes", "ram_peak_bytes")
_MEASURED = ("tokens_per_second", "computed_tokens_per_second", "step_ms", *PEAKS)
_NULL_IS_NAN = ("loss", "grad_norm", "eval_first", "eval_loss")


def step_row(
    step: int, epoch: float, batch: "Batch", learning_rate: float, seconds: float, result: "StepResult", peaks: dict
) -> dict:
    """Returns a row of metrics.jsonl, without held-out losses. `tokens` counts the tokens with a label;
    `computed_tokens_per_second` also counts prompts and padding. `peaks`: {name: peak of memory in bytes, or None}."""
    tokens = batch.trained_tokens
    return {
        "step": step,
        "epoch": epoch,
        "loss": result.loss,
        "learning_rate": learning_rate,
        "grad_norm": result.grad_norm,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "computed_tokens_per_second": result.positions / seconds,
        "step_ms": seconds * 1000,
        **peaks,
    }


def read_metrics(path: Path) -> list[dict]:
    """Returns the rows of a metrics.jsonl or samples.jsonl, up to the first damaged line; [] without a file."""
    return _rows_in(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else []


def _rows_in(text: str) -> list[dict]:
    rows = []
    for line in text.splitlines():
        row = json_object(line)
        if "step" not in row:  # a killed process may leave such a line
            break
        rows.append({key: math.nan if row[key] is None and key in _NULL_IS_NAN else row[key] for key in row})
    return rows


def computed(rows: list[dict]) -> str:
    """Returns the text of a checkpoint's metrics.jsonl: `rows` without times, speeds and memory."""
    # The same command must write the same checkpoint, bit for bit.
    return as_lines({key: row[key] for key in row if key not in _MEASURED} for row in rows)


def recorded(state: dict, folder: Path) -> tuple[list[dict], bool]:
    """Returns the rows of metrics.jsonl up to a checkpoint, and True unless the run folder `folder` has another run's
    rows. `state`: the result of load_checkpoint, with the checkpoint's own rows. They lack times, speeds and memory,
    which come from metrics.jsonl in `folder`, or are None."""
    # The folder's rows may come from another run, or lack lines after a power cut.
    there = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] <= state["step"]]
    if state["metrics"] is None:  # an older checkpoint
        return there, True
    saved, known = _rows_in(state["metrics"]), {_step_made(row): row for row in there}
    rows = [row | {key: known.get(_step_made(row), {}).get(key) for key in _MEASURED} for row in saved]
    return rows, known.keys() <= set(map(_step_made, saved))


def _step_made(row: dict) -> tuple[str, ...]:
    # Equal only in rows of the same run. No held-out loss: an evaluation that a stop prevented is added later.
    return tuple(repr(row.get(key)) for key in ("step", "loss", "learning_rate", "grad_norm"))


def write_json(path: Path, content: dict) -> None:
    """Replaces the file `path` by `content`. Numbers that are not finite become null."""
    replace_file(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def finite(content: object, shown: Callable[[float], float] = float) -> object:
    """Copies nested dicts and lists. Replaces NaN and infinity by None, and any other float x by `shown(x)`."""
    if isinstance(content, dict):
        return {key: finite(value, shown) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value, shown) for value in content]
    if isinstance(content, float):
        return shown(content) if math.isfinite(content) else None
    return content


def as_line(row: dict) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def as_lines(rows: Iterable[dict]) -> str:
    return "".join(map(as_line, rows))


def replace_file(path: Path, text: str) -> None:
    """Replaces the content of a file. After a kill, the file has the old content or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
