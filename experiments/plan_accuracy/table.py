"""Makes the tables of README.md and promise.md, and the picture: `python -m experiments.plan_accuracy.table`."""

import sys
from pathlib import Path

from experiments.harness import pictures
from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all
from experiments.plan_accuracy.cases import CASES, PROMISED, PROMISED_RAM, Case
from lowmem.planning.ram import PHASES
from lowmem.units import MIB

BEGIN = "<!-- plan accuracy -->"
BEGIN_PROMISE, BEGIN_RAM = "<!-- both ends, GPU -->", "<!-- both ends, RAM -->"
BEGIN_WHOLE_LIFE = "<!-- whole lives -->"
FOLDER = Path(__file__).resolve().parent
README, PROMISES = FOLDER / "README.md", FOLDER / "promise.md"
RESULTS = FOLDER / "results" / "rows.jsonl"
PROMISE, PROMISE_RAM = FOLDER / "results" / "promise.jsonl", FOLDER / "results" / "promise_ram.jsonl"
WHOLE_LIFE = FOLDER / "results" / "whole_life.jsonl"
PICTURE = FOLDER / "results" / "errors.png"
ALLOCATED, RESERVED = "gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes"
BATCH = 64  # of the reported whole lives; smaller batches are trials
MOST_ALLOCATED, MOST_RESERVED = 0.001, 0.005  # a case with a larger error is listed
LARGE_CAP = 3200 * MIB  # for larger caps a plan's margin, 64 MiB, is at most 2%


def committed_rows(path: Path = RESULTS, cases: list[Case] = CASES) -> list[dict]:
    names = {case.name for case in cases}
    return [row for row in row_file.read(path) if row["name"] in names]


def newest(rows: list[dict]) -> list[dict]:
    return sorted({row["name"]: row for row in rows}.values(), key=lambda row: row["name"])


def error(row: dict, peak: str) -> float | None:
    """Returns (predicted - measured) / measured; None if nothing was measured."""
    return row["predicted"][peak] / row["measured"][peak] - 1 if "measured" in row else None


def line(row: dict) -> str:
    if "measured" not in row:
        return f"{row['name']}: exit code {row['exit_code']}, {str(row['error'])[-300:]}"
    difference = row["predicted"][ALLOCATED] - row["measured"][ALLOCATED]
    said = [
        f"{row['name']}: allocated {difference:+,} B",
        f"reserved {error(row, RESERVED):+.3%}",
        f"{row['processor_seconds']:.0f} s",
        *(["CAP EXCEEDED"] if not row["cap_held"] else []),
        *([row["error"]] if row["error"] else []),
    ]
    return ", ".join(said)


def tables(rows: list[dict]) -> str:
    rows = newest(rows)
    measured = [row for row in rows if "measured" in row]
    groups: dict[str, list[dict]] = {}
    for row in measured:
        groups.setdefault(f"scripts, {row['card']}" if row["name"].startswith("train_") else row["card"], []).append(
            row
        )
    lines = [_summary(name, group) for name, group in sorted(groups.items())]
    lines.append(_summary("all", measured))
    header = (
        *("", "cases", "allocated exact", "allocated, worst", "reserved exact", "reserved within 0.5%"),
        *("reserved, most under", "reserved, most over", "cap held"),
    )
    outside = [row for row in rows if "measured" not in row or row["error"] or _is_outside(row)]
    return "\n\n".join(
        [
            markdown(header, lines),
            "![Signed errors](results/errors.png)",
            f"Cases outside of 0.1% of allocated or 0.5% of reserved: {len(outside)}",
            markdown(("case", "allocated, B", "reserved"), map(_cells, outside)) if outside else "",
        ]
    ).strip()


