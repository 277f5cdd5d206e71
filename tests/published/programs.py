"""The programs whose step times others published, written again as models and steps on tensors without data.

Only operations and their shapes count. Shape suffixes: B sequences, T tokens of each, D width, H heads.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig

from lowmem.cudasim.autocast import autocast_simulated
from lowmem.models.build import build_model
from tests.cuda.recorded_model import AdamW, Model, Size, cross_entropy
from tests.published.checked_transformer import CheckedModel, InPlaceAdamW, cross_entropy_of_logits
from tests.published.points import Point
from tests.published.torchtune_llama import build_torchtune
from tests.published.vision_transformer import build_vision_transformer

META = torch.device("meta")
NANOGPT, BOOK, MASK, NATIVE, FLASH = "nanogpt", "book", "book, mask", "book, native", "book, flash"  # kinds of GPT
Step = Callable[[], Iterator[None] | None]


def build(point: Point) -> tuple[nn.Module, Step]:
    """Returns the model on the meta device, and the step that trains it."""
    return _PROGRAMS[point.group["program"]](point)


def _tokens(point: Point) -> Tensor:
    return torch.zeros((point.shape["batch"], point.shape["tokens"]), dtype=torch.int64, device=META)


def _autocast(point: Point, forward: Callable[[], Tensor]) -> Tensor:
    if point.group["precision"] != "bf16 autocast":
        return forward()
    with autocast_simulated(), torch.autocast("cuda", torch.bfloat16):
        return forward()


def _cs336(point: Point) -> tuple[nn.Module, Step]:
    shape, group, kind = point.shape, point.group, point.group["step"]
    size = Size(shape["layers"], shape["width"], shape["heads"], shape["inner_width"], META)
    with_checks = group["program"] == "cs336 with checks"
    model, tokens = (CheckedModel if with_checks else Model)(shape["tokens"], size), _tokens(point)
    optimizer = _OPTIMIZERS[group.get("optimizer", "in Python")](model.parameters())
    loss_of = _LOSSES[group.get("loss", "mean" if kind == "forward" else "cross-entropy")]

    def step() -> Iterator[None]:
        if kind != "forward" and group.get("loss") != "mean":
            optimizer.zero_grad()
        with torch.set_grad_enabled(group.get("loss") != "none"):
            loss = _autocast(point, lambda: loss_of(model(tokens), tokens))
        if group.get("waits"):
            yield
        if kind != "forward":
            loss.backward()
            if group.get("waits"):
                yield
        if kind == "whole step":
            optimizer.step()

    return model, step


_OPTIMIZERS = {
    "in Python": AdamW, "in Python, in place": InPlaceAdamW, "foreach": partial(torch.optim.AdamW, foreach=True),
}  # fmt: skip
_LOSSES = {
    "none": lambda logits, targets: logits,
    "mean": lambda logits, targets: logits.mean(),
    "cross-entropy": cross_entropy,
    "of logits": cross_entropy_of_logits,
    "torch": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
}


def _llama(point: Point) -> tuple[nn.Module, Step]:
    model = build_model(LLAMA_3_2_1B).to(META, torch.bfloat16)
    tokens = _tokens(point)
    embedded = torch.empty(*tokens.shape, LLAMA_3_2_1B.hidden_size, dtype=torch.bfloat16, device=META)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)

    def step() -> None:
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


LLAMA_3_2_1B = LlamaConfig(
    hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    intermediate_size=8192, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=True,
)  # fmt: skip


def _gpt(kind: str, point: Point) -> tuple[nn.Module, Step]:
    with META:
        model = GPT(kind, point.shape["tokens"])
    tokens = _tokens(point)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        loss = _autocast(point, lambda: F.cross_entropy(model(tokens).view(-1, GPT2_VOCABULARY), tokens.view(-1)))
        loss.backward()
        optimizer.step()

    return model, step


def _gpt2_medium(point: Point) -> tuple[nn.Module, Step]:
    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16)
    model = build_model(config)
    model.set_attn_implementation("eager")
    model.to(META)
    tokens = _tokens(point)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        for _ in range(4):
            _autocast(point, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, 1.0 / (norm + 1e-6))  # clip_grad_norm_ does it one by one on meta tensors
        optimizer.step()
        optimizer.zero_grad()

    return model, step


_PROGRAMS = {
    "cs336": _cs336, "cs336 with checks": _cs336, "llama-3.2-1b": _llama,
    "nanogpt": partial(_gpt, NANOGPT), "book": partial(_gpt, BOOK), "gpt2-medium": _gpt2_medium,
    "torchtune": lambda point: build_torchtune(**point.shape),
    "vision transformer": lambda point: build_vision_transformer(**point.shape),
}  # fmt: skip
GPT2_VOCABULARY, BOOK_DROPOUT = 50257, 0.1


class GPT(nn.Module):
    """GPT-2 small. NANOGPT: with T x T matrices, as nanoGPT before flash attention, head tied. BOOK: as
    rasbt/LLMs-from-scratch builds it, with norms and GELU from single operations, dropout, and a separate head. MASK:
    makes the causal mask when it is needed. NATIVE: PyTorch's norms and GELU, too. FLASH: its attention, too."""

    def __init__(self, kind: str, tokens: int, layers: int = 12, width: int = 768, heads: int = 12):
        super().__init__()
        block = _Block if kind == NANOGPT else partial(_BookBlock, kind)
        norm = _SingleOperationsNorm if kind in (BOOK, MASK) else nn.LayerNorm
        self.dropout = None if kind == NANOGPT else BOOK_DROPOUT
        self.embedding, self.positions = nn.Embedding(GPT2_VOCABULARY, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(block(tokens, width, heads) for _ in range(layers)))
        self.norm, self.head = norm(width), nn.Linear(width, GPT2_VOCABULARY, bias=False)
        if kind == NANOGPT:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT) + self.positions(torch.arange(ids_BT.size(1), device=ids_BT.device))
        x_BTD = F.dropout(x_BTD, self.dropout) if self.dropout else x_BTD
        return self.head(self.norm(self.blocks(x_BTD)))


