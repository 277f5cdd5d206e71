"""Layer fusion of GPT-2 that keeps the function: the four groups that a well-known system fuses, compiled as they are.

    drop-ln                 residual + dropout, then the layer norm behind it
    attention-ln            the layer norm, then the product that makes Q, K and V
    attention-projection    attention, then its output product
    ffn-ln                  the layer norm, then the MLP and its residual

Each is a function of tensors, compiled once for all blocks (`torch.compile`); gradients are autograd's. That system
drops a residual, leaves out a product and puts an untrained norm; here logits and gradients are the stock model's but
for rounding, which the tests hold. With a cache of keys and values (generation) attention stays transformers' own.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FUSIONS = ("none", "attention", "mlp", "all")


def drop_ln(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, p: float) -> tuple[Tensor, Tensor]:
    """[B, T, D] twice -> the hidden states, and their layer norm."""
    hidden = residual + F.dropout(x, p, p > 0)
    return hidden, F.layer_norm(hidden, weight.shape, weight, bias, eps)


def attention_ln(x: Tensor, weight: Tensor, bias: Tensor, eps: float, qkv_weight: Tensor, qkv_bias: Tensor) -> Tensor:
    """[B, T, D] -> Q, K and V behind each other [B, T, 3 D]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps) @ qkv_weight + qkv_bias


def attention_projection(qkv: Tensor, weight: Tensor, bias: Tensor, heads: int, scale: float, p: float) -> Tensor:
    """[B, T, 3 D] -> [B, T, D]"""
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    found = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True, scale=scale)
    return found.transpose(1, 2).flatten(2) @ weight + bias


def ffn(normed: Tensor, residual: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor], p: float) -> Tensor:
    """[B, T, D] twice -> [B, T, D]; `weights`: of the first product and the second, each with its bias."""
    into, into_bias, out, out_bias = weights
    found = F.gelu(normed @ into + into_bias, approximate="tanh") @ out + out_bias
    return residual + F.dropout(found, p, p > 0)


def ffn_ln(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, weights: tuple[Tensor, Tensor, Tensor, Tensor], p: float
) -> Tensor:
    """[B, T, D] -> [B, T, D]"""
    return ffn(F.layer_norm(x, weight.shape, weight, bias, eps), x, weights, p)


@cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False)


def fuse(model: nn.Module, fusion: str) -> None:
    """Gives the blocks of a transformers' GPT-2 their fused forward; `fusion`: one of FUSIONS."""
    if fusion != "none":
        for block in model.transformer.h:
            block.forward = partial(_forward, block, fusion, block.forward)


def _forward(block: nn.Module, fusion: str, stock: Callable, hidden_states: Tensor, cache=None, *args, **kwargs):
    """In place of GPT2Block.forward, whose result it has: hidden states [B, T, D]."""
    if cache is not None:
        return stock(hidden_states, cache, *args, **kwargs)
    attention, mlp = block.attn, block.mlp
    drop = lambda module: module.p if block.training else 0.0  # noqa: E731
    norms = [(norm.weight, norm.bias, norm.eps) for norm in (block.ln_1, block.ln_2)]
    weights = (mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_proj.weight, mlp.c_proj.bias)
    pick = {function: function if fusion == part else compiled(function) for function, part in (
        (attention_ln, "mlp"), (attention_projection, "mlp"), (ffn_ln, "attention"),
    )}  # fmt: skip
    qkv = pick[attention_ln](hidden_states, *norms[0], attention.c_attn.weight, attention.c_attn.bias)
    found = pick[attention_projection](
        qkv, attention.c_proj.weight, attention.c_proj.bias, attention.num_heads, attention.scaling,
        drop(attention.attn_dropout),
    )  # fmt: skip
    if fusion == "all":
        hidden, normed = compiled(drop_ln)(found, hidden_states, *norms[1], drop(attention.resid_dropout))
        return compiled(ffn)(normed, hidden, weights, drop(mlp.dropout))
    hidden = hidden_states + attention.resid_dropout(found)
    return pick[ffn_ln](hidden, *norms[1], weights, drop(mlp.dropout))
