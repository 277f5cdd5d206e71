"""From texts to token ids: by all processors, in bounded memory, in the fastest way to the tokenizer's ids."""

from collections.abc import Callable, Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase

from lowmem.data.fast_bpe import FastBPE
from lowmem.data.long_text import WINDOW, LongText, Tokens
from lowmem.data.tokenizer import BYTE_LEVEL_IDS, END_OF_TEXT, byte_characters, is_byte_level

# The Rust tokenizer keeps about 150 bytes per token until a call returns, and a byte is one token at most.
BATCH_BYTES = 2**20
_FAST_FROM_CHARACTERS = 2**23  # making FastBPE takes as long as encoding some MiB without it
_PROBE = "".join(f"{before}\n{after}" for before in "a1.)é中\u0301🙂" for after in "b2(#/'ü文🙂 ")
_NO_TOKEN = b"\xff\xff"  # stands in no text


class Encoder:
    """Encodes by `tokenizer`, without added special tokens; special tokens written out in a text (an <|endoftext|>
    between two books) become their ids, as everywhere in Hugging Face's tokenizers.

    Texts are encoded by all processors (RAYON_NUM_THREADS says how many), long ones in windows (long_text.py).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._bytes = is_byte_level(tokenizer)
        self._backend = None if self._bytes else _plain_backend(tokenizer)
        self._word_starts = "" if hasattr(tokenizer, "sp_model") else _word_starts(self._backend)
        self._fast: FastBPE | None = None
        self._encoded_characters = 0
        self._token_bytes = _token_bytes(tokenizer, self._backend) if self._bytes or self._backend else None
        added = tokenizer.added_tokens_decoder.items() if self._backend else ()  # mistral-common's has none
        self._stripping = [number for number, token in added if token.lstrip or token.rstrip]

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [tokens]."""
        return [tokens[:, 0] for tokens in self._all(texts, self._encode)]

    def long_text(self) -> LongText:
        """For a text that comes in pieces."""
        return self._long_text(self._encode)

    def _long_text(self, encode: Callable[[list[str]], list[Tokens]]) -> LongText:
        return LongText(lambda texts: self._in_batches(texts, encode), self._word_starts)

    def with_places(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """The ids of each text, and the characters at which each token begins and ends, int32 [tokens, 2]; None if the
        tokenizer does not say that. White space that an added token strips is not part of the token."""
        if self._backend is not None and self._token_bytes is None:
            return self._by_offsets(texts)
        ids = self(texts)
        places = [
            self._token_bytes and _places_by_bytes(one, text, self._token_bytes)
            for one, text in zip(ids, texts, strict=True)
        ]
        if self._backend is None:
            return list(zip(ids, places, strict=True))
        rest = iter(self._by_offsets([text for text, place in zip(texts, places, strict=True) if place is None]))
        return [next(rest) if place is None else (one, place) for one, place in zip(ids, places, strict=True)]

    def _by_offsets(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        found = self._all(texts, self._encode_with_offsets)
        for tokens, text in zip(found, texts, strict=True):
            self._strip(tokens, text)
        return [(tokens[:, 0], tokens[:, 1:]) for tokens in found]

    def _strip(self, tokens: Tokens, text: str) -> None:
        for row in np.flatnonzero(np.isin(tokens[:, 0], self._stripping)):
            _, start, end = tokens[row].tolist()
            stripped = text[start:end].strip()
            start += text[start:end].find(stripped)
            tokens[row, 1:] = start, start + len(stripped)

    def _all(self, texts: list[str], encode: Callable[[list[str]], list[Tokens]]) -> list[Tokens]:
        short = iter(self._in_batches([text for text in texts if len(text) <= WINDOW], encode))
        return [next(short) if len(text) <= WINDOW else self._long_text(encode).add(text, last=True) for text in texts]

    def _in_batches(self, texts: list[str], encode: Callable[[list[str]], list[Tokens]]) -> list[Tokens]:
        found, start = [], 0
        while start < len(texts):
            end, size = start, 0
            while end < len(texts) and size < BATCH_BYTES:
                size += len(texts[end]) if texts[end].isascii() else len(texts[end].encode())
                end += 1
            found += encode(texts[start:end])
            start = end
        return found

    def _encode(self, texts: list[str]) -> list[Tokens]:
        """The ids, int32 [tokens, 1]."""
        if self._bytes:
            return [_encode_bytes(text)[:, None] for text in texts]  # the same ids, 30 times faster
        ids: list[np.ndarray | None] = [None] * len(texts)
        if self._fast is not None:
            taken = [index for index, text in enumerate(texts) if self._fast.takes(text)]
            for index, found in zip(taken, self._fast.encode([texts[index] for index in taken]), strict=True):
                ids[index] = found
        rest = [index for index, found in enumerate(ids) if found is None]
        for index, found in zip(rest, self._encode_slowly([texts[index] for index in rest]), strict=True):
            ids[index] = found
        self._count(texts)
        return [one[:, None] for one in ids]

    def _count(self, texts: list[str]) -> None:
        """Counts characters; after _FAST_FROM_CHARACTERS takes the faster way, if there is one."""
        before = self._encoded_characters
        self._encoded_characters += sum(map(len, texts))
        if before < _FAST_FROM_CHARACTERS <= self._encoded_characters and self._backend is not None:
            self._fast = FastBPE.like(self._backend, texts)

    def _encode_slowly(self, texts: list[str]) -> Iterator[np.ndarray]:
        if self._backend is None:
            ids = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )["input_ids"]
            yield from (np.asarray(one, np.int32) for one in ids)
            return
        for one in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield np.asarray(one.ids, np.int32)  # one list of Python's numbers at a time

    def _encode_with_offsets(self, texts: list[str]) -> list[Tokens]:
        """Ids and places, int32 [tokens, 3]. A postprocessor would trim the white space off a token's place."""
        processor, self._backend.post_processor = self._backend.post_processor, None
        try:
            encoded = self._backend.encode_batch(texts, add_special_tokens=False)
        finally:
            self._backend.post_processor = processor
        found = []
        for one in encoded:
            ids, places = np.asarray(one.ids, np.int32)[:, None], np.asarray(one.offsets, np.int32).reshape(-1, 2)
            found.append(np.hstack([ids, places]))
        return found


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer behind `tokenizer`, where calling that does nothing more than to call this; it need not be
    asked for what is not used here (offsets, masks), which takes half of the time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]  # which sets the backend's truncation, too
    same = isinstance(backend, Tokenizer) and backend.encode_batch_fast([_PROBE], add_special_tokens=False)[0].ids
    return backend if same == ids[0] else None


