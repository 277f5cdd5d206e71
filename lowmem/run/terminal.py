"""Sentences for a terminal: as wide as it is, and no error if it has gone away."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def output() -> Iterator[None]:
    """Output inside the block may fail: if a terminal or the program behind a pipe has gone away, all later output is
    dropped, and the run goes on."""
    try:
        yield
    except OSError:
        _send_output_nowhere()


def say(sentence: str) -> None:
    """Prints to stderr: one line, or wrapped lines at a terminal."""
    with output():
        print(for_terminal(sentence), file=sys.stderr, flush=True)


def escape_what_stdout_lacks() -> None:
    """From here on stdout writes characters that its encoding lacks as escapes, as stderr does."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def for_terminal(sentence: str) -> str:
    """`sentence`, wrapped between words if stderr is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return sentence
    fill = partial(
        textwrap.fill, width=shutil.get_terminal_size().columns, subsequent_indent="  ", break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip
    return "\n".join(map(fill, sentence.split("\n")))


def _send_output_nowhere() -> None:
    """Redirects stdout and stderr to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
