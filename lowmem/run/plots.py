"""Draws pictures of a training run: its loss, and its memory next to the prediction. Imports matplotlib only to draw.

Uses the default style and no pyplot, so it needs no window system, and ignores MPLBACKEND and a matplotlibrc.
"""

import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from lowmem.errors import first_line
from lowmem.run.figures import MEDIAN_OVER, evaluations, memory_kinds, smoothed
from lowmem.units import GIB, format_size

_MARKED_UP_TO = 20  # rows; fewer are also drawn as dots, because a single row makes no line
_VISIBLE = 0.005  # Parts below this share of a bar are drawn as one, "others".
_SAME_COLOURS = (  # of memory that most plans have, so that pictures can be compared
    *("working_weights", "gradients", "live_blocks", "boundaries", "streamed_states", "process"),
    *("resident_states", "boundary_gradients", "head", "staging_ring", "streamed_weights"),
)


def draw(path: Path, picture: Callable[..., None], *given: object) -> str | None:
    """Calls `picture(*given)`, which draws the file `path`. Returns None, or a sentence on why it could not be
    drawn."""
    try:
        _import_matplotlib()
        from matplotlib import style

        with warnings.catch_warnings(), style.context("default"):
            warnings.simplefilter("ignore")
            picture(*given)
    except ImportError:
        return f"matplotlib is not installed, so {path.name} was not drawn"
    except Exception as error:  # of a package, its fonts, its settings, the disk
        return f"{path.name} could not be drawn ({first_line(error)})"
    return None


def _import_matplotlib() -> None:
    if "matplotlib" in sys.modules:
        return
    # Notebooks set MPLBACKEND for programs that they start. The import fails if matplotlib does not know the backend.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend  # the caller of `lowmem.train` may show pictures


