"""Learning curves in one picture. Matplotlib is imported only for drawing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

POINTS = 30


@dataclass(frozen=True)
class Learned:
    """A training's losses by update, and afterwards the share of test samples, or tokens, that it predicts."""

    losses: list[float]
    accuracy: float


def draw_curves(curves: dict[str, list[float]], path: Path) -> None:
    """Draws losses by update, by name, as PNG. Curves of more than twice POINTS are running means."""
    figure = _figure(3.7)
    _losses(figure.subplots(), curves)
    _save(figure, path)


def draw_learned(panels: Mapping[str, Mapping[str, Learned]], path: Path) -> None:
    """Draws trainings by name, as PNG: for each title a row with their losses by update, and the accuracies beside."""
    figure = _figure(2.9 * len(panels))
    rows = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(3, 1))
    for (axes, beside), (title, trainings) in zip(rows, panels.items(), strict=True):
        _losses(axes, {name: one.losses for name, one in trainings.items()})
        axes.set_title(title, fontsize=10, loc="left")
        names, accuracies = list(trainings), [one.accuracy for one in trainings.values()]
        beside.barh(names, accuracies, color=[f"C{place}" for place in range(len(names))], height=0.6)
        for place, accuracy in enumerate(accuracies):
            beside.annotate(f"{accuracy:.1%}", (accuracy, place), (3, 0), textcoords="offset points", va="center",
                            fontsize=8)  # fmt: skip
        beside.invert_yaxis()
        beside.tick_params(axis="y", labelsize=8)
        beside.set_xlim(0, 1.25 * max(*accuracies, 0.01))
        beside.set_xlabel("test accuracy")
        beside.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _losses(axes, curves: Mapping[str, list[float]]) -> None:
    over = 1
    for place, (name, losses) in enumerate(curves.items()):
        over = max(1, len(losses) // POINTS)
        means = [sum(losses[end - over : end]) / over for end in range(over, len(losses) + 1)]
        # Curves that are equal lie on each other: the later ones are thinner, so that all are seen.
        axes.plot(range(over, len(losses) + 1), means, color=f"C{place}", linewidth=4.0 / (1 + place), label=name)
    axes.set_xlabel("update")
    axes.set_ylabel("loss" if over == 1 else f"loss, mean of {over} updates")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
