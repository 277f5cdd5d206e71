"""Trains a decoder on a mesh of stages, replicas and parts of layers: `python -m experiments.parallel_3d.run`.

    python -m experiments.parallel_3d.run --pp 2 --tp 2 --dp 2 --model gpt2 --compare
    python -m experiments.parallel_3d.run --pp 4 --tp 2 --dp 1 --model llama --schedule gpipe --dtype fp32 --compare
    torchrun --nproc-per-node 8 -m experiments.parallel_3d.run --pp 2 --tp 2

Starts its own processes (gloo on the CPU, NCCL if there is a GPU for each), or is one of torchrun's. The schedule is
checked before any process starts. Under --out: report.json and curves.png.
"""

import argparse
import os
import sys
from pathlib import Path

from experiments.harness import group, parallel
from experiments.harness import rows as row_file
from experiments.harness.comparison import divergence, worst
from experiments.harness.options import SEEDS, at_least, exit_code_of, is_first, make_folder, parser_of, positive
from experiments.parallel_3d.comparison import compared, losses_of, too_far, whole_weights
from experiments.parallel_3d.theory import expected
from experiments.parallel_3d.worker import AXES, Job, Told
from experiments.tensor_parallel.models import DECODERS
from experiments.tensor_parallel.worker import DTYPES
from lowmem.errors import InputError
from lowmem.units import KIB

