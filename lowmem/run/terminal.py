"""Sentences for whoever looks on: as wide as a terminal, and no error where it has gone away."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def output() -> Iterator[None]:
    """Output inside the block may fail: where a terminal, or the program behind a pipe, went away, what is written from
    then on goes nowhere, and the run goes on."""
    try:
        yield
    except OSError:
        _send_output_nowhere()


def say(sentence: str) -> None:
    """To stderr, as a line, or several at a terminal."""
    with output():
        print(for_terminal(sentence), file=sys.stderr, flush=True)


def escape_what_stdout_lacks() -> None:
    """Characters that stdout's encoding does not have are written as escapes from here on, as stderr writes them."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def for_terminal(sentence: str) -> str:
    """`sentence` as it is shown: at a terminal, in lines that end between words."""
    if sys.stderr is None or not sys.stderr.isatty():
        return sentence
    fill = partial(
        textwrap.fill, width=shutil.get_terminal_size().columns, subsequent_indent="  ", break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip
    return "\n".join(map(fill, sentence.split("\n")))


def _send_output_nowhere() -> None:
    """Whatever stdout and stderr were."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
