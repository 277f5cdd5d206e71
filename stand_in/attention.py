"""Computes CUDA's attention operators on the CPU.

`F.scaled_dot_product_attention` becomes one operator on CUDA (flash, memory-efficient or cuDNN attention), which the
CPU does not have. PyTorch itself chooses the CPU's implementation (`torch._fused_sdp_choice`):

  * one operator, `_scaled_dot_product_flash_attention_for_cpu`, which saves the logarithm of each row's sum. Its
    backward reads that and the output from the tensors that CUDA's forward saved, so code that overwrites them changes
    the gradients here, too;
  * with dropout, or if the first is not available, the plain sequence of products, softmax and `bernoulli_`. Its
    backward runs the sequence again under autograd: CUDA saves no probabilities either.

Dropout masks. CUDA's operators return a seed and an offset, two 64-bit numbers; backward draws the mask again from
them. A state of the CPU's generator has 5,056 bytes, so this module stores it and forward returns its hash as the seed.
Backward then finds the state at any time and in any order, a forward pass that is recomputed from one state stores it
once, and an overwritten seed is an error instead of another mask.

Logsumexp is [B, H, T] in fp32 throughout; efficient attention pads T to a multiple of 32.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_aten = torch.ops.aten
_ROWS_MULTIPLE = 32  # of the efficient kernel's logsumexp
_MOST_STATES = 8192  # generator states kept: 40 MiB; so many forward passes may wait for their backward
_states: OrderedDict[int, Tensor] = OrderedDict()


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], gradient: Tensor
) -> list[Tensor | None]:
    """Returns autograd's gradients of `function(*inputs)` for the `inputs`, given that of its result; None for None.
    Operators are called below autograd, inside a TorchDispatchMode, where it is excluded: it is enabled again here."""
    keys, without = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with without(keys.AutogradFunctionality, False), without(keys.ADInplaceOrView, False), torch.enable_grad():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(function(*leaves), given, gradient))
    return [None if leaf is None else next(found) for leaf in leaves]


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Computes `aten::_scaled_dot_product_flash_attention`: query [B, H, T, D], key and value [B, Hk, S, D]."""
    output, logsumexp, seed = _forward(query, key, value, None, dropout_p, is_causal, scale)
    generator = None if seed is None else torch.tensor([seed, 0], dtype=torch.uint64)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], generator, None, None


def flash_attention_backward(
    gradient, query, key, value, output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    """Computes `aten::_scaled_dot_product_flash_attention_backward`: the gradients for query, key and value."""
    saved = output, logsumexp, philox_seed
    return _backward(gradient, query, key, value, None, saved, dropout_p, is_causal, scale)[:3]


def efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    """Computes `aten::_scaled_dot_product_efficient_attention`: `attn_bias` [B, H, T, S] is added to the scores, or
    None."""
    output, logsumexp, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    if not compute_log_sumexp:
        logsumexp = None
    elif logsumexp is not None:
        logsumexp = torch.nn.functional.pad(logsumexp, (0, -query.shape[2] % _ROWS_MULTIPLE), value=torch.inf)
    return output, logsumexp, *((None, None) if seed is None else (torch.tensor(seed), torch.tensor(0)))


def efficient_attention_backward(
    gradient, query, key, value, attn_bias, output, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    """Computes `aten::_scaled_dot_product_efficient_attention_backward`: the gradients that `grad_input_mask` asks for.
    They are of query, key, value and the bias."""
    saved, asked = (output, logsumexp, philox_seed), grad_input_mask[3]
    found = _backward(gradient, query, key, value, attn_bias, saved, dropout_p, is_causal, scale, bias_gradient=asked)
    return tuple(tensor if wanted else None for tensor, wanted in zip(found, grad_input_mask, strict=True))


def _forward(query, key, value, bias, dropout_p, is_causal, scale) -> tuple[Tensor, Tensor | None, int | None]:
    """Returns the output [B, H, T, D]; the logsumexp of the CPU's operator, or None; with dropout, what names its
    mask."""
    if _in_one_operator(query, key, value, bias, dropout_p, is_causal, scale):
        found = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
        return *found, None
    seed = _keep_generator_state() if dropout_p > 0 else None
    return _plain(query, key, value, bias, dropout_p, is_causal, scale), None, seed


def _backward(
    gradient, query, key, value, bias, saved, dropout_p, is_causal, scale, bias_gradient=False
) -> Sequence[Tensor | None]:  # fmt: skip
    """Returns the gradients for query, key, value and bias; `saved`: output, logsumexp and seed."""
    output, logsumexp, seed = saved
    rows = query.shape[2]
    if not bias_gradient and _in_one_operator(query, key, value, bias, dropout_p, is_causal, scale):
        return *_aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient, query, key, value, output, logsumexp.flatten(2)[..., :rows], dropout_p,
            is_causal, attn_mask=bias, scale=scale,
        ), None  # fmt: skip

    def plain(query: Tensor, key: Tensor, value: Tensor, bias_leaf: Tensor | None) -> Tensor:
        there = bias if bias_leaf is None else bias_leaf
        return _plain(query, key, value, there, dropout_p, is_causal, scale)

    with torch.random.fork_rng(devices=[]):  # backward draws the same numbers as forward
        if dropout_p > 0:
            torch.default_generator.set_state(_kept_generator_state(seed))
        return gradients(plain, (query, key, value, bias if bias_gradient else None), gradient)


def _in_one_operator(query, key, value, bias, dropout_p, is_causal, scale) -> bool:
    """True if the CPU computes these in one operator. Keys may have fewer heads than queries.

    Forward and backward have to choose the same, so a program's `sdpa_kernel` is ignored: it chooses among CUDA's
    kernels."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        choice = torch._fused_sdp_choice(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=True)
    return choice == SDPBackend.FLASH_ATTENTION.value


def _plain(query, key, value, bias, dropout_p, is_causal, scale) -> Tensor:
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=True
    )[0]


def _keep_generator_state() -> int:
    """Keeps the state of the CPU's generator; its name, a hash of 63 bits."""
    state = torch.default_generator.get_state()
    name = int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little") >> 1
    _states[name] = state
    _states.move_to_end(name)
    while len(_states) > _MOST_STATES:
        _states.popitem(last=False)
    return name


def _kept_generator_state(seed: Tensor) -> Tensor:
    name = int(seed.flatten()[0])
    if name not in _states:
        raise RuntimeError(
            f"attention's backward has a seed, {name}, that none of the last {_MOST_STATES} forward passes with "
            "dropout has written: it was overwritten, or its forward pass is too long ago"
        )
    return _states[name]
