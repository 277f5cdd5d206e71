"""Defines the errors that a user or a machine can cause, with exit codes. Programs print these as one sentence, without
a traceback."""

from collections.abc import Iterable

NO_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # exceptions that do not mean a failure


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's text (two, if it ends with a colon); for an empty text, the type's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def some_of(names: Iterable[str]) -> str:
    """Joins the first three names with commas, and adds "..." if there are more."""
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class LowmemError(Exception):
    """Is the base class of errors that a user or a machine can cause."""

    exit_code = 1


class InputError(LowmemError):
    """Is raised for a wrong option, file or batch. Training commands raise it mostly before the first step."""

    exit_code = 2


class PlanError(LowmemError):
    """Is raised if training does not fit under the caps of GPU memory and RAM, or if a disk lacks room. For caps that
    are too small, the message names the smallest that suffice. `ways_out`: options with which the model fits, as in
    plan.json."""

    exit_code = 3

    def __init__(self, message: str, ways_out: Iterable[dict] = ()):
        super().__init__(message)
        self.ways_out = list(ways_out)


class CapExceeded(LowmemError):
    """Is raised if measured GPU memory or RAM exceeds the user's cap, or if GPU memory runs out."""

    exit_code = 4


class Stopped(LowmemError):
    """Is raised when a signal has ended a training run, after a valid checkpoint was saved."""

    exit_code = 75
    said_by = 0  # rank 0 prints the message; all ranks raise this error together
