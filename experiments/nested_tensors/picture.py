"""Draws memory over time, and the distribution of outputs."""

from pathlib import Path

from experiments.harness import pictures
from lowmem.units import MIB

LOGIT_EDGES = [place / 10 for place in range(-40, 41)]
DISTANCE_EDGES = [place / 4 for place in range(-36, 1)]  # powers of ten
ONE = "one sample at a time"


def draw_memory(rows: list[dict], path: Path) -> None:
    """Draws a panel for each model, a line for each mode: MiB above weights and gradients by second. `rows`: of one set
    of samples; the newest count."""
    newest = {(row["model"], row["mode"]): row for row in rows}
    models = list(dict.fromkeys(model for model, _ in newest))
    figure, panels = _panels(1, len(models))
    for axes, model in zip(panels[0], models, strict=True):
        for place, row in enumerate(row for key, row in newest.items() if key[0] == model):
            seconds, used = zip(*row["memory"], strict=True)
            peak = f"{row['mode']}, peak {row['peak_bytes'] / MIB:,.0f} MiB"
            axes.plot(seconds, [size / MIB for size in used], color=f"C{place}", linewidth=1.2, label=peak)
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("MiB above weights and gradients")
    _save(figure, f"{rows[0]['num_samples']} {rows[0]['data']}, batches of {rows[0]['batch_size']}", path)


def draw_outputs(rows: list[dict], path: Path) -> None:
    """Draws, for each model and mode, the distributions of logits, and of tokens' relative distances from one sample at
    a time."""
    models, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "mode"))
    figure, panels = _panels(2, len(models))
    for column, model in enumerate(models):
        of_modes = {mode: [row for row in rows if (row["model"], row["mode"]) == (model, mode)] for mode in modes}
        of_modes = {mode: found for mode, found in of_modes.items() if found}
        logits, distances = panels[0][column], panels[1][column]
        expected = _sum(next(iter(of_modes.values())), "expected")
        logits.stairs(expected, LOGIT_EDGES, fill=True, color="0.85", label=ONE)
        for place, (mode, found) in enumerate(of_modes.items()):
            # Curves that are equal lie on each other: the later ones are thinner, so that all are seen.
            look = {"color": f"C{place}", "label": mode, "linewidth": 3.2 / (1 + place)}
            logits.stairs(_sum(found, "logits"), LOGIT_EDGES, **look)
            distances.stairs(_sum(found, "distances"), DISTANCE_EDGES, **look)
        logits.set_title(model, fontsize=10)
        logits.set_xlabel("logit")
        ticks = range(int(DISTANCE_EDGES[0]), 1, 3)
        names = [f"1e{power}" if power else "1" for power in ticks]
        distances.set_xticks(list(ticks), [f"{names[0]} or less", *names[1:]])
        distances.set_xlabel("relative distance of a token's logits")
    panels[0][0].set_ylabel("logits")
    panels[1][0].set_ylabel("tokens")
    panels[0][0].legend(frameon=False, fontsize=8)
    panels[1][0].legend(frameon=False, fontsize=8)
    lists = len({row["lengths"] for row in rows})
    _save(figure, f"outputs of random weights, {lists} {'batch' if lists == 1 else 'batches'} of random tokens", path)


def _sum(rows: list[dict], name: str) -> list[int]:
    return [sum(counts) for counts in zip(*(row["distribution"][name] for row in rows), strict=True)]


def _panels(down: int, across: int):
    figure = pictures.figure(1 + 4 * across, 0.6 + 2.7 * down)
    panels = figure.subplots(down, across, squeeze=False)
    for axes in panels.flat:
        pictures.frameless(axes)
    return figure, panels


def _save(figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=10)
    pictures.save(figure, path)
