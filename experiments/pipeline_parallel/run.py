"""Trains a model cut into stages, a process for each: `python -m experiments.pipeline_parallel.run`.

    python -m experiments.pipeline_parallel.run --stages 4 --schedule 1f1b --micro-batches 8 --steps 30 --compare
    python -m experiments.pipeline_parallel.run --stages 4 --schedule zb-h1 --micro-batches 8 --plan-only
    torchrun --nproc-per-node 4 -m experiments.pipeline_parallel.run --stages 4 --schedule 1f1b

Starts its own processes (gloo on the CPU, NCCL where there is a GPU for each), or is one of torchrun's. The schedule is
made and checked before any process starts. Under --out: report.json, timeline.png (planned, and measured in the last
step) and, where it trained, curves.png.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from experiments.harness import rows as row_file
from experiments.pipeline_parallel import reference, worker
from experiments.pipeline_parallel.checker import Checked, bubble_of, check
from experiments.pipeline_parallel.picture import draw_curves, draw_timelines
from experiments.pipeline_parallel.schedules import ASYNCHRONOUS, SCHEDULES, TIMES, Action, schedule
from experiments.pipeline_parallel.stage import Layers
from experiments.pipeline_parallel.tasks import BATCH, GROUP, TASKS, Task, cut, make_task
from experiments.pipeline_parallel.worker import Actions, Job
from lowmem.errors import InputError, LowmemError

PROGRAM = "experiments.pipeline_parallel.run"
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # until a process that failed has said why, and its neighbours have noticed


class ProcessFailed(LowmemError):
    """One of the processes ended early."""


@dataclass(frozen=True)
class Trained:
    """Of all ranks: losses of the steps, spans of the last step, and by rank peaks and versions of weights."""

    losses: list[float]
    spans: list[list[tuple[float, float, Action]]]
    peak_bytes: list[int]
    weight_versions: list[int]
    weights: dict[int, dict[str, torch.Tensor]]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except ValueError as error:  # sizes that a schedule does not have
        parser.error(str(error))
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    """What the command does; its exit code."""
    job, checked = planned(options)
    is_one_of_torchruns = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    trained = None
    if not options.plan_only:
        trained = train_as_one_of(job, checked) if is_one_of_torchruns else train(job, checked)
        if trained is None:
            return 0  # another process of torchrun's says it
    report = report_of(job, checked, trained, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    timelines = {"planned": checked.spans} | ({"measured": trained.spans} if trained else {})
    draw_timelines(timelines, options.out / "timeline.png")
    print(_said(report))
    if trained:
        draw_curves(curves(job, trained, options.compare), options.out / "curves.png")
    print(f"see {options.out / 'report.json'}")
    return 0 if report["weights_bitwise_equal"] in (None, True) else 1


def planned(options: argparse.Namespace) -> tuple[Job, Checked]:
    """The job, and its schedule, checked. InputError and ValueError for what does not go together."""
    stages, asynchronous = options.stages * options.chunks, options.schedule in ASYNCHRONOUS
    batch = options.batch or 2 * options.micro_batches
    if batch < options.micro_batches:
        raise InputError(f"--batch {batch} has no sample for each of {options.micro_batches} micro-batches")
    if asynchronous and options.clip:
        raise InputError(f"--clip needs the gradients of all stages at once, which {options.schedule} never has; use 0")
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) != options.stages and not options.plan_only:
        raise InputError(f"torchrun has {os.environ['WORLD_SIZE']} processes, and --stages is {options.stages}")
    count = options.micro_batches * (options.steps if asynchronous else 1)
    actions = schedule(options.schedule, options.stages, count, options.chunks)
    checked = check(actions, stages, count, updates=count if asynchronous else 1)
    task = make_task(options.task, options.seed, options.norm)
    costs = [1.0] * len(task.layers)
    if options.balance == "time" and not options.plan_only:
        costs = seconds_of_layers(task, options.seed)
    job = Job(
        options.schedule, options.stages, options.chunks, options.micro_batches, options.steps, batch, options.task,
        options.norm, options.seed, options.learning_rate, options.clip or None, options.recompute,
        tuple(cut(costs, stages)),
        {kind: options.pad * units for kind, units in TIMES.items()} if options.pad else None, options.compare,
    )  # fmt: skip
    return job, checked


def seconds_of_layers(task: Task, seed: int, rows: int = 8, repeats: int = 5) -> list[float]:
    """Of forward and backward of each layer, the median of a few."""
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


def train(job: Job, checked: Checked) -> Trained:
    """In processes that are started here. ProcessFailed, with the cause, where one ends early; then all are ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(worker.saved(job))
        for rank, actions in enumerate(checked.actions):
            np.save(folder / f"actions-{rank}.npy", Actions.of(actions).array)
        processes = [_started(folder, rank) for rank in range(job.ranks)]
        try:
            _watch(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.stdin.close()
                process.wait()
        return _joined(torch.load(folder / worker.RESULT, weights_only=False))


def train_as_one_of(job: Job, checked: Checked) -> Trained | None:
    """In this process, one of torchrun's, and the others; None but on rank 0."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = worker.device_of(rank, job.ranks)
    worker.begin(None, rank, job.ranks, device)
    # Cuts by measured times are rank 0's, since each process has measured other ones.
    agreed = [job.sizes]
    dist.broadcast_object_list(agreed, src=0)
    job = Job(**{**vars(job), "sizes": agreed[0]})
    told = worker.work(job, rank, Actions.of(checked.actions[rank]), device)
    dist.destroy_process_group()
    return _joined(told) if rank == 0 else None


def _started(folder: Path, rank: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.pipeline_parallel.worker", str(folder), str(rank)]
    with open(folder / f"output-{rank}", "wb") as output:
        return subprocess.Popen(command, cwd=row_file.ROOT, stdin=subprocess.PIPE, stdout=output, stderr=output)


def _watch(processes: list[subprocess.Popen], folder: Path) -> None:
    """Until all have ended well, or one has not."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            raise ProcessFailed(_cause(processes, folder))
        time.sleep(POLL_SECONDS)


def _cause(processes: list[subprocess.Popen], folder: Path) -> str:
    """Of what went wrong first: a process that was killed, or the first error that is not another process's end."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)
    failures = {}
    for rank, process in enumerate(processes):
        path = folder / worker.FAILED.format(rank)
        if path.exists():
            failures[rank] = json.loads(path.read_text())
        elif process.returncode is not None and process.returncode < 0:
            return f"the process of rank {rank} was ended by signal {-process.returncode}"
        elif process.returncode:
            output = (folder / f"output-{rank}").read_text(errors="replace").strip().splitlines()
            return (
                f"the process of rank {rank} ended with exit code {process.returncode}: {(output or ['no output'])[-1]}"
            )
    rank, first = min(failures.items(), key=lambda item: (item[1]["of_another"], item[1]["time"]))
    return f"rank {rank} failed: {first['error']}"


def _joined(told: list[dict]) -> Trained:
    return Trained(
        next(one["losses"] for one in told if one["losses"]),
        [[(begin, end, Action(*action)) for begin, end, *action in one["spans"]] for one in told],
        [one["peak_bytes"] for one in told],
        [one["weight_versions"] for one in told],
        {number: weights for one in told for number, weights in one["weights"].items()},
    )


def report_of(job: Job, checked: Checked, trained: Trained | None, options: argparse.Namespace) -> dict:
    """report.json's content."""
    report = {
        "schedule": job.schedule,
        "stages": job.ranks,
        "chunks": job.chunks,
        "micro_batches": job.micro_batches,
        "steps": job.steps,
        "task": job.task,
        "layers_per_stage": list(job.sizes),
        "max_abs_loss_difference": None,
        "weights_bitwise_equal": None,
        "max_abs_weight_difference": None,
        "bubble_planned": checked.bubble,
        "bubble_measured": bubble_of(trained.spans) if trained else None,
        "peak_in_flight": checked.peak_in_flight,
        "peak_bytes_per_rank": trained.peak_bytes if trained else None,
        "weight_versions": trained.weight_versions if trained else checked.weight_versions,
        "gradients_summed_in_order": checked.in_order,
        "losses": trained.losses if trained else None,
    }
    if trained and options.compare:
        report |= compared(job, trained)
    return report | row_file.made_by(PROGRAM, sys.argv[1:])


def compared(job: Job, trained: Trained) -> dict:
    """With one process."""
    losses, weights = (reference.asynchronous if job.asynchronous else reference.synchronous)(job)
    found = in_the_whole(job, trained.weights)
    differences = [float((found[name].double() - weight.double()).abs().max()) for name, weight in weights.items()]
    return {
        "max_abs_loss_difference": max(abs(a - b) for a, b in zip(losses, trained.losses, strict=True)),
        "weights_bitwise_equal": all(torch.equal(found[name], weight) for name, weight in weights.items()),
        "max_abs_weight_difference": max(differences),
    }


def in_the_whole(job: Job, weights: dict[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stages' weights by their names in the whole model."""
    found, first = {}, 0
    for number, size in enumerate(job.sizes):
        for name, tensor in weights[number].items():
            _, place, rest = name.split(".", 2)
            found[f"layers.{first + int(place)}.{rest}"] = tensor
        first += size
    return found


def curves(job: Job, trained: Trained, compare: bool) -> dict[str, list[float]]:
    """Losses to be drawn; beside an asynchronous schedule's those of the same micro-batches, updated one by one."""
    found = {job.schedule: trained.losses}
    if compare and job.asynchronous:
        one_by_one = Job(**{**vars(job), "schedule": "pipedream", "ranks": 1, "chunks": 1, "sizes": (sum(job.sizes),)})
        found["one process, no stale weights"] = reference.asynchronous(one_by_one)[0]
    elif compare:
        found["one process"] = reference.synchronous(job)[0]
    return found


def _said(report: dict) -> str:
    measured = report["bubble_measured"]
    words = [
        f"{report['schedule']}, {report['stages']} ranks, {report['micro_batches']} micro-batches: bubble",
        f"{report['bubble_planned']:.1%} planned" + ("" if measured is None else f", {measured:.1%} measured"),
        f"\nin flight {report['peak_in_flight']}, versions of weights {report['weight_versions']}",
    ]
    if report["weights_bitwise_equal"] is not None:
        equal = "equal to" if report["weights_bitwise_equal"] else "NOT equal to"
        words.append(
            f"\nweights bit for bit {equal} one process's; losses differ by {report['max_abs_loss_difference']}"
        )
    return " ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", allow_abbrev=False, description=__doc__.split("\n")[0]
    )
    whole, some = _number(int, 1), _number(float, 0)
    parser.add_argument("--stages", type=whole, default=4, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    parser.add_argument("--micro-batches", type=whole, default=8, metavar="N", help="per step (%(default)s)")
    parser.add_argument("--chunks", type=whole, default=1, metavar="V", help="stages per process (%(default)s)")
    parser.add_argument("--steps", type=whole, default=30, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch", type=whole, metavar="N", help="samples per step (two per micro-batch)")
    parser.add_argument("--task", choices=TASKS, default="digits", help="default: %(default)s")
    parser.add_argument("--norm", choices=(GROUP, BATCH), default=GROUP, help="of the convolutions (%(default)s)")
    parser.add_argument("--learning-rate", type=some, default=1e-3, metavar="X", help="default: %(default)s")
    parser.add_argument("--clip", type=some, default=0.0, metavar="X", help="largest norm of all gradients (none)")
    parser.add_argument("--recompute", action="store_true", help="keep a stage's input alone, and run it again")
    parser.add_argument("--balance", choices=("time", "layers"), default="time", help="stages of equal (%(default)s)")
    parser.add_argument("--pad", type=some, default=0.0, metavar="S", help="seconds of a forward at least, by sleeping")
    parser.add_argument("--seed", type=_number(int, 0), default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--compare", action="store_true", help="with one process that does the same")
    parser.add_argument("--plan-only", action="store_true", help="make, check and draw the schedule alone")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline_parallel"), metavar="DIR", help="%(default)s")
    return parser


def _number(kind: type, least: float) -> Callable:
    def number(typed: str):
        value = kind(typed)
        if not value >= least:
            raise ValueError
        return value

    number.__name__ = f"{'whole number' if kind is int else 'number'} of at least {least}"
    return number


if __name__ == "__main__":
    sys.exit(main())
