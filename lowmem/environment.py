"""Environment variables reach every package that a run imports. None of them may end it without a sentence.

PYTHONWARNINGS=error makes an error of any warning; a variable that a package cannot read (TQDM_NCOLS=wide) makes one of
its import. MPLBACKEND is lowmem/run/plots.py's matter, CUDA's variables are lowmem/device.py's.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowmem.errors import InputError, first_line


@contextmanager
def warnings_end_nothing() -> Iterator[None]:
    """Inside the block Python's own filters of warnings hold if there was one that makes errors of them: a warning of
    an imported package ends no run."""
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
            for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", kind)
        yield


@contextmanager
def variables_blamed() -> Iterator[None]:
    """For imports: an InputError, which names the variables that it quotes, of an error that is no ImportError and was
    raised outside this package."""
    try:
        yield
    except (ImportError, InputError):
        raise
    except Exception as error:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        if Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
            raise
        package, said = frame.tb_frame.f_globals.get("__name__", "a package").split(".")[0], first_line(error)
        values = [value for value in os.environ.values() if re.search(rf"(?<!\w){re.escape(value)}(?!\w)", said)]
        longest = max(values, key=len, default="")
        quoted = [name for name, value in os.environ.items() if value == longest != ""]
        named = f"{' or '.join(quoted)}; unset it" if quoted else "that it reads; unset those that are yours"
        raise InputError(
            f"{package} cannot be imported ({said}), perhaps for the environment variable {named}"
        ) from None
