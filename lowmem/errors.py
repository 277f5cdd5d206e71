"""Defines the errors that a user can cause, each with an exit code. For such an error, lowmem's programs print one
sentence and no traceback."""

from collections.abc import Iterable

NO_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # exceptions that do not mean a failure


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's text, and the second too if the first ends with a colon. Returns the
    error's type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def some_of(names: Iterable[str]) -> str:
    """Joins the first three names with commas, for a sentence; adds "..." if there are more."""
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class LowmemError(Exception):
    """Is the base class of errors that a user or a machine can cause. The message has one or two sentences."""

    exit_code = 1


class InputError(LowmemError):
    """Says that an option or an input is wrong. A training run raises it before its first step."""

    exit_code = 2


class PlanError(LowmemError):
    """Says that training does not fit under the caps (limits) of GPU memory and RAM, or that a disk lacks room. If the
    caps are too small, the message names the smallest caps that suffice, and options with which the model fits.
    `ways_out`: these options as dicts, as in plan.json; empty if none are known."""

    exit_code = 3

    def __init__(self, message: str, ways_out: Iterable[dict] = ()):
        super().__init__(message)
        self.ways_out = list(ways_out)


class CapExceeded(LowmemError):
    """Says that measured GPU memory or RAM exceeded the user's cap, or that GPU memory ran out."""

    exit_code = 4


class Stopped(LowmemError):
    """Says that a signal ended the training run. A valid checkpoint was saved before."""

    exit_code = 75
    said_by = 0  # rank 0 prints the message; all ranks raise this error together
