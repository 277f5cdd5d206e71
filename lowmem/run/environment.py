"""Environment variables reach every package that a run imports. None of them may end it without a sentence.

PYTHONWARNINGS=error turns any warning into an error. A variable that a package cannot read (TQDM_NCOLS=wide) fails its
import. plots.py deals with MPLBACKEND, lowmem/device.py with CUDA's variables.
"""

import getpass
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lowmem.errors import InputError, first_line


@contextmanager
def warnings_end_nothing() -> Iterator[None]:
    """Inside the block no warning is an error: if a filter says so, Python's default filters replace all of them."""
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
        yield


@contextmanager
def variables_blamed() -> Iterator[None]:
    """For imports. Raises InputError if another package fails with anything but an ImportError; it names the variables
    whose values the error quotes."""
    _name_the_user()
    if sys.flags.optimize > 1:
        raise InputError("PYTHONOPTIMIZE=2 (python -OO) takes away docstrings, which transformers reads; use 1 or 0")
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


def _name_the_user() -> None:
    """PyTorch before 2.13 asks for the user's name on import, and in a container a user may have only a number."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
