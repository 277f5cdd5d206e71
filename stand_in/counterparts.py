"""CPU implementations of CUDA operators that the CPU lacks, or computes with other dtypes or other saved tensors.

COUNTERPARTS maps an operator to a function that takes the operator's arguments on the CPU and returns its results. A
result that nobody reads is None. A model gets the bits that it gets on a CPU. RANDOM operators draw from a generator.
SYNCHRONOUS operators read a number from device memory to decide on a shape or a result.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from stand_in import attention, interpreted

_aten = torch.ops.aten


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    # The CPU's F.dropout draws the mask, and rounds the quotient, in the dtype of `x`.
    noise = torch.empty_like(x).bernoulli_(1 - p)
    kept = noise.bool()
    return x * noise.div_(1 - p), kept


def _native_dropout_backward(gradient: Tensor, kept: Tensor, scale: float) -> Tensor:
    if scale == 0:
        return torch.zeros_like(gradient)
    # `scale` is 1 / (1 - p), and the CPU divides by its inverse.
    return gradient * kept.to(gradient.dtype).div_(1 / scale)


def _layer_norm(x: Tensor, shape, weight: Tensor | None, bias: Tensor | None, epsilon: float):
    output, mean, reciprocal = _aten.native_layer_norm.default(x, shape, weight, bias, epsilon)
    kind = torch.promote_types(x.dtype, torch.float32)
    # CUDA keeps the statistics of 16-bit inputs in fp32.
    return output, mean.to(kind), reciprocal.to(kind)


def _layer_norm_backward(gradient, x, shape, mean, reciprocal, weight, bias, asked):
    kind = x.dtype if weight is None else weight.dtype  # fp32 for fp32 weights of a 16-bit input
    statistics = mean.to(kind), reciprocal.to(kind)
    return _aten.native_layer_norm_backward.default(gradient, x, shape, *statistics, weight, bias, asked)


def _rms_norm_backward(gradient, x, shape, reciprocal, weight, asked):
    # The CPU has this only by autograd, whose steps these are, in reverse: weight, reciprocal root, mean, square.
    kind = reciprocal.dtype
    axes, leading = list(range(x.dim() - len(shape), x.dim())), list(range(x.dim() - len(shape)))
    x_there, of_normal = x.to(kind), gradient.to(kind)
    of_weight = None
    if weight is not None:
        products = of_normal * (x_there * reciprocal)
        of_weight = (products.sum(leading) if leading else products).to(weight.dtype)
        of_normal = of_normal * weight
    of_root = (of_normal * x_there).sum(axes, keepdim=True)
    of_mean = -0.5 * of_root * reciprocal.pow(3)
    of_x = of_normal * reciprocal + of_mean.expand(x.shape) / math.prod(shape) * (2 * x_there)
    return of_x.to(x.dtype) if asked[0] else None, of_weight if asked[1] else None


def _softmax(operator: OpOverload) -> Callable:
    # `half_to_float`: an fp16 input is computed in fp32; the CPU converts it first.
    return lambda x, dim, half_to_float: operator(x.float() if half_to_float else x, dim, False)


def _softmax_backward(operator: OpOverload) -> Callable:
    def backward(gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        return operator(gradient, output, dim, gradient.dtype).to(input_dtype)

    return backward


def _product(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    # Exact products are summed in the result's dtype: in fp32 for 16-bit factors.
    found = torch.matmul(left.to(out_dtype), right.to(out_dtype))
    return found if out is None else out.copy_(found)


def _sum_and_product(operator: OpOverload) -> Callable:
    def add(addend, left, right, out_dtype, *, beta=1, alpha=1, out=None) -> Tensor:
        factors = left.to(out_dtype), right.to(out_dtype)
        found = operator(addend.to(out_dtype), *factors, beta=beta, alpha=alpha)
        return found if out is None else out.copy_(found)

    return add


COUNTERPARTS: dict[OpOverload, Callable] = {
    _aten._scaled_dot_product_flash_attention.default: attention.flash_attention,
    _aten._scaled_dot_product_flash_attention_backward.default: attention.flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention.default: attention.efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward.default: attention.efficient_attention_backward,
    _aten.native_dropout.default: _native_dropout,
    _aten.native_dropout_backward.default: _native_dropout_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten._softmax.default: _softmax(_aten._softmax.default),
    _aten._softmax_backward_data.default: _softmax_backward(_aten._softmax_backward_data.default),
    _aten._log_softmax.default: _softmax(_aten._log_softmax.default),
    _aten._log_softmax_backward_data.default: _softmax_backward(_aten._log_softmax_backward_data.default),
}
for _name, _counterpart in {
    "mm": _product,
    "bmm": _product,
    "addmm": _sum_and_product(_aten.addmm.default),
    "baddbmm": _sum_and_product(_aten.baddbmm.default),
}.items():
    for _overload in {"dtype", "dtype_out"} & set(getattr(_aten, _name).overloads()):
        COUNTERPARTS[getattr(getattr(_aten, _name), _overload)] = _counterpart
COUNTERPARTS |= interpreted.COUNTERPARTS


def _tagged(*tags: torch.Tag) -> Iterable[OpOverload]:
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(_aten, packet), overload or "default")
            if operator.tags and not set(tags).isdisjoint(operator.tags):
                yield operator


# Backward passes draw masks again from what forward has saved, and the generator stays as it was.
RANDOM: set[OpOverload] = {
    operator for operator in _tagged(torch.Tag.nondeterministic_seeded) if "_backward" not in operator.name()
} - {_aten._fused_sdp_choice.default}
# These wait for the GPU without a tag. torch.cuda.set_sync_debug_mode found them in PyTorch's own samples of operators
# (torch 2.14), except for embedding_renorm_, whose sorting waits unseen by that mode.
_WAITING_WITHOUT_A_TAG = (
    "_grouped_mm.default", "_index_put_impl_.default", "embedding_renorm_.default", "histc.default",
    "index_fill.int_Tensor", "index_fill_.int_Tensor", "index_put.default", "index_put_.default", "isin.Tensor_Tensor",
    "linspace.Scalar_Tensor", "linspace.Tensor_Scalar", "linspace.Tensor_Tensor", "masked_fill.Tensor",
    "masked_fill_.Tensor", "masked_scatter_backward.default", "segment_reduce.default",
)  # fmt: skip
SYNCHRONOUS: set[OpOverload] = {
    *_tagged(torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output),
    *(getattr(getattr(_aten, packet), overload) for packet, overload in (n.split(".") for n in _WAITING_WITHOUT_A_TAG)),
} - {_aten._local_scalar_dense.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


def waits(operator: OpOverload, args: Sequence) -> bool:
    """Returns whether the operator waits for the GPU with these arguments. Indexing waits only for masks."""
    if operator in _INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operator in SYNCHRONOUS
