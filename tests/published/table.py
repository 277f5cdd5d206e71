"""Makes README.md's tables from the predictions that `python -m tests.published` leaves.

python -m tests.published.table
"""

import json
import statistics
from pathlib import Path

from experiments.harness.tables import markdown, put
from lowmem.units import GIB
from tests.published.points import Point, peaks, step_times
from tests.published.reserved import reserved

FOLDER = Path(__file__).resolve().parent
PREDICTIONS, README = FOLDER / "predictions.json", FOLDER / "README.md"
BEGIN = "<!-- made by python -m tests.published.table -->"
THIRD = 1 / 3
MOST_APART = 1.35  # predicted from measured, either way; test_published.py names the exceptions


def predictions() -> dict[str, list]:
    """Returns `step_seconds` and `peak_bytes`, one for each of `step_times()` and of `peaks()`, and
    `reserved_bytes`."""
    return json.loads(PREDICTIONS.read_text(encoding="utf-8"))


def compared() -> list[tuple[Point, float]]:
    """Returns every step point, with predicted over measured."""
    pairs = zip(step_times(), predictions()["step_seconds"], strict=True)
    return [(point, predicted / point.seconds) for point, predicted in pairs]


def ratios() -> dict[str, list[float]]:
    """Returns predicted over measured, by group."""
    found: dict[str, list[float]] = {}
    for point, ratio in compared():
        found.setdefault(point.group["name"], []).append(ratio)
    return found


def ratios_of(fitted: bool) -> list[float]:
    """Returns predicted over measured of the points that a constant was fitted to, or of those kept for judging."""
    return [ratio for point, ratio in compared() if point.is_fitted == fitted]


def with_backward(found: dict[str, list[float]]) -> list[float]:
    """Returns the ratios of groups whose steps have a backward pass."""
    forward_only = {point.group["name"] for point in step_times() if point.group["step"] == "forward"}
    return [ratio for name, group in found.items() if name not in forward_only for ratio in group]


def within_a_third(group: list[float]) -> int:
    return sum(abs(ratio - 1) <= THIRD for ratio in group)


def peak_errors() -> dict[str, list[float]]:
    """Returns predicted over measured - 1, by model and attention."""
    found: dict[str, list[float]] = {}
    for peak, predicted in zip(peaks(), predictions()["peak_bytes"], strict=True):
        name = f"{peak.model}, {'eager' if peak.eager else 'fused'} attention"
        found.setdefault(name, []).append(predicted / peak.allocated_bytes - 1)
    return found


def within_a_percent(group: list[float]) -> int:
    return sum(abs(error) <= 0.01 for error in group)


def median_size(group: list[float]) -> float:
    return statistics.median(map(abs, group))


def tables() -> str:
    return "\n\n".join((_step_table(), _peak_table(), _reserved_table()))


def _peak_table() -> str:
    groups = peak_errors()
    groups["all"] = [error for group in groups.values() for error in group]
    lines = [
        (
            *(name, str(len(group)), f"{median_size(group):.2%}"),
            *(f"{min(group):+.2%}", f"{max(group):+.2%}", str(within_a_percent(group))),
        )
        for name, group in groups.items()
    ]
    return markdown(("peaks", "points", "error, median size", "from", "to", "within 1%"), lines)


def reserved_errors() -> list[float]:
    """Returns predicted over measured - 1."""
    predicted = predictions()["reserved_bytes"]
    return [size / GIB / point.gib - 1 for point, size in zip(reserved(), predicted, strict=True)]


def _reserved_table() -> str:
    lines = [
        (point.program, point.precision, f"{point.gib:.4f}", f"{error:+.2%}")
        for point, error in zip(reserved(), reserved_errors(), strict=True)
    ]
    return markdown(("program", "precision", "GiB reserved", "error"), lines)


def _step_table() -> str:
    found = ratios()
    of = {point.group["name"]: point.group for point in step_times()}
    lines = [_line(name, group, of[name].get("fitted", ""), of[name]["source"]) for name, group in found.items()]
    lines.append(_line("all with a backward pass", with_backward(found)))
    lines += [
        _line("all that a constant was fitted to", ratios_of(True)),
        _line("all kept for judging", ratios_of(False)),
    ]
    header = ("steps", "points", "predicted / measured, median", "from", "to", "within a third", "fitted", "source")
    return markdown(header, lines)


def _line(name: str, group: list[float], *described: str) -> tuple[str, ...]:
    numbers = (f"{number:.2f}" for number in (statistics.median(group), min(group), max(group)))
    return (name, str(len(group)), *numbers, str(within_a_third(group)), *(described or ("", "")))


if __name__ == "__main__":
    put(README, BEGIN, tables())
