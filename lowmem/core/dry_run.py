"""Sees what a model's layers do: runs its code once on tensors without data, or compares outputs with a formula's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
PLAIN = {bool, int, float, str, type(None), torch.dtype}
_MOST_ERROR = 1e-5  # between a model's code and a formula, in fp32, for numbers of about 1


def dry_run(model: nn.Module, dtype: torch.dtype, run: Callable[[], Result]) -> Result | None:
    """Calls `run` while the parameters of `model` are on the meta device, and returns its result. Parameters with two
    or more dimensions have `dtype` there. If `run` raises an error, calls it again with the buffers on the meta device,
    too. Returns None if it raises an error again."""
    for with_buffers in (False, True):  # some models mix both devices, others read their buffers' values
        with _without_data(model, dtype, with_buffers), suppress(Exception):  # models that need data may raise errors
            return run()
    return None


def agrees(output: object, formula: Tensor) -> bool:
    """Returns True if `output` of a model's code is what a formula gives, except for rounding."""
    alike = isinstance(output, Tensor) and output.shape == formula.shape
    return alike and bool((output - formula).abs().max() <= _MOST_ERROR * formula.abs().max())


def structure_of(model: nn.Module) -> list:
    """Returns the modules of `model`, and their hooks and other attributes, in one list. A model whose list has not
    changed (`equal`) runs the same operations. Leaves out tensors, the training mode, and hooks that this project
    registered."""
    found: list = []
    for module in model.modules():
        found.append(module)
        for name, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else (value,)
            if name != "training":
                found += [one for one in values if not isinstance(one, Tensor) and not is_ours(one)]
    return found


def is_ours(hook: object) -> bool:
    """Returns True if `hook` is a function of this project, or a partial of one."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("lowmem.")


def equal(structure: Sequence, other: Sequence) -> bool:
    """Returns True if both lists have the same entries in the same order. Numbers, strings and dtypes are compared by
    value, and all other objects by identity."""
    return len(structure) == len(other) and all(map(_same, structure, other))


def _same(one, other) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


@contextmanager
def _without_data(model: nn.Module, dtype: torch.dtype, with_buffers: bool) -> Iterator[None]:
    """Replaces the parameters of `model`, and its buffers if `with_buffers`, by meta tensors inside `with`. Parameters
    with two or more dimensions get `dtype`. Afterwards all are as before, also buffers that the model moves when it
    runs (GPT-J's positions)."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    before = [dict(table) for table in tables]
    try:
        for table, tensors in zip(tables, before, strict=True):
            for name, tensor in tensors.items():
                is_parameter = isinstance(tensor, nn.Parameter)
                if tensor is not None and (is_parameter or with_buffers):
                    kind = dtype if is_parameter and tensor.dim() >= 2 else tensor.dtype
                    empty = torch.empty_like(tensor, device="meta", dtype=kind)
                    table[name] = nn.Parameter(empty) if is_parameter else empty
        yield
    finally:
        for table, tensors in zip(tables, before, strict=True):
            table.clear()
            table.update(tensors)


class LayerMode(TorchDispatchMode):
    """Notes in `called` which module was called last inside `with`. A base class of dispatch modes."""

    def __init__(self):
        super().__init__()
        self.called: nn.Module | None = None

    def __enter__(self):
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._calls)
        return super().__enter__()

    def __exit__(self, *exception):
        self._hook.remove()
        self.called = None
        return super().__exit__(*exception)

    def _calls(self, module: nn.Module, _) -> None:
        self.called = module
