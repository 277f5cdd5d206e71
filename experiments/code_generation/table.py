"""Makes the README's table from rows: `python -m experiments.code_generation.table`."""

import sys
from pathlib import Path

from experiments.code_generation.page import COLUMNS, ROWS
from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
KEPT = FOLDER / "results" / "rows.jsonl"
BEGIN = "<!-- made by python -m experiments.code_generation.table -->"


def section(rows: list[dict]) -> str:
    newest = {row["command"]: row for row in rows}.values()
    parts = []
    for row in sorted(newest, key=lambda row: not (row["training"] or {}).get("pretrained")):
        training = row["training"]
        lines = [
            [name, *(form.format(row[column][key]) if key in row[column] else "" for column in (*COLUMNS, "true"))]
            for key, (name, form) in ROWS.items()
        ]
        made = f"`{row['command']}`: {row['beginnings']} functions of {row['data']}"
        if training:
            made += (
                f", a {'pretrained' if training.get('pretrained') else 'random'} model of "
                f"{training['parameters'] / 1e6:.1f} million parameters, {training['steps']:,} steps of "
                f"{training['tokens_per_step']:,} tokens, {training['seconds'] / 60:.1f} minutes"
            )
        parts += [
            made + f"; {row['seconds'] / 60:.1f} minutes in all; {row['machine']}, torch {row['versions']['torch']}.",
            markdown(("", "before", "after", "true text"), lines),
        ]
    return "\n\n".join(parts)


def pages() -> list[Page]:
    return [(README, BEGIN, section(row_file.read(KEPT)))]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.code_generation.table", __doc__, main))
