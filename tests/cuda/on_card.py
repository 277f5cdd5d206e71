"""A process on a card of its own: the kind of card and the order of streams are fixed when a process begins."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, options: tuple[str, ...] = (), seconds: float = 280) -> subprocess.CompletedProcess:
    """`python -m stand_in OPTIONS -- COMMAND` in the repository; what it printed is text."""
    return subprocess.run(
        [sys.executable, "-m", "stand_in", *options, "--", *command], cwd=ROOT, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip


def output(*command: str, options: tuple[str, ...] = (), seconds: float = 280) -> str:
    """What it printed on stdout; an AssertionError with the end of stderr where it failed."""
    result = run(*command, options=options, seconds=seconds)
    assert result.returncode == 0, f"exit code {result.returncode}: {result.stderr[-3000:]}"
    return result.stdout
