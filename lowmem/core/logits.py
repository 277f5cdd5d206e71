"""Finds the function that a model applies to its logits before the softmax: none, a factor, or a soft cap."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_PRODUCTS = {_aten.mul.Tensor, _aten.mul_.Tensor, _aten.mul.Scalar, _aten.mul_.Scalar}
_QUOTIENTS = {_aten.div.Tensor, _aten.div_.Tensor, _aten.div.Scalar, _aten.div_.Scalar}
_TANH = {_aten.tanh.default, _aten.tanh_.default}
_COPIES = {_aten._to_copy.default, _aten.clone.default}


@dataclass(frozen=True)
class LogitFunction:
    """Represents a function of logits z: outer * z if `inner` is None, else outer * tanh(inner * z)."""

    outer: float = 1.0
    inner: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        return self.outer * (z if self.inner is None else (self.inner * z).tanh())


class Followed(TorchDispatchMode):
    """Notes how tensors inside `with` are computed from `head_output`: by a factor, by a soft cap or otherwise."""

    def __init__(self, head_output: Tensor):
        super().__init__()
        self._shape = head_output.shape
        self._followed: dict[int, tuple[Tensor, LogitFunction | str]] = {}  # by id, unique while the tensor exists
        self._followed[id(head_output)] = head_output, LogitFunction()

    def function_of(self, logits: Tensor) -> LogitFunction | str:
        """Returns the function that turned the head's output into `logits`. If it is neither a factor nor a soft cap,
        returns a string that says why, such as the name of an operation."""
        _, function = self._followed.get(id(logits), (None, "not using it"))
        return function if isinstance(function, str) or logits.shape == self._shape else "another shape"

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        known = [self._followed[id(leaf)][1] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._followed]
        if known:
            function = _after(operation, args, known) or operation._schema.name.removeprefix("aten::")
            for tensor in tree_leaves(result):
                self._followed[id(tensor)] = tensor, function
        return result


def _after(operation, args: tuple, known: list[LogitFunction | str]) -> LogitFunction | str | None:
    """Returns the function from the head's output to the result of `operation`; None if it is neither a factor nor a
    soft cap. `known`: the arguments' functions. A string instead, which says why there is none, is returned."""
    function = known[0]
    if isinstance(function, str) or operation.is_view or operation in _COPIES:
        return function
    numbers = [arg for arg in args if isinstance(arg, int | float)]
    if operation in _PRODUCTS and numbers:
        return replace(function, outer=function.outer * numbers[0])
    if operation in _QUOTIENTS and numbers:
        return replace(function, outer=function.outer / numbers[0])
    if operation in _TANH and function.inner is None:
        return LogitFunction(1.0, function.outer)
    return None
