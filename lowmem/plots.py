"""Pictures of a run: its loss, and its memory beside what was predicted. Needs matplotlib, imported when drawing.

The figures are made without pyplot, so no window system is asked for and nothing stays open behind a long run.
"""

import math
import statistics
from pathlib import Path

from lowmem.units import GIB, format_size

_MEDIAN_OVER = 25  # steps; drawn when there are four times as many
_MARKED_UP_TO = 20  # rows: fewer are dots on a line, for one row alone would be no line


def draw_loss(rows: list[dict], path: Path, eval_first: float | None = None) -> None:
    """Training loss per step and held-out loss where there was one, as a PNG. `rows`: of metrics.jsonl; `eval_first`:
    held-out loss before the first step. A step whose loss is not finite breaks the line and is marked on the axis.
    ImportError without matplotlib."""
    figure, axes = _figure(8, 4.5)
    finite = [row for row in rows if math.isfinite(row["loss"])]
    long = len(finite) >= 4 * _MEDIAN_OVER
    axes.plot(
        [row["step"] for row in rows],
        [row["loss"] if math.isfinite(row["loss"]) else math.nan for row in rows],
        color="C0",
        alpha=0.3 if long else 1.0,
        linewidth=1,
        marker="o" if len(rows) < _MARKED_UP_TO else None,
        markersize=4,
        label="training",
    )
    if long:
        half, losses = _MEDIAN_OVER // 2, [row["loss"] for row in finite]
        smooth = [statistics.median(losses[max(i - half, 0) : i + half + 1]) for i in range(len(losses))]
        axes.plot(
            [row["step"] for row in finite],
            smooth,
            color="C0",
            linewidth=1.5,
            label=f"training, median of {_MEDIAN_OVER} steps",
        )
    broken = [row["step"] for row in rows if not math.isfinite(row["loss"])]
    if broken:
        axes.plot(
            broken,
            [0.02] * len(broken),
            transform=axes.get_xaxis_transform(),  # steps across, share of the height upwards
            color="C3",
            marker="x",
            linestyle="none",
            label=f"loss not finite ({len(broken)} of {len(rows)} steps)",
        )
    held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    if eval_first is not None:
        held_out.insert(0, (0, eval_first))
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            color="C1",
            marker="o",
            markersize=5,
            linewidth=1,
            linestyle=":",
            label="held-out",
        )
    if not finite and not held_out:
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", color="0.4")
        axes.set_yticks([])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_memory(plan: dict, measured: dict, path: Path) -> None:
    """Predicted bytes by name at the peak, stacked, beside the measured peak and the cap, for GPU and RAM, as a PNG.
    `plan`: plan.json's content; `measured`: budget.Peaks as a dict. ImportError without matplotlib."""
    kinds = [("RAM", plan["ram_breakdown"], measured["ram_peak_bytes"], plan["limits"]["ram_bytes"])]
    if measured["gpu_reserved_peak_bytes"] is not None:
        kinds.insert(0, ("GPU", plan["breakdown"], measured["gpu_reserved_peak_bytes"], plan["limits"]["gpu_bytes"]))
    names = list(dict.fromkeys(name for _, parts, _, _ in kinds for name, size in parts.items() if size))
    figure, axes = _figure(9, 1.8 + 1.3 * len(kinds))
    colours = dict(zip(names, _colours(len(names)), strict=True))
    labels: list[str] = []
    for kind, parts, peak, cap in kinds:
        left = 0
        for name, size in parts.items():
            if size:
                drawn_before = name in axes.get_legend_handles_labels()[1]
                axes.barh(
                    len(labels), size / GIB, left=left / GIB, color=colours[name], height=0.6, edgecolor="white",
                    linewidth=0.5, label=None if drawn_before else name,
                )  # fmt: skip
                left += size
        axes.barh(len(labels) + 1, peak / GIB, color="0.35", height=0.6)
        for row, size in ((len(labels), left), (len(labels) + 1, peak)):
            axes.annotate(
                format_size(size), (size / GIB, row), (4, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # legible where it meets the cap's line
            )  # fmt: skip
        if cap is not None:
            top, bottom = len(labels) - 0.4, len(labels) + 1.4
            axes.plot([cap / GIB] * 2, [top, bottom], color="C3", linestyle="--", linewidth=1.2)
            axes.annotate(
                f"cap {format_size(cap)}", (cap / GIB, top), (0, 2), textcoords="offset points", ha="center",
                va="bottom", fontsize=8, color="C3",
            )  # fmt: skip
        labels += [f"{kind} predicted", f"{kind} measured"]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * 1.06)  # room for the sizes behind the bars
    axes.set_xlabel("GiB (2**30 bytes), peak of the run")
    handles, names = axes.get_legend_handles_labels()
    names = [name.replace("_", " ") for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float):
    """A figure of one pair of axes, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _colours(count: int) -> list:
    """As many colours as names, no two alike: 18 that are told apart at a glance, then steps of a rainbow. No grey,
    which is what was measured."""
    import matplotlib

    pairs = matplotlib.colormaps["tab20"].colors  # a strong and a pale one of each of ten hues, the eighth grey
    hues = pairs[:14] + pairs[16:]
    if count <= len(hues):
        return list((hues[::2] + hues[1::2])[:count])
    return [matplotlib.colormaps["turbo"](index / count) for index in range(count)]
