"""Finds out what a model's layers compute: runs them on tensors without data, or compares them with a formula."""

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
    """Returns the result of `run()`, during which meta tensors replace the parameters of `model`, matrices in `dtype`.
    If `run` fails, tries again with meta tensors for the buffers, too. Returns None if this also fails."""
    for with_buffers in (False, True):  # some models read their buffers' values, others need one device
        with _without_data(model, dtype, with_buffers), suppress(Exception):  # models that need data raise any error
            return run()
    return None


def look_at_blocks(
    decoder: Decoder, dtype: torch.dtype, look: Callable[[nn.Module, Callable[[], object]], Result]
) -> list[Result | None]:
    """Calls `look(block, run)` for each block, with all parameters on the meta device. Returns the results, None if
    `look` fails. `run()` runs the block forward. Blocks of equal structure share a call. `dtype`: dtype of matrices."""
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
    """Returns True if a layer's `output` is a tensor that equals the result of a `formula`, except for rounding."""
    alike = isinstance(output, Tensor) and output.shape == formula.shape
    return alike and bool((output - formula).abs().max() <= _MOST_ERROR * formula.abs().max())


def structure_of(model: nn.Module) -> list:
    """Returns the modules of `model`, their hooks and their other attributes, but no tensors, no `training` and no
    hooks of lowmem. Two lists are `equal` unless a user has replaced, added or removed one of these in between."""
    found: list = []
    for module in model.modules():
        found.append(module)
        for name, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else (value,)
            if name != "training":
                found += [one for one in values if not isinstance(one, Tensor) and not is_ours(one)]
    return found


def is_ours(hook: object) -> bool:
    """Returns True if lowmem defined `hook`, which may be any object."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("lowmem.")


def equal(structure: Sequence, other: Sequence) -> bool:
    """Returns True if two lists agree: numbers, strings and dtypes by value, all other objects by identity."""
    return len(structure) == len(other) and all(map(_same, structure, other))


def _same(one, other) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


@contextmanager
def _without_data(model: nn.Module, dtype: torch.dtype, with_buffers: bool) -> Iterator[None]:
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
    finally:  # restores also buffers that the model itself has replaced, as GPT-J does with its positions
        for table, tensors in zip(tables, before, strict=True):
            table.clear()
            table.update(tensors)


@dataclass(frozen=True)
class Operation:
    function: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    result: object
    module: nn.Module | None  # the last one whose forward was called before; None if there was none

    @property
    def reads(self) -> list[Tensor]:
        """Returns the tensors whose values the operation reads; none for a view."""
        is_view = self.function.is_view or self.function is torch.ops.aten._unsafe_view.default
        return [] if is_view else tensors_in((self.args, self.kwargs))


class Trace(TorchDispatchMode):
    """Lists the PyTorch operations that run inside `with`."""

    def __init__(self):
        super().__init__()
        self.operations: list[Operation] = []  # keeps their tensors: no two storages share an address
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
