"""Makes README.md's table from the rows that `python -m tests.mutations --out tests/mutations/results.jsonl` leaves.

    python -m tests.mutations.table

The last row of a mutation counts. A test fails if README.md and the rows disagree, or if a mutation has no row or
lives.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from tests.mutations.mutation_list import MUTATIONS, Mutation

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results.jsonl", FOLDER / "README.md"
BEGIN = "<!-- made by python -m tests.mutations.table -->"
LIVES, NOT_RUN = "**nothing**", "not run yet"


def table(rows: list[dict], mutations: Sequence[Mutation] = MUTATIONS) -> str:
    """Returns how many are found, and one line for each mutation."""
    last = {row["mutation"]: row for row in rows}
    lines = [[_file_of(one), one.name, _found_by(one, last.get(one.name))] for one in mutations]
    found = [last[mutation.name] for mutation in mutations if mutation.name in last]
    number = sum(row["caught_by"] is not None for row in found)
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in found))
    said = f"{number} of {len(mutations)} found"
    said += f"; {found[-1]['machine']}, commit {commits}" if found else ""
    return f"{said}.\n\n{markdown(('file', 'mutation', 'found by'), lines)}"


def _file_of(mutation: Mutation) -> str:
    return mutation.file if mutation.package == "lowmem" else f"{mutation.package}/{mutation.file}"


def _found_by(mutation: Mutation, row: dict | None) -> str:
    if row is None:
        return NOT_RUN
    test = LIVES if row["caught_by"] is None else f"`{row['caught_by']}`"
    same = (mutation.old, mutation.new) == (row["old"], row["new"])
    return test if same else f"{test} (the text has been adapted since)"


if __name__ == "__main__":
    put(README, BEGIN, table(row_file.read(RESULTS)))
