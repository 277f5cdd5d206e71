"""Computes the loss of held-out documents, and continues texts, by a model of transformers."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS = 16  # of a batch


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], seq: int
) -> dict[str, float]:
    """Returns the mean loss per token in nats, bits per byte of UTF-8, and the numbers of tokens and bytes of `texts`.
    Tokens have at most `seq` tokens of context. An end of text before each document counts as a token without bytes."""
    ids = [number for text in texts for number in (tokenizer.eos_token_id, *encoded(tokenizer, text))]
    ids.append(tokenizer.eos_token_id)
    total, tokens = 0.0, len(ids) - 1
    for rows in _batches([ids[start : start + seq + 1] for start in range(0, tokens, seq)]):
        rows = rows.to(model.device)
        logits = model(rows[:, :-1].clamp(min=0), use_cache=False).logits
        total += F.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=-1, reduction="sum"
        ).item()
    size = sum(len(text.encode()) for text in texts)
    return {"loss": total / tokens, "bits_per_byte": total / math.log(2) / size, "tokens": tokens, "bytes": size}


def _batches(rows: list[list[int]]) -> Iterator[Tensor]:
    """Yields int64 [B, T], padded on the right with -1."""
    for start in range(0, len(rows), ROWS):
        several = [torch.tensor(row) for row in rows[start : start + ROWS]]
        yield torch.nn.utils.rnn.pad_sequence(several, batch_first=True, padding_value=-1)


@torch.no_grad()
def continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, context: int, new_tokens: int
) -> str:
    """Returns the greedy continuation of the last `context` tokens of `prompt`, up to an end of text."""
    ids = encoded(tokenizer, prompt)[-context:] or [tokenizer.eos_token_id]
    inputs = torch.tensor([ids], device=model.device)
    cache, found = None, []
    for _ in range(new_tokens):
        output = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        if (token := inputs.item()) == tokenizer.eos_token_id:
            break
        found.append(token)
    return tokenizer.decode(found)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
