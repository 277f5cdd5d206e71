"""Trains with every synchronous schedule and with one process, and draws all curves in one picture; PipeDream apart.

    python -m experiments.pipeline_parallel.curves [--task digits|cifar10|gpt2] [--stages 4] [--steps N] [--out DIR]

Under --out: curves.jsonl with a row for each training (losses by update, accuracy on test samples), learning-<task>.png
and stale-<task>.png.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from experiments.harness import group
from experiments.harness import rows as row_file
from experiments.harness.curves import Learned, draw_learned, learned
from experiments.harness.options import exit_code_of, make_folder, parser_of, positive, under_runs
from experiments.pipeline_parallel import reference, run
from experiments.pipeline_parallel.tasks import TASKS
from experiments.pipeline_parallel.worker import Job

PROGRAM = "experiments.pipeline_parallel.curves"
RESULTS = Path(__file__).resolve().parent / "results"
NAME = "curves.jsonl"
ONE = "one process"
SCHEDULES = {  # by picture: options of `run`, or one process
    "learning": ("gpipe", "1f1b", "zb-h1", "interleaved --chunks 2", ONE),
    "stale": ("pipedream", "pipedream-vs", f"{ONE}, no stale weights"),
}
TITLES = {
    "learning": "{task}, {stages} stages: synchronous schedules",
    "stale": "{task}, {stages} stages: PipeDream, an update each micro-batch",
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: learn(options, arguments))


def learn(options: argparse.Namespace, arguments: list[str]) -> int:
    trainings = {
        f"{picture} {name}": partial(_row, picture, name, options, *_job(name, picture, options))
        for picture, names in SCHEDULES.items()
        for name in names
        if options.only is None or name in options.only
    }
    make_folder(options.out, *(path.name for path in pictures(options.out, options.task)))
    made = learned(PROGRAM, arguments, options.out / NAME, trainings)
    for path in draw(made if options.only is None else row_file.read(options.out / NAME), options.out):
        print(f"see {path}")
    return 0


def _row(picture: str, name: str, options: argparse.Namespace, job: Job, checked: run.Checked | None) -> dict:
    losses, weights = _trained(job, checked)
    return {
        "picture": picture, "name": name, "task": job.task, "stages": options.stages, "steps": job.steps,
        "batch": job.batch, "micro_batches": job.micro_batches, "learning_rate": job.learning_rate,
        "losses": losses, "test_accuracy": run.accuracy_of(job, weights),
    }  # fmt: skip


def pictures(folder: Path, task: str) -> list[Path]:
    return [folder / f"{picture}-{task}.png" for picture in SCHEDULES]


def draw(rows: list[dict], folder: Path) -> list[Path]:
    made = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for picture, path in zip(SCHEDULES, pictures(folder, task), strict=True):
            found = {row["name"]: row for row in rows if (row["task"], row["picture"]) == (task, picture)}
            if found:
                title = TITLES[picture].format(**next(iter(found.values())))
                trainings = {name: Learned(row["losses"], row["test_accuracy"]) for name, row in found.items()}
                draw_learned({title: trainings}, path)
                made.append(path)
    return made


def _job(name: str, picture: str, options: argparse.Namespace) -> tuple[Job, run.Checked | None]:
    """Returns a training's job, and its schedule or None for one process."""
    stages = 1 if name.startswith(ONE) else options.stages
    schedule = {"learning": "1f1b", "stale": "pipedream"}[picture] if name.startswith(ONE) else name
    words = ["--stages", str(stages), "--schedule", *schedule.split(), "--task", options.task]
    for option in ("steps", "batch", "data"):
        if getattr(options, option) is not None:
            words += [f"--{option}", str(getattr(options, option))]
    job, checked = run.planned(run.parser().parse_args(words))
    return job, None if name.startswith(ONE) else checked


def _trained(job: Job, checked: run.Checked | None) -> reference.Outcome:
    if checked is not None:
        trained = run.train(job, checked)
        return trained.losses, run.in_the_whole(job, trained.weights)
    with group.threads_of_a_process():
        return reference.trained(job)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--task", choices=TASKS, default="digits", help="default: %(default)s")
    parser.add_argument("--stages", type=positive, default=4, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--steps", type=positive, metavar="N", help="default: run's")
    parser.add_argument("--batch", type=positive, metavar="N", help="samples per step; default: run's")
    every = [name for names in SCHEDULES.values() for name in names]
    parser.add_argument("--only", choices=every, nargs="+", help="these trainings, beside the rows that are there")
    parser.add_argument("--data", metavar="DIR", help="a folder with CIFAR-10; default: through datasets")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), metavar="DIR", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
