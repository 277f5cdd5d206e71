"""Records the outputs of a block's matrix products and attention, and replays them when the block is recomputed.

These operations take nearly all of a block's time, so only norms, activation functions and sums are computed twice
(docs/recompute.md). Both modes, ProductRecorder and ProductReplayer, work below autograd, so they fit any model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lowmem.core.decoder import forward_replaced

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
_READS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.is_nonzero.default}


def is_kept(operation, args: Sequence) -> bool:
    """Returns True if ProductRecorder records the output of `operation` for `args`: for matrix products, attention and
    convolutions. A batched product counts only if its inner dimension is at least the smaller outer one."""
    if factors := _BATCHED_PRODUCTS.get(operation):
        rows, inner = args[factors[0]].shape[-2:]
        return inner >= min(rows, args[factors[1]].shape[-1])
    return operation in MATRIX_PRODUCTS or operation in _WHOLE


@dataclass(frozen=True)
class Kept:
    """Holds the recorded output of one operation."""

    result: object
    generator_state: Tensor | None  # after it, if it took random numbers


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


class ProductRecorder(TorchDispatchMode):
    """Records the outputs of matrix products and attention in `kept`, in order. The entry of an output that is changed
    in place afterwards becomes None. `last_matrix_product`: the index of the last entry, if it is a plain matrix
    product."""

    def __init__(self):
        super().__init__()
        self.kept: list[Kept | None] = []
        self.last_matrix_product: int | None = None
        self._numbers: dict[int, int] = {}  # {address of a kept tensor's storage: number of the product}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                number = self._numbers.pop(tensor.untyped_storage()._cdata, None)
                if number is not None:
                    self.kept[number] = None
        if is_kept(func, args):
            number = len(self.kept)
            self.last_matrix_product = number if func in MATRIX_PRODUCTS else None
            copies = tree_map_only(Tensor, Tensor.detach, result)  # autograd attaches its graph to the originals
            for tensor in _tensors(copies):
                self._numbers[tensor.untyped_storage()._cdata] = number
            state = _generator(result).get_state() if _draws(func, args, kwargs) else None
            self.kept.append(Kept(copies, state))
        return result


class ProductReplayer(LayerMode):
    """Returns, when a block is recomputed, the outputs in `kept` (from ProductRecorder) instead of computing them. A
    product whose entry is None is computed.

    `unneeded`: the index of a matrix product whose output is returned without values. If its values turn out to be
    needed, `missed` becomes True, and the results must not be used. `last_matrix_product`: as for ProductRecorder.
    `layers`: for each matrix product, the module that was called last before it. `skipped`: the module for the unneeded
    product; None if that product has not run.
    """

    def __init__(self, kept: Sequence[Kept | None] | None, unneeded: int | None):
        super().__init__()
        self.last_matrix_product: int | None = None
        self.missed = False
        self.layers: list[nn.Module | None] = []
        self.skipped: nn.Module | None = None
        self._kept, self._unneeded = kept, unneeded
        self._products = 0  # so far
        self._without_values: set[StorageWeakRef] = set()
        self._watch: saved_tensors_hooks | None = None

    def __exit__(self, *exception):
        self._kept = None
        if self._watch is not None:
            self._watch.__exit__(*exception)
            self._watch = None  # it refers to this object
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_kept(func, args):
            number = self._products
            self._products += 1
            self.last_matrix_product = number if func in MATRIX_PRODUCTS else None
            if self.last_matrix_product is not None:
                self.layers.append(self.called)
            if number == self._unneeded == self.last_matrix_product:
                self.skipped = self.called
                return self._shape_alone(*(args[index] for index in MATRIX_PRODUCTS[func]))
            kept = self._kept[number] if self._kept is not None and number < len(self._kept) else None
            if kept is not None:
                if kept.generator_state is not None:
                    _generator(kept.result).set_state(kept.generator_state)
                return kept.result
        result = func(*args, **(kwargs or {}))
        if self._without_values:
            self._follow(func, args, kwargs, result)
        return result

    def _shape_alone(self, left: Tensor, right: Tensor) -> Tensor:
        result = left.new_empty(left.shape[0], right.shape[1])
        self._without_values.add(StorageWeakRef(result.untyped_storage()))
        self._watch = saved_tensors_hooks(self._saved, lambda tensor: tensor)
        self._watch.__enter__()
        return result

    def _follow(self, func, args, kwargs, result) -> None:
        if func in _WITHOUT_VALUES or not any(map(self._has_no_values, _tensors((args, kwargs)))):
            return
        if func in _READS:
            self.missed = True
        outputs = _tensors(result) + (_written(func, args, kwargs or {}) if func._schema.is_mutable else [])
        if func is _aten.native_dropout.default:
            outputs = outputs[:1]  # the mask is drawn, not computed
        self._without_values.update(StorageWeakRef(tensor.untyped_storage()) for tensor in outputs)

    def _has_no_values(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._without_values

    def _saved(self, tensor: Tensor) -> Tensor:
        self.missed |= self._has_no_values(tensor)
        return tensor.detach()  # an operation that saves its own output would keep itself alive through its graph


@contextmanager
def product_skipped(layer: nn.Module) -> Iterator[None]:
    """Makes `layer` leave out its only matrix product inside `with`: its output then has the right shape, but no
    values."""
    forward = layer.forward

    def skipping(*arguments, **keywords):
        with ProductReplayer(None, unneeded=0):
            return forward(*arguments, **keywords)

    with forward_replaced(layer, skipping):
        yield


def _draws(operation, args: Sequence, kwargs: dict) -> bool:
    """Returns True if an operation takes numbers from a random generator."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    defaults = {a.name: a.default_value for a in operation._schema.arguments if a.has_default_value()}
    return (defaults | _by_name(operation, args, kwargs)).get("dropout_p") != 0.0


def _written(operation, args: Sequence, kwargs: dict) -> list[Tensor]:
    """Returns the tensors that an operation changes in place."""
    given = _by_name(operation, args, kwargs)
    changed = [a.name for a in operation._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([given.get(name) for name in changed])


def _by_name(operation, args: Sequence, kwargs: dict) -> dict:
    """Returns {name: value} of the arguments with which `operation` is called."""
    return dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs


def _tensors(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _generator(result) -> torch.Generator:
    """Returns the random generator of the device of an operation's result."""
    device = _tensors(result)[0].device
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
