"""Applies CUDA's autocast rules to tensors without data.

`torch.autocast` has no rules for meta tensors, and its CPU rules differ: softmax and layer_norm stay in 16 bit. The
rules here are those of torch's ATen/autocast_mode.h; a test compares the names with that file. As on CUDA, they also
apply to operators that PyTorch's own functions call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lowmem.errors import InputError

_aten = torch.ops.aten
IN_16_BIT = (
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
).split()
IN_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
# Their result has the dtype that is given, else fp32. The kernels convert numbers as they read them.
RESULT_IN_FP32 = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
NORMS = {"norm.Scalar": _aten.norm.ScalarOpt_dtype, "norm.ScalarOpt_dim": _aten.norm.ScalarOpt_dim_dtype}
# Their arguments get the widest dtype among them.
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
# Recurrent networks run in cuDNN; CUDA itself refuses binary_cross_entropy.
REFUSED = (
    "binary_cross_entropy lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input "
    "rnn_relu.data"
).split()
_KEY = "AutocastIPU"  # a dispatch key of devices that PyTorch no longer has
_NARROW = torch.float16, torch.bfloat16
_libraries: list[torch.library.Library] = []  # the registrations end with these objects
_copies: dict[Tensor, Tensor] = {}  # {weight: its 16-bit copy}, by identity


@contextmanager
def autocast_simulated() -> Iterator[None]:
    """Makes torch.autocast("cuda") inside `with` apply CUDA's rules to tensors without data. Operators in REFUSED
    raise InputError then."""
    autocast = torch.autocast
    make, enter, enable, clear = autocast.__init__, autocast.__enter__, torch.set_autocast_enabled, _copies.clear
    before, clear_cache = torch.is_autocast_enabled("cuda"), torch.clear_autocast_cache
    if not _libraries:
        _register()

    def init(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        on_cuda = device_type == "cuda"
        make(self, device_type, dtype, enabled and not on_cuda, cache_enabled)  # else it warns that CUDA is missing
        self.simulated = on_cuda
        self._enabled = enabled if on_cuda else self._enabled

    def entered(self):
        if not hasattr(self, "simulated") and self.device == "cuda":
            raise InputError("torch.autocast('cuda') was made before this function was called: make it inside")
        return enter(self)

    def enabled(*device_and_state, **by_name):
        enable(*device_and_state, **by_name)
        on = torch.is_autocast_enabled("cuda")
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, not on)

    def cleared():
        clear_cache()
        clear()  # backward may hold the copies longer

    with (
        patch.multiple(autocast, __init__=init, __enter__=entered),
        patch.multiple(torch, set_autocast_enabled=enabled, clear_autocast_cache=cleared),
    ):
        try:
            yield
        finally:
            enabled("cuda", before)
            if not before:  # code that uses no `with` may have left copies
                clear()


def narrowed(value):
    """Returns `value` in autocast's 16-bit dtype, as CUDA casts the inputs of a matmul. Caches the copies of weights.
    Returns `value` itself if autocast is off, or if it is no meta tensor in fp32, fp16 or bf16."""
    if not torch.is_autocast_enabled("cuda") or not _eligible(value):
        return value
    dtype = torch.get_autocast_dtype("cuda")
    lasting = value.dtype is torch.float32 and value.is_leaf and value.requires_grad and value._base is None
    if not lasting or not torch.is_autocast_cache_enabled():
        return value.to(dtype)
    if value not in _copies:
        _copies[value] = value.to(dtype)
    return _copies[value]


def _eligible(value) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.dtype in (torch.float32, *_NARROW)


def _widened(value):
    return value.float() if _eligible(value) else value


def _register() -> None:
    others, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for names, rule in (
        (IN_16_BIT, partial(_cast, narrowed)), (IN_FP32, partial(_cast, _widened)), (RESULT_IN_FP32, _result_in_fp32),
        (NORMS, _norm_in_fp32), (WIDEST, _widest), (REFUSED, _refused),
    ):  # fmt: skip
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(_aten, packet), overload or "default")
            aten.impl(name, partial(_without_autocast, rule, operator), _KEY)
    _libraries.extend((others, aten))


def _without_autocast(rule: Callable, operator, *args, **kwargs):
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return rule(operator, args, kwargs)


def _cast(convert: Callable, operator, args: tuple, kwargs: dict):
    args, kwargs = tree_map(convert, (args, kwargs))
    return operator(*args, **kwargs)


def _result_in_fp32(operator, args: tuple, kwargs: dict):
    arguments = operator._schema.arguments
    place = next(place for place, argument in enumerate(arguments) if argument.name == "dtype")
    of_halves = {_aten.softmax.int: _aten._softmax, _aten.log_softmax.int: _aten._log_softmax}.get(operator)
    given = args[place] if len(args) > place else kwargs.get("dtype")
    if given is not None or not _eligible(args[0]):
        return operator(*args, **kwargs)
    if of_halves and args[0].dtype is torch.float16:
        return of_halves(*args[:2], True)
    if arguments[place].kwarg_only:
        return operator(*args, **{**kwargs, "dtype": torch.float32})
    return operator(*args[:place], torch.float32)


def _norm_in_fp32(operator, args: tuple, kwargs: dict):
    if not _eligible(args[0]):
        return operator(*args, **kwargs)
    if operator is _aten.norm.ScalarOpt_dim:
        args = *args, *(False,) * (4 - len(args))
    elif len(args) < 2:
        args = *args, 2
    return NORMS[f"norm.{operator._overloadname}"](*args, dtype=torch.float32, **kwargs)


def _widest(operator, args: tuple, kwargs: dict):
    wide = any(_eligible(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves((args, kwargs)))
    return _cast(_widened, operator, args, kwargs) if wide else operator(*args, **kwargs)


def _refused(operator, args: tuple, kwargs: dict):
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
        name = operator._schema.name.removeprefix("aten::")
        raise InputError(f"autocast's rule for torch's {name} is not written down here; use fp32")
    return operator(*args, **kwargs)
