"""Trains a model of which each process has a part of every layer: `python -m experiments.tensor_parallel.run`.

    python -m experiments.tensor_parallel.run --ranks 4 --model gpt2 --steps 50 --compare
    python -m experiments.tensor_parallel.run --ranks 2 --model llama --sequence-parallel --dtype fp64 --compare
    torchrun --nproc-per-node 2 -m experiments.tensor_parallel.run --ranks 2 --model gpt2 --weights FOLDER --save

Starts its own processes (gloo on the CPU, NCCL if there is a GPU for each), or is one of torchrun's. Under --out:
report.json, curves.png and, with --save, the whole model in `model`, as transformers reads it.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from experiments.harness import group, parallel
from experiments.harness import rows as row_file
from experiments.harness.comparison import divergence
from experiments.harness.options import SEEDS, at_least, exit_code_of, is_first, make_folder, parser_of, positive
from experiments.tensor_parallel.collectives import BACKWARD, FORWARD
from experiments.tensor_parallel.models import DECODERS, RULES, SEQ
from experiments.tensor_parallel.rounding import MOST, compared, too_large
from experiments.tensor_parallel.worker import DTYPES, Job, RankResult
from lowmem.errors import InputError
from lowmem.models.build import own_generation_config
from lowmem.models.export import export_model
from lowmem.units import MIB

PROGRAM = "experiments.tensor_parallel.run"
WORK = "experiments.tensor_parallel.worker:work"
LEARNING_RATE, RESNET_LEARNING_RATE = 1e-3, 2e-2
RESNET_COMPARED_LEARNING_RATE = 1e-5  # at which rounding hardly grows
COMPARED = {
    "losses": "max_rel_loss_difference",
    "gradients": "max_rel_gradient_difference",
    "weights": "max_rel_weight_difference",
}


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    return exit_code_of(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    job = planned(options)
    if is_first():
        make_folder(options.out, "report.json", "curves.png")
    results = train(job)
    if results is None:
        return 0  # another process of torchrun's says it
    report = report_of(job, results, options.compare)
    if options.save:
        save(job, results[0].weights, options.out / "model")
    parallel.write_report(report, options.out, _said(report))
    return 1 if too_large(report) else 0


def planned(options: argparse.Namespace) -> Job:
    """Returns the job. Raises InputError for options that exclude each other."""
    usual = LEARNING_RATE
    if options.model == "resnet":
        usual = RESNET_COMPARED_LEARNING_RATE if options.compare else RESNET_LEARNING_RATE
    learning_rate = usual if options.learning_rate is None else options.learning_rate
    if options.seq is not None and options.model not in DECODERS:
        raise InputError(f"--seq is for {' and '.join(DECODERS)}: {options.model} sees images")
    job = Job(
        options.model, options.weights, options.shape, options.ranks, options.steps, options.batch, options.seq or SEQ,
        options.dtype, learning_rate, options.clip or None, options.dropout, options.sequence_parallel, options.seed,
        options.compare or options.save,
    )  # fmt: skip
    if options.save and options.model not in DECODERS:
        raise InputError(f"--save writes a folder for transformers, which has no {options.model}")
    if options.compare and options.dropout:
        raise InputError("--compare is with the ordinary model, whose dropout draws other numbers; use --dropout 0")
    if group.is_one_of_torchruns() and int(os.environ["WORLD_SIZE"]) != options.ranks:
        raise InputError(f"torchrun has {os.environ['WORLD_SIZE']} processes, and --ranks is {options.ranks}")
    job.kind.check(job.ranks, job.sequence_parallel, job.batch, job.seq)
    return job


def train(job: Job, work: str = WORK) -> list[RankResult] | None:
    return parallel.train(work, job, job.ranks)


def report_of(job: Job, results: list[RankResult], compare: bool) -> dict:
    """Returns the content of report.json. `collectives_per_block`: the most of any block. `collectives`: of a step, by
    place (block or ""), pass and kind. `bytes_per_step`: sent by a rank."""
    first = results[0]
    by_block: dict[str, Counter] = {FORWARD: Counter(), BACKWARD: Counter()}
    collectives: dict[str, dict[str, dict[str, int]]] = {}
    for (place, direction, kind), count in sorted(first.calls.items()):
        collectives.setdefault(place, {}).setdefault(direction, {})[kind] = count
        if "." in place:
            by_block[direction][place] += count
    report = {
        "model": job.model,
        "ranks": job.ranks,
        "steps": job.steps,
        "dtype": job.dtype,
        "sequence_parallel": job.sequence_parallel,
        "diverged": divergence(first.losses, first.weights),
        "max_abs_loss_difference": None,
        "max_rel_loss_difference": None,
        "max_rel_weight_difference": None,
        "max_rel_gradient_difference": None,
        "in_roundings": None,
        "collectives_per_block": {pass_: max(counts.values(), default=0) for pass_, counts in by_block.items()},
        "collectives": collectives,
        "bytes_per_step": sum(first.sent.values()),
        "parameters_per_rank": [sum(one.parameters) for one in results],
        "replicated_parameters": first.parameters[1],
        "bytes_before_per_rank": [one.bytes_before for one in results],
        "peak_bytes_per_rank": [one.peak_bytes for one in results],
        "saved_bytes_per_rank": [one.saved_bytes for one in results],
        "losses": {f"{job.ranks} ranks": first.losses},
    }
    if compare:
        found = compared(job, first)
        report |= found | {"losses": report["losses"] | found["losses"]}
    return report | row_file.made_by(PROGRAM, sys.argv[1:])


def save(job: Job, weights: dict[str, Tensor], folder: Path) -> None:
    kind = job.kind
    names = dict(kind.build(torch.float32).named_parameters())  # without buffers
    export_model(
        folder, kind.config, ((name, weights[name]) for name in names), tokenizer=kind.tokenizer(),
        generation_config=own_generation_config(kind.folder, "pretrained") if kind.folder else None,
        readme=f"# {kind.name}, trained by {PROGRAM}\n",
    )  # fmt: skip


def _said(report: dict) -> str:
    blocks = report["collectives_per_block"]
    of_all, whole = report["parameters_per_rank"], report["replicated_parameters"]
    lines = [
        f"{report['model']}, {report['ranks']} ranks: {blocks[FORWARD]} collectives forward and {blocks[BACKWARD]} "
        "backward in a block",
        f"{report['bytes_per_step'] / MIB:,.1f} MiB sent per rank and step",
        f"at most {max(of_all):,} parameters a rank, {whole:,} of them on all",
        f"peaks {', '.join(f'{peak / MIB:,.0f}' for peak in report['peak_bytes_per_rank'])} MiB",
    ]
    if report["max_rel_loss_difference"] is not None and not report["diverged"]:
        more = " and ".join(too_large(report))
        lines += [
            "beside one process, the largest relative differences: "
            + ", ".join(f"{name} {report[key]:.1e}" for name, key in COMPARED.items()),
            "in multiples of what rounding does to one process in as many steps: "
            + ", ".join(f"{name} {times:.2g}" for name, times in report["in_roundings"].items()),
            f"allowed is {MOST:g}" + (f": {more} differ MORE" if more else ""),
        ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = parser_of(PROGRAM, __doc__)
    some = at_least(float, 0, 1e6)
    found.add_argument("--ranks", type=positive, default=4, metavar="N", help="processes (%(default)s)")
    found.add_argument("--model", choices=RULES, default="gpt2", help="default: %(default)s")
    found.add_argument("--weights", metavar="DIR", help="of a GPT-2 or Llama, a folder or a hub name (random, small)")
    found.add_argument("--shape", metavar="NAME", help="random weights of this shape: gpt2, gpt2-large, config.json")
    found.add_argument("--steps", type=positive, default=50, metavar="N", help="default: %(default)s")
    found.add_argument("--batch", type=positive, default=8, metavar="N", help="samples per step (%(default)s)")
    found.add_argument("--seq", type=positive, metavar="N", help=f"tokens of a sample ({SEQ})")
    found.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: %(default)s")
    found.add_argument("--sequence-parallel", action="store_true", help="cut the sequence between the cut layers")
    rates = (
        f"default: {LEARNING_RATE}, of resnet {RESNET_LEARNING_RATE}, with --compare {RESNET_COMPARED_LEARNING_RATE}"
    )
    found.add_argument("--learning-rate", type=some, metavar="X", help=rates)
    found.add_argument(
        "--clip", type=some, default=1.0, metavar="X", help="norm of all gradients; 0: none (%(default)s)"
    )
    found.add_argument("--dropout", type=at_least(float, 0, 1), default=0.0, metavar="P", help="default: %(default)s")
    found.add_argument("--seed", type=at_least(int, 0, SEEDS), default=0, metavar="N", help="default: %(default)s")
    found.add_argument("--compare", action="store_true", help="with one process and the ordinary model")
    found.add_argument("--save", action="store_true", help="write the whole model for transformers")
    found.add_argument("--out", type=Path, default=Path("runs/tensor_parallel"), metavar="DIR", help="%(default)s")
    return found


if __name__ == "__main__":
    sys.exit(main())
