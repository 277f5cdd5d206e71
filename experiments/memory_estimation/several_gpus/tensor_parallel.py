"""Rank 0's share of a decoder under tensor parallelism (Megatron-LM, arXiv 1909.08053).

Projections into heads and into the MLP are split by columns, those back by rows; embedding and head by vocabulary. All
else is whole. For N parameters on R ranks, n of them whole, weights, gradients and moments take 16 (N - n) / R + 16 n
bytes. Sums over ranks take no memory; sequence parallelism is left out.
"""

import math

from torch import nn
from transformers.pytorch_utils import Conv1D

from lowmem.core.decoder import Decoder
from lowmem.errors import InputError

_STRUCTURES = (  # the kind of a block's products; which are split by columns, which by rows
    (Conv1D, {"c_attn", "c_fc"}, {"c_proj"}),
    (nn.Linear, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}, {"o_proj", "down_proj"}),
)


def keep_share(decoder: Decoder, ranks: int) -> None:
    """Leaves rank 0's share of the model, whose tensors are on meta. Raises InputError for blocks unlike GPT-2's and
    Llama's, and for sizes that `ranks` does not divide."""
    model, config = decoder.model, decoder.model.config.get_text_config()
    for heads in {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or ranks}:
        if heads % ranks:
            raise InputError(f"{decoder.architecture}: {heads} attention heads cannot be divided among {ranks} GPUs")
    for block in decoder.blocks:
        products = {n: m for n, m in block.named_modules() if any(p.dim() > 1 for p in m.parameters(recurse=False))}
        kinds, names = {type(m) for m in products.values()}, {n.rpartition(".")[2] for n in products}
        for kind, columns, rows in _STRUCTURES:
            if kinds == {kind} and names == columns | rows:
                break
        else:
            raise InputError(f"{decoder.architecture}: tensor parallelism does not know blocks of {sorted(names)}")
        for name, product in products.items():
            _split(product, by_columns=name.rpartition(".")[2] in columns, ranks=ranks)
        if kind is Conv1D:  # GPT-2's attention cuts q, k and v out of one product
            block.attn.split_size //= ranks
            block.attn.num_heads //= ranks
    _split_vocabulary(model, ranks)


def _split(product: nn.Module, by_columns: bool, ranks: int) -> None:
    dimension = int(by_columns) if isinstance(product, Conv1D) else int(not by_columns)
    shape = list(product.weight.shape)
    if shape[dimension] % ranks:
        raise InputError(f"a product {tuple(shape)} cannot be divided among {ranks} GPUs")
    shape[dimension] //= ranks
    product.weight = nn.Parameter(product.weight.new_empty(shape))
    if by_columns and product.bias is not None:
        product.bias = nn.Parameter(product.bias.new_empty(product.bias.shape[0] // ranks))
    if by_columns and isinstance(product, Conv1D):
        product.nf //= ranks


def _split_vocabulary(model: nn.Module, ranks: int) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # Rounded up: no other rank's share is larger.
    rows = math.ceil(model.config.get_text_config().vocab_size / ranks)
    tied = embedding.weight is head.weight
    embedding.weight = nn.Parameter(embedding.weight.new_empty(rows, embedding.weight.shape[1]))
    head.weight = embedding.weight if tied else nn.Parameter(head.weight.new_empty(rows, head.weight.shape[1]))
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.new_empty(rows))
    model.config.get_text_config().vocab_size = rows  # what the loss cuts the logits by