PROGRAM = "experiments.parallel_3d.run"
WORK = "experiments.parallel_3d.worker:work"
FOLDER = Path(__file__).resolve().parent
SCHEDULES = ("1f1b", "gpipe", "zb-h1")  # one stage for each process, and one update of all
MOST_PLANNED = 400_000  # micro-batches x stages
REPLICAS = 2


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    return exit_code_of(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    job = planned(options)
    if is_first():
        make_folder(options.out, "report.json", "curves.png")
    told = train(job)
    if told is None:
        return 0  # another process of torchrun's says it
    report = report_of(job, told, options.compare)
    parallel.write_report(report, options.out, _said(report))
    return 1 if too_far(report) or report["copies_differ"] else 0


def planned(options: argparse.Namespace) -> Job:
    """Returns the job. Raises InputError for options that exclude each other."""
    given = int(os.environ["WORLD_SIZE"]) if group.is_one_of_torchruns() else options.processes
    model = options.pp * options.tp
    if options.dp is None and given is not None and given % model:
        raise InputError(
            f"{options.pp} stages of {options.tp} parts are {model} processes, which do not divide {given}"
        )
    dp = options.dp or (REPLICAS if given is None else given // model)
    if given not in (None, model * dp):
        raise InputError(f"a mesh of {options.pp} x {dp} x {options.tp} has {model * dp} processes, and not {given}")
    if options.batch < dp * options.micro_batches:
        raise InputError(
            f"--batch {options.batch} has no sample for each of {options.micro_batches} micro-batches of {dp} replicas"
        )
    if options.micro_batches * options.pp > MOST_PLANNED:
        raise InputError(f"a schedule has {MOST_PLANNED:,} micro-batches times stages at most")
    shape = options.shape or str(FOLDER / f"{options.model}.json")
    job = Job(
        options.model, None, shape, options.tp, options.steps, options.batch, options.seq, options.dtype,
        options.learning_rate, options.clip or None, options.dropout, False, options.seed, options.compare,
        options.pp, dp, options.schedule, options.micro_batches,
    )  # fmt: skip
    job.kind.check(job.ranks, False, job.batch, job.seq)
    if job.pp > job.layers:
        raise InputError(f"the model has {job.layers} layers with embedding and head, which make no {job.pp} stages")
    job.checked()
    return job


def train(job: Job) -> list[Told] | None:
    return parallel.train(WORK, job, job.mesh.processes)


def report_of(job: Job, told: list[Told], compare: bool) -> dict:
    """Returns the content of report.json. Bytes are those of the process with the most, `*_theory` its by theory;
    `off_theory_bytes`: the largest difference of any process."""
    theory = [expected(job, one.place) for one in told]
    losses = losses_of(told)
    weights, copies_differ = whole_weights(told)
    checked = job.checked()
    report = {
        "model": job.model,
        "mesh": [job.pp, job.dp, job.ranks],
        "schedule": job.schedule,
        "micro_batches": job.micro_batches,
        "steps": job.steps,
        "dtype": job.dtype,
        "dropout": job.dropout,
        "layers_per_stage": job.sizes,
        "diverged": divergence(losses, weights),
        "copies_differ": copies_differ,
        "loss_distance": None,
        "weight_distance": None,
        "allowed": None,
        "bubble_planned": checked.bubble,
        "peak_in_flight": checked.peak_in_flight,
        "off_theory_bytes": worst(_off(one, of_one) for one, of_one in zip(told, theory, strict=True)),
        "losses": {"x".join(map(str, (job.pp, job.dp, job.ranks))): losses},
    }
    for name in ("parameters", "gradients", "moments"):
        found = [getattr(one, f"{name}_bytes") for one in told]
        most = found.index(max(found))
        report |= {f"{name}_bytes": found[most], f"{name}_bytes_theory": getattr(theory[most], name)}
    report["sent_bytes"] = {axis: max(one.sent[axis] for one in told) for axis in AXES}
    report["sent_bytes_theory"] = {axis: max(one.sent[axis] for one in theory) for axis in AXES}
    if compare:
        found = compared(job, losses, weights)
        report |= found | {"losses": report["losses"] | found["losses"]}
    return report | row_file.made_by(PROGRAM, sys.argv[1:])


def _off(told: Told, theory) -> float:
    held = ((told.parameters_bytes, theory.parameters), (told.gradients_bytes, theory.gradients))
    sent = ((told.sent[axis], theory.sent[axis]) for axis in AXES)
    return worst(abs(one - other) for one, other in (*held, (told.moments_bytes, theory.moments), *sent))


def _said(report: dict) -> str:
    mesh = "{} stages x {} replicas x {} parts".format(*report["mesh"])
    held = sum(report[f"{name}_bytes"] for name in ("parameters", "gradients", "moments"))
    sent = ", ".join(f"{axis} {report['sent_bytes'][axis] / KIB:,.1f}" for axis in AXES)
    lines = [
        f"{report['model']}, {mesh}: bubble {report['bubble_planned']:.1%} planned; KiB sent in a step: {sent}",
        f"at most {held / KIB:,.0f} KiB of parameters, gradients and moments; off theory by "
        f"{report['off_theory_bytes']:g} bytes",
    ]
    if report["copies_differ"]:
        lines.append(f"copies of the same weight DIFFER: {', '.join(report['copies_differ'])}")
    if report["allowed"] and not report["diverged"]:
        far = too_far(report)
        lines += [
            f"{name} {report[f'{name}_distance']:.1e} from one process in fp64, allowed is {most:.1e}"
            + (": TOO FAR" if name in far else "")
            for name, most in report["allowed"].items()
        ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = parser_of(PROGRAM, __doc__)
    some = at_least(float, 0, 1e6)
    found.add_argument("--pp", type=positive, default=2, metavar="N", help="stages (%(default)s)")
    found.add_argument("--tp", type=positive, default=2, metavar="N", help="parts of each layer (%(default)s)")
    found.add_argument("--dp", type=positive, metavar="N", help=f"replicas ({REPLICAS}, or what --processes leaves)")
    found.add_argument("--processes", type=positive, metavar="N", help="all together (torchrun's)")
    found.add_argument("--model", choices=DECODERS, default="gpt2", help="default: %(default)s")
    found.add_argument("--shape", metavar="NAME", help="of random weights: gpt2, config.json (a small one)")
    found.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    found.add_argument("--micro-batches", type=positive, default=4, metavar="N", help="of a replica (%(default)s)")
    found.add_argument("--steps", type=positive, default=5, metavar="N", help="default: %(default)s")
    found.add_argument("--batch", type=positive, default=16, metavar="N", help="samples of all replicas (%(default)s)")
    found.add_argument("--seq", type=positive, default=32, metavar="N", help="tokens of a sample (%(default)s)")
    found.add_argument("--dtype", choices=DTYPES, default="fp64", help="default: %(default)s")
    found.add_argument("--learning-rate", type=some, default=1e-3, metavar="X", help="default: %(default)s")
    found.add_argument(
        "--clip", type=some, default=1.0, metavar="X", help="norm of all gradients; 0: none (%(default)s)"
    )
    found.add_argument("--dropout", type=at_least(float, 0, 1), default=0.0, metavar="P", help="default: %(default)s")
    found.add_argument("--seed", type=at_least(int, 0, SEEDS), default=0, metavar="N", help="default: %(default)s")
    found.add_argument("--compare", action="store_true", help="with one process and the ordinary model")
    found.add_argument("--out", type=Path, default=Path("runs/parallel_3d"), metavar="DIR", help="%(default)s")
    return found


if __name__ == "__main__":
    sys.exit(main())
