"""How long plans, steps, loading and saving take on this machine, as rows: `python -m experiments.bench.run`.

    python -m experiments.bench.run --only "plan"
    python -m experiments.bench.run --before COMMIT        the same in a copy of another commit, alternately

Each case is a separate process; of each figure the least of `--rounds` counts. A case that the other commit lacks is
timed in this tree alone.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.bench.cases import CASES, IN_PROCESS, PROCESSES, ROOT, tokenized, whole_process
from experiments.bench.table import RESULTS, tables
from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, exit_code_of, parser_of, positive, under_runs
from experiments.harness.trees import unpacked
from lowmem.errors import InputError

PROGRAM = "experiments.bench.run"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases that have this in their name")
    parser.add_argument("--before", metavar="COMMIT", help="time that commit, too, by turns with this tree")
    parser.add_argument(
        "--rounds", type=positive, default=1, metavar="N", help="processes per case and tree (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.only in case]
    if not chosen:
        raise InputError(f"--only {options.only}: no case has that in its name; there are {', '.join(CASES)}")
    os.environ |= {"OMP_NUM_THREADS": "1"}
    common = {"sources": row_file.sources(PROGRAM), "rounds": options.rounds} | row_file.made_by(PROGRAM, arguments)
    made = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {"after": ROOT}
        if options.before is not None:
            trees["before"] = unpacked(options.before, Path(folder))
            common["before_commit"] = named(options.before)
        check_rows(options.out, "--out")
        for case in chosen:
            in_both = trees if case not in IN_PROCESS or _has(case, trees.get("before", ROOT)) else {"after": ROOT}
            found = least_of_rounds(case, in_both, options.rounds)
            made.append(common | {"case": case} | found)
            row_file.append(options.out, made[-1])
    print(tables(made))
    return 0


def least_of_rounds(case: str, trees: dict[str, Path], rounds: int) -> dict[str, dict]:
    """Returns {tree: least of each figure} of a case's processes."""
    found: dict[str, dict] = {}
    for _ in range(rounds):
        for name, tree in trees.items():
            values = in_tree(case, tree)
            known = found.setdefault(name, values)
            found[name] = {key: min(known[key], value) for key, value in values.items()}
    return found


def in_tree(case: str, tree: Path) -> dict:
    """Runs a case in one process, and returns its figures. Raises CalledProcessError if the process fails."""
    if case in PROCESSES:
        return whole_process(case, tree)
    if case not in IN_PROCESS:
        return tokenized(tree)
    command = [sys.executable, "-m", "experiments.bench.cases", case]
    result = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def named(commit: str) -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short=12", commit], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return result.stdout.strip()


def _has(case: str, tree: Path) -> bool:
    path = tree / "experiments" / "bench" / "cases.py"
    return path.exists() and f'"{case}":' in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