def _summary(name: str, rows: list[dict]) -> list[str]:
    allocated = [error(row, ALLOCATED) for row in rows]
    reserved = [error(row, RESERVED) for row in rows]
    within = sum(abs(value) <= MOST_RESERVED for value in reserved)
    return [
        name, str(len(rows)), _share(allocated.count(0.0), rows), f"{max(allocated, key=abs, default=0):+.4%}",
        _share(reserved.count(0.0), rows), _share(within, rows), f"{min([*reserved, 0.0]):+.2%}",
        f"{max([*reserved, 0.0]):+.2%}", _share(sum(row["cap_held"] for row in rows), rows),
    ]  # fmt: skip


def _share(count: int, rows: list) -> str:
    return f"{count} ({count / len(rows):.0%})" if rows else "0"


def _is_outside(row: dict) -> bool:
    held = row["cap_held"] and abs(error(row, ALLOCATED)) <= MOST_ALLOCATED
    return not held or abs(error(row, RESERVED)) > MOST_RESERVED


def _cells(row: dict) -> list[str]:
    if "measured" not in row:
        return [row["name"], "none", f"exit code {row['exit_code']}: {str(row['error']).splitlines()[-1]}"]
    difference = row["predicted"][ALLOCATED] - row["measured"][ALLOCATED]
    return [row["name"], f"{difference:+,}", f"{error(row, RESERVED):+.2%} {row['error'] or ''}".strip()]


def promise_table(rows: list[dict]) -> str:
    rows = newest(rows)
    cards = {card: [row for row in rows if row["card"] == card] for card in sorted({row["card"] for row in rows})}
    header = (
        *("", "cells", "run under the smallest cap named", "reserved of that cap, most"),
        "largest cap refused, of the one named",
        *("layouts run under the largest refused cap, less margin and 2%", "of these out of memory"),
        *(
            "tensors of the most frugal layout, of what it was given",
            "with the margin left in, out of memory, caps from 3.1 GiB on",
        ),
        "caps below",
    )
    failed = [row for row in rows if not row["ok"]]
    listed = [(row["name"], row.get("why", ""), str(row.get("completed_though_refused", ""))) for row in failed]
    return "\n\n".join(
        [
            f"Measured: {len(rows)} of {len(PROMISED)} cells.",
            markdown(header, [_ends(card, of_card) for card, of_card in (*cards.items(), ("all", rows))]),
        ]
        + ([markdown(("cells that did not hold", "why", "completed though refused"), listed)] if failed else [])
    )


def _ends(card: str, rows: list[dict]) -> list[str]:
    ran = [row for row in rows if "tried" in row]
    shares = [row["least_allocated_bytes"] / row["tried_bytes"] for row in ran]
    tried, completed = sum(row["tried"] for row in ran), sum(len(row["completed_though_refused"]) for row in ran)
    reserved = [row["reserved_bytes"] / row["named_bytes"] for row in ran if row["reserved_bytes"]]
    apart = [row["refused_bytes"] / row["named_bytes"] for row in ran]
    return [
        card, str(len(rows)), str(sum(row["completes"] for row in rows)), f"{max(reserved, default=0):.1%}",
        f"{min(apart, default=0):.1%} or more", str(tried), str(tried - completed),
        f"{min(shares, default=0):.1%} to {max(shares, default=0):.1%}",
        _out_of_memory([row for row in ran if row["named_bytes"] >= LARGE_CAP]),
        _out_of_memory([row for row in ran if row["named_bytes"] < LARGE_CAP]),
    ]  # fmt: skip


def _out_of_memory(rows: list[dict]) -> str:
    return f"{sum(not row['completed_in_the_margin'] for row in rows)} of {len(rows)}"


def promise_ram_table(rows: list[dict]) -> str:
    header = (
        *("cell", "RAM cap named, MiB", "of it states", "measured under it", "not needed", "of the cap"),
        "exit codes: refused, under the cap named",
    )
    measured = f"Measured: {len(newest(rows))} of {len(PROMISED_RAM)} cells."
    return f"{measured}\n\n{markdown(header, [_ram_cells(row) for row in newest(rows)])}"


