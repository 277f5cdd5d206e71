"""Draws predicted peaks: by batch, and by the size of the model."""

from pathlib import Path

from experiments.harness import pictures
from experiments.harness.models import MODELS
from experiments.memory_estimation.estimate import SMALLEST
from experiments.memory_estimation.table import NAMES
from lowmem.units import GIB

PICTURED = ("opt-125m", "gpt2-medium", "bloom-560m", "gpt2-large", "opt-1.3b", "gpt2-xl")


def draw_batches(rows: list[dict], path: Path) -> None:
    """Draws predicted reserved peaks by batch at the shortest sequences, a panel per model; hollow points exceed the
    cap."""
    rows = [r for r in rows if r["kind"] == "predicted" and r["method"] in NAMES and "refused" not in r]
    rows = [row for row in rows if row["seq"] == min(row["seq"] for row in rows)]
    shown = [name for name in PICTURED if any(row["model"] == name for row in rows)] or sorted(
        {row["model"] for row in rows}
    )[: len(PICTURED)]
    if not shown:
        return
    columns = min(3, len(shown))
    figure = pictures.figure(3.6 * columns, 2.9 * -(-len(shown) // columns) + 0.5)
    grid = figure.subplots(-(-len(shown) // columns), columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.remove()
    ticks = sorted({row["batch"] for row in rows if row["model"] in shown})
    for axes, name in zip(grid.flat, shown, strict=False):
        _panel(axes, name, [row for row in rows if row["model"] == name], ticks)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.supylabel("predicted reserved peak (GiB)", fontsize=10)
    pictures.save(figure, path)


def draw_sizes(rows: list[dict], path: Path) -> None:
    """Draws predicted peaks by model size: of plain training with a batch of one, and the smallest caps of lowmem."""
    rows = [row for row in rows if row["kind"] == "predicted" and row.get("seq") and "refused" not in row]
    rows = [row for row in rows if MODELS[row["model"]].parameters]
    if not any(row["method"] == SMALLEST for row in rows):
        return
    seq = max(row["seq"] for row in rows if row["method"] == SMALLEST)
    largest = max(row["batch"] for row in rows if row["method"] == SMALLEST)
    lines = (
        ("plain fp32, batch 1", "fp32", 1, "allocated_peak_bytes", "C1"),
        ("plain bf16 autocast, batch 1", "bf16", 1, "allocated_peak_bytes", "C2"),
        (f"lowmem, batch {largest}, at least", SMALLEST, largest, "smallest_cap_bytes", "C0"),
        ("lowmem, batch 1, at least", SMALLEST, 1, "smallest_cap_bytes", "C9"),
    )
    figure = pictures.figure(6.4, 4.4)
    axes = figure.subplots()
    for label, method, batch, value, colour in lines:
        points = sorted(
            (MODELS[row["model"]].parameters, row[value] / GIB)
            for row in rows
            if (row["method"], row["batch"], row["seq"]) == (method, batch, seq)
        )
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=5, alpha=0.8, label=label)
    for card_gib in (8, 11, 16, 24):
        axes.axhline(card_gib, color="0.8", linewidth=0.8, zorder=0)
        axes.annotate(f"{card_gib} GiB", (1, card_gib), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                      fontsize=8, color="0.5")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g}B")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("parameters, all of them trained")
    axes.set_ylabel("predicted GPU memory (GiB)")
    axes.set_title(f"{seq:,} tokens per sequence, Adam in fp32", fontsize=10)
    pictures.frameless(axes)
    axes.legend(frameon=False, fontsize=9)
    pictures.save(figure, path)


def _panel(axes, name: str, rows: list[dict], ticks: list[int]) -> None:
    for colour, (method, label) in zip(("C1", "C2", "C0"), NAMES.items(), strict=True):
        planned = [r for r in rows if r["method"] == method and "reserved_peak_bytes" in r]  # or nothing fits
        points = sorted((r["batch"], r["reserved_peak_bytes"] / GIB, r["fits"]) for r in planned)
        line = "none" if method == "lowmem" else "-"  # two batches with different layouts: no line between them
        x, y = [p[0] for p in points], [p[1] for p in points]
        axes.plot(x, y, color=colour, linewidth=1.3, linestyle=line, marker="o", markersize=5, label=label)
        for fits, face in ((True, colour), (False, "white")):
            some = [p for p in points if p[2] is fits]
            axes.plot([p[0] for p in some], [p[1] for p in some], "o", color=colour, markerfacecolor=face, markersize=5)
    axes.axhline(rows[0]["limit_bytes"] / GIB, color="C3", linestyle="--", linewidth=1, label="cap")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=rows[0]["limit_bytes"] > 4 * GIB)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel(f"sequences of {rows[0]['seq']} tokens", fontsize=9)
    pictures.frameless(axes)
