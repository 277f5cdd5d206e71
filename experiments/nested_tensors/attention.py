"""Causal attention within each document of a ragged batch: one row [1, N] of documents laid end to end.

PACKED and NESTED are implementations of transformers' attention interface. A model is called with
`documents=Documents(lengths)`, which transformers hands down to every layer.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from lowmem.core.batch import micro_batch_shapes

PACKED, NESTED = "lowmem_packed", "lowmem_nested"
LEAST_POSITIONS = 256  # of a class, below which its attention takes no less time: some ten operations are called for it


@dataclass(frozen=True)
class Rows:
    """The documents of a batch as rows of a few classes of widths, `shapes` (rows, width), one class behind the other.
    `there` int64 [M]: the batch's token in each of the M places of all rows, an arbitrary one in padding. `back` int64
    [N]: the place of each token."""

    shapes: list[tuple[int, int]]
    there: Tensor
    back: Tensor

    def to(self, device: torch.device) -> "Rows":
        return Rows(self.shapes, self.there.to(device), self.back.to(device))


class Documents:
    """The documents of a ragged batch: their `lengths` [B], in order. Raises ValueError for an empty document."""

    def __init__(self, lengths: Sequence[int]):
        if not len(lengths) or min(lengths) < 1:
            raise ValueError("every document of a ragged batch must have one token at least")
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self.longest, self.tokens, self.device = int(self.lengths.max()), int(self.lengths.sum()), torch.device("cpu")
        ends = self.lengths.cumsum(0)
        self.offsets = F.pad(ends, (1, 0))
        self._starts = ends - self.lengths

    @property
    def position_ids(self) -> Tensor:
        """Returns int64 [1, N], from 0 in every document."""
        return (torch.arange(self.tokens) - self._starts.repeat_interleave(self.lengths))[None]

    def to(self, device: torch.device) -> "Documents":
        other = copy.copy(self)
        other.device, other.offsets = torch.device(device), self.offsets.to(device)
        for name in self.__dict__.keys() & {"classes", "padded"}:
            setattr(other, name, getattr(self, name).to(device))
        return other

    @functools.cached_property
    def classes(self) -> Rows:
        """Returns rows of widths chosen as a training step chooses its micro-batches' (lowmem/core/batch.py)."""
        lengths, order = self.lengths.sort(descending=True, stable=True)
        shapes = micro_batch_shapes(lengths.tolist(), self.longest, len(lengths), LEAST_POSITIONS)
        return self._rows(order.split([rows for rows, _ in shapes]))

    @functools.cached_property
    def padded(self) -> Rows:
        """Returns all documents in one class, in their order."""
        return self._rows([torch.arange(len(self.lengths))])

    def _rows(self, classes: Sequence[Tensor]) -> Rows:
        shapes, there, back = [], [], torch.empty(self.tokens, dtype=torch.int64)
        places = 0
        for chosen in classes:
            starts, lengths = self._starts[chosen, None], self.lengths[chosen, None]
            within = torch.arange(int(lengths.max()))
            rows, is_real = starts + within.minimum(lengths - 1), within < lengths
            back[rows[is_real]] = places + is_real.flatten().nonzero()[:, 0]
            places += rows.numel()
            shapes.append(tuple(rows.shape))
            there.append(rows.flatten())
        return Rows(shapes, torch.cat(there).to(self.device), back.to(self.device))


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    documents: Documents, scaling: float | None = None, dropout: float = 0.0, **more,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention of `query` [1, H, N, d], `key` and `value` [1, G, N, d], with G a divisor of H -> [1, N, H,
    d]. Raises ValueError for other shapes, and for attention that is more than causal."""
    _check(query, key, documents, more)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, d]
    grouped = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype is not torch.float32 and dropout == 0:
        from torch.nn.attention.varlen import varlen_attn

        offsets, longest = documents.offsets.int(), documents.longest
        groups = {"enable_gqa": True} if grouped else {}
        return varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(), offsets, offsets, longest, longest,
            scale=scaling, window_size=(-1, 0), **groups,
        )[None], None  # fmt: skip
    rows = documents.classes
    sizes = [count * width for count, width in rows.shapes]
    # Indexing by a tensor would do the same: its backward, which may add, takes ten times as long (torch 2.13, CPU).
    classes = zip(*(tensor.index_select(0, rows.there).split(sizes) for tensor in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(
            *(tensor.unflatten(0, shape).transpose(1, 2) for tensor in one),  # [rows, heads, width, d]
            dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped,
        ).transpose(1, 2).flatten(0, 1)
        for shape, one in zip(rows.shapes, classes, strict=True)
    ]  # fmt: skip
    return torch.cat(outputs).index_select(0, rows.back)[None], None


def nested_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    documents: Documents, scaling: float | None = None, dropout: float = 0.0, **more,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention, as `packed_attention`, through `torch.nested` tensors of the jagged layout."""
    _check(query, key, documents, more)
    heads = query.shape[1]
    if query.is_cuda:  # whose kernel takes no grouped keys
        key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    jagged = [
        torch.nested.nested_tensor_from_jagged(
            tensor[0].transpose(0, 1).contiguous(), documents.offsets, min_seqlen=1, max_seqlen=documents.longest
        ).transpose(1, 2)
        for tensor in (query, key, value)
    ]
    if query.is_cuda:
        output = F.scaled_dot_product_attention(*jagged, dropout_p=dropout, is_causal=True, scale=scaling)
        return output.transpose(1, 2).values()[None], None
    # The CPU has no causal kernel for nested tensors (torch 2.13).
    padded = [tensor.transpose(1, 2).to_padded_tensor(0.0).transpose(1, 2) for tensor in jagged]
    output = F.scaled_dot_product_attention(
        *padded, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != heads
    )
    return output.transpose(1, 2).flatten(0, 1).index_select(0, documents.padded.back)[None], None


def _check(query: Tensor, key: Tensor, documents: Documents, more: dict) -> None:
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == documents.tokens:
        raise ValueError(
            f"a ragged batch is one row of its {documents.tokens} tokens, and not {query.shape[0]} of {query.shape[2]}"
        )
    unknown = [name for name in ("sliding_window", "softcap", "s_aux") if more.get(name) is not None]
    if unknown:
        raise ValueError(f"ragged attention is causal and no more: this model asks for {', '.join(unknown)}")


def _no_mask(*_, **__) -> None:
    """Returns None as the model's mask: attention knows documents, and needs none."""


for _name, _attention in ((PACKED, packed_attention), (NESTED, nested_attention)):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _no_mask)
