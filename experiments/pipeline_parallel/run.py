"""Trains a model cut into stages, a process for each: `python -m experiments.pipeline_parallel.run`.

    python -m experiments.pipeline_parallel.run --stages 4 --schedule 1f1b --micro-batches 8 --steps 30 --compare
    python -m experiments.pipeline_parallel.run --stages 4 --schedule zb-h1 --micro-batches 8 --plan-only
    torchrun --nproc-per-node 4 -m experiments.pipeline_parallel.run --stages 4 --schedule 1f1b

Starts its own processes (gloo on the CPU, NCCL if there is a GPU for each), or is one of torchrun's. The schedule is
checked before any process starts. Under --out: report.json, timeline.png (planned, and measured in the last step) and
curves.png.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experiments.harness import group, parallel
from experiments.harness import rows as row_file
from experiments.harness.comparison import divergence, worst
from experiments.harness.options import SEEDS, at_least, exit_code_of, is_first, make_folder, parser_of, positive
from experiments.pipeline_parallel import reference
from experiments.pipeline_parallel.checker import Checked, bubble_of, check
from experiments.pipeline_parallel.picture import draw_timelines
from experiments.pipeline_parallel.schedules import ASYNCHRONOUS, COMPUTED, SCHEDULES, TIMES, Action, schedule
from experiments.pipeline_parallel.stage import Layers
from experiments.pipeline_parallel.tasks import BATCH, GROUP, LAYERS, TASKS, Task, accuracy, cut, make_task
from experiments.pipeline_parallel.worker import Actions, Job
from lowmem.errors import InputError

PROGRAM = "experiments.pipeline_parallel.run"
WORK = "experiments.pipeline_parallel.worker:work"
LEARNING_RATE, STALE_LEARNING_RATE = 3e-3, 1e-3  # PipeDream updates after each micro-batch, by older weights
STEPS = {"digits": 300, "cifar10": 1000, "gpt2": 100}
BATCH_SIZE = 64
FILES = ("report.json", "timeline.png", "curves.png")
MOST_PLANNED = 400_000  # micro-batches x stages: some 2 GB and a minute until it is checked


@dataclass(frozen=True)
class Trained:
    """Results of all ranks: losses of the steps, spans of the last step, and by rank the other fields. Bytes are of GPU
    memory, else of the process's RAM."""

    losses: list[float]
    spans: list[list[tuple[float, float, Action]]]
    bytes_before: list[int]
    peak_bytes: list[int]
    weight_versions: list[int]
    weights: dict[int, dict[str, torch.Tensor]]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    return exit_code_of(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    job, checked = planned(options)
    if is_first():
        make_folder(options.out, *FILES)
    elif options.plan_only:
        return 0
    trained = None
    if not options.plan_only:
        trained = train(job, checked)
        if trained is None:
            return 0  # another process of torchrun's says it
    report = report_of(job, checked, trained, options)
    timelines = {"planned": checked.spans} | ({"measured": trained.spans} if trained else {})
    draw_timelines(timelines, options.out / "timeline.png")
    parallel.write_report(report, options.out, _said(report))
    return 0 if report["weights_bitwise_equal"] in (None, True) else 1


def planned(options: argparse.Namespace) -> tuple[Job, Checked]:
    """Returns the job, and its checked schedule. Raises InputError for options that exclude each other."""
    stages, asynchronous = options.stages * options.chunks, options.schedule in ASYNCHRONOUS
    steps = options.steps or STEPS[options.task]
    batch = options.batch or max(BATCH_SIZE, options.micro_batches)
    if batch < options.micro_batches:
        raise InputError(f"--batch {batch} has no sample for each of {options.micro_batches} micro-batches")
    if asynchronous and options.clip:
        raise InputError(f"--clip needs the gradients of all stages at once, which {options.schedule} never has; use 0")
    if group.is_one_of_torchruns() and int(os.environ["WORLD_SIZE"]) != options.stages and not options.plan_only:
        raise InputError(f"torchrun has {os.environ['WORLD_SIZE']} processes, and --stages is {options.stages}")
    count = options.micro_batches * (steps if asynchronous else 1)
    if count * stages > MOST_PLANNED:
        raise InputError(f"{count:,} micro-batches in {stages} stages: a schedule has {MOST_PLANNED:,} at most of both")
    try:
        actions = schedule(options.schedule, options.stages, count, options.chunks)
    except ValueError as error:  # sizes that it does not have
        raise InputError(str(error)) from error
    checked = check(actions, stages, count, updates=count if asynchronous else 1)
    if options.data and options.task != "cifar10":
        raise InputError(f"--data is a folder with CIFAR-10, and --task is {options.task}")
    costs = [1.0] * LAYERS[options.task]
    if not options.plan_only:
        task = make_task(options.task, options.seed, options.norm, data=options.data)
        costs = seconds_of_layers(task, options.seed) if options.balance == "time" else costs
    usual = STALE_LEARNING_RATE if asynchronous else LEARNING_RATE
    rate = usual if options.learning_rate is None else options.learning_rate
    job = Job(
        options.schedule, options.stages, options.chunks, options.micro_batches, steps, batch, options.task,
        options.norm, options.seed, rate, options.clip or None, options.recompute,
        tuple(cut(costs, stages)),
        {kind: options.pad * units for kind, units in TIMES.items()} if options.pad else None, True, options.data,
    )  # fmt: skip
    return job, checked


def seconds_of_layers(task: Task, seed: int, rows: int = 8, repeats: int = 5) -> list[float]:
    x, target = (tensor[:rows] for tensor in (task.inputs, task.targets))
    found = []
    for number, layer in enumerate(task.layers):
        one = Layers([layer], number, seed)
        x = x.detach().requires_grad_(x.is_floating_point())
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            output = one(x, 0, 0)
            (task.loss_of(output, target) if layer is task.layers[-1] else output.sum()).backward()
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
        x = output
    return found


def train(job: Job, checked: Checked) -> Trained | None:
    told = parallel.train(WORK, (job, [Actions.of(actions) for actions in checked.actions]), job.ranks)
    return told and _joined(checked, told)


def _joined(checked: Checked, told: list[dict]) -> Trained:
    computed = [[action for action in actions if action.kind in COMPUTED] for actions in checked.actions]
    return Trained(
        next(one["losses"] for one in told if one["losses"]),
        [
            list(zip(one["times"][::2], one["times"][1::2], actions, strict=True))
            for one, actions in zip(told, computed, strict=True)
        ],
        [one["bytes_before"] for one in told],
        [one["peak_bytes"] for one in told],
        [one["weight_versions"] for one in told],
        {number: weights for one in told for number, weights in one["weights"].items()},
    )


def report_of(job: Job, checked: Checked, trained: Trained | None, options: argparse.Namespace) -> dict:
    report = {
        "schedule": job.schedule,
        "stages": job.ranks,
        "chunks": job.chunks,
        "micro_batches": job.micro_batches,
        "steps": job.steps,
        "task": job.task,
        "layers_per_stage": list(job.sizes),
        "diverged": trained and divergence(trained.losses, in_the_whole(job, trained.weights)),
        "max_abs_loss_difference": None,
        "weights_bitwise_equal": None,
        "max_abs_weight_difference": None,
        "bubble_planned": checked.bubble,
        "bubble_measured": bubble_of(trained.spans) if trained else None,
        "peak_in_flight": checked.peak_in_flight,
        "peak_bytes_per_rank": trained.peak_bytes if trained else None,
        "bytes_before_per_rank": trained.bytes_before if trained else None,
        "weight_versions": trained.weight_versions if trained else checked.weight_versions,
        "gradients_summed_in_order": checked.in_order,
        "losses": {job.schedule: trained.losses} if trained else None,
        "test_accuracy": trained and accuracy_of(job, in_the_whole(job, trained.weights)),
    }
    if trained and options.compare:
        found = compared(job, trained)
        report |= found | {"losses": report["losses"] | found["losses"]}
    return report | row_file.made_by(PROGRAM, sys.argv[1:])


def compared(job: Job, trained: Trained) -> dict:
    """Compares with one process. An asynchronous schedule's losses are shown beside training whose weights are never
    stale."""
    device = group.device_of(0, job.ranks)
    with group.threads_of_a_process():
        losses, weights = reference.trained(job, device)
        shown = {"one process": losses}
        if job.asynchronous:
            one_stage = replace(job, schedule="pipedream", ranks=1, sizes=(sum(job.sizes),))
            shown = {"one process, no stale weights": reference.trained(one_stage, device)[0]}
    found = in_the_whole(job, trained.weights)
    differences = [_distance(found[name], weight) for name, weight in weights.items()]
    return {
        "losses": shown,
        "max_abs_loss_difference": _distance(torch.tensor(trained.losses).double(), torch.tensor(losses).double()),
        "weights_bitwise_equal": not any(differences),
        "max_abs_weight_difference": worst(differences),
    }


def accuracy_of(job: Job, weights: dict[str, torch.Tensor]) -> float:
    task = job.make_task()
    layers = Layers(task.layers, 0, job.seed)
    layers.load_state_dict(weights)
    return accuracy(task, layers)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest absolute difference of two elements; 0 if both are not a number."""
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one.double() - other.double()).abs().where(~same, 0.0).max())


def in_the_whole(job: Job, weights: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the stages' weights by their names in the whole model, as far as they were kept."""
    found, first = {}, 0
    for number, size in enumerate(job.sizes):
        for name, tensor in weights.get(number, {}).items():
            _, place, rest = name.split(".", 2)
            found[f"layers.{first + int(place)}.{rest}"] = tensor
        first += size
    return found


def _said(report: dict) -> str:
    measured = report["bubble_measured"]
    lines = [
        f"{report['schedule']}, {report['stages']} ranks, {report['micro_batches']} micro-batches: bubble "
        f"{report['bubble_planned']:.1%} planned" + ("" if measured is None else f", {measured:.1%} measured"),
        f"in flight {report['peak_in_flight']}, versions of weights {report['weight_versions']}",
    ]
    if report["losses"]:
        first, last = (next(iter(report["losses"].values()))[place] for place in (0, -1))
        lines.append(f"loss {first:.4g} to {last:.4g}, {report['test_accuracy']:.1%} of the test samples right")
    if report["weights_bitwise_equal"] is not None and not report["diverged"]:
        equal = "equal to" if report["weights_bitwise_equal"] else "NOT equal to"
        lines.append(f"weights bit for bit {equal} one process's; losses differ by {report['max_abs_loss_difference']}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = parser_of(PROGRAM, __doc__)
    some = at_least(float, 0, 1e6)
    found.add_argument("--stages", type=positive, default=4, metavar="N", help="processes (%(default)s)")
    found.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    found.add_argument("--micro-batches", type=positive, default=8, metavar="N", help="per step (%(default)s)")
    found.add_argument("--chunks", type=positive, default=1, metavar="V", help="stages per process (%(default)s)")
    steps = ", ".join(f"{task} {count}" for task, count in STEPS.items())
    found.add_argument("--steps", type=positive, metavar="N", help=f"default: {steps}")
    found.add_argument("--batch", type=positive, metavar="N", help=f"samples per step ({BATCH_SIZE})")
    found.add_argument("--task", choices=TASKS, default="digits", help="default: %(default)s")
    found.add_argument("--norm", choices=(GROUP, BATCH), default=GROUP, help="of the convolutions (%(default)s)")
    found.add_argument("--data", metavar="DIR", help="CIFAR-10: cifar-10-batches-py, or train/ and test/ with images")
    rates = f"default: {LEARNING_RATE}, of {' and '.join(ASYNCHRONOUS)} {STALE_LEARNING_RATE}"
    found.add_argument("--learning-rate", type=some, metavar="X", help=rates)
    found.add_argument("--clip", type=some, default=0.0, metavar="X", help="largest norm of all gradients (none)")
    found.add_argument("--recompute", action="store_true", help="keep a stage's input alone, and run it again")
    found.add_argument("--balance", choices=("time", "layers"), default="time", help="stages of equal (%(default)s)")
    found.add_argument("--pad", type=some, default=0.0, metavar="S", help="seconds of a forward at least, by sleeping")
    found.add_argument("--seed", type=at_least(int, 0, SEEDS), default=0, metavar="N", help="default: %(default)s")
    found.add_argument("--compare", action="store_true", help="with one process that does the same")
    found.add_argument("--plan-only", action="store_true", help="make, check and draw the schedule alone")
    found.add_argument("--out", type=Path, default=Path("runs/pipeline_parallel"), metavar="DIR", help="%(default)s")
    return found


if __name__ == "__main__":
    sys.exit(main())
