"""The README's tables, made from rows: `python -m experiments.pipeline_parallel.table` puts them between its marks."""

from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from lowmem.units import MIB

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
BEGIN = "<!-- made by python -m experiments.pipeline_parallel.table -->"


def sections(rows: list[dict]) -> str:
    """Of each section's command lines the newest row."""
    of: dict[str, dict[str, dict]] = {}
    for row in rows:
        of.setdefault(row["section"], {})[row["options"]] = row
    titles = {
        "equal": ("**Weights after 30 steps**, beside one process; fp32, CPU", _equal),
        "bubble": ("**Bubble** of 4 ranks and 8 micro-batches a step; actions padded to equal sleeps", _bubble),
        "memory": (
            "**Peak of a process by the number of micro-batches**, GPT-2 in 4 stages: MiB of RAM, most of which Python "
            "and its libraries take",
            _memory,
        ),
    }
    parts = []
    for section, (title, table) in titles.items():
        if section in of:
            parts += [title, table(list(of[section].values()))]
    if rows:
        last = rows[-1]
        parts.append(f"On {last['machine']}; torch {last['versions']['torch']}, Python {last['versions']['python']}.")
    return "\n\n".join(parts)


def _equal(rows: list[dict]) -> str:
    lines = [
        [
            _words(row["options"], "--steps", "--compare"),
            "yes" if row["weights_bitwise_equal"] else f"no: {row['max_abs_weight_difference']:.1e}",
            f"{row['max_abs_loss_difference']:g}",
            _list(row["peak_in_flight"]),
            _list(row["weight_versions"]),
        ]
        for row in rows
    ]
    return markdown(("", "bit for bit equal", "losses differ by", "in flight", "versions of weights"), lines)


def _bubble(rows: list[dict]) -> str:
    lines = [
        [
            row["schedule"] + (f", {row['chunks']} chunks" if row["chunks"] > 1 else ""),
            f"{row['bubble_planned']:.4f}",
            f"{row['bubble_measured']:.4f}",
            f"{row['bubble_measured'] / row['bubble_planned'] - 1:+.1%}",
        ]
        for row in rows
    ]
    return markdown(("", "planned", "measured", "difference"), lines)


def _memory(rows: list[dict]) -> str:
    left_out = ("--stages", "--steps", "--task", "--batch", "--micro-batches")
    lines = [
        [_words(row["options"], *left_out), str(row["micro_batches"])]
        + [f"{peak / MIB:,.0f}" for peak in row["peak_bytes_per_rank"]]
        for row in rows
    ]
    return markdown(("", "micro-batches", *(f"rank {rank}" for rank in range(rows[0]["stages"]))), lines)


def _words(options: str, *left_out: str) -> str:
    """Options without these and their values, and without the name of the schedule's option."""
    words, found = options.split(), []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if word in left_out or (before in left_out and not word.startswith("--")) or word == "--schedule":
            continue
        found.append(word)
    return " ".join(found)


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    put(README, BEGIN, sections(row_file.read(RESULTS / "rows.jsonl")))
