"""The README's tables and the picture, made from rows: `python -m experiments.plan_accuracy.table`."""

import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from experiments.plan_accuracy.cases import CASES

BEGIN = "<!-- plan accuracy -->"
FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
RESULTS = FOLDER / "results" / "rows.jsonl"
PICTURE = FOLDER / "results" / "errors.png"
ALLOCATED, RESERVED = "gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes"
MOST_ALLOCATED, MOST_RESERVED = 0.001, 0.005  # errors from which a case is listed


def committed_rows() -> list[dict]:
    """Those of cases that there still are."""
    names = {case.name for case in CASES}
    return [row for row in row_file.read(RESULTS) if row["name"] in names]


def newest(rows: list[dict]) -> list[dict]:
    """The last row of each case, in the order of names."""
    return sorted({row["name"]: row for row in rows}.values(), key=lambda row: row["name"])


def error(row: dict, peak: str) -> float | None:
    """(predicted - measured) / measured; None where nothing was measured."""
    return row["predicted"][peak] / row["measured"][peak] - 1 if "measured" in row else None


def line(row: dict) -> str:
    """A row for people."""
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
    """By card and by script: how many cases, how many exact, the worst; then every case that is not within."""
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


def draw(rows: list[dict], path: Path) -> None:
    """Signed errors of both peaks, sorted, in percent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in newest(rows) if "measured" in row]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for peak, label, colour in ((RESERVED, "reserved", "C0"), (ALLOCATED, "allocated", "C1")):
        axes.plot(sorted(100 * error(row, peak) for row in measured), ".", label=label, color=colour)
    axes.axhspan(-100 * MOST_RESERVED, 100 * MOST_RESERVED, color="0.92", zorder=0)
    axes.set(xlabel="cases, by error", ylabel="predicted - measured (%)")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> int:
    rows = committed_rows()
    put(README, BEGIN, tables(rows))
    draw(rows, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
