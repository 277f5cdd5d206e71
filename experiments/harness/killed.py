"""Measures how a command of several processes ends when one of them, or the command itself, is killed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from experiments.harness.rows import ROOT
from experiments.harness.tables import markdown

SECONDS_TO_START = 15.0
TITLE = "**Until nothing runs any more**, once a process of four is killed (SIGKILL)"
CASES = ["rank 0", "rank 2", "the command"]


def ended(module: str, who: str) -> dict:
    """Runs `python -m module`, and kills the process `who` (an entry of CASES) by SIGKILL. Returns the seconds until
    all of its processes are gone, the command's stderr and its exit code."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", module, "--steps", "1000000", "--out", out]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        time.sleep(SECONDS_TO_START)
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = sorted(child.pid for child in children if child.ppid() != process.pid)  # of the server that forks them
        began = time.monotonic()
        os.kill(process.pid if who == "the command" else ranks[int(who.split()[1])], signal.SIGKILL)
        said = process.communicate()[1]
        while any(_runs(child.pid) for child in children):
            time.sleep(0.01)
        return {"seconds": round(time.monotonic() - began, 2), "said": said.strip(), "exit_code": process.returncode}


def table(rows: list[dict]) -> str:
    """Returns a Markdown table. `rows`: rows of results, one for each process that was killed."""
    lines = [[row["options"], f"{row['seconds']:.1f}", str(row["exit_code"]), row["said"]] for row in rows]
    return markdown(("killed", "seconds", "exit code of the command", "what it says"), lines)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie
    except FileNotFoundError:
        return False
