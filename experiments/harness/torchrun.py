"""Starts a script with torchrun, and finds its processes."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from experiments.harness.rows import ROOT

_PR_SET_PDEATHSIG = 1  # of Linux, sys/prctl.h


def start(
    arguments: Sequence[str], ranks: int = 2, restarts: int = 0, meeting: Sequence[str] = ("--standalone",), **how
) -> subprocess.Popen:
    """Starts torchrun, which runs a script in `ranks` processes and restarts them up to `restarts` times. `arguments`:
    the script and its arguments. `meeting`: torchrun's rendezvous options. `how`: arguments of Popen."""
    launcher = [*meeting, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, *arguments]
    # A second attempt may hang with the store of the first (pytorch#135712).
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    how |= {"text": True, "preexec_fn": _end_with_parent, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **how)


def _end_with_parent() -> None:
    # If its parent dies, torchrun gets SIGTERM, and ends its processes, which have sessions of their own.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Returns {rank: process id} of the script's processes. `process`: torchrun."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error, KeyError):  # one that has just ended, or is no rank
            found[int(child.environ()["RANK"])] = child.pid
    return found
