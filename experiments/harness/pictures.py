"""Draws PNG pictures without a display. Matplotlib is imported only for drawing."""

from pathlib import Path


def figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(found)
    return found


def frameless(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def save(figure, path: Path, **how) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, **how)
