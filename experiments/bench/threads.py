"""How long OpenMP's threads should wait for one another before they sleep: `python -m experiments.bench.threads`.

Trains the demo's small model with several values of GOMP_SPINCOUNT, next to 0, 2 and 14 busy processes (README.md).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from experiments.bench.table import THREADS
from experiments.harness import rows as row_file
from experiments.harness.options import at_least, check_rows, exit_code_of, parser_of, positive, under_runs

PROGRAM = "experiments.bench.threads"
ROOT = Path(__file__).resolve().parents[2]
SPIN_COUNTS = ("lowmem", "300000", "0", "10000")  # 300,000 is libgomp's own
BUSY = (0, 2, 14)
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--busy", type=at_least(int, 0), nargs="+", default=BUSY, help="numbers of other processes")
    parser.add_argument("--spin", nargs="+", default=SPIN_COUNTS, help="values of GOMP_SPINCOUNT; 'lowmem' chooses one")
    parser.add_argument("--steps", type=positive, default=12, help="training steps in each process (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, help="processes of each setting (%(default)s)")
    parser.add_argument("--out", type=Path, default=under_runs(THREADS), metavar="ROWS.jsonl")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(step_seconds(options.steps)))
        return 0
    check_rows(options.out, "--out")
    common = row_file.made_by(PROGRAM, arguments) | {"sources": row_file.sources(PROGRAM)}
    for busy in options.busy:
        found: dict[str, list[float]] = {spin: [] for spin in options.spin}
        for _ in range(options.rounds):
            for spin in options.spin:
                with other_processes(busy):
                    found[spin] += measured(spin, options.steps)
        for spin, seconds in found.items():
            row = common | {"busy": busy, "spin": spin, "steps": len(seconds)}
            row |= {"step_seconds": round(statistics.median(seconds), 4), "least_seconds": round(min(seconds), 4)}
            row_file.append(options.out, row)
            print(f"{busy:2} other processes, spin {spin:>8}: {row['step_seconds']:.3f} s a step", flush=True)
    return 0


def measured(spin: str, steps: int) -> list[float]:
    """Returns the seconds of one process's steps, without the first two. `spin`: GOMP_SPINCOUNT, or "lowmem" for
    lowmem's choice."""
    variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if spin != "lowmem":
        variables["GOMP_SPINCOUNT"] = spin
    command = [sys.executable, "-m", PROGRAM, "--child", "--steps", str(steps)]
    result = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])[2:]


def step_seconds(steps: int) -> list[float]:
    """Trains the demo's small model on random tokens, and returns the seconds of each step."""
    import lowmem
    from lowmem.settings import DEMO

    model = lowmem.load(lowmem.Settings(**DEMO))  # imports PyTorch, after the count is chosen
    import torch

    batch, seq = DEMO["batch"], DEMO["seq"]
    tokens = torch.randint(0, 256, (batch, seq + 1))
    found = []
    for number in range(steps):
        begin = time.perf_counter()
        model.step(lowmem.Batch(tokens[:, :-1], tokens[:, 1:]), number, learning_rate=1e-3)
        found.append(time.perf_counter() - begin)
    return found


@contextmanager
def other_processes(count: int):
    """Runs `count` busy processes during the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