def draw_loss(rows: list[dict], path: Path, eval_first: float | None = None) -> None:
    """Draws training and held-out losses, as a PNG. `rows`: rows of metrics.jsonl. `eval_first`: held-out loss before
    the first step, or None. A loss that is not finite is marked on the axis."""
    figure, axes = _figure(8, 4.5)
    smooth = smoothed(rows)
    broken = [row["step"] for row in rows if not math.isfinite(row["loss"])]
    axes.plot(
        [row["step"] for row in rows], [row["loss"] if math.isfinite(row["loss"]) else math.nan for row in rows],
        color="C0", alpha=0.3 if smooth else 1.0, linewidth=1, marker="o" if len(rows) < _MARKED_UP_TO else None,
        markersize=4, label="training",
    )  # fmt: skip
    if smooth:
        label = f"training, median of {MEDIAN_OVER} steps"
        axes.plot(list(smooth), list(smooth.values()), color="C0", linewidth=1.5, label=label)
    if broken:
        axes.plot(
            broken, [0.02] * len(broken), transform=axes.get_xaxis_transform(),  # steps, share of the height
            color="C3", marker="x", linestyle="none", label=f"loss not finite ({len(broken)} of {len(rows)} steps)",
        )  # fmt: skip
    if held_out := evaluations(rows, eval_first):
        style = {"color": "C1", "marker": "o", "markersize": 5, "linewidth": 1, "linestyle": ":", "label": "held-out"}
        axes.plot(*zip(*held_out, strict=True), **style)
    if len(broken) == len(rows) and not held_out:
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", color="0.4")
        axes.set_yticks([])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def draw_memory(
    plan: dict, measured: dict | None, path: Path, timeline: Sequence[tuple[float, int, int]] = (),
    ram_phases: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Draws a PNG with three parts: GPU memory over a step (if there is a `timeline`), peaks of memory, and RAM in each
    phase of a run. `plan`: content of plan.json. `measured`: {name: peak in bytes}, None before training. `timeline`:
    predicted (second of a step, allocated bytes, reserved bytes). `ram_phases`: {phase: measured bytes}."""
    kinds, limits = memory_kinds(plan, measured), plan["limits"]
    heights = (*([2.6] if timeline else []), 1.8 + 1.3 * len(kinds), 2.0)
    figure, *panels = _figure(9, sum(heights), rows=heights)
    if timeline:
        _draw_timeline(panels[0], timeline, (measured or {}).get("gpu_reserved_peak_bytes"), limits["gpu_bytes"])
    axes = panels[-2]
    _draw_peaks(axes, kinds)
    _draw_phases(panels[-1], plan["ram_phases"], ram_phases or {}, limits["ram_bytes"])
    handles, names = axes.get_legend_handles_labels()
    names = [name.replace("_", " ") for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _draw_peaks(axes, kinds: list[tuple[str, dict[str, int], int | None, int | None]]) -> None:
    kinds = [(kind, _visible(parts), *figures) for kind, parts, *figures in kinds]
    names = list(dict.fromkeys([*_SAME_COLOURS, *(name for _, parts, *_ in kinds for name in parts)]))
    colours = dict(zip(names, _colours(len(names)), strict=True))
    annotate = partial(axes.annotate, textcoords="offset points")
    labels: list[str] = []
    for kind, parts, peak, cap in kinds:
        left = 0
        for name, size in parts.items():
            drawn_before = name in axes.get_legend_handles_labels()[1]
            axes.barh(
                len(labels), size / GIB, left=left / GIB, color=colours[name], height=0.6, edgecolor="white",
                linewidth=0.5, label=None if drawn_before else name,
            )  # fmt: skip
            left += size
        rows = [(f"{kind} predicted", left)]
        if peak is not None:
            axes.barh(len(labels) + 1, peak / GIB, color="0.35", height=0.6)
            rows.append((f"{kind} measured", peak))
        for row, (_, size) in enumerate(rows, start=len(labels)):
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # legible across the cap's line
            annotate(format_size(size), (size / GIB, row), (4, 0), va="center", fontsize=8, bbox=box)
        if cap is not None:
            top, bottom = len(labels) - 0.4, len(labels) + len(rows) - 0.6
            axes.plot([cap / GIB] * 2, [top, bottom], color="C3", linestyle="--", linewidth=1.2)
            where = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "C3"}
            annotate(f"cap {format_size(cap)}", (cap / GIB, top), (0, 2), **where)
        labels += [label for label, _ in rows]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * 1.06)  # room for the sizes to the right of the bars
    axes.set_xlabel("GiB (2**30 bytes), peak of the run")


def _visible(parts: dict[str, int]) -> dict[str, int]:
    least = _VISIBLE * sum(parts.values())
    shown = {name: size for name, size in parts.items() if size >= max(least, 1)}
    others = sum(parts.values()) - sum(shown.values())
    return shown | ({"others": others} if others else {})


def _draw_phases(axes, predicted: dict[str, int], measured: dict[str, int], cap_bytes: int | None) -> None:
    names = list(dict.fromkeys([*predicted, *measured]))
    side = 0.2 if measured else 0.0
    for phases, label, colour, place in ((predicted, "predicted", "C0", -side), (measured, "measured", "0.35", side)):
        known = [(number + place, phases[name] / GIB) for number, name in enumerate(names) if name in phases]
        if known:
            bars = axes.bar(*zip(*known, strict=True), 0.38, color=colour, label=label)
            axes.bar_label(bars, fmt="%.2f", padding=1, fontsize=7)
    if cap_bytes is not None:
        axes.axhline(cap_bytes / GIB, color="C3", linestyle="--", linewidth=1.2, label="cap")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("RAM (GiB)")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.1)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_timeline(
    axes, timeline: Sequence[tuple[float, int, int]], measured_bytes: int | None, cap_bytes: int | None
) -> None:
    seconds = [second for second, _, _ in timeline]
    for place, label, colour in ((2, "reserved (predicted)", "C1"), (1, "allocated (predicted)", "C0")):
        values = [point[place] / GIB for point in timeline]
        axes.step(seconds, values, where="post", color=colour, linewidth=1, label=label)
    lines = (measured_bytes, "reserved, peak (measured)", ":", "0.35"), (cap_bytes, "cap", "--", "C3")
    for size, label, style, colour in lines:
        if size is not None:
            axes.axhline(size / GIB, color=colour, linestyle=style, linewidth=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of one step (predicted)")
    axes.set_ylabel("GPU memory (GiB)")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _figure(width: float, height: float, rows: tuple[float, ...] = (1,)):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, *panels


def _colours(count: int) -> list:
    import matplotlib

    pairs = matplotlib.colormaps["tab20"].colors  # ten hues, each strong and pale
    hues = pairs[:14] + pairs[16:]  # without grey, which marks measured values
    if count <= len(hues):
        return list((hues[::2] + hues[1::2])[:count])
    return [matplotlib.colormaps["turbo"](index / count) for index in range(count)]
