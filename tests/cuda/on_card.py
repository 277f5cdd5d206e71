"""A process on a card of its own: the kind of card and the order of streams are fixed when a process begins."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, options: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess:
    """`python -m stand_in OPTIONS -- COMMAND` in the repository, with more variables; what it printed is text."""
    return subprocess.run(
        [sys.executable, "-m", "stand_in", *options, "--", *command], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"} | environment,  # a signal that ends it leaves a traceback
    )  # fmt: skip


def output(*command: str, options: Sequence[str] = (), **environment: str) -> str:
    """Returns its stdout. If it failed, raises AssertionError with the end of its output."""
    result = run(*command, options=options, **environment)
    assert result.returncode == 0, f"exit code {result.returncode}: {result.stderr[-3000:]}{result.stdout[-500:]}"
    return result.stdout
