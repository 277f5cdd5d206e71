"""Makes the README's tables from rows: `python -m experiments.nested_tensors.table`."""

import re
import statistics
import sys
from pathlib import Path

from experiments.harness import pictures
from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all
from experiments.nested_tensors.picture import draw_memory, draw_outputs
from lowmem.units import MIB

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
EVAL_ROWS, PEAK_ROWS, STAGE_ROWS = (RESULTS / f"{name}.jsonl" for name in ("eval", "peaks", "stages"))
BEGIN = "<!-- made by python -m experiments.nested_tensors.table -->"
ALLOWED_MEMORY = 1.15  # of the share of positions that are real, times the peak of padded
OUTPUTS = "outputs.png"
BETWEEN, BACKWARD = "norms, sums", "backward"
STAGES = ("embedding", "attention", "MLP", BETWEEN, "head, loss", BACKWARD)  # in the order of the picture
SEED = [  # its own figures, of one batch of random words, forward only
    *("a Llama, random words, forward only", "the seed: nested", "", "", "0.07 to 0.10", "1,314", "0.55", "")
]


def modes_table(peaks: list[dict], stages: list[dict]) -> str:
    """Returns a table of peaks, and of speeds in the newest run of the stages: medians of ratios to padded in the same
    round."""
    newest = {(*_what(row), row["mode"]): row for row in peaks}
    lines = []
    for what in dict.fromkeys(key[:-1] for key in newest):
        of_modes = {key[-1]: row for key, row in newest.items() if key[:-1] == what}
        timed = [row for row in stages if _what(row) == what]
        lines += _modes_of(of_modes, [row for row in timed if row["date"] == timed[-1]["date"]])
    header = (
        *("", "mode", "real / all positions", "real tokens/s", "times padded"),
        *("peak, MiB", "of padded", f"real share x {ALLOWED_MEMORY}"),
    )
    return markdown(header, [*lines, SEED])


def _what(row: dict) -> tuple:
    return (*_where(row), *(row[key] for key in ("model", "data", "num_samples", "batch_size")))


def _where(row: dict) -> tuple[str, str]:
    # Rows without these fields are older than the options.
    return row.get("device", "cpu"), row.get("dtype", "fp32")


def _modes_of(peaks: dict[str, dict], timed: list[dict]) -> list[list[str]]:
    padded = peaks["padded"]
    device, dtype, model, data, count, batch_size = _what(padded)
    where = "" if (device, dtype) == ("cpu", "fp32") else f", {dtype} on {device}"
    lines = []
    for mode, row in peaks.items():
        speeds = {one["round"]: _speed(one) for one in timed if one["mode"] == mode}
        ratios = [
            speeds[one["round"]] / _speed(one) for one in timed if one["mode"] == "padded" and one["round"] in speeds
        ]
        speed, times = (
            (f"{statistics.median(speeds.values()):.1f}", f"{statistics.median(ratios):.2f}") if ratios else ("", "")
        )
        lines.append(
            [
                f"{model}, {count} {data}, batches of {batch_size}{where}" if mode == "padded" else "",
                mode,
                f"{row['tokens'] / row['positions']:.2f}",
                speed,
                times,
                f"{row['peak_bytes'] / MIB:,.0f}",
                f"{row['peak_bytes'] / padded['peak_bytes']:.2f}",
                ""
                if mode in ("padded", "bucketed")
                else f"{ALLOWED_MEMORY * padded['tokens'] / padded['positions']:.2f}",
            ]
        )
    return lines


def _speed(row: dict) -> float:
    return row["tokens"] / sum(row["seconds"].values())


def eval_table(rows: list[dict]) -> str:
    """Returns the largest distances by device, model and mode."""
    newest = _newest(rows)
    lines = []
    for kind in dict.fromkeys(key[:-1] for key in newest):
        of_mode = [row for key, row in newest.items() if key[:-1] == kind]
        *where, model, mode = kind
        worst = {key: max(row[key] for row in of_mode) for key in ("output", "gradient")}
        lines.append(
            [", ".join([model, *where]), mode, str(len(of_mode)), f"{worst['output']:.1e}", f"{worst['gradient']:.1e}"]
        )
    return markdown(("model", "mode", "batches", "tokens' logits", "parameters' gradients"), lines)


def _newest(rows: list[dict]) -> dict[tuple, dict]:
    return {(*_where(row), row["model"], row["mode"], row["lengths"]): row for row in rows}


