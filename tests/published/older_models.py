"""Three decoders that make and keep the tensors of transformers 4.42 to 4.46, whose peaks its documentation publishes.

The older code had rotations in fp32, GELU as six operations, key and value of every block in the output, and boolean
masks of all positions in every block. All in fp16. Shape suffixes: B sequences, T tokens of each, D width, H heads, K
width of a head.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = tuple[Tensor, Tensor]
FP16 = torch.float16
LOWEST = torch.finfo(FP16).min


def _mask(x: Tensor, tokens: int) -> Tensor:
    """Returns the mask that eager attention adds to its scores: [B, 1, T, T]."""
    return torch.full((x.size(0), 1, tokens, tokens), LOWEST, dtype=FP16, device=x.device)


def _merge(y_BHTK: Tensor) -> Tensor:
    return y_BHTK.transpose(1, 2).contiguous().flatten(2)


class _Block(nn.Module):
    """Common parts of GPT-2's and GPT-NeoX's blocks."""

    positions: int

    def __init__(self, width: int, heads: int, eager: bool):
        super().__init__()
        self.heads, self.eager = heads, eager
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.ones(self.positions, self.positions, dtype=torch.bool).tril()[None, None])


class Gpt2Block(_Block):
    positions, vocabulary, dropout = 1024, 50257, 0.1

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Cache]:
        y, cache = self.attend(self.norm_1(x), mask)
        x = y + x
        return x + F.dropout(self.down(_gelu_in_steps(self.up(self.norm_2(x)))), self.dropout), cache

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Cache]:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=2))
        if self.eager:
            scores = torch.matmul(q, k.transpose(-1, -2))
            scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=FP16, device=x.device)
            lowest = torch.full([], LOWEST, dtype=FP16, device=x.device)
            scores = torch.where(self.mask[:, :, : x.size(1), : x.size(1)], scores, lowest)
            scores = scores + mask
            weights = F.dropout(F.softmax(scores, dim=-1), self.dropout)
            y = torch.matmul(weights, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return F.dropout(self.projection(_merge(y)), self.dropout), (k, v)


def _gelu_in_steps(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class NeoXBlock(_Block):
    positions, vocabulary, dropout, rotated = 2048, 50304, 0.0, 16

    def __init__(self, width: int, heads: int, eager: bool):
        super().__init__(width, heads, eager)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(self.positions, self.rotated, dtype=torch.float32))

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Cache]:
        from_attention, cache = self.attend(self.norm_1(x), mask)
        return self.down(F.gelu(self.up(self.norm_2(x)))) + from_attention + x, cache

    def rotate(self, y: Tensor) -> Tensor:
        # In fp32, because the tables are.
        places = torch.arange(y.size(2), device=y.device)[None]
        cosine, sine = self.cosine[places].unsqueeze(1), self.sine[places].unsqueeze(1)
        turned, rest = y[..., : self.rotated], y[..., self.rotated :]
        half_turned = torch.cat((-turned[..., self.rotated // 2 :], turned[..., : self.rotated // 2]), dim=-1)
        return torch.cat(((turned * cosine) + (half_turned * sine), rest), dim=-1)

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Cache]:
        q, k, v = self.qkv(x).unflatten(2, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        q, k = self.rotate(q), self.rotate(k)
        cache = k, v
        if self.eager:
            batch, heads, tokens, _ = q.shape
            scores = torch.zeros(batch * heads, tokens, tokens, dtype=q.dtype, device=q.device)
            scores = torch.baddbmm(scores, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
            scores = scores.view(batch, heads, tokens, tokens)
            scores = torch.where(self.mask[:, :, :tokens, :tokens], scores, torch.empty((), device=q.device))
            scores = scores + mask
            weights = F.softmax(scores, dim=-1)
            weights = weights.to(v.dtype)
            y = torch.matmul(weights, v)
        else:
            y = F.scaled_dot_product_attention(q.to(FP16), k.to(FP16), v, is_causal=True)
        return self.projection(_merge(y)), cache


class OptBlock(nn.Module):
    positions, vocabulary, dropout = 2050, 50272, 0.1

    def __init__(self, width: int, heads: int, eager: bool):
        super().__init__()
        self.heads, self.eager = heads, eager
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.projection = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Cache]:
        y, cache = self.attend(x, mask)
        x = self.norm_1(x + F.dropout(y, self.dropout))
        y = F.relu(self.up(x))
        return self.norm_2(x + F.dropout(self.down(y), self.dropout)), cache

    def split(self, y: Tensor) -> Tensor:
        return y.unflatten(2, (self.heads, -1)).transpose(1, 2).contiguous()

    def attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Cache]:
        q = self.query(x) * 0.125
        k, v = self.split(self.key(x)), self.split(self.value(x))
        q = self.split(q)
        if self.eager:
            batch, heads, tokens, _ = q.shape
            weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
            weights = weights.view(batch, heads, tokens, tokens) + mask
            weights = torch.max(weights, torch.empty((), dtype=FP16, device=x.device))
            weights = F.softmax(weights.flatten(0, 1), dim=-1, dtype=torch.float32).to(FP16)
            y = torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (batch, heads))
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return self.projection(_merge(y)), (k, v)


class Decoder(nn.Module):
    """A decoder of these blocks. `narrow`: the width of the embeddings, or None if it is that of the blocks."""

    def __init__(self, block: type, layers: int, width: int, heads: int, eager: bool, narrow: int | None, tied: bool):
        super().__init__()
        self.eager, self.embedding = eager, nn.Embedding(block.vocabulary, narrow or width)
        self.places = None if block is NeoXBlock else nn.Embedding(block.positions, width)
        self.dropout = block.dropout if block is Gpt2Block else 0.0
        self.widen, self.narrow = (
            (nn.Linear(narrow, width, bias=False), nn.Linear(width, narrow, bias=False)) if narrow else (None, None)
        )
        self.blocks = nn.ModuleList(block(width, heads, eager) for _ in range(layers))
        self.norm = None if narrow else nn.LayerNorm(width)
        self.head = nn.Linear(narrow or width, block.vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, list[Cache]]:
        x = self.embedding(ids_BT)
        x = self.widen(x) if self.widen else x
        if self.places:
            x = F.dropout(x + self.places(torch.zeros_like(ids_BT)), self.dropout)
        mask = _mask(x, x.size(1)) if self.eager else None
        caches = []
        for block in self.blocks:
            x, cache = block(x, mask)
            caches.append(cache)
        x = self.norm(x) if self.norm else x
        x = self.narrow(x) if self.narrow else x
        return self.head(x), caches


MODELS: dict[str, Callable[[bool], Decoder]] = {
    "gpt2-large": lambda eager: Decoder(Gpt2Block, 36, 1280, 20, eager, None, True),
    "pythia-410m": lambda eager: Decoder(NeoXBlock, 24, 1024, 16, eager, None, False),
    "opt-350m": lambda eager: Decoder(OptBlock, 24, 1024, 16, eager, 512, True),
}
