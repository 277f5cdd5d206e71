"""Runs a training program, from the command line to the exit code (errors.py).

Bad options and paths are refused before PyTorch and transformers are imported, which takes seconds. Every error that a
user or a machine can cause ends with one sentence on stderr.
"""

import gc
import sys
import time
from pathlib import Path

from lowmem.distributed.launch import first_rank_here, launched_rank
from lowmem.errors import CapExceeded, LowmemError, first_line
from lowmem.run.cli import parse_arguments
from lowmem.run.early import check_run, packages_needed
from lowmem.run.environment import limit_waiting_of_threads, variables_blamed, warnings_end_nothing
from lowmem.run.signals import StopRequest, interrupt_ends_at_once
from lowmem.settings import Settings
from lowmem.terminal import escape_what_stdout_lacks, say

SECONDS_TO_TELL = 5


def main(defaults: Settings, arguments: list[str] | None = None, ends_process: bool | None = None) -> int:
    """Trains, or only prints a plan or data, and returns the exit code. `arguments`: options that override `defaults`,
    None for the process's command line. `ends_process`: True if the process exits after this call; later signals then
    do not change the exit code. False restores the earlier signal handlers. None means True if `arguments` is None."""
    escape_what_stdout_lacks()
    settings = defaults
    try:
        with warnings_end_nothing():
            # Until training begins, Ctrl-C ends the process at once. Then it is a request to save and stop.
            with interrupt_ends_at_once(), packages_needed():
                settings = parse_arguments(sys.argv[1:] if arguments is None else arguments, defaults)
                settings = check_run(settings, say if launched_rank() == 0 else lambda _: None)
                limit_waiting_of_threads()
                with variables_blamed():
                    from lowmem.run.train import run
            ends = arguments is None if ends_process is None else ends_process
            if ends:
                gc.freeze()  # imported modules live until the end
            ends = ends and launched_rank() == 0  # torchrun ends the others with a signal
            with interrupt_ends_at_once() if settings.trains_nothing else StopRequest(ends) as stop:
                run(settings, stop)
    except Exception as error:
        said = _in_a_sentence(error, settings)
        if said is None:
            raise
        rank = launched_rank()
        tells = getattr(error, "said_by", first_rank_here()) == rank
        if not tells:  # torchrun stops all ranks when one ends, so the rank that prints must end first
            time.sleep(SECONDS_TO_TELL)
        if tells or not hasattr(error, "said_by"):  # a rank that still runs has another error
            say(f"{Path(sys.argv[0]).name}: {f'rank {rank}: ' if rank else ''}{said}")
        return said.exit_code
    return 0


def _in_a_sentence(error: Exception, settings: Settings) -> LowmemError | None:
    """Returns the error to show to the user, in one sentence; None if `error` is a mistake in this code."""
    if isinstance(error, LowmemError):
        return error
    if "torch" not in sys.modules:
        return None
    import torch

    reason = first_line(error)
    if isinstance(error, torch.OutOfMemoryError):
        return CapExceeded(f"out of GPU memory under --gpu-limit: {reason}; what was saved is safe")
    if isinstance(error, OSError):  # a full disk or quota, a folder that went away
        return LowmemError(f"{error.filename or settings.out}: {error.strerror or error}; what was saved is safe")
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in reason:
        advice = "Free some, or lower --micro-batch or --seq"
        return LowmemError(f"out of RAM ({reason}); what was saved is safe. {advice}")
    if isinstance(error, torch.distributed.DistError) or "gloo" in reason:
        return LowmemError("another rank has ended; the same command goes on from the newest checkpoint")
    if isinstance(error, torch.AcceleratorError) or reason.startswith(("CUDA error", "CUDA driver error")):
        return LowmemError(f"the GPU failed ({reason}); what was saved is safe, and the same command resumes from it")
    return None
