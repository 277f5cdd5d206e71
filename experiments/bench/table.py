"""Makes the README's tables from rows, between its marks: `python -m experiments.bench.table`."""

import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results" / "rows.jsonl", FOLDER / "README.md"
THREADS = FOLDER / "results" / "threads.jsonl"
BEGIN = "<!-- made by python -m experiments.bench.table -->"
BEGIN_THREADS = "<!-- made by python -m experiments.bench.table, threads -->"
WHAT = {
    "plan large": "plan GPT-2-Large for an rtx3060",
    "plan xl": "plan GPT-2-XL for an rtx3060",
    "plan xl, 6 GiB": "plan GPT-2-XL for an rtx3060 under 6 GiB",
    "plan llama-7b": "plan Llama-7B for an rtx3090",
    "small run": "three steps of the demo's small model, from start to export",
    "run": "two steps of GPT-2 on the CPU, 4 x 1,024 tokens, from start to export",
    "step": "a step of GPT-2 on the CPU / stock forward and backward",
    "sorted": "a step of examples of many lengths, --pack sorted / padded",
    "packed": "the same, --pack packed / padded",
    "load": "load GPT-2 / safetensors' own reading",
    "draw": "random weights of GPT-2 / torch's numbers",
    "save": "a checkpoint of GPT-2 / its bytes in one file",
    "tokenize": "tokens of 200 MB in one text / the tokenizer alone",
}


def tables(rows: list[dict]) -> str:
    """Returns a table of each case's newest row and, if there is any, of its newest row of two trees."""
    newest = {row["case"]: row for row in rows}
    compared = {row["case"]: row for row in rows if "before" in row}
    lines = [_cells(WHAT[case], newest[case]) for case in WHAT if case in newest]
    header = ("", "CPU, s", "wall, s", "plain CPU, s", "CPU / plain", "wall / plain", "per second", "RAM", "commit")
    found = [*[_machine(row) for row in list(newest.values())[-1:]], markdown(header, lines)]
    if compared:
        ratios = [_ratios(WHAT[case], compared[case]) for case in WHAT if case in compared]
        found.append(markdown(("after / before, by turns", "CPU", "wall", "before", "after"), ratios))
    return "\n\n".join(found)


def threads_table(rows: list[dict]) -> str:
    """Returns a step's seconds by number of other processes and spin count. The newest row of a setting counts."""
    found = {(row["busy"], row["spin"]): row["step_seconds"] for row in rows}
    spins = list(dict.fromkeys(spin for _, spin in found))
    lines = [
        [str(busy), *(f"{found[busy, spin]:.3g}" if (busy, spin) in found else "" for spin in spins)]
        for busy in sorted({busy for busy, _ in found})
    ]
    titles = {"lowmem": "chosen by lowmem", "300000": "300000, libgomp's own"}
    return markdown(("other processes", *(titles.get(spin, spin) for spin in spins)), lines)


def _cells(what: str, row: dict) -> list[str]:
    values = row["after"]
    cpu, wall = values["cpu_seconds"], values["wall_seconds"]
    cells = [what, f"{cpu:.3g}", f"{wall:.3g}", "", "", "", "", "", str(row["commit"])]
    if "plain_cpu_seconds" in values:
        ratios = (cpu / values["plain_cpu_seconds"], wall / values["plain_wall_seconds"])
        cells[3:6] = [f"{values['plain_cpu_seconds']:.3g}", *(f"{ratio:.2f}" for ratio in ratios)]
        cells[6] = f"{values['amount'] / wall:.3g} {values['unit']}"
    if "ram_peak_bytes" in values:
        cells[7] = f"{values['ram_peak_bytes'] / 2**20:.0f} MiB"
    return cells


def _ratios(what: str, row: dict) -> list[str]:
    after, before = row["after"], row["before"]
    ratios = (after[key] / before[key] for key in ("cpu_seconds", "wall_seconds"))
    return [what, *(f"{ratio:.2f}" for ratio in ratios), str(row["before_commit"]), str(row["commit"])]


def _machine(row: dict) -> str:
    versions = row["versions"]
    return (
        f"On {row['machine']}, one thread each but for tokenizing; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, "
        f"Python {versions['python']}; processes per case and tree: {row['rounds']}."
    )


def pages() -> list[Page]:
    return [
        (README, BEGIN, tables(row_file.read(RESULTS))),
        (README, BEGIN_THREADS, threads_table(row_file.read(THREADS))),
    ]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.bench.table", __doc__, main))
