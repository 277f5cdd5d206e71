"""Kills (SIGKILL) a run again and again; it has to end as if nothing had happened.

    python -m tests.faults.sigkill --kills 200

Trains the demo's model with --save-every 1, kills it at a random moment, and starts the same command again. Half of the
moments are drawn over a whole life of the process, half over the time of saving. After every kill the newest valid
checkpoint must be no older than the one before; in the end weights, moments and loss rows must be those of an
undisturbed run. Most processes are forks of this one; --real of them are the script itself. Power cuts are tested by
the order of fsync and rename (test_saves.py).
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a process that forks should have no threads

import torch  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401

import lowmem.run.train  # noqa: E402, F401
from lowmem.files import Damaged, Manifest  # noqa: E402
from lowmem.run.main import main as run_script  # noqa: E402
from tests.faults import table  # noqa: E402
from tests.runs import ROOT, SCRIPTS, SMALL, assert_same_run  # noqa: E402

SAVING_SECONDS = 0.3  # after a step was done: a few more steps and their saves


def start(arguments: list[str], log: Path, real: bool) -> int:
    """Returns the process id of a run with these arguments, as a fork of this process or as the script."""
    if real:
        with open(log, "ab") as file:
            command = [sys.executable, str(ROOT / "train_gpt2_large.py"), *arguments]
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT).pid
    child = os.fork()
    if child == 0:
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os._exit(run_script(SCRIPTS["large"].SETTINGS, arguments))
        finally:
            os._exit(99)  # an exception: its traceback is in the log
    return child


def ended(process: int) -> int | None:
    """Returns the exit code of a process; None while it runs."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait(process: int, seconds: float, until=lambda: False) -> int | None:
    """Waits for the process's end, at most `seconds` or until `until()`. Returns its exit code if it ended."""
    limit = time.monotonic() + seconds
    while (code := ended(process)) is None and time.monotonic() < limit and not until():
        time.sleep(0.002)
    return code


def newest_valid_step(out: Path) -> int:
    """Returns the step of the newest valid checkpoint, or 0. Changes nothing."""
    steps = []
    # what was put aside while its successor is renamed into place gets its place back when a run starts
    for folder in (*out.glob("checkpoints/step-*"), *out.glob("checkpoints/.old-step-*")):
        try:
            manifest = Manifest(folder)
            for name in manifest.entries:
                manifest.verify(name)
            steps.append(int(folder.name.removeprefix(".old-").removeprefix("step-")))
        except Damaged:
            continue
    return max(steps, default=0)


def killed(process: int, out: Path, row: dict, reached: int) -> int:
    """Kills a run, and counts that in `row`. Returns the newest step that ever had a valid checkpoint; before it was
    `reached`."""
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    row["kills"] += 1
    found = newest_valid_step(out)
    row["lost"] += found < reached
    return max(reached, found)


def rows_in(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_often(folder: Path, kills: int, real: int, steps: int, seed: int) -> dict:
    """Returns the row that is printed; `folder` keeps the logs and the last run."""
    generator = random.Random(seed)
    arguments = [*SMALL, "--data", str(ROOT / "tests" / "runs.py"), "--steps", str(steps), "--save-every", "1"]
    began = time.monotonic()
    code = wait(start([*arguments, "--out", str(folder / "whole")], folder / "whole.log", real=False), 600)
    assert code == 0, (code, folder)
    life_seconds = time.monotonic() - began
    real_ones = set(generator.sample(range(kills), real))
    row = {"kills": 0, "runs": 0, "while_saving": 0, "before_any_checkpoint": 0, "lost": 0, "wrong_exits": 0}
    row |= {"different_runs": 0, "of_the_script_itself": 0}
    while row["kills"] < kills:
        row["runs"] += 1
        out, log = folder / f"run-{row['runs']}", folder / f"run-{row['runs']}.log"
        reached, code = 0, None
        while code is None:
            is_real = row["kills"] in real_ones and row["kills"] < kills
            process = start([*arguments, "--out", str(out)], log, is_real)
            if row["kills"] == kills:
                code = wait(process, 600)
                break
            if generator.random() < 0.5:
                code = wait(process, generator.uniform(0, life_seconds + 4 * is_real))
            else:
                rows = rows_in(out)
                code = wait(process, 600, until=lambda out=out, rows=rows: rows_in(out) > rows)
                code = wait(process, generator.uniform(0, SAVING_SECONDS)) if code is None else code
            if code is not None:
                break
            reached = killed(process, out, row, reached)
            row["of_the_script_itself"] += is_real
            row["while_saving"] += any(out.glob("checkpoints/.*"))
            row["before_any_checkpoint"] += reached == 0
        if code != 0:
            row["wrong_exits"] += 1
            continue
        try:
            assert_same_run(folder / "whole", out)
        except AssertionError:
            row["different_runs"] += 1
    return row | {"steps_of_a_run": steps, "seed": seed, "seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = table.parser("sigkill", __doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--real", type=int, default=10, help="how many of them hit the script itself (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="of a run (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    common = table.common("sigkill", options.record)
    with tempfile.TemporaryDirectory() as folder:
        row = kill_often(Path(folder), options.kills, min(options.real, options.kills), options.steps, options.seed)
    table.report(common | row, options.record)
    return 1 if row["lost"] or row["wrong_exits"] or row["different_runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
