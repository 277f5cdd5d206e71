"""Runs what the README's tables say, and keeps rows: `python -m experiments.pipeline_parallel.measure`.

python -m experiments.pipeline_parallel.measure --only bubble

equal    30 steps of each schedule beside one process that does the same
memory   the peak of each process by the number of micro-batches
bubble   actions padded to equal sleeps: on a machine with fewer cores than processes, stages that compute measure
         how the processes share the cores
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.pipeline_parallel import run
from experiments.pipeline_parallel.table import RESULTS, sections

PROGRAM = "experiments.pipeline_parallel.measure"
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved --chunks 2")
STALE = ("pipedream", "pipedream-vs")
CASES = {
    "equal": [
        f"--stages {stages} --schedule {schedule} --steps 30 --compare {task}"
        for task, schedules in {
            "--task digits": (*SCHEDULES, *STALE),
            "--task digits --norm batch --batch 19": SCHEDULES,
            "--task gpt2 --clip 1": SCHEDULES,
            "--task gpt2 --clip 1 --recompute": ("1f1b",),
        }.items()
        for stages in (2, 4)
        for schedule in schedules
    ],
    "memory": [
        f"--stages 4 --schedule {schedule} --steps 1 --task gpt2 --micro-batches {count} --batch {count}"
        for schedule, counts in {
            "1f1b": (8, 64, 1000, 4000),
            "gpipe": (8, 64, 1000),
            "gpipe --recompute": (8, 64, 1000, 4000),
        }.items()
        for count in counts
    ],
    "bubble": [
        f"--stages 4 --schedule {schedule} --steps {steps} --pad 0.1 --balance layers"
        for schedule, steps in [*((name, 2) for name in SCHEDULES), ("pipedream", 4)]
    ],
}
KEPT = (
    *("schedule", "stages", "chunks", "micro_batches", "steps", "task", "max_abs_loss_difference"),
    *("weights_bitwise_equal", "max_abs_weight_difference", "bubble_planned", "bubble_measured", "peak_in_flight"),
    *("peak_bytes_per_rank", "weight_versions"),
)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", allow_abbrev=False)
    parser.add_argument("--only", choices=CASES, action="append", help="default: all of them")
    parser.add_argument("--rows", type=Path, default=RESULTS / "rows.jsonl", metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
    for section in options.only or CASES:
        for words in CASES[section]:
            with tempfile.TemporaryDirectory() as out:
                code = run.main([*shlex.split(words), "--out", out])
                report = json.loads((Path(out) / "report.json").read_text())
            row = common | {"section": section, "options": words, "exit_code": code}
            row_file.append(options.rows, row | {key: report[key] for key in KEPT})
    print(sections(row_file.read(options.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
