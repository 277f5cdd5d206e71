"""Pictures of a run: when each rank computes what, and how the loss falls. Matplotlib is imported where it is used."""

from pathlib import Path

from experiments.pipeline_parallel.checker import Span, bubble_of
from experiments.pipeline_parallel.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

COLOURS = {FORWARD: "C0", BACKWARD: "C1", INPUT_GRADIENT: "C3", WEIGHT_GRADIENT: "C2"}
SHOWN = 600  # spans of a rank; more are no picture
NUMBERED = 80
POINTS = 30


def draw_timelines(timelines: dict[str, list[list[Span]]], path: Path) -> None:
    """A panel for each: a row for each rank, a bar for each action with the number of its micro-batch. Every other
    chunk of a rank is paler."""
    figure, panels = _panels(len(timelines))
    ranks = len(next(iter(timelines.values())))
    for axes, (name, spans) in zip(panels, timelines.items(), strict=True):
        start = min(begin for of_rank in spans for begin, _, _ in of_rank)
        end = max(end for of_rank in spans for _, end, _ in of_rank[:SHOWN])
        for rank, of_rank in enumerate(spans):
            for begin, ends, action in of_rank[:SHOWN]:
                alpha = 1.0 - 0.45 * (action.stage // ranks % 2)
                axes.barh(rank, ends - begin, left=begin - start, height=0.86, color=COLOURS[action.kind],
                          alpha=alpha, edgecolor="white", linewidth=0.5)  # fmt: skip
                if len(of_rank) <= NUMBERED and (ends - begin) / (end - start) > 0.009:
                    axes.text((begin + ends) / 2 - start, rank, str(action.micro_batch), ha="center", va="center",
                              fontsize=6, color="white", clip_on=True)  # fmt: skip
        axes.set_xlim(0, end - start)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.invert_yaxis()
        axes.set_title(f"{name}: bubble {bubble_of(spans):.1%}", fontsize=9, loc="left")
        axes.set_xlabel("unit times" if name == "planned" else "seconds", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    shown = {action.kind for spans in timelines.values() for of_rank in spans for _, _, action in of_rank}
    from matplotlib.patches import Patch

    figure.legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in shown],
                  loc="outside lower center", ncols=4, frameon=False, fontsize=8)  # fmt: skip
    _save(figure, path)


def draw_curves(curves: dict[str, list[float]], path: Path) -> None:
    """The loss by update, which an asynchronous schedule makes of each micro-batch. Many are drawn as running means."""
    figure, (axes,) = _panels(1, height=3.2)
    for number, (name, losses) in enumerate(curves.items()):
        over = max(1, len(losses) // POINTS)
        means = [sum(losses[end - over : end]) / over for end in range(over, len(losses) + 1)]
        axes.plot(range(over, len(losses) + 1), means, color=f"C{number}", linewidth=3.0 / (1 + number), label=name)
    axes.set_xlabel("update")
    axes.set_ylabel("loss" if over == 1 else f"loss, mean of {over} updates")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _panels(count: int, height: float = 2.2):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height * count + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(count, 1, squeeze=False)[:, 0]


def _save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
