"""Kinds of numbers for argparse."""

from collections.abc import Callable


def at_least(kind: type, least: float, below: float | None = None) -> Callable:
    """Reads a number of at least `least` and, where it is given, less than `below`; argparse says so of another."""

    def read(typed: str):
        value = kind(typed)
        if not value >= least or (below is not None and not value < below):
            raise ValueError
        return value

    limits = f"of at least {least}" + (f" and less than {below}" if below is not None else "")
    read.__name__ = f"{'whole number' if kind is int else 'number'} {limits}"
    return read
