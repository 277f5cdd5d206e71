"""Makes report.html: one page about training runs, finished or not, which a browser shows without a network. The page
is page.html with the runs' data as JSON in place of one placeholder."""

import json
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from lowmem.errors import InputError
from lowmem.fields import option_name
from lowmem.run.figures import (
    MEDIAN_OVER,
    build_report,
    evaluations,
    is_report_of,
    memory_kinds,
    short_names,
    smoothed,
    summary,
)
from lowmem.run.log import continuation
from lowmem.run.metrics import PEAKS, finite, read_metrics, replace_file
from lowmem.run_folder import missing_of_run, read_run_json
from lowmem.settings import FIELD_NAMES, Settings, in_words
from lowmem.units import GIB

MOST_POINTS = 2000  # in a curve; for a longer run, the page has every second, third, ... step
_PLACEHOLDER = "null /* the data of the runs */"


def write_page(folders: Sequence[Path], path: Path, say: Callable[[str], None] = print) -> None:
    """Writes the HTML page `path` about the runs whose output folders are `folders`. Leaves out folders whose run
    cannot be shown; `say` gets a sentence about each. Raises InputError if no run can be shown."""
    names, runs = short_names(map(str, folders)), []
    for folder in folders:
        try:
            if missing := missing_of_run(folder):
                raise InputError(f"{folder} is no run folder: it has no {missing} of a run")
            runs.append(run_data(folder, names[str(folder)]))
        except InputError as error:
            if len(folders) == 1:
                raise
            say(f"{error}; it is left out")
    if not runs:
        raise InputError("no run is left to show")
    replace_file(path, make_page(runs))


def make_page(runs: list[dict]) -> str:
    """Returns the HTML of report.html. `runs`: a result of `run_data` for each run."""
    content = finite({"runs": runs, "median_over": MEDIAN_OVER}, lambda number: float(f"{number:.6g}"))
    data = json.dumps(content, allow_nan=False)
    template = files("lowmem.run").joinpath("page.html").read_text(encoding="utf-8")
    # Without `<`, no string of a run can end the script element; the page's script writes only text, never HTML.
    return template.replace(_PLACEHOLDER, data.replace("<", r"\u003c"))


def run_data(folder: Path, name: str) -> dict:
    """Returns everything that the page shows about the run in `folder`, {name in page.html: value}. `name`: the run's
    label on the page. Raises InputError if the files in `folder` are not those of a run of this version."""
    try:
        plan, settings = read_run_json(folder / "plan.json"), read_run_json(folder / "settings.json")
        rows, report = read_metrics(folder / "metrics.jsonl"), read_run_json(folder / "report.json")
        finished = is_report_of(report, rows)
        if not finished:
            report = _report_so_far(plan, rows, settings)
        return {
            "name": name,
            "finished": finished,
            "steps": len(rows),
            "planned_steps": plan["steps"],
            "summary": report.get("summary") or summary(report, rows),
            "remarks": _remarks(report),
            "columns": _columns(rows),
            "held_out": _held_out(rows, report["loss"]["eval_first"]),
            "step_seconds_planned": plan["predicted"]["step_seconds"],
            "memory": [
                {"kind": kind, "parts": parts, "measured": measured, "cap": cap}
                for kind, parts, measured, cap in memory_kinds(plan, report["measured"])
            ],
            "phases": _phases(plan, report),
            "samples": _samples(read_metrics(folder / "samples.jsonl")),
            "settings": _settings(settings),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder}: its files cannot be shown ({type(error).__name__}: {error})") from None


def _report_so_far(plan: dict, rows: list[dict], settings: dict) -> dict:
    depends_on = plan.get("depends_on", {})
    eval_first = rows[0].get("eval_first") if rows else None
    device = depends_on.get("card") or plan.get("choice", {}).get("device", "unknown")
    versions = {name: depends_on[name] for name in ("torch", "transformers") if name in depends_on}
    return build_report(plan, rows, dict.fromkeys(PEAKS), device, versions, settings.get("batch", 0), eval_first)


def _remarks(report: dict) -> list[str]:
    remarks = [f"At the end of the run: {failure}." for failure in report.get("failed", [])]
    if report["loss"]["diverged"]:
        remarks.insert(0, "This run made the model worse: its held-out loss is higher than before training.")
    if measures := report.get("out_of_memory"):
        steps = ", ".join(str(step) for step in sorted({measure["step"] for measure in measures}))
        remarks.append(f"GPU memory ran out in step {steps}; the run went on with less (out_of_memory in report.json).")
    return remarks


def _columns(rows: list[dict]) -> dict[str, list]:
    kept = rows[:: math.ceil(len(rows) / MOST_POINTS) or 1]
    columns = {name: [row[name] for row in kept] for name in ("step", "loss", "learning_rate", "grad_norm")}
    columns["tokens_per_second"] = [row["tokens_per_second"] for row in kept]
    columns["step_seconds"] = [row["step_ms"] and row["step_ms"] / 1000 for row in kept]
    for name in PEAKS[1:]:
        columns[name] = [None if row[name] is None else row[name] / GIB for row in kept]
    if smooth := smoothed(rows):
        columns["smooth_loss"] = [smooth.get(row["step"]) for row in kept]
    return columns


def _held_out(rows: list[dict], eval_first: float | None) -> dict[str, list]:
    found: dict[str, list] = {"held-out": evaluations(rows, eval_first)}
    names = short_names(name for row in rows for name in row.get("eval_losses", {}))
    for row in rows:
        for name, loss in row.get("eval_losses", {}).items():
            found.setdefault(f"held-out, {names[name]}", []).append([row["step"], loss])
    return {name: points for name, points in found.items() if points}


def _phases(plan: dict, report: dict) -> list[list]:
    planned = plan.get("ram_phases", {})
    measured = {phase: sizes["measured"] for phase, sizes in report.get("ram_phases", {}).items()}
    return [[phase, planned.get(phase), measured.get(phase)] for phase in {**planned, **measured}]


def _samples(rows: list[dict]) -> list[dict]:
    prompts: dict[str, list] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        prompts.setdefault(row.get("prompt", ""), []).append([row["step"], continuation(row)])
    return [{"prompt": prompt, "texts": texts} for prompt, texts in prompts.items()]


def _settings(settings: dict) -> list[list]:
    defaults = json.loads(json.dumps({name: getattr(Settings, name) for name in FIELD_NAMES}))
    known = [name for name in FIELD_NAMES if name in settings]
    # option, value as text, True if it is not the default
    return [[option_name(name), in_words(name, settings[name]), settings[name] != defaults[name]] for name in known]
