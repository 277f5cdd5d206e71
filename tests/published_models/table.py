"""README.md's tables, of the rows that `python -m tests.published_models` leaves in results.jsonl.

python -m tests.published_models.table
"""

from collections import Counter
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results.jsonl", FOLDER / "README.md"
BEGIN = "<!-- made by python -m tests.published_models.table -->"
KINDS = {"config": "config.json", "tokenizer": "tokenizer"}
VALUES = ("5 from training", "4 from 5", "published, 4 from 5")
OUTCOMES = ("trained", "refused")


def tables(rows: list[dict]) -> str:
    """Returns the number of cases by kind and outcome, then every case."""
    counts = Counter((row["kind"], row["outcome"] if row["ok"] else "wrong") for row in rows)
    lines = [[name, *(str(counts[kind, outcome]) for outcome in (*OUTCOMES, "wrong"))] for kind, name in KINDS.items()]
    made = sorted({f"commit {row['commit']}, transformers {row['versions']['transformers']}" for row in rows})
    parts = [markdown(("published", *OUTCOMES, "wrong"), lines), f"Made by `{rows[0]['command']}`; {'; '.join(made)}."]
    for kind, name in KINDS.items():
        header = (name, "outcome", *VALUES, "said")
        parts.append(markdown(header, [_line(row) for row in rows if row["kind"] == kind]))
    return "\n\n".join(parts)


def _line(row: dict) -> list[str]:
    outcome = row["outcome"] if row["ok"] else f"WRONG: {row['outcome']}"
    return [row["name"], outcome, *(_shown(row["values"], name) for name in VALUES), row["said"]]


def _shown(values: dict[str, float], name: str) -> str:
    """Returns a difference of logits, "" if it was not measured; the one with eager attention, if that was compared."""
    eager = values.get(f"{name}, both eager")
    value = values.get(name) if eager is None else eager
    return "" if value is None else f"{value:.0e}".replace("0e+00", "0") + " (eager)" * (eager is not None)


def put_tables() -> None:
    put(README, BEGIN, tables(row_file.read(RESULTS)))


if __name__ == "__main__":
    put_tables()
