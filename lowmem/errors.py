"""The errors that a user can cause, each with its exit code (the scripts print one sentence and no traceback)."""

from collections.abc import Iterable

NO_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # what is raised and has not failed


def first_line(error: BaseException) -> str:
    """The first line of the error's text, and the second one if a colon announces it; its kind if there is no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def first_few(names: Iterable[str]) -> str:
    """Up to three of the names, for a sentence."""
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class LowmemError(Exception):
    """Anything that went wrong and can be said in one or two sentences."""

    exit_code = 1


class InputError(LowmemError):
    """Bad usage or bad input, found before anything is written."""

    exit_code = 2


class PlanError(LowmemError):
    """No plan fits under the caps; the message names the smallest that would."""

    exit_code = 3


class CapExceeded(LowmemError):
    """Measured memory went over a cap that the user set."""

    exit_code = 4


class Stopped(LowmemError):
    """A signal ended the run after a valid checkpoint was saved."""

    exit_code = 75
