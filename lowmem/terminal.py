"""Prints sentences, wrapped to the width of the terminal. Output to a closed terminal or pipe raises no error."""

import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import TextIO

from lowmem.errors import LowmemError


@contextmanager
def output(*, needed: bool = False) -> Iterator[None]:
    """Ignores an OSError of printing in the `with` block, and discards all later output, so that training goes on. If
    the output is `needed`, raises LowmemError for errors such as a full disk, but not for a closed terminal or pipe."""
    try:
        yield
        if needed and sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        lost = needed and error.errno not in (errno.EPIPE, errno.EIO)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1,) if lost else (1, 2):  # Python flushes stdout again at its end
            os.dup2(nowhere, stream)
        os.close(nowhere)
        if lost:
            raise LowmemError(f"the answer could not be written: {error.strerror}") from None


def say(sentence: str) -> None:
    """Prints a sentence to stderr, wrapped if stderr is a terminal."""
    with output():
        print(for_terminal(sentence, sys.stderr), file=sys.stderr, flush=True)


def escape_what_stdout_lacks() -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def has_room_for_a_bar() -> bool:
    """Returns True if stderr is a terminal with at least two lines, or of unknown size (a notebook)."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).lines > 1
    except (OSError, ValueError):  # stderr has no file descriptor, as in a notebook
        return True


def for_terminal(text: str, stream: TextIO | None) -> str:
    """Returns `text`, with lines wrapped at the terminal's width if `stream` is a terminal."""
    at_terminal = stream is not None and stream.isatty()
    return filled(text, shutil.get_terminal_size().columns) if at_terminal else text


def filled(text: str, width: int, indent: str = "  ") -> str:
    """Returns `text`, wrapped between words at `width` columns. Continuation lines begin with `indent`."""
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(map(wrapper.fill, text.split("\n")))


def beside(columns: dict[str, str]) -> str:
    """Formats {title: text} as columns side by side, together as wide as the terminal, at most 120 characters."""
    width = (min(shutil.get_terminal_size().columns, 120) - 3 * (len(columns) - 1)) // len(columns)
    cells = []
    for title, text in columns.items():
        lines = [piece for line in text.strip().splitlines() for piece in textwrap.wrap(line, width)]
        cells.append([title, "-" * width, *(lines or ["(only blanks)"])])
    rows = zip_longest(*cells, fillvalue="")
    return "\n".join("   ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
