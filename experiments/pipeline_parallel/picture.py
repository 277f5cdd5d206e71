"""Draws when each rank computes which action."""

from pathlib import Path

from experiments.harness import pictures
from experiments.pipeline_parallel.checker import Span, bubble_of
from experiments.pipeline_parallel.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

COLOURS = {FORWARD: "C0", BACKWARD: "C1", INPUT_GRADIENT: "C3", WEIGHT_GRADIENT: "C2"}
SHOWN = 600  # spans of a rank; more are no picture
NUMBERED = 80


def draw_timelines(timelines: dict[str, list[list[Span]]], path: Path) -> None:
    """Draws a panel for each timeline, with a row for each rank, and a bar for each action. Every other chunk is
    paler."""
    from matplotlib.patches import Patch

    figure = pictures.figure(9, 2.2 * len(timelines) + 0.5)
    panels = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
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
        pictures.frameless(axes)
    shown = {action.kind for spans in timelines.values() for of_rank in spans for _, _, action in of_rank}
    figure.legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in shown],
                  loc="outside lower center", ncols=4, frameon=False, fontsize=8)  # fmt: skip
    pictures.save(figure, path)
