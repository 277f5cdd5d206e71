"""The file of rows: one JSON object per line, of one case: model, method, tokens, batch, cap and card."""

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
    """Returns all rows of a file; [] without a file. Raises InputError, with the line, if one is broken."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not a row ({error}); remove the line or the file") from None
    return rows


def replace(path: Path, new: list[dict]) -> list[dict]:
    """Replaces the rows of the cases of `new` in the file, and returns all rows."""
    made = {key(row) for row in new}
    # A batch that a method no longer reaches goes too: the predicted rows of a family are replaced together.
    families = {_family(row) for row in new if row["kind"] == "predicted"}
    kept = [row for row in read(path) if key(row) not in made and _family(row) not in families]
    rows = sorted(kept + new, key=lambda row: tuple(str(part).rjust(12) for part in key(row)))
    write(path, rows)
    return rows


def _family(row: dict) -> tuple:
    return tuple(part for name, part in zip(KEY, key(row), strict=True) if name != "batch")
