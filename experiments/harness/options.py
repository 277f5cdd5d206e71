"""Shared parts of commands: a parser, kinds of numbers, an output folder, an exit code."""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from experiments.harness.rows import ROOT
from lowmem.errors import InputError, LowmemError
from lowmem.units import parse_size

SEEDS = 2**31  # seeds are below


def parser_of(program: str, doc: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m program`, described by the first line of `doc`."""
    return argparse.ArgumentParser(prog=f"python -m {program}", description=doc.split("\n")[0], allow_abbrev=False)


def without_options(program: str, doc: str, command: Callable[[], None]) -> int:
    """Runs a command that has no option but --help. Returns its exit code."""
    parser_of(program, doc).parse_args()
    return exit_code_of(lambda: command() or 0)


def exit_code_of(command: Callable[[], int]) -> int:
    """Calls `command` and returns its exit code. If it raises a LowmemError, prints the error and returns the error's
    exit code. Returns 1 if a process that it started failed, or after Ctrl-C."""
    try:
        return command()
    except (LowmemError, subprocess.CalledProcessError) as error:
        if is_first():
            print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1


def is_first() -> bool:
    """Returns True for the process of rank 0, and if torchrun did not start this process."""
    return os.environ.get("RANK", "0") == "0"


def at_least(kind: type, least: float, below: float = math.inf) -> Callable:
    """Returns an argparse type: a number of at least `least` and less than `below`."""

    def read(typed: str):
        value = kind(typed)
        if not least <= value < below:
            raise ValueError
        return value

    limits = f"of at least {least}" + (f" and less than {below}" if below < math.inf else "")
    read.__name__ = f"{'whole number' if kind is int else 'number'} {limits}"
    return read


positive = at_least(int, 1)


def size(typed: str) -> int:
    """Returns a size such as "11GiB" in bytes, as an argparse type. Raises ArgumentTypeError for any other text."""
    try:
        return parse_size(typed)
    except (InputError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def under_runs(committed: Path) -> Path:
    """Returns a command's default output, under runs/. `committed`: rows in the repository, as a file or folder:
    experiments/bench/results/rows.jsonl gives runs/bench/rows.jsonl."""
    # Only --rows or --out overwrites committed rows.
    parts = committed.resolve().relative_to(ROOT / "experiments").parts
    return Path("runs", *(part for part in parts if part != "results"))


def make_folder(path: Path, *older: str) -> None:
    """Makes the folder `path`, and removes the files `older` from it. Raises InputError if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for name in older:
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--out {path} cannot be written: {error.strerror or error}") from error


def check_rows(path: Path, option: str = "--rows") -> None:
    """Raises InputError if no row can be appended to the file `path`, the value of `option`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror or error}") from error
