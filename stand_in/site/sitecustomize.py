"""What every Python process does first on the stand-in: Python imports a module of this name when it starts.

The libraries are loaded before PyTorch asks for CUDA's, whose names then count as loaded. What has to be done to a
module is done right after its import, so that a process which needs no PyTorch does not wait for it.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path


class _AfterImport:
    """A finder that finds nothing by itself: it lets `then` follow the import of the module `name`. Asking only where
    the module is, as transformers asks for torch before it imports it, changes nothing."""

    def __init__(self, name, then):
        self.name, self.then = name, then
        self.asking_others = False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.asking_others:
            return None
        self.asking_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking_others = False
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_and_then(module):
            sys.meta_path.remove(self)
            load(module)
            self.then()

        spec.loader.exec_module = load_and_then
        return spec


def _load_libraries(folder):
    ctypes.CDLL(str(folder / "libstand_in_card.so"), mode=ctypes.RTLD_GLOBAL)
    for library in sorted(folder.glob("lib*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _begin_values():
    from stand_in import values

    values.begin()


def _pass_over_timing():
    from stand_in import passed_over

    passed_over.timing()


def _pass_over_comparisons():
    from stand_in import passed_over

    passed_over.comparisons()


if os.environ.get("STAND_IN_LIBRARIES"):
    _load_libraries(Path(os.environ["STAND_IN_LIBRARIES"]))
    sys.meta_path.insert(0, _AfterImport("lowmem.calibrate", _pass_over_timing))
    if os.environ.get("STAND_IN_VALUES"):
        sys.meta_path.insert(0, _AfterImport("torch", _begin_values))
    else:
        sys.meta_path.insert(0, _AfterImport("lowmem.fused", _pass_over_comparisons))
