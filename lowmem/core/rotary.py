"""Rotates queries and keys by their positions with one kernel each way (kernels/layer_kernels.py), if a GPU can.

Rotary embeddings (arXiv:2104.09864) turn the numbers i and i + R / 2 of each head by an angle, for all i < R / 2. The
attention of most models in transformers calls a function of its own file for that, `apply_rotary_pos_emb`.
`rotary_forward` returns the attention's forward with another function under this name. Which models turn these pairs is
found out by the function's values. A model that pairs its numbers in another way keeps its own function.

Per element of q and k, each direction moves 4 bytes. PyTorch's five operators move 18.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem

NAME = "apply_rotary_pos_emb"
_MOST_ERROR = 1e-5  # between a model's function and `rotate_plainly`, in fp32, for numbers of about 1


def rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R numbers of each head of `x` [B, H, T, E] in plain PyTorch. `cos`, `sin`: [B or 1, T, R]."""
    turned, passed = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return torch.cat((turned, passed), -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_q: Tensor, of_k: Tensor):
        return *_rotate(of_q, of_k, *ctx.saved_tensors, backward=True), None, None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates `q` [B, H, T, E] and `k` [B, G, T, E] as `rotate_plainly` does, rounded once. All have one dtype. No
    gradient reaches `cos` and `sin`. The results are stored as [B, T, H or G, E]."""
    if torch.is_grad_enabled():
        return _Rotate.apply(q, k, cos, sin)
    return _rotate(q, k, cos, sin, backward=False)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, cos, sin))
    new = [torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format) for each in (q, k)]
    new_q, new_k = (each.transpose(1, 2) for each in new)
    torch.ops.lowmem.rotate(q, k, cos, sin, new_q, new_k, backward)
    return new_q, new_k


def rotary_forward(module: nn.Module) -> Callable | None:
    """Returns the forward of the attention `module` with the kernel in place of its file's function; None if it calls
    none, or one that rotates other pairs."""
    forward = inspect.unwrap(type(module).forward)
    plain = getattr(forward, "__globals__", {}).get(NAME)
    if plain is None or NAME not in forward.__code__.co_names or not _rotates_halves(plain):
        return None
    names = forward.__globals__ | {NAME: partial(_rotate_or, plain)}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return partial(own, module)


def _rotate_or(plain: Callable, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others, **keywords):
    """Calls `plain` if it gets more arguments than `rotate` has, or if dtypes or devices differ."""
    alike = q.dtype == k.dtype == cos.dtype == sin.dtype and q.device == cos.device
    if others or keywords or not alike:
        return plain(q, k, cos, sin, *others, **keywords)
    return rotate(q, k, cos, sin)


def _rotates_halves(function: Callable) -> bool:
    """Returns True if `function(q, k, cos, sin)` rotates as `rotate_plainly` does."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    for width in (8, 4):
        cos, sin = (torch.randn(2, 3, width, generator=generator) for _ in range(2))
        try:
            with torch.no_grad():
                found = function(q, k, cos, sin)
        except Exception:  # whatever a function says that needs more arguments, or rotates whole heads only
            if width == 8:
                return False
            continue
        for x, one in zip((q, k), found, strict=True):
            truth = rotate_plainly(x, cos, sin)
            if one.shape != truth.shape or (one - truth).abs().max() > _MOST_ERROR * truth.abs().max():
                return False
    return True
