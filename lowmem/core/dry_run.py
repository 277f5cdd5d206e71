"""Finds out what a model's layers compute. Lists the PyTorch operations that run on tensors without data (on the meta
device), or compares a layer's outputs with those of a formula."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.core.decoder import AnswerYes, Decoder, kind_of

Result = TypeVar("Result")
PLAIN = {bool, int, float, str, type(None), torch.dtype}
_MOST_ERROR = 1e-5  # of a model's code in fp32 against a formula, relative to the largest number


def dry_run(model: nn.Module, dtype: torch.dtype, run: Callable[[], Result]) -> Result | None:
    """Calls `run()` while the parameters of `model` are on the meta device, and returns its result. Parameters with two
    or more dimensions have `dtype` there. If `run` raises an error, calls it again with the buffers on the meta device,
    too. Returns None if the second call raises an error, too."""
    for with_buffers in (False, True):  # some models read their buffers' values, others need one device
        with _without_data(model, dtype, with_buffers), suppress(Exception):  # models that need data raise any error
            return run()
    return None


def look_at_blocks(
    decoder: Decoder, dtype: torch.dtype, look: Callable[[nn.Module, Callable[[], object]], Result]
) -> list[Result | None]:
    """Inspects each block of `decoder` by calling `look(block, run)`. Returns a list with the result for each block.
    `run()` runs the block once, on tensors without data. Equal blocks (`kind_of`) share one call. The result is None if
    `look` raises an error, for example because the block needs data."""
    known: dict[tuple, Result | None] = {}
    for index, block in enumerate(decoder.blocks):
        if (kind := kind_of(block)) not in known:
            known[kind] = dry_run(decoder.model, dtype, partial(look, block, partial(_run_block, decoder, index)))
    return [known[kind_of(block)] for block in decoder.blocks]


def _run_block(decoder: Decoder, index: int) -> None:
    with torch.no_grad(), AnswerYes():
        hidden, extras = decoder.embed(*decoder.example(decoder.head_weight.shape[0]))
    decoder.block(index, hidden.detach().requires_grad_(), extras[index])


def agrees(output: object, formula: Tensor) -> bool:
    """Returns True if `output`, computed by a model's code, equals `formula`, computed by a formula, except for
    rounding. Returns False if `output` is no tensor, or has another shape."""
    alike = isinstance(output, Tensor) and output.shape == formula.shape
    return alike and bool((output - formula).abs().max() <= _MOST_ERROR * formula.abs().max())


def structure_of(model: nn.Module) -> list:
    """Returns a list of the modules of `model`, their hooks and their other attributes. If the list has not changed
    (`equal`), the model runs the same operations. The list has no tensors, training modes, or hooks that this project
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
    """Replaces the parameters of `model` by meta tensors inside `with`. If `with_buffers`, also replaces the buffers.
    Parameters with two or more dimensions get `dtype`. On exit, restores all of them, also buffers that the model
    itself has replaced (as GPT-J does with its positions)."""
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


@dataclass(frozen=True)
class Operation:
    """Describes a PyTorch operation that ran, with its arguments and result. `module`: the last module whose forward
    was called before the operation; None if there was none."""

    function: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    result: object
    module: nn.Module | None

    @property
    def reads(self) -> list[Tensor]:
        """Returns the tensors whose values the operation reads: all among its arguments, but none for a view."""
        is_view = self.function.is_view or self.function is torch.ops.aten._unsafe_view.default
        return [] if is_view else tensors_in((self.args, self.kwargs))


class Trace(TorchDispatchMode):
    """Lists in `operations` all PyTorch operations that run inside `with`; a dispatch mode. The list keeps the
    operations' tensors alive, so different storages have different addresses."""

    def __init__(self):
        super().__init__()
        self.operations: list[Operation] = []
        self._called: nn.Module | None = None

    def __enter__(self):
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._calls)
        return super().__enter__()

    def __exit__(self, *exception):
        self._hook.remove()
        return super().__exit__(*exception)

    def _calls(self, module: nn.Module, _) -> None:
        self._called = module

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self.operations.append(Operation(operation, args, kwargs, result, self._called))
        return result


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
