"""What commands share: a parser, kinds of numbers, a folder to write to, an exit code."""

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
    """Returns the parser of `python -m program`. `doc`: the module's, whose first line describes it."""
    return argparse.ArgumentParser(prog=f"python -m {program}", description=doc.split("\n")[0], allow_abbrev=False)


def without_options(program: str, doc: str, command: Callable[[], None]) -> int:
    """Runs a command that takes no option but --help, before anything is written. Returns its exit code."""
    parser_of(program, doc).parse_args()
    return exit_code_of(lambda: command() or 0)


def exit_code_of(command: Callable[[], int]) -> int:
    """Returns what a command returns, or the exit code of its error, which one process says. That is 1 if the command
    has started a process that failed."""
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
    """True except in torchrun's processes of other ranks, so that only one process reports."""
    return os.environ.get("RANK", "0") == "0"


def at_least(kind: type, least: float, below: float = math.inf) -> Callable:
    """Reads a number of at least `least` and less than `below`; argparse says so of another."""

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
    """Reads a size such as 11GiB, in bytes."""
    try:
        return parse_size(typed)
    except (InputError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def under_runs(committed: Path) -> Path:
    """Returns where a command writes by default, for a file or folder of committed rows: under runs/. Only --rows or
    --out writes over what is committed."""
    parts = committed.resolve().relative_to(ROOT / "experiments").parts
    return Path("runs", *(part for part in parts if part != "results"))


def make_folder(path: Path, *older: str) -> None:
    """Makes the folder before the work is done, without the files of these names that an older run left there.
    InputError if it cannot be made, or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for name in older:
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--out {path} cannot be written: {error.strerror or error}") from error


def check_rows(path: Path, option: str = "--rows") -> None:
    """Raises InputError, before the work, if no row can be added to the file that `option` names."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror or error}") from error
