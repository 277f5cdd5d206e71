"""Learning curves in one picture. Matplotlib is imported only for drawing."""

from pathlib import Path

POINTS = 30


def draw_curves(curves: dict[str, list[float]], path: Path) -> None:
    """Draws losses by update, by name, as PNG. Curves of more than twice POINTS are running means."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
