"""Makes the tables of tables.md and the README's verdict from rows: `python -m experiments.bigger_models.table`."""

import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from experiments.bigger_models.measure import CARD_CASES, LEARNED, ON_CARD, RAM_WITHIN, TRAINED
from experiments.bigger_models.plans import CASES, KIND, LADDER_CARD, LADDER_LIMITS, NO_CAP, RESIDENT, SMALLEST
from experiments.bigger_models.shapes import SHAPES
from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all, runs_twice
from lowmem.units import GIB, counted

FOLDER = Path(__file__).resolve().parent
README, TABLES = FOLDER / "README.md", FOLDER / "tables.md"
KEPT = FOLDER / "results" / "rows.jsonl"
BEGIN = "<!-- made by python -m experiments.bigger_models.table -->"
ADAM_BYTES = 16  # per parameter, kept the usual way: fp32 weights, gradients, m and v
FLOPS = 6  # per parameter and token of a forward and backward, without what is computed again


def committed_rows() -> list[dict]:
    return list({row["name"]: row for row in row_file.read(KEPT)}.values())


def tables(rows: list[dict]) -> str:
    planned = {row["name"]: row for row in rows if row["kind"] == KIND}
    parts = [
        "**Plans**, 64 x 1,024 tokens a step, GiB. *RAM* is the whole process's; *in it* are Adam's states with the "
        "lower halves of the weights / working weights / boundaries / gradients; *on the disk* the states that RAM has "
        "no room for; *twice*: forward and backward",
        _plans(planned),
        "**Gradients in RAM** where the GPU does not hold them, instead of forward and backward twice; any RAM, GiB",
        _gradients(planned),
        f"**The ladder**: 64 x 1,024 tokens a step on an {LADDER_CARD}, any RAM, GiB: under {LADDER_LIMITS[0]}, and "
        "under the smallest cap of GPU memory. *6 N*: floating-point operations of one forward and backward, six per "
        "parameter and token, of what a step does",
        _ladder(planned),
        "**Slices, trained on the CPU** with Adam's states on a disk, GiB of RAM; of T5 so many blocks of each kind",
        _slices([row for row in rows if row["kind"] == TRAINED]),
        "**Do slices learn?** Each trains on one batch, from random weights. Its widths are the model's, and its "
        "vocabulary is bytes. The table has the loss of the first step, of the last, and the highest",
        _learned([row for row in rows if row["kind"] == LEARNED]),
        "**Under a cap that the 16-bit weights alone exceed**, on the stand-in, GiB",
        _on_card([row for row in rows if row["kind"] == ON_CARD]),
    ]
    return "\n\n".join(parts)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}"


def _plans(planned: dict[str, dict]) -> str:
    header = (
        "model", "GPU cap", "RAM cap", "card", "GPU allocated / reserved", "RAM", "in it", "on the disk", "s per step",
        "of it waiting", "tokens/s",
    )  # fmt: skip
    cases = [case for case in CASES if case.gpu_limit != SMALLEST and case.name in planned]
    cases = [case for case in cases if case.gradients != RESIDENT]
    several = {(case.shape, case.gpu_limit) for case in CASES if case.ram_limit != NO_CAP}  # the ladder has one RAM
    lines = []
    for _, group in groupby(cases, key=lambda case: (case.shape, case.gpu_limit, case.ram_limit)):
        found = [case for case in group if (case.shape, case.gpu_limit) in several]
        for error, alike in groupby(found, key=lambda case: planned[case.name]["error"]):
            alike = list(alike)
            if error is None:
                lines += [_plan(planned[case.name]) for case in alike]
            else:
                said = [alike[0].shape, alike[0].gpu_limit, alike[0].ram_limit, ", ".join(one.card for one in alike)]
                lines.append([*said, error, *[""] * (len(header) - 5)])
    return markdown(header, lines)


def _plan(row: dict) -> list[str]:
    said, ram = row["predicted"], row["ram_breakdown"]
    peaks = " / ".join(_gib(said[f"gpu_{kind}_peak_bytes"]) for kind in ("allocated", "reserved"))
    streamed = ("states", "weights", "boundaries", "gradients")
    parts = " / ".join(_gib(ram.get(f"streamed_{name}", 0)) for name in streamed)
    seconds = f"{said['step_seconds']:.0f}" + (", twice" if runs_twice(row["choice"]) else "")
    return [
        row["shape"], row["gpu_limit"], row["ram_limit"], row["card"], peaks, _gib(said["ram_peak_bytes"]), parts,
        _gib(row["disk"].get("states", 0)), seconds, f"{row['seconds_waiting_for_copies']:.0f}",
        f"{row['tokens_per_second']:,.0f}",
    ]  # fmt: skip


