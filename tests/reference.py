"""Plain implementations to compare with: one page, no tricks, nothing from lowmem but the data face."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, logging

from families import LLAMA, MORE_FAMILIES, OLD, V, config, with_dropout
from lowmem.core.batch import Batch

logging.set_verbosity_error()

VOCABULARY = V
TINY = {
    "gpt2": config("gpt2", OLD, n_layer=4, n_embd=48),
    "llama": config("llama", LLAMA, num_hidden_layers=4, hidden_size=48, intermediate_size=96),
}


def tiny_config(family: str, dropout: float = 0.0):
    """Small enough for a second, real enough to have every part: two or more heads, four blocks, grouped keys; three
    blocks in other families than GPT-2 and Llama."""
    return MORE_FAMILIES[family]() if family in MORE_FAMILIES else with_dropout(TINY[family](), dropout)


def tiny_model(family: str, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    return model_of(tiny_config(family, dropout), seed)


def model_of(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """fp32, on the CPU. Weights are larger than transformers would draw them, so that attention matters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float()


def mixed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Matrices in `dtype`, vectors in fp32, as the store lays them out."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype if parameter.dim() >= 2 else torch.float32)
    return model


def logits_of_pieces(decoder, input_ids: Tensor, position_ids=None, document_ids=None) -> Tensor:
    """As the step runs a model that is taken apart."""
    hidden, extras = decoder.embed(input_ids, position_ids, document_ids)
    for index, extra in enumerate(extras):
        hidden = decoder.block(index, hidden, extra)
    return nn.functional.linear(
        decoder.final(hidden).to(decoder.head_weight.dtype), decoder.head_weight, decoder.head_bias
    )


def plain_training(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], *, learning_rates: list[float], weight_decay: float = 0.01,
    clip_norm: float | None = 1.0, autocast: bool = False, betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> Iterator[float]:  # fmt: skip
    """The whole batch at once, transformers' own loss, torch.optim.AdamW, fp32 (or plain bf16 autocast); yields the
    loss of each step. `batches`: (input_ids, labels), both [B, T], labels already shifted, -100 ignored."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=epsilon, foreach=False, fused=False)
    model.train()
    for (input_ids, labels), learning_rate in zip(batches, learning_rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=input_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


class DocumentsApart(nn.Module):
    """`model` on rows [B, T] of packed documents, each of which it is given in a row of its own; `lengths`: the
    documents' of each row."""

    def __init__(self, model: nn.Module, lengths: list[list[int]]):
        super().__init__()
        self.model, self.lengths = model, lengths

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        rows = [
            torch.cat([self.model(input_ids=ids, use_cache=use_cache).logits for ids in row[None].split(lengths, 1)], 1)
            for row, lengths in zip(input_ids, self.lengths, strict=True)
        ]
        return SimpleNamespace(logits=torch.cat(rows))


def make_batch(seed: int, rows: int, seq: int) -> Batch:
    """Random tokens, each row's labels one token further."""
    tokens = torch.randint(0, VOCABULARY, (rows, seq + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
