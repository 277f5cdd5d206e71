"""Applies rotary position embeddings (RoPE) with one kernel for forward and one for backward, on GPUs that run them.

RoPE (arXiv:2104.09864) rotates the numbers i and i + R / 2 of each head of queries and keys by an angle that depends on
the position, for all i < R / 2. The attention of most models in transformers calls a function of its own file for that,
`apply_rotary_pos_emb`. `rotary_forward` returns a copy of the attention's forward in which this name means a function
that runs the kernel (kernels/layer_kernels.py). All other names of that file keep their values. A model whose function
rotates other pairs of numbers keeps its own function.

Per element of q and k, each direction moves 4 bytes. PyTorch's operators move 20 in forward and 28 in backward. No GPU
has run this code yet.
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
    """Applies rotary position embeddings (RoPE) to `x` [B, H, T, E] in plain PyTorch. Rotates the first R numbers of
    each head and copies the others. `cos`, `sin`: [B or 1, T, R]."""
    rotated, others = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return torch.cat((rotated, others), -1)


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
    """Applies rotary position embeddings (RoPE) to `q` [B, H, T, E] and `k` [B, G, T, E], as `rotate_plainly` does,
    rounded once. All four arguments have one dtype. No gradient reaches `cos` and `sin`. The results have the shapes of
    `q` and `k`, and are stored as [B, T, H or G, E]."""
    if torch.is_grad_enabled():
        return _Rotate.apply(q, k, cos, sin)
    return _launch(q, k, cos, sin, backward=False)  # an autograd Function takes ten microseconds more


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, cos, sin))
    new_q, new_k = (_by_token(each) for each in (q, k))
    torch.ops.lowmem.rotate(q, k, cos, sin, new_q, new_k, backward)
    return new_q, new_k


def _by_token(x: Tensor) -> Tensor:
    """Returns an uninitialized tensor with the shape [B, H, T, E] and dtype of `x`, stored as [B, T, H, E]."""
    _, heads, tokens, width = x.shape
    strides = tokens * heads * width, width, heads * width, 1
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


class RotaryAttention:
    """Replaces the forward of `module`, an attention layer, to apply RoPE with the kernel. Runs the code of `forward`,
    the layer's own forward. `plain`: the RoPE function that the layer's file calls. This function still runs for
    arguments that the kernel does not take."""

    def __init__(self, module: nn.Module, forward: FunctionType, plain: Callable):
        names = forward.__globals__ | {NAME: partial(_rotate_or, plain)}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        self._module, self._run = module, own

    def __call__(self, *arguments, **keywords):
        return self._run(self._module, *arguments, **keywords)

    def __reduce__(self):
        return rotary_forward, (self._module,)


def rotary_forward(module: nn.Module) -> RotaryAttention | None:
    """Returns a forward for the attention layer `module` that applies RoPE with the kernel. Returns None if the layer's
    own forward calls no `apply_rotary_pos_emb`, or if that function rotates other pairs of numbers than the kernel.
    Also returns None if an unknown decorator wraps the layer's forward."""
    forward = type(module).forward
    while (inner := getattr(forward, "__wrapped__", None)) is not None and _renames_arguments(forward):
        forward = inner
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    plain = forward.__globals__.get(NAME)
    if plain is None or NAME not in forward.__code__.co_names or not _rotates_halves(plain):
        return None
    return RotaryAttention(module, forward, plain)


def _renames_arguments(wrapper: Callable) -> bool:
    """Returns True if `wrapper` comes from transformers' deprecate_kwarg, a decorator that only renames arguments which
    no block passes."""
    return "deprecate_kwarg" in getattr(getattr(wrapper, "__code__", None), "co_qualname", "")


def _rotate_or(plain: Callable, *given, **keywords):
    """Returns `rotate(*given)` if `rotate` takes these arguments (q, k, cos, sin), otherwise `plain(*given,
    **keywords)`."""
    return rotate(*given) if not keywords and _fit(*given) else plain(*given, **keywords)


def _fit(*given) -> bool:
    """Returns True if `given` are q, k, cos and sin with the shapes that `rotate` takes, all of one dtype and on one
    device."""
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
