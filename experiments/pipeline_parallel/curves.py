"""Trains with every synchronous schedule and with one process, and draws all curves in one picture; PipeDream apart.

    python -m experiments.pipeline_parallel.curves [--task digits|cifar10|gpt2] [--stages 4] [--steps N] [--out DIR]

Under --out: curves.jsonl with a row for each training (losses by update, accuracy on test samples), learning-<task>.png
and stale-<task>.png.
"""

import argparse
import sys
from pathlib import Path

import torch

from experiments.harness import group
from experiments.harness import rows as row_file
from experiments.harness.countdown import Countdown
from experiments.harness.curves import Learned, draw_learned
from experiments.harness.options import at_least, make_folder, under_runs
from experiments.pipeline_parallel import reference, run
from experiments.pipeline_parallel.tasks import TASKS
from experiments.pipeline_parallel.worker import Job
from lowmem.errors import LowmemError

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
    try:
        jobs = {
            (picture, name): _job(name, picture, options)
            for picture, names in SCHEDULES.items()
            for name in names
            if options.only is None or name in options.only
        }
        make_folder(options.out, *(path.name for path in pictures(options.out, options.task)))
        common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
        made = []
        countdown = Countdown({" ".join(key): 0.0 for key in jobs})  # how long each takes is not known
        for (picture, name), (job, checked) in jobs.items():
            with countdown.case(f"{picture} {name}"):
                losses, weights = _trained(job, checked)
            row = {
                "picture": picture, "name": name, "task": job.task, "stages": options.stages, "steps": job.steps,
                "batch": job.batch, "micro_batches": job.micro_batches, "learning_rate": job.learning_rate,
                "losses": [round(loss, 4) for loss in losses], "test_accuracy": run.accuracy_of(job, weights),
            }  # fmt: skip
            made.append(row | common)
            row_file.append(options.out / NAME, made[-1])
            print(line(row), flush=True)
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for path in draw(made if options.only is None else row_file.read(options.out / NAME), options.out):
        print(f"see {path}")
    return 0


def pictures(folder: Path, task: str) -> list[Path]:
    """Returns where the pictures of a task are."""
    return [folder / f"{picture}-{task}.png" for picture in SCHEDULES]


def draw(rows: list[dict], folder: Path) -> list[Path]:
    """Draws the newest rows of each task, and returns where the pictures are."""
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


def line(row: dict) -> str:
    """Returns a row for people."""
    first, last = row["losses"][0], row["losses"][-1]
    return f"{row['name']}: loss {first:.2f} to {last:.2f}, test accuracy {row['test_accuracy']:.1%}"


def _job(name: str, picture: str, options: argparse.Namespace) -> tuple[Job, run.Checked | None]:
    """Returns a training's job, and its schedule; None for one process."""
    stages = 1 if name.startswith(ONE) else options.stages
    schedule = {"learning": "1f1b", "stale": "pipedream"}[picture] if name.startswith(ONE) else name
    words = ["--stages", str(stages), "--schedule", *schedule.split(), "--task", options.task]
    for option in ("steps", "batch", "data"):
        if getattr(options, option) is not None:
            words += [f"--{option}", str(getattr(options, option))]
    job, checked = run.planned(run.parser().parse_args(words))
    return job, None if name.startswith(ONE) else checked


def _trained(job: Job, checked: run.Checked | None) -> reference.Outcome:
    """Returns losses, and weights by their names in the whole model. LowmemError if a process fails."""
    if checked is not None:
        trained = run.train(job, checked)
        return trained.losses, run.in_the_whole(job, trained.weights)
    threads = torch.get_num_threads()
    torch.set_num_threads(group.THREADS)  # as many as a stage has, for the same bits
    try:
        return (reference.asynchronous if job.asynchronous else reference.synchronous)(job)
    finally:
        torch.set_num_threads(threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", allow_abbrev=False, description=__doc__.split("\n")[0]
    )
    whole = at_least(int, 1)
    parser.add_argument("--task", choices=TASKS, default="digits", help="default: %(default)s")
    parser.add_argument("--stages", type=whole, default=4, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--steps", type=whole, metavar="N", help="default: run's")
    parser.add_argument("--batch", type=whole, metavar="N", help="samples per step; default: run's")
    every = [name for names in SCHEDULES.values() for name in names]
    parser.add_argument("--only", choices=every, nargs="+", help="these trainings, beside the rows that are there")
    parser.add_argument("--data", metavar="DIR", help="a folder with CIFAR-10; default: through datasets")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), metavar="DIR", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