class _Block(nn.Module):
    def __init__(self, tokens: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.ones(tokens, tokens).tril()[None, None])

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(self.norm_1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD)), approximate="tanh"))

    def attend(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x_BTD).chunk(3, dim=2))
        scores_BHTT = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores_BHTT = scores_BHTT.masked_fill(self.mask == 0, float("-inf"))
        y = F.softmax(scores_BHTT, dim=-1) @ v
        return self.projection(y.transpose(1, 2).contiguous().view(x_BTD.shape))


class _SingleOperationsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        mean, variance = x_BTD.mean(-1, keepdim=True), x_BTD.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x_BTD - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class _BookBlock(nn.Module):
    def __init__(self, kind: str, tokens: int, width: int, heads: int):
        super().__init__()
        self.heads, self.kind = heads, kind
        norm = _SingleOperationsNorm if kind in (BOOK, MASK) else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(width), norm(width)
        widths = (3 * width,) if kind == FLASH else (width,) * 3
        self.projections = nn.ModuleList(nn.Linear(width, outputs, bias=False) for outputs in widths)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if kind == BOOK:
            self.register_buffer("mask", torch.ones(tokens, tokens).triu(1))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = F.dropout(self.attend(self.norm_1(x_BTD)), BOOK_DROPOUT, self.training) + x_BTD
        return F.dropout(self.down(self.gelu(self.up(self.norm_2(x_BTD)))), BOOK_DROPOUT, self.training) + x_BTD

    def gelu(self, y: Tensor) -> Tensor:
        if self.kind in (NATIVE, FLASH):
            return F.gelu(y, approximate="tanh")
        return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3))))

    def attend(self, x_BTD: Tensor) -> Tensor:
        made, dropout = [project(x_BTD) for project in self.projections], BOOK_DROPOUT if self.training else 0.0
        if self.kind == FLASH:
            q, k, v = made.pop().unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            k, q, v = (made.pop(0).unflatten(2, (self.heads, -1)).transpose(1, 2) for _ in range(3))
            tokens = q.size(2)
            mask = self.mask if self.kind == BOOK else torch.ones(tokens, tokens, device=q.device).bool().triu(1)
            scores_BHTT = (q @ k.transpose(2, 3)).masked_fill_(mask.bool()[:tokens, :tokens], float("-inf"))
            y = F.dropout(torch.softmax(scores_BHTT / k.size(-1) ** 0.5, dim=-1), dropout) @ v
        return self.out(y.transpose(1, 2).contiguous().view(x_BTD.shape))
