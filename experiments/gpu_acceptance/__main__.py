"""Runs the jobs one after another within the given time (README.md).

Exit codes: 0 if every job ran and every check held, 1 if not, 2 bad usage.
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.gpu_acceptance.jobs import JOBS, Job
from experiments.harness import rows
from experiments.harness.child import A_CHECK_FAILED, machine_here, output_of
from experiments.harness.options import under_runs
from experiments.harness.progress import FACTOR, Progress, flops_per_second
from lowmem.units import GIB

RESULTS = Path(__file__).parent / "results"
OUT = under_runs(RESULTS)
LEAST_SHARE = 1 / 3  # a job starts only if this share of its time limit is left
LOOK_SECONDS = 1.0  # interval at which the jobs' progress is read
OUT_OF_TIME = "skipped: out of time"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def _interruptible() -> Iterator[None]:
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@_interruptible()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m experiments.gpu_acceptance", allow_abbrev=False,
        description="Measure on a GPU: correctness, training under caps, and the denominator. Rows go to a .jsonl.",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder of rows.jsonl ({OUT})")
    names = f"{', '.join(dict.fromkeys(job.section for job in JOBS))}, or a job such as {JOBS[0].full_name}"
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help=f"sections or jobs: {names}")
    parser.add_argument("--again", action="store_true", help="run what has a good row already, too")
    parser.add_argument(
        "--dry-run", action="store_true", help="with tiny shapes, on the CPU or on the stand-in: shows that all runs"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.only) - {name for job in JOBS for name in (job.section, job.full_name)}
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such section or job; there are {names}")
    if not 0 < options.minutes < 60 * 24:
        parser.error(f"--minutes {options.minutes:g}: give a number above 0")
    chosen = [job for job in JOBS if not options.only or {job.section, job.full_name} & set(options.only)]

    deadline = time.monotonic() + options.minutes * 60
    refusal = _refused_on_stand_in(options.dry_run) if rows.on_stand_in() else None
    if refusal:
        print(f"gpu_acceptance: {refusal}", file=sys.stderr)
        return 2
    try:
        machine = machine_here()
        device = "cpu" if options.dry_run and not rows.on_stand_in() else "cuda"
        if not machine["names"]:
            print("gpu_acceptance: lowmem cannot be imported here (see above); try make setup.", file=sys.stderr)
            return 1
        if device not in machine["names"]:
            print("gpu_acceptance: PyTorch finds no GPU here; --dry-run runs it on the CPU, tiny.", file=sys.stderr)
            return 2
        if device == "cuda":
            chosen = [job for job in chosen if job.cards <= machine.get("cards", 1) or job.full_name in options.only]
        with tempfile.TemporaryDirectory(prefix="gpu_acceptance_") as scratch:
            path = (options.out or OUT) / "rows.jsonl"
            if options.dry_run and options.out is None:
                path = Path(scratch) / "rows.jsonl"
            try:
                refusal = _refused_at(path, device)
                if refusal:
                    print(f"gpu_acceptance: {refusal}; give another --out", file=sys.stderr)
                    return 2
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    good = run_jobs(chosen, path, Path(scratch), machine, device, deadline, again=options.again)
            except BlockingIOError:
                print(f"gpu_acceptance: another run writes to {path}; wait for its end", file=sys.stderr)
                return 2
            except OSError as error:
                print(f"gpu_acceptance: {error.filename or path.parent}: {error.strerror}", file=sys.stderr)
                return 2
    except KeyboardInterrupt as interrupt:
        print(
            f"gpu_acceptance: stopped by {interrupt}; the rows so far stay, the same command goes on", file=sys.stderr
        )
        return 1
    return 0 if good else 1


def run_jobs(
    jobs: Sequence[Job], path: Path, scratch: Path, machine: dict, device: str, deadline: float, *, again: bool = False
) -> bool:
    """Runs `jobs` in order until `deadline` (of time.monotonic), with rows to `path`. Returns whether all are good.
    `machine`: of `machine_here`. `device`: "cuda", or "cpu" for a dry run."""
    dry_run, stand_in = _kind_here(device)
    shared = {
        "commit": rows.commit(),
        "device": machine["names"][device],
        "versions": machine["versions"],
        "dry_run": dry_run,
        "stand_in": stand_in,
    }
    last_rows = {(row["section"], row["name"]): row for row in rows.read(path)}
    good = True
    for index, job in enumerate(jobs):
        common = shared | of_job(job, shared["dry_run"])
        earlier = last_rows.get((job.section, job.name))
        if not again and earlier is not None and _still_holds(earlier, common):
            print(f"there   {job.full_name}  (since {earlier['date']}; --again measures it again)", flush=True)
            continue
        folder = scratch / str(index)
        folder.mkdir()
        good &= _run_job(job, path, folder, common, device, deadline)
        shutil.rmtree(folder, ignore_errors=True)  # checkpoints of XL: the next one's must find room
    return good


def of_job(job: Job, dry_run: bool) -> dict:
    """Returns the fields that all rows of one job share."""
    command = ["python3", *rows.through_stand_in(), "-m", "experiments.gpu_acceptance", "--only", job.full_name]
    caps = {
        name: None if gib is None else int(gib * GIB)
        for name, gib in (("gpu_bytes", job.gpu_gib), ("ram_bytes", job.ram_gib))
    }
    return {
        "section": job.section,
        "caps": caps,
        "command": shlex.join(command + (["--dry-run"] if dry_run else [])),
        "sources": rows.sources(job.target),
    }


def task_of(job: Job, path: Path, scratch: Path, common: dict, device: str) -> dict:
    return {
        "name": job.name, "target": job.target, "options": job.options, "gpu_gib": job.gpu_gib, "ram_gib": job.ram_gib,
        "device": device, "rows": str(path.resolve()), "scratch": str(scratch), "common": common,
        "flops_per_second": flops_per_second(common["device"]),
    }  # fmt: skip


def _run_job(job: Job, path: Path, scratch: Path, common: dict, device: str, deadline: float) -> bool:
    """Runs a job, in another process after each case that ended one. Returns whether all was good."""
    progress, began = Progress(scratch), time.monotonic()
    task = task_of(job, path, scratch, common, device)
    silent_seconds = job.seconds + FACTOR * job.flops / task["flops_per_second"]
    while True:
        started = time.monotonic()
        if deadline - started < silent_seconds * LEAST_SHARE:
            return _failed(path, job.name, common, started - began, OUT_OF_TIME, None)
        code, why = _run_process(task, progress, silent_seconds, deadline)
        output = output_of(scratch)
        if code in (0, A_CHECK_FAILED):
            if code and output:
                print(output, file=sys.stderr)
            return code == 0
        if code is not None:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            sentence = output.strip().splitlines()[-1] if output else "nothing was said"
            why = f"the process ended {how}: {sentence}"
        case = None if why.startswith(OUT_OF_TIME) else progress.case()
        if case is None:
            return _failed(path, job.name, common, time.monotonic() - began, why, output)
        _failed(path, f"{job.name}: {case}", common, time.monotonic() - started, why, output)
        progress.failed(case)


def _run_process(
    task: dict, progress: Progress, silent_seconds: float, deadline: float
) -> tuple[int | None, str | None]:
    """Runs one process of a job. Returns its exit code, or None and why it was ended. `silent_seconds`: until it must
    announce its time limit."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # no job needs the hub, and a time-out is worth a measurement
    if task["common"]["dry_run"]:
        environment["OMP_NUM_THREADS"] = "1"  # tiny work: more would wait for each other
    with open(Path(task["scratch"]) / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.harness.child", json.dumps(task)],
            cwd=rows.ROOT, env=environment, stdin=subprocess.PIPE, stderr=stderr, start_new_session=True,
        )  # fmt: skip
    started = time.monotonic()
    until, said = started + silent_seconds, False
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_SECONDS), None
            now, announced = time.monotonic(), progress.until()
            if announced is not None:
                if not said and deadline - now < (announced - now) * LEAST_SHARE:
                    return None, f"{OUT_OF_TIME}: by its plan it may take {announced - now:.0f} s"
                until, said = announced, True
            if now > deadline:
                return None, f"{OUT_OF_TIME}: ended after {now - started:.0f} s"
            if now > until:
                return None, f"ended after {now - started:.0f} s: its time was over"
    finally:  # also when a signal ends this process: nothing may stay on the GPU
        _end(process)


