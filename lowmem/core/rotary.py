"""Applies rotary position embeddings (RoPE) with one kernel for forward and one for backward.

They take the place of `apply_rotary_pos_emb` in attention layers of transformers. No GPU has run this code yet.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowmem.core.dry_run import agrees
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem

NAME = "apply_rotary_pos_emb"


def rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE (arXiv:2104.09864) to the first R numbers of each head of `x` [B, H, T, E] in plain PyTorch. `cos`,
    `sin`: [B or 1, T, R]."""
    rotated, others = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return torch.cat((rotated, others), -1)


# Each direction moves 4 bytes per element of q and k. PyTorch's operators move 20 in forward and 28 in backward.
class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_q: Tensor, of_k: Tensor):
        return *_launch(of_q, of_k, *ctx.saved_tensors, backward=True), None, None


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Applies RoPE to `q` [B, H, T, E] and `k` [B, G, T, E] as `rotate_plainly` does, but rounded once, and without
    gradients for `cos` and `sin` [B or 1, T, R]. The results have the same shapes, stored as [B, T, H or G, E]."""
    if torch.is_grad_enabled():
        return _Rotate.apply(q, k, cos, sin)
    return _launch(q, k, cos, sin, backward=False)  # an autograd Function takes ten microseconds more


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, cos, sin))
    new_q, new_k = (_by_token(each) for each in (q, k))
    torch.ops.lowmem.rotate(q, k, cos, sin, new_q, new_k, backward)
    return new_q, new_k


def _by_token(x: Tensor) -> Tensor:
    _, heads, tokens, width = x.shape
    # [B, H, T, E], stored as [B, T, H, E]
    strides = tokens * heads * width, width, heads * width, 1
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


class RotaryAttention(partial):
    """Serves as the forward of an attention layer: calls a copy of its `forward` that applies RoPE with a fused kernel.
    The RoPE function that `forward` calls still runs for arguments that the kernel does not take."""

    def __reduce__(self):  # for copies and pickles, which cannot hold a copied function
        return rotary_forward, self.args


def rotary_forward(module: nn.Module) -> RotaryAttention | None:
    """Returns a forward for the attention layer `module` that applies RoPE with the kernel. Returns None if the layer's
    own forward cannot be copied, or calls no `apply_rotary_pos_emb`. Also returns None if it rotates other pairs than i
    and i + R / 2 of a head's first R numbers."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    plain = forward.__globals__.get(NAME)
    if plain is None or NAME not in forward.__code__.co_names or not _rotates_halves(plain):
        return None
    names = forward.__globals__ | {NAME: partial(_rotate_or, plain)}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    own.__module__ = __name__  # dry_run.is_ours reads it
    return RotaryAttention(own, module)


def _rotate_or(plain: Callable, *given, **keywords):
    return rotate(*given) if not keywords and _fit(*given) else plain(*given, **keywords)


def _fit(*given) -> bool:
    if len(given) != 4 or not all(isinstance(each, Tensor) for each in given):
        return False
    q, k, cos, sin = given
    alike = all((each.dtype, each.device) == (q.dtype, q.device) for each in given)
    if not alike or cos.requires_grad or sin.requires_grad:
        return False
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape):
        return False
    rows, tokens, width = cos.shape
    same_ends = k.shape[0] == q.shape[0] and k.shape[2:] == q.shape[2:]
    return same_ends and rows in (1, q.shape[0]) and tokens == q.shape[2] and width <= q.shape[3] and width % 2 == 0


@cache
def _rotates_halves(function: Callable) -> bool:
    """Returns True if `function(q, k, cos, sin)` gives the results of `rotate_plainly`."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    for width in (8, 4):
        cos, sin = (torch.randn(2, 3, width, generator=generator) for _ in range(2))
        truth = [rotate_plainly(x, cos, sin) for x in (q, k)]
        try:
            with torch.no_grad():
                found = function(q.clone(), k.clone(), cos, sin)
        except Exception:  # a function that needs more arguments, or whole heads, may raise any error
            if width == 8:
                return False
            continue
        if not isinstance(found, tuple) or len(found) != 2 or not all(map(agrees, found, truth)):
            return False
    return True
