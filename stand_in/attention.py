"""Computes CUDA's attention operators on the CPU.

The CPU has one operator for attention, without dropout. For other arguments, matmuls and a softmax are computed, and
again in backward, under autograd. Logsumexp is [B, H, T] in fp32; efficient attention pads T to a multiple of 32.
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
    """Returns autograd's gradients of `function(*inputs)` for the `inputs`, given the `gradient` of its result. None in
    `inputs` gives None."""
    # Inside a TorchDispatchMode, autograd is excluded; it is enabled again here.
    keys, without = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with without(keys.AutogradFunctionality, False), without(keys.ADInplaceOrView, False), torch.enable_grad():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(function(*leaves), given, gradient))
    return [None if leaf is None else next(found) for leaf in leaves]


def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Computes the CUDA operator `aten::_scaled_dot_product_flash_attention` on the CPU. Query is [B, H, T, D], key and
    value are [B, Hk, S, D]. Returns the operator's nine results, None for those that nobody reads."""
    output, logsumexp, seed = _forward(query, key, value, None, dropout_p, is_causal, scale)
    generator = None if seed is None else torch.tensor([seed, 0], dtype=torch.uint64)
    return output, logsumexp, None, None, query.shape[2], key.shape[2], generator, None, None


def flash_attention_backward(
    gradient, query, key, value, output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    saved = output, logsumexp, philox_seed
    return _backward(gradient, query, key, value, None, saved, dropout_p, is_causal, scale)[:3]


def efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    """Computes the CUDA operator `aten::_scaled_dot_product_efficient_attention` on the CPU. `attn_bias`: [B, H, T, S],
    added to the scores, or None. Returns the operator's four results, None for those that nobody reads."""
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
    saved, asked = (output, logsumexp, philox_seed), grad_input_mask[3]
    found = _backward(gradient, query, key, value, attn_bias, saved, dropout_p, is_causal, scale, bias_gradient=asked)
    return tuple(tensor if wanted else None for tensor, wanted in zip(found, grad_input_mask, strict=True))


def _forward(query, key, value, bias, dropout_p, is_causal, scale) -> tuple[Tensor, Tensor | None, int | None]:
    """Returns (output [B, H, T, D], logsumexp, seed of the dropout mask). Without dropout the seed is None. Logsumexp
    is None if matmuls and a softmax computed the output, and not one operator."""
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
    output, logsumexp, seed = saved
    rows = query.shape[2]
    if not bias_gradient and _in_one_operator(query, key, value, bias, dropout_p, is_causal, scale):
        # The saved tensors are read, so code that overwrites them changes the gradients, as on CUDA.
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
    # Forward and backward have to choose the same, so a program's `sdpa_kernel`, which chooses among CUDA's kernels, is
    # ignored.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        choice = torch._fused_sdp_choice(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=True)
    return choice == SDPBackend.FLASH_ATTENTION.value


def _plain(query, key, value, bias, dropout_p, is_causal, scale) -> Tensor:
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=True
    )[0]


def _keep_generator_state() -> int:
    """Stores the state of the CPU's generator, and returns a hash of 63 bits that names it."""
    # CUDA's operators return a seed and an offset, and backward draws the mask again from these 16 bytes. A state of
    # the CPU's generator has 5,056 bytes, so it is stored here, and its hash is the seed. An overwritten seed is an
    # error.
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
