"""Prepares every Python process on the stand-in: Python imports a module of this name when it starts.

The libraries are loaded before PyTorch asks for CUDA's, whose names then count as loaded.
"""

import atexit
import ctypes
import importlib.util
import os
import sys
import time
from pathlib import Path


class _AfterImport:
    """Calls `then` after the import of module `name`. Goes into sys.meta_path, whose other finders find the module."""

    def __init__(self, name, then):
        self.name, self.then = name, then
        self.asking_others = False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.asking_others:
            return None
        self.asking_others = True
        try:
            # A mere question for the module, as transformers asks for torch before it imports it, changes nothing.
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


def _wait_for_backward_threads():
    # A backward thread that needs the interpreter's lock after Python's end, to free its last tensors, aborts the
    # process (pytorch #38228). Finished threads sleep; a thread that waits for the lock gets it while this one sleeps.
    asleep = 0
    for _ in range(200):  # at most a second
        threads = [folder for folder in Path("/proc/self/task").glob("*") if _name(folder).startswith("pt_autograd")]
        asleep = asleep + 1 if all(_state(folder) == "S" for folder in threads) else 0
        if not threads or asleep == 3:
            return
        time.sleep(0.005)


def _name(thread):
    return (thread / "comm").read_text()


def _state(thread):
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def _begin_values():
    from stand_in import values

    values.begin()


def _leave_out_nccl():
    # NCCL's library sends nothing here; gloo sends.
    sys.modules["torch.distributed.distributed_c10d"]._NCCL_AVAILABLE = False


def _pass_over_comparisons():
    from stand_in import passed_over

    passed_over.comparisons()


if os.environ.get("STAND_IN_LIBRARIES"):
    _load_libraries(Path(os.environ["STAND_IN_LIBRARIES"]))
    atexit.register(_wait_for_backward_threads)
    sys.meta_path.insert(0, _AfterImport("torch.distributed.distributed_c10d", _leave_out_nccl))
    if os.environ.get("STAND_IN_VALUES"):
        sys.meta_path.insert(0, _AfterImport("torch", _begin_values))
    else:
        sys.meta_path.insert(0, _AfterImport("lowmem.core.kernels.fused", _pass_over_comparisons))
