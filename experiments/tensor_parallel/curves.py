"""Trains models by ranks and by one process, and draws all curves in one picture, with the accuracy on test samples.

    python -m experiments.tensor_parallel.curves [--model mlp resnet gpt2 llama] [--ranks N] [--steps N] [--out DIR]

Under --out: curves.jsonl with a row for each training, and learning.png.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.harness import group
from experiments.harness import rows as row_file
from experiments.harness.comparison import divergence
from experiments.harness.countdown import Countdown
from experiments.harness.curves import Learned, draw_learned
from experiments.harness.options import at_least, make_folder, under_runs
from experiments.tensor_parallel import run, worker
from experiments.tensor_parallel.collectives import Ranks
from experiments.tensor_parallel.worker import Job
from lowmem.errors import LowmemError
from lowmem.units import counted

PROGRAM = "experiments.tensor_parallel.curves"
RESULTS = Path(__file__).resolve().parent / "results"
NAME, PICTURE = "curves.jsonl", "learning.png"
ONE = "one process"
MOST_TESTED = 256
LEARNING = {  # options of `run` with which the loss falls in minutes
    "mlp": "--steps 200 --batch 32",
    "gpt2": "--steps 100 --batch 16 --learning-rate 3e-3",
    "llama": "--steps 100 --batch 16 --learning-rate 3e-3",
    "resnet": "--steps 40 --batch 32",
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    try:
        jobs = {model: _job(model, options) for model in options.model}
        make_folder(options.out, PICTURE)
        common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
        made = []
        names = (counted(options.ranks, "ranks"), ONE)
        countdown = Countdown({f"{model}, {name}": 0.0 for model in jobs for name in names})  # not known how long
        for model, job in jobs.items():
            for name in names:
                with countdown.case(f"{model}, {name}"):
                    losses, weights = _trained(job, name)
                if said := divergence(losses, weights):
                    raise LowmemError(f"{model}, {name}: {said}")
                row = {
                    "model": model, "name": name, "ranks": job.ranks, "steps": job.steps, "batch": job.batch,
                    "learning_rate": job.learning_rate, "losses": [round(loss, 4) for loss in losses],
                    "test_accuracy": accuracy(job, weights),
                }  # fmt: skip
                made.append(row | common)
                row_file.append(options.out / NAME, made[-1])
                print(line(row), flush=True)
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    draw(made, options.out / PICTURE)
    print(f"see {options.out / PICTURE}")
    return 0


def draw(rows: list[dict], path: Path) -> None:
    """Draws the newest row of each training."""
    panels: dict[str, dict[str, Learned]] = {}
    for row in rows:
        panels.setdefault(row["model"], {})[row["name"]] = Learned(row["losses"], row["test_accuracy"])
    draw_learned(panels, path)


def line(row: dict) -> str:
    """Returns a row for people."""
    first, last = row["losses"][0], row["losses"][-1]
    return f"{row['model']}, {row['name']}: loss {first:.2f} to {last:.2f}, test accuracy {row['test_accuracy']:.1%}"


def accuracy(job: Job, weights: dict[str, Tensor]) -> float:
    """Returns the share of the first MOST_TESTED test samples' predictions that the ordinary model with these weights
    makes as it should."""
    kind = job.kind
    sharded = job.sharder(Ranks(0, 1)).apply({})
    sharded.load(iter(weights.items()))
    model = sharded.model.eval()
    inputs, targets = (tensor[:MOST_TESTED] for tensor in kind.tests(job.seq))
    with torch.no_grad():
        found = model(inputs) if kind.config is None else model(inputs.long(), use_cache=False).logits
    return float((found.argmax(dim=-1) == targets).double().mean())


def _job(model: str, options: argparse.Namespace) -> Job:
    words = ["--model", model, "--ranks", str(options.ranks), *LEARNING[model].split()]
    words += ["--steps", str(options.steps)] if options.steps else []
    return replace(run.planned(run.parser().parse_args(words)), keep=True)


def _trained(job: Job, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses, and whole weights by name. LowmemError if a process fails."""
    if name != ONE:
        first = run.train(job)[0]
        return first.losses, first.weights
    threads = torch.get_num_threads()
    torch.set_num_threads(group.THREADS)
    try:
        alone = worker.reference(job)
    finally:
        torch.set_num_threads(threads)
    return alone.losses, alone.weights


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", allow_abbrev=False, description=__doc__.split("\n")[0]
    )
    whole = at_least(int, 1)
    parser.add_argument("--model", choices=LEARNING, nargs="+", default=list(LEARNING), help="default: all of them")
    parser.add_argument("--ranks", type=whole, default=2, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--steps", type=whole, metavar="N", help="default: by model")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), metavar="DIR", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
