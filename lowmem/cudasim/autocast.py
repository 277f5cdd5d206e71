"""Applies CUDA's autocast rules (aten/src/ATen/autocast_mode.h) to tensors without data.

`torch.autocast` has no rules for meta tensors, and its CPU rules differ: softmax and layer_norm stay in 16 bit. CUDA
has rules for operators. Here functions that are written in Python have rules, too, such as cross_entropy. A test
compares the names with PyTorch's own test lists.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lowmem.errors import InputError

IN_16_BIT = (
    "linear matmul __matmul__ __rmatmul__ mm bmm mv einsum addmm addbmm baddbmm addmv addr chain_matmul "
    "scaled_dot_product_attention conv1d conv2d conv3d"
).split()
IN_FP32 = (
    "softmax log_softmax layer_norm rms_norm group_norm norm cross_entropy nll_loss mse_loss pow __pow__ __rpow__ "
    "rsqrt reciprocal exp expm1 log log1p log2 log10 logsumexp sum prod cumsum cumprod softplus l1_loss "
    "smooth_l1_loss kl_div cosine_similarity acos asin cosh sinh tan erfinv dist"
).split()
# CUDA's autocast casts the arguments of these functions to their widest dtype. Here different float dtypes are refused.
WIDEST = "addcdiv addcmul atan2 dot vdot cross bilinear index_put scatter_add tensordot".split()
# functions of PyTorch's lists that have no rule here
REFUSED = (
    "prelu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell conv_tbc convolution _convolution conv_transpose1d "
    "conv_transpose2d conv_transpose3d binary_cross_entropy cdist pdist renorm poisson_nll_loss "
    "cosine_embedding_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss triplet_margin_loss "
    "binary_cross_entropy_with_logits multilabel_margin_loss multi_margin_loss grid_sampler"
).split()
_HAVE_A_DTYPE = ("softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod")  # they keep a dtype that is given


def _functions(names: list[str]) -> dict:
    return {getattr(place, name): name for place in (torch, Tensor, F) for name in names if hasattr(place, name)}


_IN_16_BIT, _IN_FP32, _WIDEST, _REFUSED = map(_functions, (IN_16_BIT, IN_FP32, WIDEST, REFUSED))


class CudaAutocast(TorchFunctionMode):
    """Simulates torch.autocast("cuda", dtype) around a forward pass. A dtype of None switches autocast off inside
    another one. Raises InputError if a function in REFUSED is called, or if one in WIDEST gets different float
    dtypes."""

    _open: ClassVar[list["CudaAutocast"]] = []  # the innermost one, which is the last, decides

    def __init__(self, dtype: torch.dtype | None = torch.bfloat16):
        super().__init__()
        self._dtype = dtype
        self._copies: dict[Tensor, Tensor] = {}  # {weight: its 16-bit copy}, by identity

    def __enter__(self):
        self._open.append(self)
        return super().__enter__()

    def __exit__(self, *exception):
        self._open.remove(self)
        # Backward may hold the copies longer.
        self._copies.clear()
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._dtype is None or self._open[-1] is not self:
            return func(*args, **kwargs)
        if func in _IN_16_BIT:
            args, kwargs = tree_map(self._narrow, (args, kwargs))
        elif func in _IN_FP32 and not (_IN_FP32[func] in _HAVE_A_DTYPE and _dtype_given(args, kwargs)):
            args, kwargs = tree_map(_widened, (args, kwargs))
        elif func in _REFUSED or (func in _WIDEST and len(_float_dtypes((args, kwargs))) > 1):
            name = (_REFUSED | _WIDEST)[func]
            raise InputError(f"autocast's rule for torch's {name} is not written down here; use fp32")
        return func(*args, **kwargs)

    def _narrow(self, value):
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return value
        if not (value.dtype is torch.float32 and value.is_leaf and value.requires_grad and value._base is None):
            return value.to(self._dtype)
        if value not in self._copies:
            self._copies[value] = value.to(self._dtype)
        return self._copies[value]


def _widened(value):
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def _dtype_given(args: tuple, kwargs: dict) -> bool:
    return kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)


def _float_dtypes(values) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
