"""Tests both ends of a plan's promise for RAM, on the stand-in: the smallest cap named holds, and hardly less would
have.

    .venv-cuda/bin/python -m stand_in --ram -- -m experiments.plan_accuracy.promise_ram [--only TEXT ...]

A cell is a model, its options and a cap of the GPU that leaves states to be streamed (promise.md). `slack` is the share
of the largest refused cap that the run did not need: at most a plan's own allowance (ALLOWED_BYTES), and 2% of the cap.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from experiments.harness import rows
from experiments.harness.models import MODELS
from experiments.harness.options import check_rows, exit_code_of, under_runs
from experiments.plan_accuracy.cases import PROMISED_RAM, Case
from experiments.plan_accuracy.whole_life import run_process
from lowmem.errors import InputError
from lowmem.planning.ram import PROCESS_VARIES_BYTES, TRAINING_BYTES
from lowmem.units import MIB, format_size

RESULTS = Path(__file__).parent / "results" / "promise_ram.jsonl"
PROGRAM = "experiments.plan_accuracy.promise_ram"
WORDS = "All parameters of a model are trained under a cap of memory that holds. "
RUN = ["--init", "random", "--steps", "2", "--fixed-batch", "--eval-batches", "1", "--resume", "never"]
TOO_LITTLE = "1MiB"
ALLOWED_BYTES = TRAINING_BYTES + PROCESS_VARIES_BYTES  # which plans assume, for what training adds to a process


def cap_named(sentence: str) -> int | None:
    """Returns the smallest cap of RAM, in bytes, that a refusal names; None if it names none."""
    found = re.search(r"--ram-limit (\d+)MiB", sentence)
    return int(found[1]) * MIB if found else None


def run_cell(case: Case, folder: Path) -> dict:
    config = MODELS[case.model].write(folder / case.model)
    for name in ("train.txt", "evaluation.txt"):
        (folder / name).write_text(WORDS * 2000)
    command = [
        *(sys.executable, "-m", "stand_in", "--gpu", case.card, "--ram", "--", "train_gpt2_large.py"),
        *("--model", str(config), *RUN, *case.options, "--gpu-limit", case.cap),
        *("--data", str(folder / "train.txt"), "--eval-data", str(folder / "evaluation.txt")),
        *("--out", str(folder / "run"), "--wandb", "disabled"),
    ]
    log = folder / "log.txt"
    refused = run_process([*command, "--ram-limit", TOO_LITTLE], log, None)
    cap_bytes = cap_named(log.read_text())
    if refused["exit_code"] != 3 or cap_bytes is None:
        return {"ok": False, "refused": refused, "said": log.read_text().splitlines()[-3:]}
    completed = run_process([*command, "--ram-limit", f"{cap_bytes // MIB}MiB"], log, None)
    said = None if completed["exit_code"] == 0 else log.read_text().splitlines()[-3:]
    values = {"ok": False, "named_bytes": cap_bytes, "refused": refused, "completed": completed, "said": said}
    report = folder / "run" / "report.json"
    if report.exists():
        found = json.loads(report.read_text())
        measured = found["measured"]["ram_peak_bytes"]
        values |= {name: found["plan"][name] for name in ("choice", "ram_phases", "ram_breakdown")}
        values |= {"measured_bytes": measured, "phases": found["ram_phases"], "slack": slack(cap_bytes, measured)}
        values["ok"] = said is None and 0 <= cap_bytes - measured <= ALLOWED_BYTES + cap_bytes // 50
    return values


def slack(named_bytes: int, measured_bytes: int) -> float:
    """Returns the unneeded share of the largest refused cap; below 0 if the run needed more."""
    refused_bytes = named_bytes - MIB
    return 1 - measured_bytes / refused_bytes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of the names of cells")
    parser.add_argument("--rows", type=Path, default=under_runs(RESULTS), help="%(default)s")
    typed = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(typed)
    if not rows.on_stand_in():
        parser.error("start it on the stand-in: .venv-cuda/bin/python -m stand_in --ram -- -m " + PROGRAM)
    common = rows.made_by(PROGRAM, typed) | {"sources": rows.sources(PROGRAM)}
    done = {row["name"] for row in rows.read(options.rows) if row["sources"] == common["sources"]}
    if not any(text in case.name for case in PROMISED_RAM for text in options.only):
        raise InputError(f"--only {' '.join(options.only)}: no cell has that in its name")
    check_rows(options.rows)
    failed = 0
    for case in PROMISED_RAM:
        if case.name in done or not any(text in case.name for text in options.only):
            continue
        with tempfile.TemporaryDirectory(prefix="lowmem-") as folder:
            row = {"name": case.name, "card": case.card} | run_cell(case, Path(folder)) | common
        rows.append(options.rows, row)
        failed += not row["ok"]
        line = f"{'ok    ' if row['ok'] else 'FAILED'} {case.name}"
        if "slack" in row:
            line += f": named {format_size(row['named_bytes'])}, measured {format_size(row['measured_bytes'])}"
        print(line if row["ok"] else f"{line}: {row.get('said')}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
