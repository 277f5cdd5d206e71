"""Makes README.md's tables from the rows in results/mutations.jsonl.

    python -m tests.stream_order.mutations --jobs 2 --out tests/stream_order/results/mutations.jsonl
    python -m tests.stream_order.table

The last row of a method and a mutation counts. A test fails if README.md and the rows disagree.
"""

from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from tests.stream_order.check import SANITIZER, WAYS
from tests.stream_order.mutation_list import MUTATIONS, Mutation
from tests.stream_order.mutations import is_found

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results" / "mutations.jsonl", FOLDER / "README.md"
BEGIN = "<!-- made by python -m tests.stream_order.table -->"
METHODS = {  # by a row's `method`: its columns, by the keys of its `found`
    "checker": {"reading waits": "checker, `.item()` waits", "reading does not wait": "checker, it does not"},
    "sanitizer": {SANITIZER: "PyTorch's sanitizer on the stand-in"},
    "orders": {"orders": "adversarial orders on the stand-in"},
}
NOT_RUN = "not run yet"
assert METHODS["checker"].keys() == WAYS.keys()


def tables(rows: list[dict]) -> str:
    """Returns one line for each method, and one for each mutation."""
    last = {(row["method"], row["mutation"]): row for row in rows}
    programs, columns = [], []
    for method, ways in METHODS.items():
        found = [last[method, mutation.name] for mutation in MUTATIONS if (method, mutation.name) in last]
        programs.append(_summary(method, found))
        columns += [(method, way, title) for way, title in ways.items()]
    lines = []
    for mutation in MUTATIONS:
        of_mutation = {method: last.get((method, mutation.name)) for method in METHODS}
        cells = [_cell(of_mutation[method], way) for method, way, _ in columns]
        checked = of_mutation["checker"]
        lines.append([mutation.file, _named(mutation, checked), *cells, _first_report(mutation, checked)])
    header = ["file", "mutation", *(title for *_, title in columns), "the first race"]
    return f"{markdown(['method', 'command', 'result'], programs)}\n\n{markdown(header, lines)}"


def _summary(method: str, found: list[dict]) -> list[str]:
    if not found:
        return [method, "", NOT_RUN]
    equivalent = [row for row in found if row["equivalent"]]
    others = [row for row in found if not row["equivalent"]]
    said = f"{sum(map(is_found, others))} of {len(others)} found; {len(equivalent)} equivalent, "
    said += f"{sum(map(is_found, equivalent))} of them found"
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in found))
    machine = f"{sum(row['seconds'] for row in found):.0f} s of processes on {found[-1]['machine']}, commit {commits}"
    return [method, f"`{found[-1]['command']}`", f"{said}; {machine}"]


def _named(mutation: Mutation, row: dict | None) -> str:
    same = row is None or (mutation.old, mutation.new) == (row["old"], row["new"])
    return mutation.name if same else f"{mutation.name} (the text has been adapted since)"


def _cell(row: dict | None, way: str) -> str:
    if row is None:
        return NOT_RUN
    if way in row["found"]:
        return row["found"][way]["arrangement"]
    if row["equivalent"]:
        return "equivalent"
    return "no" if is_found(row) or row["method"] != "checker" else "**not found**"


def _first_report(mutation: Mutation, row: dict | None) -> str:
    if mutation.equivalent:
        return f"none is possible: {mutation.equivalent}"
    if row is None:
        return NOT_RUN
    parts = [race["report"] for race in list(row["found"].values())[:1]]
    parts += ["and other bits than the plain run's"] if row["wrong"] else []
    return "; ".join([*parts, *(row["failed"] or [])[1:]])


if __name__ == "__main__":
    put(README, BEGIN, tables(row_file.read(RESULTS)))
