"""Trains models by ranks and by one process, and draws all curves in one picture, with the accuracy on test samples.

    python -m experiments.tensor_parallel.curves [--model mlp resnet gpt2 llama] [--ranks N] [--steps N] [--out DIR]

Under --out: curves.jsonl with a row for each training, and learning.png.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from experiments.harness import group
from experiments.harness.comparison import divergence
from experiments.harness.curves import Learned, draw_learned, learned
from experiments.harness.options import exit_code_of, make_folder, parser_of, positive, under_runs
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
    return exit_code_of(lambda: learn(options, arguments))


def learn(options: argparse.Namespace, arguments: list[str]) -> int:
    trainings = {
        f"{model}, {name}": partial(_row, name, _job(model, options))
        for model in options.model
        for name in (counted(options.ranks, "ranks"), ONE)
    }
    make_folder(options.out, PICTURE)
    draw(learned(PROGRAM, arguments, options.out / NAME, trainings), options.out / PICTURE)
    print(f"see {options.out / PICTURE}")
    return 0


def _row(name: str, job: Job) -> dict:
    losses, weights = _trained(job, name)
    if said := divergence(losses, weights):
        raise LowmemError(f"{job.model}, {name}: {said}")
    return {
        "model": job.model, "name": name, "ranks": job.ranks, "steps": job.steps, "batch": job.batch,
        "learning_rate": job.learning_rate, "losses": losses, "test_accuracy": accuracy(job, weights),
    }  # fmt: skip


def draw(rows: list[dict], path: Path) -> None:
    panels: dict[str, dict[str, Learned]] = {}
    for row in rows:
        panels.setdefault(row["model"], {})[row["name"]] = Learned(row["losses"], row["test_accuracy"])
    draw_learned(panels, path)


def accuracy(job: Job, weights: dict[str, Tensor]) -> float:
    """Returns the share of right predictions of the ordinary model with these weights on the first MOST_TESTED test
    samples."""
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
    if name != ONE:
        first = run.train(job)[0]
        return first.losses, first.weights
    with group.threads_of_a_process():
        alone = worker.reference(job)
    return alone.losses, alone.weights


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", choices=LEARNING, nargs="+", default=list(LEARNING), help="default: all of them")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--steps", type=positive, metavar="N", help="default: by model")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), metavar="DIR", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
