"""Describes the function that a model applies to its logits before the softmax: none, a factor, or a soft cap.

    f(z) = outer * z                      as in Granite and Cohere
    f(z) = outer * tanh(inner * z)        as in Gemma 2: 30 tanh(z / 30) stays within +-30

The loss applies the same f to each chunk of logits (loss.py). `Followed`, a dispatch mode, finds f: it watches every
operation on the head's output while the model runs, on real tensors or on meta tensors.
"""

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
        """Applies the function to `z` and returns a new tensor. Only comparisons use this method; the loss works in
        place."""
        return self.outer * (z if self.inner is None else (self.inner * z).tanh())


class Followed(TorchDispatchMode):
    """Follows the tensors that are computed from `head_output` inside `with`; a dispatch mode. Notes, for each such
    tensor, the function that computes it from `head_output`."""

    def __init__(self, head_output: Tensor):
        super().__init__()
        self._shape = head_output.shape
        self._followed: dict[int, tuple[Tensor, LogitFunction | str]] = {}  # by id, unique while the tensor exists
        self._followed[id(head_output)] = head_output, LogitFunction()

    def function_of(self, logits: Tensor) -> LogitFunction | str:
        """Returns the function that turned the head's output into `logits`. If this is neither a factor nor a soft cap,
        returns a string with the reason, usually the name of the first unsupported operation."""
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
    """Returns the function that computes the result of `operation` from the head's output. Returns None if that is
    neither a factor nor a soft cap. `args`: the operation's arguments. `known` has an entry for each argument that
    depends on the head's output: that argument's function, or a string with the reason why there is none. If the first
    entry is a string, returns this string."""
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
