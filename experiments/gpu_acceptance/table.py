"""Makes tables and the picture of speed from rows: measurements on a GPU, beside plans.

Of several rows of one job and card, the last good one counts.
"""

import itertools
import statistics
from collections.abc import Iterable
from pathlib import Path

from experiments.gpu_acceptance import predicted
from experiments.harness import pictures
from experiments.harness import rows as row_file
from experiments.harness.tables import markdown
from lowmem.units import GIB

NOT_MEASURED = "not measured yet"
TRAININGS = ("large exact", "large 8-bit", "large no clip", "xl exact", "xl 8-bit", "xl no clip")
BARS = {"large exact": (1.0, 0.95), "xl exact": (1.0, 0.80), "xl 8-bit": (1.0, 0.95)}  # eager, compiled: to be reached
RESULTS = Path(__file__).parent / "results"


def committed_rows() -> tuple[list[dict], list[dict]]:
    """Returns measured rows, of real shapes on a real GPU, and predicted rows."""
    measured = [row for row in row_file.read(RESULTS / "rows.jsonl") if row_file.is_measured(row)]
    return measured, row_file.read(RESULTS / predicted.NAME)


def speed_table(rows: list[dict]) -> str:
    """Returns a table per card: trainings of 64 x 1,024 tokens under 11 GiB, against plain transformers."""
    header = (
        "training, 64 x 1,024 tokens", "sequences/s", "of plain eager", "of plain compiled", "of plain eager, same cap",
        "GPU allocated, GiB", "GPU reserved", "RAM", "predicted: s per step, allocated, RAM", "the update adds",
    )  # fmt: skip
    cards = list(dict.fromkeys(row["device"] for row in rows)) or [None]
    parts = []
    for card in cards:
        found = _last_good(row for row in rows if row["device"] == card)
        lines = [[name, *_training(found, name)] for name in TRAININGS]
        parts.append((f"On {card}:\n\n" if card else "") + markdown(header, lines))
    return "\n\n".join(parts)


def _last_good(rows: Iterable[dict]) -> dict[tuple[str, str], dict]:
    """Returns the last row of each name without an error, whatever its checks say."""
    return {(row["section"], row["name"]): row for row in rows if row["error"] is None}


def _not_held(row: dict) -> list[str]:
    # These invalidate a row's speed. The update's cost has its own bar in the table.
    return [name for name, held in row["checks"].items() if not held and name not in ("update", "timeline")]


def _training(found: dict[tuple[str, str], dict], name: str) -> list[str]:
    rows = (found.get(("train", of)) for of in (name, f"{name}: run"))
    row = next((row for row in rows if row is not None and "sequences_per_second" in row["values"]), None)
    if row is None:
        return [NOT_MEASURED] + [""] * 8
    if _not_held(row):
        return [f"not held: {', '.join(_not_held(row))}"] + [""] * 8
    values, size = row["values"], name.split()[0]
    speed = values["sequences_per_second"]
    plain = [("denominator", size, "eager"), ("denominator", size, "compiled"), ("denominator", "capped", "eager")]
    ratios = []
    for index, (section, job, way) in enumerate(plain):
        bar = f" (bar {BARS[name][index]:.2f})" if name in BARS and index < 2 else ""
        ratios.append(_ratio(speed, _values(found, section, job), f"gpt2-{size}, {way}") + bar)
    peaks = [f"{values[f'{kind}_peak_bytes'] / GIB:.2f}" for kind in ("gpu_allocated", "gpu_reserved", "ram")]
    said = (
        f"{values['predicted_step_seconds']:.2f} s (measured {values['step_seconds']:.2f}), "
        f"{values['predicted_gpu_allocated_peak_bytes'] / GIB:.2f}, {values['predicted_ram_peak_bytes'] / GIB:.2f}"
    )
    adds = f"{values['update_adds']:+.1%}" if "update_adds" in values else ""
    cut = "" if values.get("complete", True) else f" ({values['steps']} of {values['of_steps']} steps)"
    return [f"{speed:.2f}{cut}", *ratios, *peaks, said, adds]


def _values(found: dict[tuple[str, str], dict], section: str, name: str) -> dict:
    """Returns the values of a job that has ended, or the best that its parts have found."""
    if (section, name) in found:
        return found[section, name]["values"]
    best: dict = {}
    for (of, part), row in found.items():
        values = row["values"]
        if of == section and part.startswith(f"{name}: ") and "sequences_per_second" in values:
            way = f"{values['model']}, {values['way']}"
            if way not in best or values["sequences_per_second"] > best[way]["sequences_per_second"]:
                best[way] = values
    return best


def _ratio(speed: float, values: dict, way: str) -> str:
    if way not in values:
        return NOT_MEASURED
    plain = values[way]
    if plain is None:
        return "plain does not fit"
    return f"{speed / plain['sequences_per_second']:.2f}" if "sequences_per_second" in plain else plain["error"]


def plans_table(rows: list[dict]) -> str:
    """Returns a table of predicted rows: a step's share of the speed of its forward and backward, by sequences per
    step."""
    if not rows:
        return f"No plan has been made for this: `python -m {predicted.__name__}`."
    batches = sorted({row["batch"] for row in rows})
    groups: dict[tuple[str, str], dict[int, dict]] = {}
    for row in rows:
        groups.setdefault((row["card"], row["model"]), {})[row["batch"]] = row
    lines = [
        [card, model, *(f"{_share(of[batch]):.2f}" if batch in of else "" for batch in batches),
         f"{of[max(of)]['step_seconds']:.1f} s", _of_plain(of[max(of)])]
        for (card, model), of in groups.items()
    ]  # fmt: skip
    names = (f"{batch} x {predicted.SEQ:,}" for batch in batches)
    return markdown(("card", "model", *names, "a step of the last", "of plain eager"), lines)


