"""Fuses groups of GPT-2's layers as functions of tensors, compiled once for all blocks. Logits and gradients are the
stock model's but for rounding. On the stand-in with --values the groups run uncompiled."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.harness import rows as row_file
from lowmem.errors import InputError

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")  # which are one function
FUSIONS = ("none", "attention", "mlp", "all")


def drop_ln(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> tuple[Tensor, Tensor]:
    """Computes [B, T, D] twice -> residual + dropout, and its layer norm."""
    hidden = residual + F.dropout(x, p, p > 0)
    return hidden, F.layer_norm(hidden, weight.shape, weight, bias, eps)


def attention_ln(x: Tensor, weight: Tensor, bias: Tensor, eps: float, qkv_weight: Tensor, qkv_bias: Tensor) -> Tensor:
    """Computes layer norm and product: [B, T, D] -> Q, K and V, concatenated [B, T, 3 D]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps) @ qkv_weight + qkv_bias


def attention_projection(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor, scale: float, p: float
) -> Tensor:
    """Computes attention and its output product: [B, heads, T, D / heads] each -> [B, T, D]. A single query sees all
    keys."""
    causal = query.shape[2] == key.shape[2]
    found = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=causal, scale=scale)
    return found.transpose(1, 2).flatten(2) @ weight + bias


def ffn(normed: Tensor, residual: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], p: float) -> Tensor:
    """Computes an MLP and its residual: [B, T, D] twice -> [B, T, D]. `weights`: of both products, each with its
    bias."""
    into, into_bias, out, out_bias = weights
    found = F.gelu(normed @ into + into_bias, approximate="tanh") @ out + out_bias
    return residual + F.dropout(found, p, p > 0)


def ffn_ln(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, weights: tuple[Tensor, Tensor, Tensor, Tensor], p: float
) -> Tensor:
    """Computes layer norm, MLP and residual: [B, T, D] -> [B, T, D]."""
    return ffn(F.layer_norm(x, weight.shape, weight, bias, eps), x, weights, p)


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False) if compiles() else function


def compiles() -> bool:
    """Returns False on the stand-in with --values, which knows no compiled kernels."""
    return not (row_file.on_stand_in() and row_file.computes_values())


def fuse(model: nn.Module, fusion: str) -> None:
    """Gives the blocks of transformers' GPT-2 their fused forward; `fusion`: one of FUSIONS. Raises InputError for a
    model whose blocks compute something else."""
    if fusion != "none":
        if model.config.activation_function not in ACTIVATIONS:
            raise InputError(
                f"--fusion {fusion} knows {' and '.join(ACTIVATIONS)}; the model's activation function is "
                f"{model.config.activation_function}"
            )
        if model.config.scale_attn_by_inverse_layer_idx:
            raise InputError(f"--fusion {fusion}: the model's blocks scale attention each by another number")
        for block in model.transformer.h:
            block.forward = partial(_forward, block, fusion)


def _forward(block: nn.Module, fusion: str, hidden_states: Tensor, past_key_values=None, *_, **__) -> Tensor:
    """Replaces GPT2Block.forward, with the same result: hidden states [B, T, D]. Only for sequences without padding: a
    prompt, or one token after the cache's content."""
    attention, mlp = block.attn, block.mlp
    drop = lambda module: module.p if block.training else 0.0  # noqa: E731
    norms = [(norm.weight, norm.bias, norm.eps) for norm in (block.ln_1, block.ln_2)]
    weights = (mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_proj.weight, mlp.c_proj.bias)
    pick = {function: function if fusion == part else compiled(function) for function, part in (
        (attention_ln, "mlp"), (attention_projection, "mlp"), (ffn_ln, "attention"),
    )}  # fmt: skip
    qkv = pick[attention_ln](hidden_states, *norms[0], attention.c_attn.weight, attention.c_attn.bias)
    query, key, value = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
        if key.shape[2] > query.shape[2]:
            # Not compiled in generation, since its keys grow.
            pick[attention_projection] = attention_projection
    found = pick[attention_projection](
        query, key, value, attention.c_proj.weight, attention.c_proj.bias, attention.scaling,
        drop(attention.attn_dropout),
    )  # fmt: skip
    if fusion == "all":
        hidden, normed = compiled(drop_ln)(found, hidden_states, *norms[1], drop(attention.resid_dropout))
        return compiled(ffn)(normed, hidden, weights, drop(mlp.dropout))
    hidden = hidden_states + attention.resid_dropout(found)
    return pick[ffn_ln](hidden, *norms[1], weights, drop(mlp.dropout))
