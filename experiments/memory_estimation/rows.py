"""The results file: one JSON object per line; the README's tables and the picture are made from it and nothing else.

A row is predicted or measured, and of one case: model, method, tokens per sequence, batch, cap, card. It carries what
is needed to make it again. A run replaces the rows of its own cases and leaves the others.
"""

import json
from pathlib import Path

from experiments.harness.rows import write
from lowmem.errors import InputError

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
NAME = "rows.jsonl"
KEY = ("kind", "model", "method", "seq", "batch", "limit_bytes", "card")


def key(row: dict) -> tuple:
    return tuple(row.get(name) for name in KEY)


def read(path: Path) -> list[dict]:
    """Returns all rows of a file, none if there is no file; InputError with the line if one is broken."""
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
    write(path, rows)
    return rows


def _family(row: dict) -> tuple:
    return tuple(part for name, part in zip(KEY, key(row), strict=True) if name != "batch")
