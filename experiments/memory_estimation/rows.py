"""The results file: one JSON object per line; the README's tables and the picture are made from it and nothing else.

A row is predicted or measured, and of one case: model, method, tokens per sequence, batch, cap, card. It carries what
is needed to make it again. A run replaces the rows of its own cases and leaves the others.
"""

import json
import os
import platform
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from lowmem.errors import InputError
from lowmem.report import versions

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
NAME = "rows.jsonl"
KEY = ("kind", "model", "method", "seq", "batch", "limit_bytes", "card")


def key(row: dict) -> tuple:
    return tuple(row.get(name) for name in KEY)


def common(arguments: list[str]) -> dict:
    """What all rows of one run share. `command`: the call that makes them."""
    return {
        "command": shlex.join(["python", "-m", "experiments.memory_estimation.run", *arguments]),
        "commit": _commit(),
        "versions": {name: version for name, version in versions().items() if name != "platform"},
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read(path: Path) -> list[dict]:
    """All rows of a file, none where there is no file; InputError with the line where one is broken."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not a row ({error}); remove the line or the file") from None
    return rows


def replace(path: Path, new: list[dict]) -> list[dict]:
    """Writes `new` into the file in the place of the rows of their cases; all rows that are then there.

    A case of another batch that a method no longer reaches goes too: the predicted rows of a (model, method, seq, cap,
    card) are replaced together.
    """
    made = {key(row) for row in new}
    families = {_family(row) for row in new if row["kind"] == "predicted"}
    kept = [row for row in read(path) if key(row) not in made and _family(row) not in families]
    rows = sorted(kept + new, key=lambda row: tuple(str(part).rjust(12) for part in key(row)))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)
    return rows


def _family(row: dict) -> tuple:
    return tuple(part for name, part in zip(KEY, key(row), strict=True) if name != "batch")


def _commit() -> str:
    """What is checked out, "+dirty" if files differ from it, "unknown" where git does not say."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!experiments/memory_estimation/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+dirty" if changed else "")


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()
