"""Compares plans with PyTorch's own allocator, case by case, on the stand-in.

    .venv-cuda/bin/python -m stand_in -- -m experiments.plan_accuracy.run

Appends a row for each case to --out. Cases that have a row of the same sources are left out, so the command goes on
where it was stopped. Five cases take about a minute of one processor.
"""

import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, exit_code_of, parser_of, positive, under_runs
from experiments.plan_accuracy.cases import CASES
from experiments.plan_accuracy.table import RESULTS, line, newest
from lowmem.errors import InputError

PROGRAM = "experiments.plan_accuracy.run"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases that have this in their name")
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="of those every N-th")
    parser.add_argument("--again", action="store_true", help="also cases that have a row of these sources")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    wanted = [case for case in CASES if options.only in case.name][:: options.every]
    if options.list:
        print("\n".join(case.name for case in wanted))
        return 0
    if not wanted:
        raise InputError(f"--only {options.only}: no case has that in its name; --list names them")
    check_rows(options.out, "--out")
    through = row_file.through_stand_in()
    common = {
        "command": shlex.join(["python", *through, "-m", PROGRAM, *map(row_file.portable, arguments)]),
        "commit": row_file.commit(),
        "sources": row_file.sources(PROGRAM),
        "stand_in": True,
    }
    done = {row["name"] for row in row_file.read(options.out) if row["sources"] == common["sources"]}
    wanted = [case for case in wanted if options.again or case.name not in done]
    for card, cases in groupby(sorted(wanted, key=lambda case: case.card), key=lambda case: case.card):
        command = [sys.executable, "-m", "stand_in", "--gpu", card, "--", "-m", "experiments.plan_accuracy.cell"]
        with subprocess.Popen(
            [*command, *(case.name for case in cases)], cwd=row_file.ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        ) as process:  # fmt: skip
            for text in process.stdout:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                row = json.loads(text) | {"card": card, "date": now} | common
                row_file.append(options.out, row)
                print(line(row), flush=True)
        if process.returncode:
            print(f"{' '.join(command)} ended with exit code {process.returncode}", file=sys.stderr)
            return 1
    everything = newest(row_file.read(options.out))
    print(f"{options.out} has rows of {len(everything)} of {len(CASES)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
