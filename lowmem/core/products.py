"""Records the outputs of a block's matmuls and attention, and returns them when the block is recomputed. Leaves out a
block's last matmul if backward does not need its values (docs/recompute.md)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowmem.core.decoder import Decoder
from lowmem.core.dry_run import Trace, look_at_blocks, tensors_in
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.operation_recorder import address_of

_aten = torch.ops.aten
MATRIX_PRODUCTS = {_aten.mm.default: (0, 1), _aten.addmm.default: (1, 2)}  # {operation: positions of the factors}
_BATCHED_PRODUCTS = {_aten.bmm.default: (0, 1), _aten.baddbmm.default: (1, 2)}
_WHOLE = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten.convolution.default,
    _aten._grouped_mm.default,
}
_WITHOUT_VALUES = {_aten.empty_like.default, _aten.new_empty.default, _aten.zeros_like.default, _aten.ones_like.default}


def is_saved(operation, args: Sequence) -> bool:
    """Returns True if ProductRecorder records the output of the operator `operation`: of a convolution, attention, or a
    matmul. A batched matmul [M, K] x [K, N] is recorded only if K is at least the smaller of M and N."""
    if factors := _BATCHED_PRODUCTS.get(operation):
        rows, inner = args[factors[0]].shape[-2:]
        return inner >= min(rows, args[factors[1]].shape[-1])
    return operation in MATRIX_PRODUCTS or operation in _WHOLE


@dataclass(frozen=True)
class SavedProduct:
    result: object
    generator_state: Tensor | None  # of the random generator after the operation; None if it drew no numbers


class ProductRecorder(TorchDispatchMode):
    """Records the outputs of matmuls, attention and convolutions that run inside `with`, in the list `products`. If an
    operation changes an output in place later, the output's entry becomes None."""

    def __init__(self):
        super().__init__()
        self.products: list[SavedProduct | None] = []
        self._paused = False
        self._numbers: dict[int, int] = {}  # {address of a saved tensor's storage: number of the product}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                number = self._numbers.pop(tensor.untyped_storage()._cdata, None)
                if number is not None:
                    self.products[number] = None
        if is_saved(func, args) and not self._paused:
            copies = tree_map_only(Tensor, Tensor.detach, result)  # autograd attaches its graph to the originals
            for tensor in tensors_in(copies):
                self._numbers[tensor.untyped_storage()._cdata] = len(self.products)
            state = _generator(result).get_state() if _draws(func, args, kwargs) else None
            self.products.append(SavedProduct(copies, state))
        return result

    def without(self, layer: nn.Module) -> AbstractContextManager:
        """Returns a context manager in which the matmuls of `layer` are not recorded."""
        forward = layer.forward

        @wraps(forward)
        def unrecorded(*arguments, **keywords):
            with patch.object(self, "_paused", True):
                return forward(*arguments, **keywords)

        return patch.object(layer, "forward", unrecorded)


class ProductReplayer(TorchDispatchMode):
    """Makes matmuls, attention and convolutions inside `with` return the outputs that a ProductRecorder has recorded,
    in the same order, instead of computing them. Computes an operation if its entry in `products` is None."""

    def __init__(self, products: Sequence[SavedProduct | None]):
        super().__init__()
        self._products = deque(products)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.lowmem.gated.default and self._products and self._products[0] is not None:
            return args[0]  # any tensor: the next product does not read it
        if is_saved(func, args) and self._products:
            saved = self._products.popleft()
            if saved is not None:
                if saved.generator_state is not None:
                    _generator(saved.result).set_state(saved.generator_state)
                return saved.result
        return func(*args, **(kwargs or {}))


class _Skipper(TorchDispatchMode):
    """Leaves out the first matmul inside `with` and the activation before it. Also leaves out sums and multiples of the
    matmul's output, and its dropout. The results have the right shapes, but no values."""

    def __init__(self):
        super().__init__()
        self._without_values: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.lowmem.gated.default and not self._without_values:
            return args[0]
        if func in MATRIX_PRODUCTS and not self._without_values:
            left, right = (args[index] for index in MATRIX_PRODUCTS[func])
            return self._noted(left.new_empty(left.shape[0], right.shape[1]))
        if func is torch.ops.lowmem.drop.default and self._has_none(args[0]):
            self._noted(args[2])
            return None
        if func in (_aten.add.Tensor, _aten.mul.Tensor) and any(map(self._has_none, tensors_in(args))):
            shape = torch.broadcast_shapes(*(each.shape for each in tensors_in(args)))
            return self._noted(tensors_in(args)[0].new_empty(shape, dtype=torch.result_type(*args)))
        return func(*args, **(kwargs or {}))

    def _has_none(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._without_values

    def _noted(self, tensor: Tensor) -> Tensor:
        self._without_values.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor


@contextmanager
def product_skipped(layer: nn.Module) -> Iterator[None]:
    """Makes `layer` leave out its matmul inside `with`. Its output and sums of it then have shapes, but no values."""
    forward = layer.forward

    @wraps(forward)
    def skipping(*arguments, **keywords):
        until_the_end.enter_context(_Skipper())
        return forward(*arguments, **keywords)

    with ExitStack() as until_the_end, patch.object(layer, "forward", skipping):
        yield


def skippable_layers(decoder: Decoder, dtype: torch.dtype) -> list[nn.Module | None]:
    """Returns, for each block, the layer that makes its last matmul, if this matmul can be left out when the block is
    recomputed. The entry is None if backward needs the matmul's values, or if the layer makes other matmuls. It is also
    None if the block's code fails on meta tensors, which have no data. `dtype`: the matrices' dtype."""
    names = look_at_blocks(decoder, dtype, _skippable_layer)
    return [block.get_submodule(name) if name else None for block, name in zip(decoder.blocks, names, strict=True)]


def _skippable_layer(block: nn.Module, run: Callable[[], object]) -> str | None:
    saved: list[Tensor] = []  # tensors that autograd saves for backward

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())  # an operation that saves its own output would keep itself alive by its graph
        return saved[-1]

    with torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor), Trace() as trace:
        run()
    operations = trace.operations
    products = [number for number, each in enumerate(operations) if is_saved(each.function, each.args)]
    if not products:
        return None
    last = operations[products[-1]]
    computed_from = set(map(address_of, tensors_in(last.result)))  # storages of the product and all computed from it
    for each in operations[products[-1] + 1 :]:
        if each.function not in _WITHOUT_VALUES and any(address_of(tensor) in computed_from for tensor in each.reads):
            written = _written(each.function, each.args, each.kwargs)
            computed_from.update(map(address_of, tensors_in(each.result) + written))
    needed = any(address_of(tensor) in computed_from for tensor in saved)
    alone = sum(operations[number].module is last.module for number in products) == 1
    if last.function not in MATRIX_PRODUCTS or needed or not alone:
        return None
    return next((name for name, module in block.named_modules() if module is last.module), None)


def _draws(operation, args: Sequence, kwargs: dict) -> bool:
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    defaults = {a.name: a.default_value for a in operation._schema.arguments if a.has_default_value()}
    return (defaults | _by_name(operation, args, kwargs)).get("dropout_p") != 0.0


def _written(operation, args: Sequence, kwargs: dict) -> list[Tensor]:
    given = _by_name(operation, args, kwargs)
    changed = [a.name for a in operation._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([given.get(name) for name in changed])


def _by_name(operation, args: Sequence, kwargs: dict) -> dict:
    return dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs


def _generator(result) -> torch.Generator:
    device = tensors_in(result)[0].device
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