def _gradients(planned: dict[str, dict]) -> str:
    header = ("model", "GPU cap", "card", "twice: RAM", "s per step", "in RAM: RAM", "s per step", "of the time")
    lines = []
    for case in CASES:
        pair = [planned.get(one.name) for one in (case, replace(case, gradients="auto"))]
        if case.gradients != RESIDENT or any(row is None or row["error"] for row in pair):
            continue
        cells = [case.shape, case.gpu_limit, case.card]
        for row in pair:
            cells += [_gib(row["predicted"]["ram_peak_bytes"]), f"{row['predicted']['step_seconds']:.0f}"]
        twice, in_ram = (row["predicted"]["step_seconds"] for row in pair)
        lines.append([*cells, f"{in_ram / twice:.2f}"])
    return markdown(header, lines)


def _ladder(planned: dict[str, dict]) -> str:
    header = (
        "model", "parameters", "16 bytes per parameter", "GPU reserved", "RAM", "s per step", "tokens/s",
        "TFLOP/s of 6 N", "smallest cap", "RAM", "s per step", "tokens/s",
    )  # fmt: skip
    lines = []
    for shape in SHAPES.values():
        cells = [shape.name, f"{shape.parameters:,}", _gib(ADAM_BYTES * shape.parameters)]
        for gpu_limit in LADDER_LIMITS:
            row = _of(planned, shape.name, gpu_limit)
            cells += _step(row, gpu_limit)
        lines.append(cells)
    return markdown(header, lines)


def _of(planned: dict[str, dict], shape: str, gpu_limit: str) -> dict | None:
    where = (shape, gpu_limit, NO_CAP, LADDER_CARD)
    where_of = [((case.shape, case.gpu_limit, case.ram_limit, case.card), case) for case in CASES]
    case = next(case for found, case in where_of if found == where and case.gradients != RESIDENT)
    return planned.get(case.name)


def _step(row: dict | None, gpu_limit: str) -> list[str]:
    count = 4 if gpu_limit == SMALLEST else 5
    if row is None:
        return ["not planned", *[""] * (count - 1)]
    if row["error"]:
        return [f"refused: {row['error']}", *[""] * (count - 1)]
    said = row["predicted"]
    speed = [f"{row['tokens_per_second']:,.0f}"]
    first = said["gpu_reserved_peak_bytes"]
    if gpu_limit == SMALLEST:
        first = row["limits"]["gpu_bytes"]
    else:
        speed.append(f"{FLOPS * row['parameters'] * row['tokens_per_second'] / 1e12:.0f}")
    return [f"{first / GIB:.2f}", _gib(said["ram_peak_bytes"]), f"{said['step_seconds']:.1f}", *speed]


def _error(row: dict) -> float:
    return row["predicted_ram_peak_bytes"] / row["ram_peak_bytes"] - 1


def _slices(rows: list[dict]) -> str:
    if not rows:
        return "None was trained yet: `python -m experiments.bigger_models.measure` does."
    header = (
        "slice", "parameters", "cap", "predicted", "measured", "error", "bytes per parameter", "states on the disk",
        "forward and backward", "s per step",
    )  # fmt: skip
    lines = [
        [
            f"{row.get('shape', 'gpt-j-6b')}, {counted(row['blocks'], 'blocks')}", f"{row['parameters']:,}",
            _gib(row["ram_limit_bytes"]),
            *(f"{row[f'{kind}ram_peak_bytes'] / GIB:.2f}" for kind in ("predicted_", "")), f"{_error(row):+.1%}",
            f"{row['ram_peak_bytes'] / row['parameters']:.1f}", _gib(row["disk"]["states"]),
            "twice" if runs_twice(row["choice"]) else "once", f"{row['step_seconds']:.0f}",
        ]
        for row in sorted(rows, key=lambda row: row["parameters"])
    ]  # fmt: skip
    return markdown(header, lines)


