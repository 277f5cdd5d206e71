"""Encodes texts as token ids in bounded memory."""

from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase

from lowmem.data.long_text import WINDOW, LongText, Tokens
from lowmem.errors import InputError

# The Rust tokenizer needs about 150 bytes per token until a call returns; a token has at least one byte.
BATCH_BYTES = 2**20
_PROBE = "".join(f"{before}\n{after}" for before in "a1.)é中\u0301🙂" for after in "b2(#/'ü文🙂 ")


class Encoder:
    """Encodes texts as token ids, without adding special tokens. A special token that is written in a text, such as
    <|endoftext|>, becomes its id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self._word_starts = "" if hasattr(tokenizer, "sp_model") else _word_starts(self._backend)
        added = tokenizer.added_tokens_decoder.items() if self._backend else ()  # mistral-common's has no backend
        self._stripping = [number for number, token in added if token.lstrip or token.rstrip]

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [tokens]."""
        return [tokens[:, 0] for tokens in self._all(texts, self._encode)]

    def long_text(self, encode: Callable[[list[str]], list[Tokens]] | None = None) -> LongText:
        """Returns a LongText, which tokenizes one text that arrives in pieces. `encode`: tokenizes short texts;
        None for a function that gives only the tokens' ids, not their places in the text."""
        return LongText(lambda texts: _in_batches(texts, encode or self._encode), self._word_starts)

    def with_places(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Returns (ids int32 [tokens], places int32 [tokens, 2]) of each text. Places are the characters at which a
        token begins and ends; None if the tokenizer does not report them. White space that a special token takes
        in (lstrip, rstrip) is left out."""
        if self._backend is None:
            return [(ids, None) for ids in self(texts)]
        found = self._all(texts, self._encode_with_offsets)
        for tokens, text in zip(found, texts, strict=True):
            for row in np.flatnonzero(np.isin(tokens[:, 0], self._stripping)):
                _, start, end = tokens[row].tolist()
                stripped = text[start:end].strip()
                start += text[start:end].find(stripped)
                tokens[row, 1:] = start, start + len(stripped)
        return [(tokens[:, 0], tokens[:, 1:]) for tokens in found]

    def _all(self, texts: list[str], encode: Callable[[list[str]], list[Tokens]]) -> list[Tokens]:
        short = iter(_in_batches([text for text in texts if len(text) <= WINDOW], encode))
        return [next(short) if len(text) <= WINDOW else self.long_text(encode).add(text, last=True) for text in texts]

    def _encode(self, texts: list[str]) -> list[Tokens]:
        """Returns the ids of each text as a column, int32 [tokens, 1]. `_encode_with_offsets` returns two more
        columns."""
        if self._backend is not None:
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            ids = (one.ids for one in encoded)  # one list of Python's numbers at a time
        else:
            ids = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )["input_ids"]
        return [_int32(one)[:, None] for one in ids]

    def _encode_with_offsets(self, texts: list[str]) -> list[Tokens]:
        """Returns (id, begin, end) of each token of each text, int32 [tokens, 3]. Begin and end count characters."""
        processor, self._backend.post_processor = self._backend.post_processor, None
        try:
            encoded = self._backend.encode_batch(texts, add_special_tokens=False)
        finally:
            self._backend.post_processor = processor
        found = []
        for one in encoded:
            ids, places = _int32(one.ids)[:, None], np.asarray(one.offsets, np.int32).reshape(-1, 2)
            found.append(np.hstack([ids, places]))
        return found


def _int32(ids: list[int]) -> np.ndarray:
    try:
        return np.asarray(ids, np.int32)
    except OverflowError:
        raise InputError(f"the tokenizer gives token id {max(ids)}, which is no id of a model") from None


def _in_batches(texts: list[str], encode: Callable[[list[str]], list[Tokens]]) -> list[Tokens]:
    found, batch, size = [], [], 0
    for text in texts:
        batch.append(text)
        size += len(text.encode())
        if size >= BATCH_BYTES:
            found += encode(batch)
            batch, size = [], 0
    return found + (encode(batch) if batch else [])


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Returns the Rust tokenizer inside `tokenizer`; None if there is none, or if it gives a test text other ids."""
    # Calling the Rust tokenizer directly takes half the time.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]  # this also sets the backend's truncation
    same = isinstance(backend, Tokenizer) and backend.encode_batch_fast([_PROBE], add_special_tokens=False)[0].ids
    return backend if same == ids[0] else None


def _word_starts(backend: Tokenizer | None) -> str | None:
    """Returns the white-space characters at which a Unigram tokenizer begins a new word; None for other tokenizers."""
    if backend is None or not isinstance(backend.model, models.Unigram):
        return None
    found = ""
    for space in " \n\t\r\u3000":
        encoding = backend.encode(f"a{space}b", add_special_tokens=False)
        before, behind = set(), set()
        for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
            (before if start < 1 else behind).add(word)
            (behind if end > 1 else before).add(word)
        found += space * before.isdisjoint(behind)
    return found