def _failed(path: Path, name: str, common: dict, seconds: float, error: str, output: str | None) -> bool:
    row = rows.make_row(common, name, seconds, error=error, output=output)
    rows.append(path, row)
    print(rows.summary(row), flush=True)
    if output:
        print(output, file=sys.stderr)
    return False


def _refused_on_stand_in(dry_run: bool) -> str | None:
    if not dry_run:
        return "the stand-in has no speed to measure, and real shapes would take it days; --dry-run runs tiny ones"
    if not os.environ.get("STAND_IN_VALUES"):
        return "the stand-in computes nothing without --values, and much here compares values"
    return None


def _refused_at(path: Path, device: str) -> str | None:
    kind = _kind_here(device)
    if any(kind) and path.parent.resolve() == RESULTS.resolve():
        return f"{path} is for what was measured on a GPU"
    # A file has only rows of one kind of run.
    if any((row["dry_run"], row.get("stand_in", False)) != kind for row in rows.read(path)):
        return f"{path} has rows of another kind of run"
    return None


def _kind_here(device: str) -> tuple[bool, bool]:
    """Returns whether rows of this run are of a dry run, and whether of the stand-in."""
    return device == "cpu" or rows.on_stand_in(), rows.on_stand_in()


def _still_holds(row: dict, common: dict) -> bool:
    return row["ok"] and all(row[key] == common[key] for key in ("sources", "device"))


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _interrupt(number: int, _) -> None:
    for caught in SIGNALS:
        signal.signal(caught, signal.SIG_IGN)  # a second one must not disturb the cleaning up
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