def _learned(rows: list[dict]) -> str:
    if not rows:
        return "None was trained yet: `python -m experiments.bigger_models.measure --only learns` does."
    header = ("slice", "parameters", "tokens", "steps", "rate", "warm-up, of all steps", "loss", "s per step")
    lines = [
        [
            f"{row['shape']}, {counted(row['blocks'], 'blocks')}", f"{row['parameters']:,}",
            f"{row['batch']} x {row['seq']}",
            str(len(row["losses"])), f"{row['lr']:g}", f"{row['warmup_steps']:g}",
            ", ".join(f"{loss:.2f}" for loss in (row["losses"][0], max(row["losses"]), row["losses"][-1])),
            f"{row['step_seconds']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(header, lines)


def _on_card(rows: list[dict]) -> str:
    if not rows:
        return "None has run yet: `python -m stand_in -- -m experiments.bigger_models.measure` does."
    header = (
        "model", "parameters", "tokens", "16-bit weights", "cap", "allocated: predicted, measured",
        "reserved: predicted, measured", "states on the disk", "computed",
    )  # fmt: skip
    order = [f"card: {case.name}" for case in CARD_CASES]
    lines = []
    for row in sorted(rows, key=lambda row: order.index(row["name"])):
        sizes = [
            ", ".join(f"{row[which][f'gpu_{kind}_peak_bytes'] / GIB:.3f}" for which in ("predicted", "measured"))
            for kind in ("allocated", "reserved")
        ]
        computed = "memory alone"
        if row["computed"]:
            same = row["checks"]["losses and norms are those without a cap"]
            computed = "losses and norms as without a cap" if same else "NOT the losses and norms without a cap"
        lines.append([
            row["name"].removeprefix("card: "), f"{row['parameters']:,}", f"{row['batch']} x {row['seq']:,}",
            f"{row['weights_bytes'] / GIB:.2f}", f"{row['gpu_limit_bytes'] / GIB:.2f}", *sizes,
            _gib(row["disk"].get("states", 0)), computed,
        ])  # fmt: skip
    return markdown(header, lines)


def verdict(rows: list[dict]) -> str:
    planned = [row for row in rows if row["kind"] == KIND and row.get("gradients") != RESIDENT]
    fitting = [row for row in planned if not row["error"]]
    sentences = []
    for shape in SHAPES:
        for gpu_limit in dict.fromkeys(case.gpu_limit for case in CASES if case.ram_limit != NO_CAP):
            found = [row for row in fitting if (row["shape"], row["gpu_limit"]) == (shape, gpu_limit)]
            free, *capped = (
                [row for row in found if row["ram_limit"] == ram_limit]
                for ram_limit in dict.fromkeys([NO_CAP, *(case.ram_limit for case in CASES)])
            )
            if free and any(capped):
                sentences.append(
                    f"By its plan {shape} trains under {gpu_limit} of GPU memory with {_span(free)} of RAM, at "
                    + ". ".join([_speeds(free), *(_under_ram(alike) for alike in capped if alike)])
                    + "."
                )
    refused = {(row["shape"], row["error"]) for row in planned if row["error"]}
    sentences += [f"{shape} is refused: {error}." for shape, error in sorted(refused)]
    ladder = [row for row in fitting if (row["card"], row["ram_limit"]) == (LADDER_CARD, NO_CAP)]
    for gpu_limit in LADDER_LIMITS:
        ends = sorted((row for row in ladder if row["gpu_limit"] == gpu_limit), key=lambda row: row["parameters"])
        if len(ends) > 1:
            small, large = ends[0], ends[-1]
            times = large["predicted"]["step_seconds"] / small["predicted"]["step_seconds"]
            cap = f"{gpu_limit}" if gpu_limit != SMALLEST else "the smallest cap of each"
            sentences.append(
                f"From {small['shape']} to {large['shape']}, {large['parameters'] / small['parameters']:.0f} times the "
                f"parameters, a step takes {times:.0f} times as long under {cap}."
            )
    slices = [row for row in rows if row["kind"] == TRAINED]
    if slices:
        errors = [_error(row) for row in slices]
        within = sum(abs(error) <= RAM_WITHIN for error in errors)
        sentences.append(
            f"Of {len(slices)} slices that were trained {within} took RAM within {RAM_WITHIN:.0%} of the prediction; "
            f"errors are {min(errors):+.1%} to {max(errors):+.1%}."
        )
    sentences += [
        f"A slice of {counted(row['blocks'], 'blocks')} with a warm-up learns one batch: {len(row['losses'])} steps "
        f"take the loss from {row['losses'][0]:.2f} to {row['losses'][-1]:.2f}."
        for row in rows
        if row["kind"] == LEARNED and row["warmup_steps"]
    ]
    largest = [row for row in slices if row.get("one_block_more_is_too_large_for")]
    sentences += [
        f"The largest, of {row['parameters']:,} parameters, was bounded by the machine's "
        f"{row['one_block_more_is_too_large_for']}: {row['ram_limit_bytes'] / GIB:.0f} GiB of RAM and "
        f"{row['disk_limit_bytes'] / GIB:.0f} GiB of disk were allowed."
        for row in largest
    ]
    cards = [row for row in rows if row["kind"] == ON_CARD]
    if cards:
        off = [
            row["predicted"]["gpu_reserved_peak_bytes"] / row["measured"]["gpu_reserved_peak_bytes"] - 1
            for row in cards
        ]
        held = sum(row["checks"]["reserved under the cap"] for row in cards)
        sentences.append(
            f"{held} of {len(cards)} runs stayed under a cap that their 16-bit weights exceed; reserved memory "
            f"was predicted to {min(off):+.1%} to {max(off):+.1%}."
        )
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _under_ram(rows: list[dict]) -> str:
    return f"Under {rows[0]['ram_limit']} of RAM with {_states(rows)} of states on a disk, at {_speeds(rows)}"


def _span(rows: list[dict], unit: str = " GiB") -> str:
    sizes = sorted({_gib(row["predicted"]["ram_peak_bytes"]) for row in rows}, key=float)
    return (sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}") + unit


def _states(rows: list[dict]) -> str:
    sizes = sorted({_gib(row["disk"].get("states", 0)) for row in rows}, key=float)
    return (sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}") + " GiB"


def _speeds(rows: list[dict]) -> str:
    return ", ".join(f"{row['tokens_per_second']:,.0f} ({row['card']})" for row in rows) + " tokens/s"


def pages() -> list[Page]:
    return [(README, BEGIN, verdict(committed_rows())), (TABLES, BEGIN, tables(committed_rows()))]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.bigger_models.table", __doc__, main))
