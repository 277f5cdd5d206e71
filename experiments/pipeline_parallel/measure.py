"""Measures the tables of tables.md, and keeps rows: `python -m experiments.pipeline_parallel.measure`.

python -m experiments.pipeline_parallel.measure --only bubble

equal    30 steps of each schedule, compared with one process
memory   the peak of each process, by the number of micro-batches
bubble   actions padded to equal sleeps, since more processes than cores would measure how cores are shared
killed   how long processes survive after one of them, or the command, is killed
"""

import shlex
import sys

from experiments.harness import killed, sections
from experiments.harness.options import exit_code_of
from experiments.pipeline_parallel import run, table

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
            "--task gpt2": STALE,
        }.items()
        for stages in (2, 4)
        for schedule in schedules
    ],
    "memory": [
        f"--stages 4 --schedule {schedule} --steps 1 --task gpt2 --balance layers "
        f"--micro-batches {count} --batch {count}"
        for schedule, counts in {
            "1f1b": (8, 64, 1000, 4000),
            "zb-h1": (8, 64, 1000, 4000),
            "interleaved --chunks 2": (8, 64, 1000, 4000),
            "gpipe": (8, 64, 1000),
            "gpipe --recompute": (8, 64, 1000),
        }.items()
        for count in counts
    ],
    "bubble": [
        f"--stages 4 --schedule {schedule} --steps {steps} --pad {seconds} --balance layers"
        for seconds in (0.3, 1)
        for schedule, steps in [*((name, 2) for name in SCHEDULES), *((name, 4) for name in STALE)]
    ],
    "killed": killed.CASES,
}
KEPT = (
    *("schedule", "stages", "chunks", "micro_batches", "steps", "task", "max_abs_loss_difference"),
    *("weights_bitwise_equal", "max_abs_weight_difference", "bubble_planned", "bubble_measured", "peak_in_flight"),
    *("peak_bytes_per_rank", "bytes_before_per_rank", "weight_versions", "layers_per_stage", "diverged"),
)


def main(arguments: list[str] | None = None) -> int:
    return sections.measure(PROGRAM, CASES, values_of, table.ROWS, table.sections, arguments)


def values_of(section: str, words: str) -> dict:
    if section == "killed":
        return killed.ended(run.PROGRAM, words)
    options = run.parser().parse_args(shlex.split(words))
    job, checked = run.planned(options)
    outcome = run.train(job, checked)
    report = run.report_of(job, checked, outcome, options)
    found = {key: report[key] for key in KEPT}
    if section == "equal" and job.asynchronous:
        found["losses"] = {name: [round(loss, 4) for loss in losses] for name, losses in report["losses"].items()}
    if section == "bubble":
        start = min(of_rank[0][0] for of_rank in outcome.spans)
        found["times"] = [
            [round(moment - start, 4) for begin, end, _ in of_rank for moment in (begin, end)]
            for of_rank in outcome.spans
        ]
    return found


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
