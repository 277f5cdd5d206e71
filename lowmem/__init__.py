"""Train every parameter of a language model, exactly, under hard caps of GPU memory and RAM.

Each name in `__all__` is imported from its module when it is first used. So `import lowmem` imports neither PyTorch nor
transformers.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - checked before imports that fail in an older Python
    sys.exit(
        f"lowmem needs Python 3.11 or newer, and this is Python {sys.version_info[0]}.{sys.version_info[1]} "
        f"({sys.executable}): run make setup, which looks for one, and then .venv/bin/python"
    )

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ imports these names
    from lowmem.core.batch import Batch
    from lowmem.core.layout import Layout
    from lowmem.core.step import TrainingStep
    from lowmem.cudasim.peak import cuda_peak
    from lowmem.errors import CapExceeded, InputError, LowmemError, PlanError, Stopped
    from lowmem.planning.plan import Plan
    from lowmem.run.api import LoadedModel, export, load, plan, train
    from lowmem.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Batch", "CapExceeded", "InputError", "Layout", "LoadedModel", "LowmemError", "Plan", "PlanError", "Settings",
    "Stopped", "TrainingStep", "cuda_peak", "export", "load", "plan", "train",
]  # fmt: skip

_HOMES = dict.fromkeys(("CapExceeded", "InputError", "LowmemError", "PlanError", "Stopped"), "errors")
_HOMES |= dict.fromkeys(("LoadedModel", "export", "load", "plan", "train"), "run.api")
_HOMES |= {"Batch": "core.batch", "Layout": "core.layout", "TrainingStep": "core.step"}
_HOMES |= {"Plan": "planning.plan", "Settings": "settings", "cuda_peak": "cudasim.peak"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowmem.run.environment import limit_waiting_of_threads, variables_blamed, warnings_end_nothing

    limit_waiting_of_threads()
    with warnings_end_nothing(), variables_blamed():
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
