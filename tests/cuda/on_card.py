"""Starts a process on a card: the kind of card and the order of streams are fixed when a process begins."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lowmem.device import ALLOCATOR_VARIABLES

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, options: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess:
    """Runs `python -m stand_in OPTIONS -- COMMAND` in the repository, with more variables. Its output is text."""
    # A training that ran in this process before has made these settings (lowmem/device.py).
    set_by_training = *ALLOCATOR_VARIABLES, "CUBLAS_WORKSPACE_CONFIG"
    inherited = {name: value for name, value in os.environ.items() if name not in set_by_training}
    return subprocess.run(
        [sys.executable, "-m", "stand_in", *options, "--", *command], cwd=ROOT, capture_output=True, text=True,
        env=inherited | {"PYTHONFAULTHANDLER": "1"} | environment,  # a signal that ends it leaves a traceback
    )  # fmt: skip


def output(*command: str, options: Sequence[str] = (), **environment: str) -> str:
    """Returns its stdout. Raises AssertionError with the end of its output if the command failed."""
    result = run(*command, options=options, **environment)
    assert result.returncode == 0, f"exit code {result.returncode}: {result.stderr[-3000:]}{result.stdout[-500:]}"
    return result.stdout
