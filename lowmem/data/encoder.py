"""From texts to token ids: by all processors, in bounded memory, long texts in the fastest way to the same ids."""

import re
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from lowmem.data.fast_bpe import FastBPE
from lowmem.data.tables import PIECE_CHARACTERS
from lowmem.data.tokenizer import BYTE_LEVEL_IDS, END_OF_TEXT, is_byte_level

# The Rust tokenizer keeps about 150 bytes per token until a call returns, so a call gets only so many characters, long
# texts in pieces; each piece is encoded by one thread.
BATCH_CHARACTERS = 2**21
_THREADS_PIECE_CHARACTERS = 2**16
_FAST_FROM_CHARACTERS = 2**23  # making FastBPE takes as long as encoding some MiB without it
# Not within a run of spaces and line ends, which may be one token; a slash may belong to the line end (o200k's words).
_LINE_END = re.compile(r"(?<=\S\n)(?=[^\s/])")
_PROBE = "".join(f"{before}\n{after}" for before in "a1.)é中\u0301🙂" for after in "b2(#/'ü文🙂")  # around a line end


class Encoder:
    """Encodes by `tokenizer`, without added special tokens; special tokens written out in a text (an <|endoftext|>
    between two books) become their ids, as everywhere in Hugging Face's tokenizers.

    Long texts are encoded in pieces cut at line ends, by all processors (RAYON_NUM_THREADS says how many). For
    tokenizers that never join a line end with the next line's first word (the byte-level ones: GPT-2, Llama 3, Qwen)
    the ids are the same; what others get is cut every 2**20 characters only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._bytes = is_byte_level(tokenizer)
        self._backend = None if self._bytes else _plain_backend(tokenizer)
        free = self._backend is not None and _cuts_freely(self._backend)
        self._piece_characters = _THREADS_PIECE_CHARACTERS if free else PIECE_CHARACTERS
        self._fast: FastBPE | None = None
        self._encoded_characters = 0

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [tokens]."""
        if self._bytes:
            return [_encode_bytes(text) for text in texts]  # the same ids, 30 times faster
        pieces = [(index, piece) for index, text in enumerate(texts) for piece in _cut(text, self._piece_characters)]
        encoded: list[list[np.ndarray]] = [[np.empty(0, np.int32)] for _ in texts]
        start = 0
        while start < len(pieces):
            end, characters = start, 0
            while end < len(pieces) and characters < BATCH_CHARACTERS:
                characters += len(pieces[end][1])
                end += 1
            ids = self._encode([piece for _, piece in pieces[start:end]])
            for (index, _), piece_ids in zip(pieces[start:end], ids, strict=True):
                encoded[index].append(piece_ids)
            self._count(characters, [piece for _, piece in pieces[start:end]])
            start = end
        return [np.concatenate(parts) for parts in encoded]

    def _count(self, characters: int, texts: list[str]) -> None:
        """Takes the faster way from here on, if there is one, where texts turn out to be long."""
        before, self._encoded_characters = self._encoded_characters, self._encoded_characters + characters
        if before < _FAST_FROM_CHARACTERS <= self._encoded_characters and self._backend is not None:
            self._fast = FastBPE.like(self._backend, texts)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        ids: list[np.ndarray | None] = [None] * len(texts)
        if self._fast is not None:
            taken = [index for index, text in enumerate(texts) if self._fast.takes(text)]
            for index, found in zip(taken, self._fast.encode([texts[index] for index in taken]), strict=True):
                ids[index] = found
        rest = [index for index, found in enumerate(ids) if found is None]
        for index, found in zip(rest, self._encode_slowly([texts[index] for index in rest]), strict=True):
            ids[index] = found
        return ids

    def _encode_slowly(self, texts: list[str]) -> Iterator[np.ndarray]:
        if self._backend is None:
            ids = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )["input_ids"]
            yield from (np.asarray(one, np.int32) for one in ids)
            return
        for one in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield np.asarray(one.ids, np.int32)  # one list of Python's numbers at a time


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer behind `tokenizer`, where calling that does nothing more than to call this; it need not be
    asked for what is not used here (offsets, masks), which takes half of the time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]  # which sets the backend's truncation, too
    same = isinstance(backend, Tokenizer) and backend.encode_batch_fast([_PROBE], add_special_tokens=False)[0].ids
    return backend if same == ids[0] else None


def _cuts_freely(backend: Tokenizer) -> bool:
    """Whether a text of every kind of neighbours of a line end has the same ids when it is cut at the line ends."""
    lines = [backend.encode(line, add_special_tokens=False).ids for line in _LINE_END.split(_PROBE)]
    return [token for line in lines for token in line] == backend.encode(_PROBE, add_special_tokens=False).ids


def _encode_bytes(text: str) -> np.ndarray:
    parts = [np.frombuffer(part.encode(), np.uint8).astype(np.int32) for part in text.split(END_OF_TEXT)]
    end_of_text = np.array([BYTE_LEVEL_IDS - 1], np.int32)
    return np.concatenate([parts[0], *(piece for part in parts[1:] for piece in (end_of_text, part))])


def _cut(text: str, characters: int) -> Iterator[str]:
    start = 0
    while cut := _LINE_END.search(text, start + characters):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]