def draw(folder: Path, plots: Path) -> list[Path]:
    evals, peaks, stages = (row_file.read(folder / path.name) for path in (EVAL_ROWS, PEAK_ROWS, STAGE_ROWS))
    made = []
    for kind in _kinds(stages):
        made.append(plots / picture_name(kind))
        draw_stages([row for row in stages if row["data"] == kind], made[-1])
    timed = _over_time(peaks)
    for kind in _kinds(timed):
        made.append(plots / picture_name(kind, "memory"))
        draw_memory([row for row in timed if row["data"] == kind], made[-1])
    if counted := _counted(evals):
        made.append(plots / OUTPUTS)
        draw_outputs(counted, made[-1])
    return made


def _over_time(peaks: list[dict]) -> list[dict]:
    """Returns the rows with memory over time, of the newest device and number of samples."""
    timed = [row for row in peaks if row.get("memory")]
    newest = {row["data"]: (*_where(row), row["num_samples"], row["batch_size"]) for row in timed}
    return [row for row in timed if (*_where(row), row["num_samples"], row["batch_size"]) == newest[row["data"]]]


def _counted(evals: list[dict]) -> list[dict]:
    counted = [row for row in _newest(evals).values() if row.get("distribution")]
    return [row for row in counted if _where(row) == _where(counted[-1])]


def draw_stages(rows: list[dict], path: Path) -> None:
    """Draws a panel for each model of the newest run, a bar for each mode: milliseconds a real token by stage."""
    run = [row for row in rows if row["date"] == rows[-1]["date"]]
    models, modes = (list(dict.fromkeys(row[key] for row in run)) for key in ("model", "mode"))
    figure = pictures.figure(8, 1.2 + 0.9 * len(models) + 0.3 * len(modes))
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, model in zip(panels, models, strict=True):
        ends = [0.0] * len(modes)
        for number, stage in enumerate(STAGES):
            widths = [
                statistics.median(
                    1e3 * row["seconds"][stage] / row["tokens"]
                    for row in run
                    if (row["model"], row["mode"]) == (model, mode)
                )
                for mode in modes
            ]
            colour = "0.8" if stage == BACKWARD else f"C{number}"
            axes.barh(modes, widths, left=ends, color=colour, label=stage, height=0.7)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end in enumerate(ends):
            axes.annotate(f"{end:.1f}", (end, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_title(model, fontsize=10)
        axes.set_xlim(0, 1.12 * max(ends))
        axes.set_xlabel("ms a real token")
        pictures.frameless(axes)
    panels[0].invert_yaxis()  # which they share
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STAGES), frameon=False,
                  fontsize=8)  # fmt: skip
    first = run[0]
    figure.suptitle(f"{first['num_samples']} {first['data']}, batches of {first['batch_size']}", fontsize=10)
    pictures.save(figure, path)


def picture_name(data: str, what: str = "stages") -> str:
    """Returns the picture's file name for samples of `data`, which may be a path or a name on the hub."""
    return f"{what}-{re.sub('[^A-Za-z0-9.-]+', '-', data).strip('-')}.png"


def sections() -> str:
    stages = row_file.read(STAGE_ROWS)
    last, versions = stages[-1], stages[-1]["versions"]
    return "\n\n".join(
        (
            "**Distance from one sample at a time in fp32**, relative, the largest of all batches; 1e-5 is allowed",
            eval_table(row_file.read(EVAL_ROWS)),
            "**Time and memory**, forward and backward, fp32. Modes alternate, batch after batch; medians of the "
            "rounds. Each peak is of a separate process, above weights and gradients.",
            modes_table(row_file.read(PEAK_ROWS), stages),
            f"On {last['machine']}, {last['threads']} threads; torch {versions['torch']}, transformers "
            f"{versions['transformers']}.",
            "**Where the time goes**",
            *(f"![Time a real token by stage, {kind}](results/{picture_name(kind)})" for kind in _kinds(stages)),
            "**Memory over time**, forward and backward of all batches, each mode in a separate process: the highest "
            "of every stretch of time",
            *(
                f"![Memory over time, {kind}](results/{picture_name(kind, 'memory')})"
                for kind in _kinds(_over_time(row_file.read(PEAK_ROWS)))
            ),
            "**Distribution of outputs**: all logits by mode, over those of one sample at a time (grey); below, how "
            "far a token's are from those",
            f"![Distribution of logits, and of their distances](results/{OUTPUTS})",
        )
    )


def _kinds(stages: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["data"] for row in stages))


def pages() -> list[Page]:
    return [(README, BEGIN, sections())]


def main() -> None:
    put_all(pages())
    draw(RESULTS, RESULTS)


if __name__ == "__main__":
    sys.exit(without_options("experiments.nested_tensors.table", __doc__, main))
