"""Makes tables of README.md and tables.md, and pictures: `python -m experiments.pipeline_parallel.table`."""

import sys
from pathlib import Path

from experiments.harness import killed
from experiments.harness import rows as row_file
from experiments.harness.curves import draw_curves
from experiments.harness.options import without_options
from experiments.harness.sections import newest, page
from experiments.harness.tables import Page, learned_table, markdown, put_all
from experiments.pipeline_parallel import curves
from experiments.pipeline_parallel.checker import Span, check, steady_bubble_of
from experiments.pipeline_parallel.picture import draw_timelines
from experiments.pipeline_parallel.schedules import ASYNCHRONOUS, COMPUTED, schedule
from lowmem.units import MIB

FOLDER = Path(__file__).resolve().parent
RESULTS, README, TABLES = FOLDER / "results", FOLDER / "README.md", FOLDER / "tables.md"
ROWS = RESULTS / "rows.jsonl"
BEGIN = "<!-- made by python -m experiments.pipeline_parallel.table -->"
LEARNED_BEGIN = "<!-- learned, made by python -m experiments.pipeline_parallel.table -->"
FEWEST = 8  # micro-batches, beside whose peak others are held


def sections(rows: list[dict]) -> str:
    tables = [
        (
            ("equal",),
            "**Weights after 30 steps of 8 micro-batches**, beside one process that does the same; fp32, CPU",
            _equal,
        ),
        (
            ("bubble",),
            "**Bubble** of 4 ranks, 8 micro-batches a step, actions padded to sleeps of equal length. In steady state: "
            "from the last rank's first backward to the first rank's last forward",
            _bubble,
        ),
        (
            ("memory",),
            "**Peak RAM of each process by the number of micro-batches**, MiB: GPT-2 in 4 stages, one step. Most of it "
            "is there before the step: Python, its libraries, the model and the text",
            _memory,
        ),
        (("killed",), killed.TITLE, killed.table),
    ]
    return page(rows, tables)


def learned(rows: list[dict]) -> str:
    newest = {(row["task"], row["name"]): row for row in rows}
    return learned_table(newest.values(), ("task", "stages", "name"))


def _equal(rows: list[dict]) -> str:
    cases: dict[str, dict[int, dict]] = {}
    for row in rows:
        cases.setdefault(_words(row["options"], "--steps", "--compare", "--stages", "--micro-batches"), {})[
            row["stages"]
        ] = row
    ranks = sorted({row["stages"] for row in rows})
    lines = []
    for words, of_ranks in cases.items():
        most = of_ranks[max(of_ranks)]
        cells = [_difference(of_ranks[count]) if count in of_ranks else "" for count in ranks]
        lines.append([words, *cells, _list(most["peak_in_flight"]), _list(most["weight_versions"])])
    return markdown(
        ("", *(f"{count} ranks" for count in ranks), f"in flight, {ranks[-1]} ranks", "versions of weights"), lines
    )


def _difference(row: dict) -> str:
    if row.get("diverged"):
        return "diverged"
    if row["weights_bitwise_equal"] and row["max_abs_loss_difference"] == 0:
        return "equal bits"
    return f"weights {row['max_abs_weight_difference']:.1e}, losses {row['max_abs_loss_difference']:.1e} apart"


def _bubble(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        planned = _planned(row).spans
        steady = [steady_bubble_of(spans) for spans in (planned, timeline(row))]
        planned_bubble, measured = row["bubble_planned"], row["bubble_measured"]
        lines.append(
            [
                _name(row),
                row["options"].split("--pad ")[1].split()[0],
                f"{planned_bubble:.4f}",
                f"{measured:.4f}",
                f"{measured / planned_bubble - 1:+.1%}",
            ]
            + ["" if share is None else f"{share + 0.0:.4f}" for share in steady]
        )
    return markdown(
        ("", "a forward, s", "planned", "measured", "difference", "planned, steady", "measured, steady"), lines
    )


def _memory(rows: list[dict]) -> str:
    fewest = {_name(row): row["peak_bytes_per_rank"] for row in rows if row["micro_batches"] == FEWEST}
    lines = []
    for row in rows:
        peaks, least = row["peak_bytes_per_rank"], fewest[_name(row)]
        growth = max(peak / of_fewest - 1 for peak, of_fewest in zip(peaks, least, strict=True))
        lines.append(
            [_name(row), f"{row['micro_batches']:,}", f"{max(row['bytes_before_per_rank']) / MIB:,.0f}"]
            + [f"{peak / MIB:,.0f}" for peak in peaks]
            + [f"{growth:+.1%}" if row["micro_batches"] != FEWEST else ""]
        )
    ranks = [f"rank {rank}" for rank in range(rows[0]["stages"])]
    return markdown(("", "micro-batches", "before", *ranks, f"beside {FEWEST}, the worst rank"), lines)


def _name(row: dict) -> str:
    return " ".join(
        [row["schedule"]]
        + [f"{row['chunks']} chunks"] * (row["chunks"] > 1)
        + ["recompute"] * ("--recompute" in row["options"])
    ).replace(" ", ", ", 1)


def _planned(row: dict):
    asynchronous = row["schedule"] in ASYNCHRONOUS
    count = row["micro_batches"] * (row["steps"] if asynchronous else 1)
    actions = schedule(row["schedule"], row["stages"], count, row["chunks"])
    return check(actions, row["stages"] * row["chunks"], count, count if asynchronous else 1)


def timeline(row: dict) -> list[list[Span]]:
    """Returns the times (in seconds) at which each rank computed, from a row that has them."""
    return [
        list(zip(times[::2], times[1::2], [a for a in actions if a.kind in COMPUTED], strict=True))
        for times, actions in zip(row["times"], _planned(row).actions, strict=True)
    ]


def _words(options: str, *left_out: str) -> str:
    words, found = options.split(), []
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if word in left_out or (before in left_out and not word.startswith("--")) or word == "--schedule":
            continue
        found.append(word)
    return " ".join(found)


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def pages() -> list[Page]:
    return [
        (TABLES, BEGIN, sections(row_file.read(ROWS))),
        (README, LEARNED_BEGIN, learned(row_file.read(curves.RESULTS / curves.NAME))),
    ]


def main() -> None:
    put_all(pages())
    rows = row_file.read(ROWS)
    curves.draw(row_file.read(curves.RESULTS / curves.NAME), RESULTS)
    measured = {_name(row): timeline(row) for row in newest(rows, "bubble")}
    draw_timelines(measured, RESULTS / "timelines.png")
    stale = [row for row in newest(rows, "equal") if row["schedule"] in ASYNCHRONOUS and row["stages"] == 4]
    for task in dict.fromkeys(row["task"] for row in stale):
        drawn = {}
        for row in stale:
            drawn |= row["losses"] if row["task"] == task else {}
        draw_curves(drawn, RESULTS / f"curves-{task}.png")


if __name__ == "__main__":
    sys.exit(without_options("experiments.pipeline_parallel.table", __doc__, main))
