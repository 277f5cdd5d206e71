"""Handles environment variables of other packages, so that none ends training with a traceback. Sets one for OpenMP."""

import getpass
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lowmem.errors import InputError, first_line

_FALSE_ALARMS = {  # {logger: the beginning of a message that is not true here}
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than the specified maximum",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "bitsandbytes.cextension": "The installed version of bitsandbytes was compiled without GPU support",
}


@contextmanager
def warnings_end_nothing() -> Iterator[None]:
    """Keeps warnings in the `with` block from being raised as errors, as PYTHONWARNINGS=error asks. Also drops
    misleading log messages (_FALSE_ALARMS), even after the block."""
    for name in _FALSE_ALARMS:
        logging.getLogger(name).addFilter(_is_no_false_alarm)  # adding it again changes nothing
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
        yield


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_FALSE_ALARMS[record.name])


@contextmanager
def variables_blamed() -> Iterator[None]:
    """Turns an error that a package raises on import in the `with` block into an InputError. The message names the
    environment variables whose values the error quotes. ImportErrors, InputErrors and errors of lowmem itself are
    raised unchanged. Raises InputError for PYTHONOPTIMIZE=2."""
    try:  # in a container, a user may have a number and no name; PyTorch before 2.13 asks for the name on import
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
    if sys.flags.optimize > 1:
        raise InputError("PYTHONOPTIMIZE=2 (python -OO) removes docstrings, which transformers reads; use 1 or 0")
    try:
        yield
    except (ImportError, InputError):
        raise
    except Exception as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        packages = [name.split(".")[0] for name in modules if name]
        package = [name for name in packages if name not in sys.stdlib_module_names][-1]
        if package == "lowmem":
            raise
        said = first_line(error)
        values = [value for value in os.environ.values() if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said)]
        longest = max(values, key=len, default="")
        quoted = [name for name, value in os.environ.items() if value == longest != ""]
        named = f"{' or '.join(quoted)}; unset it" if quoted else "that it reads; unset those that are yours"
        raise InputError(
            f"{package} cannot be imported ({said}), perhaps because of the environment variable {named}"
        ) from None


def limit_waiting_of_threads() -> None:
    """Sets GOMP_SPINCOUNT, which limits how long a waiting thread of OpenMP keeps a processor busy. Does nothing if
    PyTorch is imported already, or if the user has set GOMP_SPINCOUNT or OMP_WAIT_POLICY."""
    # OpenMP reads the variable only once, when PyTorch is imported.
    if "torch" in sys.modules or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        return
    samples = []
    for _ in range(5):
        samples.append(_other_running_threads())
        time.sleep(0.004)
    # On a busy machine a waiting thread must sleep at once: it holds the processor that the other thread needs.
    # The values are from `python -m experiments.bench.threads`.
    os.environ["GOMP_SPINCOUNT"] = "0" if sum(samples) / len(samples) > 0.5 else "10000"


def _other_running_threads() -> int:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("procs_running")) - 1
    except (OSError, StopIteration):  # the system does not say it
        return 0