def _of_plain(row: dict) -> str:
    plain = row.get("plain_sequences_per_second")  # None where a card has no bf16; older rows have none
    return "" if plain is None else f"{row['sequences_per_second'] / plain:.2f}"


def _share(row: dict) -> float:
    return row["sequences_per_second"] / row["alone_sequences_per_second"]


def memory_table(rows: list[dict]) -> str:
    """Returns a table of signed errors of predicted peaks on GPUs, by model."""
    last = {(row["device"], row["name"]): row for row in rows if row["section"] == "memory"}
    ran = [row for row in last.values() if "completes" in row["values"]]
    cases = [row for row in ran if row["values"]["completes"]]
    if not cases:
        return f"Peaks on a GPU, predicted and measured: {NOT_MEASURED}."
    lines = [
        [
            row["device"], values["model"], values["method"], f"{values['batch']} x {values['seq']}",
            *(
                f"{values[f'measured_{kind}_peak_bytes'] / GIB:.2f} ({values[f'{kind}_error']:+.2%})"
                if values["completes"] else "ran out of memory"
                for kind in ("allocated", "reserved")
            ),
        ]
        for row in ran
        for values in [row["values"]]
    ]  # fmt: skip
    said = []
    for method in dict.fromkeys(row["values"]["method"] for row in cases):
        errors = [abs(row["values"]["allocated_error"]) for row in cases if row["values"]["method"] == method]
        said.append(f"{method} {statistics.mean(errors):.2%}, the largest {max(errors):.2%}")
    header = ("card", "model", "training", "batch", "GiB allocated (error of the prediction)", "reserved (error)")
    return f"{markdown(header, lines)}\n\nMean absolute error of what is allocated: {'; '.join(said)}."


def levers_table(rows: list[dict]) -> str:
    cases = {(row["device"], row["name"]): row for row in rows if row["section"] == "levers" and row["values"]}
    found = [row for row in cases.values() if "of_all" in row["values"]]
    if not found:
        return f"A step without single changes: {NOT_MEASURED}."
    ways = dict.fromkeys(way for row in found for way in row["values"]["of_all"] if way != "all")
    busy = [f"{way}: busy seconds" for way in ("all", "without any")]
    lines = []
    for row in found:
        values = row["values"]
        lines.append(
            [row["device"], row["name"].partition(": ")[2], f"{values['micro_batches']} x {values['micro_batch']}",
             f"{values['step_seconds']['all']:.3f} s",
             *(f"{values['of_all'][way]:.2f}" if way in values["of_all"] else NOT_MEASURED for way in ways),
             ", ".join(f"{values[name]:.3f} s" for name in busy)]
        )  # fmt: skip
    header = ("card", "model", "micro-batches", "a step", *ways, "kernels run: with all, without any")
    return markdown(header, lines)


def checks_table(rows: list[dict]) -> str:
    """Returns a table of each job's cases on GPUs: how many held, and the failed checks of the others."""
    jobs: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        job, _, case = row["name"].partition(": ")
        if case:
            jobs.setdefault((row["device"], f"{row['section']}/{job}"), {})[case] = row
    lines = []
    for (device, job), cases in jobs.items():
        failed = [
            f"{case}: {'; '.join(name for name, held in row['checks'].items() if not held) or row['error']}"
            for case, row in cases.items()
            if not row["ok"]
        ]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in cases.values()))
        lines.append([device, job, f"{len(cases) - len(failed)} of {len(cases)}", "<br>".join(failed), commits])
    return markdown(("card", "job", "cases in which every check held", "the others: not so", "commits"), lines)


def draw_speed(rows: list[dict], plans: list[dict], path: Path) -> None:
    """Draws a step's share of the speed of forward and backward, by tokens per step: plans as lines, measurements as
    points."""
    measured = list(_measured_points(rows))
    if not plans and not measured:
        return
    figure = pictures.figure(6.4, 4.0)
    axes = figure.subplots()
    cards = list(dict.fromkeys(row["card"] for row in plans))
    for model, colour in (("gpt2-large", "C0"), ("gpt2-xl", "C1")):
        for card, style in zip(cards, itertools.cycle(("-", "--", ":", "-."))):  # noqa: B905  which has no end
            points = sorted(
                (r["batch"] * r["seq"], _share(r)) for r in plans if (r["card"], r["model"]) == (card, model)
            )
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=3,
                      label=f"{model}, planned for {card}")  # fmt: skip
    for card, tokens, ratio, name in measured:
        axes.plot(tokens, ratio, "s", color="C0" if name.startswith("large") else "C1", markersize=7,
                  label=f"{name}, measured on {card}, of plain eager")  # fmt: skip
    axes.axhline(1, color="0.7", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, max(1.1, *(1.1 * ratio for _, _, ratio, _ in measured), 1.1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axes.set_xlabel("tokens per optimizer step")
    axes.set_ylabel("speed of a step / its forward and backward alone\n(measured: / plain eager)")
    pictures.frameless(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    pictures.save(figure, path)


def _measured_points(rows: list[dict]) -> Iterable[tuple[str, int, float, str]]:
    for card in dict.fromkeys(row["device"] for row in rows):
        found = _last_good(row for row in rows if row["device"] == card)
        for (section, name), row in found.items():
            size = name.split()[0]
            plain = _values(found, "denominator", size).get(f"gpt2-{size}, eager") or {}
            speed = row["values"].get("sequences_per_second")
            good = section == "train" and ":" not in name and not _not_held(row)
            if good and speed and plain.get("sequences_per_second"):
                yield card, row["values"]["tokens_per_step"], speed / plain["sequences_per_second"], name