def _word_starts(backend: Tokenizer | None) -> str | None:
    """The white space before which a Unigram tokenizer ends a word; None for other models."""
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


def _token_bytes(tokenizer: PreTrainedTokenizerBase, backend: Tokenizer | None) -> list[bytes] | None:
    """The bytes of each id of a byte-level tokenizer, by id; None for another tokenizer."""
    if backend is not None and not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
    found = []
    for token, number in tokenizer.get_vocab().items():
        found += [_NO_TOKEN] * (number + 1 - len(found))
        if number not in added and byte_of.keys() >= set(token):
            found[number] = bytes(byte_of[character] for character in token)
        else:
            found[number] = added.get(number, _NO_TOKEN)
    return found


def _places_by_bytes(ids: np.ndarray, text: str, token_bytes: list[bytes]) -> np.ndarray | None:
    """The characters at which each token begins and ends in `text`; None if the ids' bytes are not the text's."""
    parts, written = [token_bytes[number] for number in ids.tolist()], text.encode()
    if b"".join(parts) != written:
        return None
    ends = np.cumsum([len(part) for part in parts], dtype=np.int32)
    characters = np.cumsum(np.frombuffer(written, np.uint8) & 0xC0 != 0x80, dtype=np.int32)  # up to and with a byte
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    return np.stack([characters[begins] - 1, characters[ends - 1]], axis=1)


def _encode_bytes(text: str) -> np.ndarray:
    parts = [np.frombuffer(part.encode(), np.uint8).astype(np.int32) for part in text.split(END_OF_TEXT)]
    end_of_text = np.array([BYTE_LEVEL_IDS - 1], np.int32)
    return np.concatenate([parts[0], *(piece for part in parts[1:] for piece in (end_of_text, part))])
