"""From the documents of a source to token ids end to end, and the share of them that is held out.

RAM: 2 bytes per token up to 65,536 ids, else 4; examples one more for what is trained; 24 per document, and the name of
each file. While the held-out share is taken out it is twice that. Texts are dropped as soon as they are tokenized.
"""

import dataclasses
import itertools
import math
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem.data.formats import Format, Segments, UntrainableRow, find_format
from lowmem.data.sources import Record, Source, stable_hash
from lowmem.data.tokenizer import PIECE_CHARACTERS, encode
from lowmem.errors import InputError

_PLACE = re.compile(r"(.*?)([1-9][0-9]{0,8})?", re.DOTALL)  # "a.jsonl:17": what its neighbours share, and the number


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokens of n documents end to end.

    tokens  uint16 or uint32 [N], an end-of-text token after each document
    lengths int64 [n], in tokens
    keys    uint64 [n], what decides on which side of a held-out share a document falls
    trained bool [N], which tokens are trained; None for packed text: all
    places  int32 [n, 2], where each was read: which of `files`, and the line or row in it, 0 for a whole file
    """

    tokens: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    trained: np.ndarray | None
    places: np.ndarray
    files: tuple[str, ...]
    format: Format
    notes: tuple[str, ...] = ()

    def select(self, chosen: np.ndarray) -> "Documents":
        """The documents whose place in `chosen` (bool [n]) is true."""
        kept = np.repeat(chosen, self.lengths)
        return dataclasses.replace(
            self,
            tokens=self.tokens[kept],
            lengths=self.lengths[chosen],
            keys=self.keys[chosen],
            trained=None if self.trained is None else self.trained[kept],
            places=self.places[chosen],
        )

    def where(self, chosen: slice) -> list[str]:
        """The places that neighbouring documents were read from, one per file: ["a.jsonl:17-23", "b.txt"]."""
        found = []
        for file, places in itertools.groupby(self.places[chosen].tolist(), key=lambda place: place[0]):
            numbers = [number for _, number in places if number]
            found.append(self.files[file] + "-".join(map(str, dict.fromkeys((*numbers[:1], *numbers[-1:])))))
        return found


def read_documents(
    source: Source,
    records: Iterable[Record],
    *,
    text_field: str,
    train_on: str,
    rows_limit: int | None,
    tokenizer: PreTrainedTokenizerBase,
    seq: int,
    vocabulary_size: int,
) -> Documents:
    """All documents of `records` as tokens, or as many as fill `rows_limit` rows."""
    records = iter(records)
    first = next(records, None)
    if first is None:
        raise InputError(f"{source.name}: there is no document in it")
    writer = _Writer(find_format(first, text_field, train_on, tokenizer), tokenizer, vocabulary_size, seq)
    skipped = 0
    for record in itertools.chain([first], records):
        try:
            writer.add(record, writer.format.segments(record))
        except UntrainableRow:
            if not (source.lenient or record.whole_file):
                raise
            skipped += 1
        if rows_limit is not None and writer.rows >= rows_limit:
            break
    notes = [f"{source.name} is streamed and was read as far as needed"] if rows_limit is not None else []
    notes += [f"{skipped:,} empty ones skipped"] if skipped else []
    return writer.finish(source.name, notes)


def hold_out(documents: Documents, fraction: float, seq: int) -> tuple[Documents, Documents, str]:
    """`documents` as (training, held out, what was done), the share counted in tokens (examples: in rows).

    Whole documents go, in the order of their hash; equal ones have equal hashes and stay together, so nothing held out
    is trained on elsewhere. A document that would more than double the share stays in training. Where text has too few
    documents for that (one book), its last tokens are held out.
    """
    nothing = documents.select(np.zeros(len(documents.lengths), bool))
    packed = documents.format.packed
    sizes = documents.lengths if packed else np.ones_like(documents.lengths)
    smallest = seq + 1 if packed else 1
    target = max(fraction * sizes.sum(), smallest)
    if fraction == 0 or sizes.sum() < target + smallest:
        return documents, nothing, "nothing held out" + (" (there is too little of it)" if fraction else "")
    hashes, group = np.unique(documents.keys, return_inverse=True)
    group_sizes = np.bincount(group, weights=sizes)
    chosen, share = np.zeros(len(hashes), bool), 0
    for index in range(len(hashes)):
        if share + group_sizes[index] <= 2 * target:
            chosen[index] = True
            share += group_sizes[index]
        if share >= target:
            break
    held_out = chosen[group]
    if share >= target and sizes.sum() - share >= smallest:
        return (
            documents.select(~held_out),
            documents.select(held_out),
            f"held out: {held_out.sum():,} of its documents, by hash",
        )
    if not packed:
        return documents, nothing, "nothing held out (its examples are too few or all the same)"
    cut = len(documents.tokens) - math.ceil(target)
    train, tail = (dataclasses.replace(documents, tokens=tokens) for tokens in np.split(documents.tokens, [cut]))
    return train, tail, f"held out: its last {len(tail.tokens):,} tokens, since its documents are few and long"


class _Writer:
    """Tokenizes documents in batches of about a million characters and lays their ids end to end."""

    def __init__(self, format: Format, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, seq: int):
        self.format, self.tokenizer, self.vocabulary_size, self.seq = format, tokenizer, vocabulary_size, seq
        self.dtype = np.uint16 if vocabulary_size <= 2**16 else np.uint32
        self.pending: list[tuple[Record, Segments]] = []
        self.pending_characters = 0
        self.tokens: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.keys: list[int] = []
        self.files: dict[str, int] = {}
        self.places = array("i")
        self.token_count = self.truncated = self.dropped = 0

    @property
    def rows(self) -> int:
        return self.token_count // self.seq if self.format.packed else len(self.lengths)

    def add(self, record: Record, segments: Segments) -> None:
        self.pending.append((record, segments))
        self.pending_characters += sum(len(text) for text, _ in segments)
        if self.pending_characters >= PIECE_CHARACTERS:
            self._flush()

    def finish(self, name: str, notes: list[str]) -> Documents:
        self._flush()
        if not self.lengths:
            raise InputError(
                f"{name}: no example has a token to train on within {self.seq} tokens; raise --seq"
                if self.dropped
                else f"{name}: every document in it is empty"
            )
        notes += [f"{self.truncated:,} cut off at {self.seq:,} tokens"] if self.truncated else []
        notes += [f"{self.dropped:,} of these dropped, with no trained token left"] if self.dropped else []
        trained = None if self.format.packed else np.concatenate(self.trained)
        return Documents(
            np.concatenate(self.tokens),
            np.array(self.lengths, np.int64),
            np.array(self.keys, np.uint64),
            trained,
            np.array(self.places, np.int32).reshape(-1, 2),
            tuple(self.files),
            self.format,
            tuple(notes),
        )

    def _flush(self) -> None:
        texts = [text for _, segments in self.pending for text, _ in segments]
        encoded = iter(encode(self.tokenizer, texts))
        kept = []
        for record, segments in self.pending:
            parts = [(next(encoded), trained) for _, trained in segments]
            if not segments[-1][0][-64:].rstrip().endswith(self.tokenizer.eos_token):  # as a chat template does
                parts.append((np.array([self.tokenizer.eos_token_id], np.int32), segments[-1][1]))
            ids = np.concatenate([ids for ids, _ in parts])
            if ids.max() >= self.vocabulary_size:
                raise InputError(
                    f"{record.where}: the tokenizer gives token id {ids.max()}, but the model has only "
                    f"{self.vocabulary_size} ids; use the tokenizer that belongs to the model"
                )
            if not self.format.packed:
                trained = np.concatenate([np.full(len(ids), trained) for ids, trained in parts])[: self.seq + 1]
                self.truncated += len(ids) > self.seq + 1
                if not trained[1:].any():  # the first token is never a label
                    self.dropped += 1
                    continue
                self.trained.append(trained)
                ids = ids[: self.seq + 1]
            kept.append(ids.astype(self.dtype))
            self.lengths.append(len(ids))
            self.keys.append(stable_hash(record.key or "".join(text for text, _ in segments)))
            file, number = _PLACE.fullmatch(record.where).groups(default="0")
            self.places.extend((self.files.setdefault(file, len(self.files)), int(number)))
            self.token_count += len(ids)
        self.tokens += [np.concatenate(kept)] if kept else []  # one array for thousands of short documents
        self.pending, self.pending_characters = [], 0
