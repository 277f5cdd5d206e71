"""Compares whole runs of both scripts at full shape with their plans, on the stand-in, from loading to the last report.

    .venv-cuda/bin/python -m stand_in --gpu rtx3060 --ram -- -m experiments.plan_accuracy.whole_life [--only CASE ...]

A case is one run in two processes (promise.md). XL needs 16 GiB of free RAM, and 40 GiB of disk below --scratch. A case
that has a row of the same sources is not run again.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.harness import rows
from experiments.harness.options import check_rows, exit_code_of, under_runs
from experiments.plan_accuracy.table import WHOLE_LIFE

PROGRAM = "experiments.plan_accuracy.whole_life"
CASES = {
    f"{size}-{optimizer}-{'clip' if clip else 'no-clip'}": (size, optimizer, clip)
    for size in ("large", "xl")
    for optimizer in ("adamw", "adamw8bit")
    for clip in (True, False)
}


def run_process(command: list[str], log: Path, metrics: Path | None) -> dict:
    """Runs `command` to its end; returns its exit code, seconds and largest resident set, without that of its children.
    With `metrics`, the process gets SIGTERM as soon as that file has a row."""
    started = time.perf_counter()
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=rows.ROOT, stdout=file, stderr=file, env=os.environ)
        signalled = False
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if metrics is not None and not signalled and metrics.exists() and metrics.stat().st_size:
                process.send_signal(signal.SIGTERM)
                signalled = True
            time.sleep(0.1)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "resident_peak_bytes": usage.ru_maxrss * 1024,
        "seconds": round(time.perf_counter() - started, 1),
    }


def run_case(name: str, batch: int, scratch: Path) -> dict:
    size, optimizer, clip = CASES[name]
    out = scratch / "run"
    command = [
        sys.executable, f"train_gpt2_{size}.py", "--init", "random", "--batch", str(batch), "--steps", "3",
        "--fixed-batch", "--eval-every", "1", "--eval-batches", "1", "--keep-last", "1", "--optimizer", optimizer,
        "--clip-norm", "1" if clip else "0", "--out", str(out),
    ]  # fmt: skip
    stopped = run_process(command, scratch / "stopped.txt", out / "metrics.jsonl")
    resumed = run_process(command, scratch / "resumed.txt", None)
    report = out / "report.json"
    found = json.loads(report.read_text()) if report.exists() else {"plan": {}, "measured": {}}
    said = (scratch / "resumed.txt").read_text().splitlines()[-5:]
    return {
        "model": size, "optimizer": optimizer, "clip": clip, "batch": batch, "gpu": os.environ["STAND_IN_GPU"],
        "limits": found["plan"].get("limits"), "choice": found["plan"].get("choice"),
        "predicted": found["plan"].get("predicted"), "measured": found["measured"],
        "ram_phases": found.get("ram_phases"),
        "stopped": stopped, "resumed": resumed, "ok": (stopped["exit_code"], resumed["exit_code"]) == (75, 0),
        "said": None if resumed["exit_code"] == 0 else said,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--batch", type=int, default=64, help="sequences per step (%(default)s)")
    parser.add_argument(
        "--scratch", default=tempfile.gettempdir(), help="where run folders lie meanwhile (%(default)s)"
    )
    parser.add_argument("--rows", type=Path, default=under_runs(WHOLE_LIFE), help="%(default)s")
    typed = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(typed)
    if not rows.on_stand_in():
        parser.error("start it on the stand-in: .venv-cuda/bin/python -m stand_in --ram -- -m " + PROGRAM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash of XL must not leave 20 GiB behind
    common = rows.made_by(PROGRAM, typed) | {"sources": rows.sources(PROGRAM)}
    done = {
        row["case"] for row in rows.read(options.rows)
        if row.get("sources") == common["sources"] and row["batch"] == options.batch and row["ok"]
    }  # fmt: skip
    check_rows(options.rows)
    failed = 0
    for name in options.only:
        if name in done:
            continue
        with tempfile.TemporaryDirectory(prefix="lowmem-", dir=options.scratch) as scratch:
            row = {"case": name, **run_case(name, options.batch, Path(scratch)), **common}
        rows.append(options.rows, row)
        failed += not row["ok"]
        print(f"{name}: exit codes {row['stopped']['exit_code']} and {row['resumed']['exit_code']}; {row['measured']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
