"""Times only the optimizer's update on this machine's CPU: ns per parameter, and its speed relative to a copy.

All updates alternate, and a row has medians. On a machine that others use, take one thread (OMP_NUM_THREADS=1). RAM:
about 110 bytes per parameter.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from experiments.harness import rows
from experiments.harness.child import probe
from experiments.harness.options import exit_code_of, make_folder, parser_of, positive, under_runs
from experiments.peers.table import update_table
from experiments.peers.updates import CANDIDATES, Candidate, Gradients, Update, random_gradients
from lowmem.errors import InputError
from lowmem.limits import ram_available_bytes
from lowmem.units import MIB, format_size

RESULTS = Path(__file__).resolve().parent / "results"
NAME = "update.jsonl"
RAM_PER_PARAMETER_BYTES = 110
COPIED_BYTES = 512 * MIB


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: run(options, arguments))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    check_ram(options.parameters)
    make_folder(options.out)
    found = measure(options.parameters, options.repeats, ["python", "-m", "experiments.peers.update", *arguments])
    path = options.out / NAME
    for row in found:
        rows.append(path, row)
    print(f"{update_table(found)}\n\n{path} is written")
    return 0 if all(row["ok"] for row in found) else 1


def check_ram(parameters: int) -> None:
    """Raises InputError if so many parameters do not fit into the free RAM."""
    free_bytes, where = ram_available_bytes()
    if parameters * RAM_PER_PARAMETER_BYTES > free_bytes:
        most = free_bytes // RAM_PER_PARAMETER_BYTES
        raise InputError(
            f"--parameters {parameters} takes {format_size(parameters * RAM_PER_PARAMETER_BYTES)} of RAM, and "
            f"{format_size(free_bytes)} are left ({where}); give at most {most}"
        )


def measure(parameters: int, repeats: int, command: list[str]) -> list[dict]:
    """Returns a row for each candidate; `error` says why one did not run."""
    machine = probe()
    common = {
        "section": "peers update",
        "caps": {"gpu_bytes": None, "ram_bytes": None},
        "command": shlex.join(command),
        "commit": rows.commit(),
        "sources": rows.sources("experiments.peers.update:measure"),
        "device": machine["names"]["cpu"],
        "versions": machine["versions"],
        "dry_run": False,
        "stand_in": rows.on_stand_in(),
    }
    shared = {
        "run": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "parameters": parameters,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    }
    gradients = random_gradients(parameters)
    updates: dict[str, Update] = {}
    errors: dict[str, str] = {}
    for candidate in CANDIDATES:
        try:
            updates[candidate.name] = _made(candidate, gradients)
        except Exception as error:  # whatever a package does where it cannot be built or run here
            errors[candidate.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    source = torch.ones(COPIED_BYTES // 4)
    copy = torch.empty_like(source)
    # Nothing is faster than the memory, whose speed copy_ shows. A copy also fetches the memory that it overwrites, so
    # an update in place may pass 100%. add_ is one pass in place.
    updates |= {"copy_": lambda: copy.copy_(source), "add_": lambda: copy.add_(1.0)}
    seconds = {name: [] for name in updates}
    for _ in range(repeats):
        for name, run in updates.items():
            seconds[name].append(_seconds(run))
    copied, added = (2 * source.nbytes / statistics.median(seconds[name]) for name in ("copy_", "add_"))
    shared |= {"copy_bytes_per_second": copied, "add_bytes_per_second": added, "copy_seconds": seconds["copy_"]}

    found = []
    for candidate in CANDIDATES:
        values = dict(shared)
        taken = seconds.get(candidate.name, [0.0])
        if candidate.name not in errors:
            per_parameter = statistics.median(taken) / parameters
            moved = candidate.bytes_per_parameter / per_parameter
            values |= {"ns_per_parameter": 1e9 * per_parameter, "bytes_per_parameter": candidate.bytes_per_parameter}
            values |= {"bytes_per_second": moved, "share_of_copy": moved / copied, "update_seconds": taken}
            values["packages"] = {name: metadata.version(name) for name in candidate.packages}
        error = errors.get(candidate.name)
        found.append(rows.make_row(common, candidate.name, sum(taken), values=values, error=error))
    return found


def _made(candidate: Candidate, gradients: Gradients) -> Update:
    """Returns the candidate's update after one call, which makes states and compiles."""
    missing = [package for package in candidate.packages if find_spec(package) is None]
    if missing:
        raise InputError(f"not installed: pip install {' '.join(missing)}")
    run = candidate.make(gradients)
    run()
    return run


def _seconds(run: Update) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("experiments.peers.update", __doc__)
    parser.add_argument("--parameters", type=positive, default=50_000_000, help="(%(default)s)")
    parser.add_argument("--repeats", type=positive, default=7, help="rounds (%(default)s)")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), help=f"folder of {NAME} (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
