"""Kills (SIGKILL) one of torchrun's processes at drawn moments: `python -m experiments.several_gpus.killed`.

A small model trains on two processes of the CPU, with a checkpoint after every step. torchrun starts the processes
again. Exit code 1 if a run ends with other bits than one that nobody kills.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, exit_code_of, parser_of, positive, under_runs
from experiments.harness.rows import ROOT
from experiments.harness.tables import Page
from experiments.harness.torchrun import ranks_of, start

PROGRAM = "experiments.several_gpus.killed"
HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results" / "killed.jsonl", HERE / "README.md"
BEGIN = "<!-- made by python -m experiments.several_gpus.killed -->"
RANKS, STEPS = 2, 12
OPTIONS = (
    *("--demo", "--device", "cpu", "--steps", str(STEPS), "--seq", "64", "--batch", "4", "--micro-batch", "1"),
    *("--save-every", "1", "--eval-every", "4", "--eval-batches", "1", "--wandb", "disabled"),
)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--kills", type=positive, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments and ranks (%(default)s)")
    parser.add_argument("--rows", type=Path, default=under_runs(RESULTS), metavar="ROWS.jsonl", help="%(default)s")
    options = parser.parse_args(arguments)
    common, drawn = row_file.made_by(PROGRAM, arguments), random.Random(options.seed)
    check_rows(options.rows)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        process = started(whole)
        wait_for_steps(process, whole, 1)
        began = time.monotonic()
        wait_for_steps(process, whole, STEPS)
        seconds = (time.monotonic() - began) / (STEPS - 1)
        if code := process.wait():
            print(f"error: the run that nobody kills ended with exit code {code}", file=sys.stderr)
            return 1
        expected, differ = digest_of(whole), 0
        for number in range(options.kills):
            case = {"rank": drawn.randrange(RANKS), "step": drawn.randrange(1, STEPS)}
            case |= {"delay": drawn.uniform(0, seconds)}
            row = {"kill": number} | case | killed(Path(name) / str(number), **case, expected=expected)
            row_file.append(options.rows, row | common)
            print(f"{number + 1} of {options.kills}: {said(row)}", flush=True)
            differ += not row["equal"]
    return 1 if differ else 0


def started(out: Path) -> subprocess.Popen:
    script = [str(ROOT / "train_gpt2_large.py"), *OPTIONS, "--out", str(out)]
    return start(script, RANKS, restarts=3, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_steps(process: subprocess.Popen, out: Path, count: int) -> None:
    while process.poll() is None and steps_of(out) < count:
        time.sleep(0.01)


def steps_of(out: Path) -> int:
    rows = out / "metrics.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def killed(out: Path, rank: int, step: int, delay: float, expected: str) -> dict:
    """Trains in `out`, and kills the process of `rank` `delay` seconds after `step` steps. Returns a row: the state at
    the kill, the seconds until one step more, and whether the end has the digest `expected`."""
    process = started(out)
    wait_for_steps(process, out, step)
    time.sleep(delay)
    workers = ranks_of(process)
    if rank in workers:
        os.kill(workers[rank], signal.SIGKILL)
    began = time.monotonic()
    unfinished = [path.name for path in (out / "checkpoints").glob("*") if not path.name.startswith("step-")]
    while process.poll() is None and set(workers.values()) & set(ranks_of(process).values()):
        time.sleep(0.01)
    steps = steps_of(out)  # a step may have been written after the kill
    wait_for_steps(process, out, steps + 1)
    again = time.monotonic() - began
    code = process.wait()
    return {
        "steps_at_kill": steps, "in_a_save": bool(unfinished), "killed": rank in workers, "exit_code": code,
        "seconds_until_a_step": round(again, 2),
        "equal": rank in workers and code == 0 and digest_of(out) == expected,
    }  # fmt: skip


def digest_of(out: Path) -> str:
    """Returns a digest of the exported weights and of the last checkpoint."""
    found = hashlib.sha256()
    for path in sorted(
        [*(out / "model").glob("*.safetensors"), *(out / "checkpoints").glob(f"step-*{STEPS}/*.safetensors")]
    ):
        found.update(path.read_bytes())
    return found.hexdigest()


def said(row: dict) -> str:
    where = "in a save" if row["in_a_save"] else "between saves" if row["killed"] else "when it had ended"
    end = "the same bits" if row["equal"] else f"OTHER BITS or exit code {row['exit_code']}"
    return f"rank {row['rank']} after {row['steps_at_kill']} steps, {where}; {row['seconds_until_a_step']} s; {end}"


def in_a_sentence(rows: list[dict]) -> str:
    rows = [row for row in rows if row["killed"] and row["date"] == rows[-1]["date"]]
    seconds = sorted(row["seconds_until_a_step"] for row in rows)
    in_saves, equal = (sum(row[name] for row in rows) for name in ("in_a_save", "equal"))
    return (
        f"{len(rows)} ranks were killed, {in_saves} of them in a save, and {equal} runs ended with the same bits. It "
        f"took {seconds[0]:.0f} to {seconds[-1]:.0f} seconds until the run had made one step more."
    )


def pages() -> list[Page]:
    return [(README, BEGIN, in_a_sentence(row_file.read(RESULTS)))]


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
