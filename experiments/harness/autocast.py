"""CUDA's autocast on tensors without data.

`torch.autocast` follows a tensor's device: meta tensors have no rules, and the CPU's differ from CUDA's (facts that
matter: on the CPU softmax and layer_norm stay in bf16). So CUDA's rules (aten/src/ATen/autocast_mode.h, and "CUDA Ops
that can autocast to float16/float32" in PyTorch's documentation) are applied here where Python calls a function:

- matrix products and attention run in bf16. The bf16 copy of a weight is made once and kept until autocast ends, and
  by the graph until backward has used it;
- softmax, norms, losses, powers and sums run in fp32;
- everything else takes what it is given: fp32 + bf16 is fp32, and an embedding is in its table's fp32.

What this sees is Python's calls and not the dispatcher's, so a function written in Python is named here itself
(cross_entropy, not only the nll_loss inside). A test compares the names with PyTorch's own test lists. What those lists
have and this has not is refused by name.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lowmem.errors import InputError

IN_BF16 = (
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "einsum", "addmm", "addbmm", "baddbmm"),
    *("addmv", "addr", "chain_matmul", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d"),
)
IN_FP32 = (
    *(
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "norm",
        "cross_entropy",
        "nll_loss",
        "mse_loss",
    ),
    *(
        "pow",
        "__pow__",
        "__rpow__",
        "rsqrt",
        "reciprocal",
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "logsumexp",
    ),
    *("sum", "prod", "cumsum", "cumprod", "softplus", "l1_loss", "smooth_l1_loss", "kl_div", "cosine_similarity"),
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "dist"),
)
WIDEST = ("addcdiv", "addcmul", "atan2", "dot", "vdot", "cross", "bilinear", "index_put", "scatter_add", "tensordot")
REFUSED = (
    *("prelu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "conv_tbc", "convolution", "_convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "binary_cross_entropy", "cdist", "pdist", "renorm"),
    *("poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "binary_cross_entropy_with_logits", "multilabel_margin_loss", "multi_margin_loss"),
    *("grid_sampler",),
)
_HAVE_A_DTYPE = ("softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod")  # one that is given is respected


def _functions(names: tuple[str, ...]) -> dict:
    """What Python calls by these names: in torch, as a method, in torch.nn.functional."""
    return {getattr(place, name): name for place in (torch, Tensor, F) for name in names if hasattr(place, name)}


_IN_BF16, _IN_FP32, _WIDEST, _REFUSED = map(_functions, (IN_BF16, IN_FP32, WIDEST, REFUSED))


class CudaAutocast(TorchFunctionMode):
    """`with CudaAutocast():` for torch.autocast("cuda", torch.bfloat16), around the forward pass of a model whose
    parameters are in fp32. InputError for a function that autocast has a rule for and this has not."""

    def __init__(self):
        super().__init__()
        self._copies: dict[Tensor, Tensor] = {}  # of the weights, by identity

    def __exit__(self, *exception):
        self._copies.clear()
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _IN_BF16:
            args, kwargs = tree_map(self._to_bf16, (args, kwargs))
        elif func in _IN_FP32 and not (_IN_FP32[func] in _HAVE_A_DTYPE and _dtype_given(args, kwargs)):
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
        elif func in _REFUSED or (func in _WIDEST and len(_float_dtypes((args, kwargs))) > 1):
            name = (_REFUSED | _WIDEST)[func]
            raise InputError(f"autocast's rule for torch's {name} is not written down here; use fp32")
        return func(*args, **kwargs)

    def _to_bf16(self, value):
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float16):
            return value
        if not (value.dtype is torch.float32 and value.is_leaf and value.requires_grad and value._base is None):
            return value.to(torch.bfloat16)
        if value not in self._copies:
            self._copies[value] = value.to(torch.bfloat16)
        return self._copies[value]


def _to_fp32(value):
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def _dtype_given(args: tuple, kwargs: dict) -> bool:
    return kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)


def _float_dtypes(values) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    tree_map(lambda v: found.add(v.dtype) if isinstance(v, Tensor) and v.is_floating_point() else None, values)
    return found
