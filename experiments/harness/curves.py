"""Runs trainings, appends a row of results for each, and draws their loss curves and accuracies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.harness import pictures
from experiments.harness import rows as row_file
from experiments.harness.countdown import Countdown

POINTS = 30
WIDTH = 9


@dataclass(frozen=True)
class Learned:
    """A training's losses by update, and its final accuracy (0 to 1) on test data."""

    losses: list[float]
    accuracy: float


def learned(program: str, arguments: list[str], path: Path, trainings: Mapping[str, Callable[[], dict]]) -> list[dict]:
    """Runs each training, appends a row for it to the file `path`, and returns these rows. `trainings`: {title:
    function that trains and returns a row's values}, among them `losses` by update and `test_accuracy`."""
    common = {"sources": row_file.sources(program)} | row_file.made_by(program, arguments)
    countdown = Countdown(dict.fromkeys(trainings, 0.0))  # how long each takes is not known
    made = []
    for title, train in trainings.items():
        with countdown.case(title):
            row = train() | common
        row["losses"] = [round(loss, 4) for loss in row["losses"]]
        made.append(row)
        row_file.append(path, row)
        first, last = row["losses"][0], row["losses"][-1]
        print(f"{title}: loss {first:.2f} to {last:.2f}, test accuracy {row['test_accuracy']:.1%}", flush=True)
    return made


def draw_curves(curves: dict[str, list[float]], path: Path) -> None:
    """Draws losses by update, {name: losses}, as PNG. Curves of 2 x POINTS updates or more are running means."""
    figure = pictures.figure(WIDTH, 3.7)
    _losses(figure.subplots(), curves)
    pictures.save(figure, path)


def draw_learned(panels: Mapping[str, Mapping[str, Learned]], path: Path) -> None:
    """Draws trainings as PNG. `panels`: {title: {name of a training: its results}}. Each title gets a row: losses by
    update, and next to them the accuracies."""
    figure = pictures.figure(WIDTH, 2.9 * len(panels))
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
        pictures.frameless(beside)
    pictures.save(figure, path)


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
    pictures.frameless(axes)
