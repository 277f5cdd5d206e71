"""What commands read: kinds of numbers, and a folder to write to."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from lowmem.errors import InputError

SEEDS = 2**31  # seeds are below


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


def make_folder(path: Path) -> None:
    """Makes the folder before the work is done. InputError if it cannot be made, or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out {path} cannot be written: {error.strerror or error}") from error