def _ram_cells(row: dict) -> list[str]:
    codes = ", ".join(str(row[run]["exit_code"]) for run in ("refused", "completed") if run in row)
    if "slack" not in row:
        return [row["name"], "", "", "not measured", "", "", codes]
    sizes = (row["named_bytes"], row["ram_breakdown"]["streamed_states"], row["measured_bytes"])
    unused = row["named_bytes"] - MIB - row["measured_bytes"]
    return [
        row["name"], *(f"{size / MIB:,.0f}" for size in sizes), f"{unused / MIB:,.0f}", f"{row['slack']:.1%}", codes,
    ]  # fmt: skip


def whole_life_table(rows: list[dict]) -> str:
    newest_rows = {row["case"]: row for row in rows if row["batch"] == BATCH}
    rows = sorted(newest_rows.values(), key=lambda row: row["case"])
    # Of the second process: the first one is stopped and writes no report.
    phases = [phase for phase in PHASES if any(phase in (row["ram_phases"] or ()) for row in rows)]
    header = (
        *("", "exit codes", "allocated, MiB", "reserved", "cap", "RAM of the first process"),
        *(f"RAM, {phase}" for phase in phases), "cap",
    )  # fmt: skip
    return markdown(header, [_life_cells(row, phases) for row in rows])


def _life_cells(row: dict, phases: list[str]) -> list[str]:
    def both(predicted: int | None, measured: int | None) -> str:
        return " / ".join("" if size is None else f"{size / MIB:,.0f}" for size in (predicted, measured))

    codes = f"{row['stopped']['exit_code']}, {row['resumed']['exit_code']}"
    if not row["ok"]:
        return [row["case"], codes, " ".join(row["said"] or ["not stopped in time"]), *[""] * (len(phases) + 4)]
    peaks = [both(row["predicted"][peak], row["measured"][peak]) for peak in (ALLOCATED, RESERVED)]
    gpu_cap, ram_cap = (
        "none" if limit is None else f"{limit / MIB:,.0f}"
        for limit in (row["limits"]["gpu_bytes"], row["limits"]["ram_bytes"])
    )
    first = both(row["predicted"]["ram_peak_bytes"], row["stopped"]["resident_peak_bytes"])
    ram = [row["ram_phases"].get(phase, {}) for phase in phases]
    by_phase = [both(sizes.get("predicted"), sizes.get("measured")) for sizes in ram]
    return [row["case"], codes, *peaks, gpu_cap, first, *by_phase, ram_cap]


def draw(rows: list[dict], path: Path) -> None:
    measured = [row for row in newest(rows) if "measured" in row]
    figure = pictures.figure(6.4, 3.6)
    axes = figure.subplots()
    for peak, label, colour in ((RESERVED, "reserved", "C0"), (ALLOCATED, "allocated", "C1")):
        axes.plot(sorted(100 * error(row, peak) for row in measured), ".", label=label, color=colour)
    axes.axhspan(-100 * MOST_RESERVED, 100 * MOST_RESERVED, color="0.92", zorder=0)
    axes.set(xlabel="cases, by error", ylabel="predicted - measured (%)")
    axes.legend(frameon=False)
    pictures.save(figure, path, metadata={"Software": None})


def pages() -> list[Page]:
    return [
        (README, BEGIN, tables(committed_rows())),
        (PROMISES, BEGIN_PROMISE, promise_table(committed_rows(PROMISE, PROMISED))),
        (PROMISES, BEGIN_RAM, promise_ram_table(committed_rows(PROMISE_RAM, PROMISED_RAM))),
        (PROMISES, BEGIN_WHOLE_LIFE, whole_life_table(row_file.read(WHOLE_LIFE))),
    ]


def main() -> None:
    put_all(pages())
    draw(committed_rows(), PICTURE)


if __name__ == "__main__":
    sys.exit(without_options("experiments.plan_accuracy.table", __doc__, main))
