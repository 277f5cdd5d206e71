"""Makes plans in a forked process, so that planning takes no memory from the process that trains.

A simulated step leaves some hundred MiB of Python objects behind. In the training process, the peak of RAM would
include them for the rest of the run, and the RAM cap limits this peak.
"""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

import torch

from lowmem.errors import LowmemError


@contextmanager
def process_aside() -> Iterator[Callable]:
    """Yields `aside(function, *arguments)`, which calls `function` in a forked process, and returns its result or
    raises its error. Arguments and results must be picklable. If a fork is not safe, `aside` calls `function` in this
    process."""
    # A fork is safe before CUDA is initialised and before autograd starts its threads, which are not forked.
    if sys.platform != "linux" or torch.cuda.is_initialized() or _autograd_has_threads():
        yield lambda function, *arguments: function(*arguments)
        return
    # Nothing is imported a second time, and a script needs no `if __name__ == "__main__"`.
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(ours, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads; those here hold no lock of the fork
        process.start()
    theirs.close()

    def aside(function: Callable, *arguments):
        try:
            ours.send((function, arguments))
            error, result = ours.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise LowmemError(
                f"the process that plans was ended (exit code {process.exitcode}), by the system if RAM ran out"
            ) from None
        if error is not None:
            raise error
        return result

    try:
        yield aside
    finally:
        ours.close()
        process.kill()  # it has nothing to clean up
        process.join()
        process.close()


def _autograd_has_threads() -> bool:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().startswith("pt_autograd"):
                return True
    return False


def _serve(ours: connection.Connection, theirs: connection.Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a terminal or job: the
        signal.signal(number, signal.SIG_IGN)  # parent answers them
    threading.Thread(target=_end_with, args=(parent_process().sentinel,), daemon=True).start()
    ours.close()  # the fork's copy of the parent's end
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or autograd would look for devices
    torch.set_num_threads(1)  # OpenMP's threads are not forked
    with suppress(EOFError, ConnectionError):
        while True:
            function, arguments = theirs.recv()
            try:
                outcome = None, function(*arguments)
            except Exception as error:
                if not isinstance(error, LowmemError):
                    error.add_note(f"In the process that plans:\n{traceback.format_exc()}")
                outcome = error, None
            theirs.send(outcome)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
