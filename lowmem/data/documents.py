"""From the documents of a source to token ids end to end, and the share of them that is held out.

Token ids are in files, 2 bytes each up to 65,536 ids, else 4; examples take one more byte for the trained mask. RAM
holds 32 bytes per document, the name of each file, and the text that is being tokenized: TOKENIZING_BYTES at most,
however long the text is. Exceptions (long_text.py): a long word to Unigram or WordPiece, SentencePiece's own library, a
`.json` list, and a row of a table. While the held-out share is written, the disk holds twice the data.
"""

import dataclasses
import itertools
import math
import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lowmem.data.encoder import Encoder
from lowmem.data.formats import Format, UntrainableRow, find_format, with_first_filled
from lowmem.data.long_text import LongText
from lowmem.data.records import Record, Source, StableHash
from lowmem.data.seams import Seams, Segments
from lowmem.data.stored import ArrayFolder, StoredArray
from lowmem.errors import InputError
from lowmem.units import MIB

TOKENIZING_BYTES = 300 * MIB  # a test holds it to that
_BATCH_CHARACTERS = 2**20  # of texts that are tokenized together
_PLACE = re.compile(r"(.*?)([1-9][0-9]{0,8})?", re.DOTALL)  # "a.jsonl:17": what its neighbours share, and the number
_PROGRESS_AFTER_SECONDS = 2


@dataclass(frozen=True, eq=False)
class Documents:
    """The tokens of n documents end to end.

    tokens  uint16 or uint32 [N], an end-of-text token after each document
    lengths int64 [n], in tokens
    keys    uint64 [n], of the content: what decides on which side of a held-out share a document falls
    trained bool [N], which tokens are trained; None for packed text: all
    places  int32 [n, 2], where each was read: which of `files`, and the line or row in it, 0 for a whole file

    `packed`: documents may be cut and joined; otherwise one is one example. `description`: of their format.
    """

    tokens: StoredArray
    lengths: np.ndarray
    keys: np.ndarray
    trained: StoredArray | None
    places: np.ndarray
    files: tuple[str, ...]
    packed: bool
    description: str
    notes: tuple[str, ...] = ()

    def select(self, chosen: np.ndarray, folder: ArrayFolder) -> "Documents":
        """The documents whose place in `chosen` (bool [n]) is true; their tokens are written into `folder`."""
        ends = np.cumsum(self.lengths)
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)  # of runs of neighbours
        spans = [(ends[first] - self.lengths[first], ends[after - 1]) for first, after in edges]

        def of(values: StoredArray) -> StoredArray:
            runs = itertools.chain.from_iterable(values.part(*span).chunks() for span in spans)
            return folder.write(runs, values.dtype)

        return dataclasses.replace(
            self,
            tokens=of(self.tokens),
            lengths=self.lengths[chosen],
            keys=self.keys[chosen],
            trained=None if self.trained is None else of(self.trained),
            places=self.places[chosen],
        )

    def between(self, start: int, stop: int) -> "Documents":
        """Tokens `start` to `stop` of packed text, of its first and last document perhaps a part."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        there = (ends > start) & (starts < stop)
        return dataclasses.replace(
            self,
            tokens=self.tokens.part(start, stop),
            lengths=np.minimum(ends, stop)[there] - np.maximum(starts, start)[there],
            keys=self.keys[there],
            places=self.places[there],
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
    target_tokens: int | None,
    vocabulary_size: int,
    folder: ArrayFolder,
) -> Documents:
    """All documents of `records` as tokens, or as many as fill `rows_limit` rows, written into `folder`.
    `target_tokens`: how many of a row's seq + 1 tokens are the target's, for encoder-decoders (pairs.py)."""
    first, records = with_first_filled(iter(records))
    if first is None:
        raise InputError(f"{source.name}: there is no document in it")
    format = find_format(first, text_field, train_on, tokenizer)
    writer = _Writer(format, tokenizer, vocabulary_size, seq, target_tokens, folder)
    skipped, why = 0, ""
    for record in _with_progress(records, source.name, writer):
        try:
            segments = writer.format.segments(record)
            folder.count_read(sum(len(text.encode(errors="replace")) for text, _ in segments))
            writer.add(record, segments)
        except UntrainableRow as row:
            if not (source.lenient or record.whole_file):
                raise
            skipped, why = skipped + 1, why or f" ({row})"
        if rows_limit is not None and writer.rows >= rows_limit:
            break
    notes = [f"{source.name} is streamed and was read as far as needed"] if rows_limit is not None else []
    notes += [f"{skipped:,} empty one{'s' * (skipped > 1)} skipped"] if skipped else []
    return writer.finish(source.name, notes, why)


def hold_out(documents: Documents, fraction: float, seq: int, folder: ArrayFolder) -> tuple[Documents, Documents, str]:
    """`documents` as (training, held out, what was done), the share counted in tokens (examples: in rows).

    Whole documents go, in the order of their hash; equal ones have equal hashes and stay together, so nothing held out
    is trained on elsewhere. A document that would more than double the share stays in training. Where text has too few
    documents for that (one book), its last tokens are held out.
    """
    packed = documents.packed
    sizes = documents.lengths if packed else np.ones_like(documents.lengths)
    smallest = seq + 1 if packed else 1
    target = max(fraction * sizes.sum(), smallest)

    def nothing(why: str) -> tuple[Documents, Documents, str]:
        return documents, documents.select(np.zeros(len(documents.lengths), bool), folder), f"nothing held out ({why})"

    if fraction == 0 or sizes.sum() < target + smallest:
        return nothing("there is too little of it" if fraction else "--eval-fraction 0")
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
            documents.select(~held_out, folder),
            documents.select(held_out, folder),
            f"held out: {held_out.sum():,} of its documents, by hash",
        )
    if not packed:
        return nothing("its examples are too few or all the same")
    total = len(documents.tokens)
    cut = total - math.ceil(target)
    train, tail = documents.between(0, cut), documents.between(cut, total)
    return train, tail, f"held out: its last {len(tail.tokens):,} tokens, since its documents are few and long"


def _with_progress(records: Iterable[Record], name: str, writer: "_Writer") -> Iterator[Record]:
    """`records`, with a line at a terminal where they take long."""
    hidden = sys.stderr is None or not sys.stderr.isatty()
    with tqdm(
        desc=f"tokenizing {name[-40:]}", file=sys.stderr, unit=" tokens", unit_scale=True,
        delay=_PROGRESS_AFTER_SECONDS, disable=hidden,
        dynamic_ncols=True, leave=False, bar_format="{desc}: {n_fmt} tokens, {rate_fmt}, {elapsed}",
    ) as bar:  # fmt: skip
        for record in records:
            yield record
            bar.update(writer.token_count - bar.n)


class _Writer:
    """Tokenizes documents by _BATCH_CHARACTERS and lays their ids end to end."""

    def __init__(
        self, format: Format, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, seq: int,
        target_tokens: int | None, folder: ArrayFolder,
    ):  # fmt: skip
        self.format, self.tokenizer, self.vocabulary_size, self.seq = format, tokenizer, vocabulary_size, seq
        self.target_tokens = target_tokens
        self.encode = Encoder(tokenizer)
        self.mark = Seams(self.encode, target_tokens is not None)
        self.begin = np.array(format.begin, np.int32)
        self.begin_text = "".join(tokenizer.convert_ids_to_tokens(format.begin))
        self.pending: list[tuple[Record, Segments]] = []
        self.pending_characters = 0
        self.tokens = folder.writer(np.uint16 if vocabulary_size <= 2**16 else np.uint32)
        self.trained = None if format.packed else folder.writer(np.bool_)
        self.lengths, self.keys, self.places = array("q"), array("Q"), array("i")
        self.files: dict[str, int] = {}
        self.token_count = self.truncated = self.dropped = 0
        self.long_text: LongText | None = None  # of a document whose text goes on in the next record
        self.begun_tokens, self.begun_hash, self.begun_end = 0, StableHash(), ""

    @property
    def rows(self) -> int:
        return self.token_count // self.seq if self.format.packed else len(self.lengths)

    def add(self, record: Record, segments: Segments) -> None:
        if record.goes_on or record.begun:
            self._flush()
            self.long_text = self.long_text or self.encode.long_text()
            ids = self.long_text.add(segments[0][0], last=not record.goes_on)[:, 0]
            self._write(record, segments, ids, np.ones(len(ids), bool))
            return
        self.pending.append((record, segments))
        self.pending_characters += sum(len(text) for text, _ in segments)
        if self.pending_characters >= _BATCH_CHARACTERS:
            self._flush()

    def finish(self, name: str, notes: list[str], why_empty: str) -> Documents:
        self._flush()
        if not self.lengths:
            beside = f" ({', '.join(notes)})" if notes else ""
            raise InputError(
                f"{name}: no example has a token to train on within {self.seq} tokens{beside}; raise --seq"
                if self.dropped
                else f"{name}: every document in it is empty{why_empty}"
            )
        room = f"{self.seq:,} tokens"
        if self.target_tokens is not None:
            room = f"{self.seq + 1 - self.target_tokens:,} tokens of source or {self.target_tokens:,} of target"
        notes += self.mark.notes
        notes += [f"{self.truncated:,} cut off at {room}"] if self.truncated else []
        notes += [f"{self.dropped:,} of these dropped, with no trained token left"] if self.dropped else []
        return Documents(
            self.tokens.finish(),
            np.array(self.lengths, np.int64),
            np.array(self.keys, np.uint64),
            self.trained and self.trained.finish(),
            np.array(self.places, np.int32).reshape(-1, 2),
            tuple(self.files),
            self.format.packed,
            self.format.description,
            tuple(notes),
        )

    def _flush(self) -> None:
        pending, self.pending, self.pending_characters = self.pending, [], 0
        examples = self.mark([segments for _, segments in pending])
        for (record, segments), (ids, trained) in zip(pending, examples, strict=True):
            self._write(record, segments, ids, trained)

    def _write(self, record: Record, segments: Segments, ids: np.ndarray, trained: np.ndarray) -> None:
        """Writes a record's tokens, and the tokens that begin or end its document if they are missing."""
        texts = [text for text, _ in segments]
        if not record.begun and not "".join(texts).startswith(self.begin_text):
            texts = [self.begin_text, *texts]
            ids, trained = _joined((self.begin, segments[0][1]), (ids, trained))
        self.begun_end = (self.begun_end + texts[-1][-64:])[-64:]
        ended = self.begun_end.rstrip().endswith(self.tokenizer.eos_token)  # as a chat template does
        if not record.goes_on and not ended:
            ids, trained = _joined((ids, trained), ([self.tokenizer.eos_token_id], segments[-1][1]))
        if ids.max(initial=0) >= self.vocabulary_size:
            raise InputError(
                f"{record.where}: the tokenizer gives token id {ids.max()}, but the model has only "
                f"{self.vocabulary_size} ids; use the tokenizer that belongs to the model"
            )
        if self.trained is not None:
            kept = self._room_for(trained)
            self.truncated += len(kept) < len(ids)
            ids, trained = ids[kept], trained[kept]
            if not trained[self.target_tokens is None :].any():  # a decoder's first token is never a label
                self.dropped += 1
                return
            self.trained.append(trained)
        self.tokens.append(ids)
        self.token_count += len(ids)
        self.begun_tokens += len(ids)
        for text in texts:
            self.begun_hash.update(text)
        if not record.goes_on:
            self._end_document(record)

    def _room_for(self, trained: np.ndarray) -> np.ndarray:
        """Which tokens of an example there is room for, by place. A source has a room of its own, in which its end
        stands, too: however long a prompt is, all of a target's room is left for the answer."""
        places = np.arange(len(trained))
        if self.target_tokens is None:
            return places[: self.seq + 1]
        first = int(trained.argmax())
        source = min(first, self.seq - self.target_tokens)
        return np.concatenate([places[:source], places[first : first + self.target_tokens]])

    def _end_document(self, record: Record) -> None:
        self.lengths.append(self.begun_tokens)
        self.keys.append(self.begun_hash.value())
        file, number = _PLACE.fullmatch(record.where).groups(default="0")
        self.places.extend((self.files.setdefault(file, len(self.files)), int(number)))
        self.long_text = None
        self.begun_tokens, self.begun_hash, self.begun_end = 0, StableHash(), ""


def _joined(*parts: tuple[np.ndarray, np.ndarray | bool]) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and whether each is trained, end to end."""
    trained = [np.broadcast_to(trained, len(ids)) for ids, trained in parts]
    return np.concatenate([np.asarray(ids, np.int32) for ids, _ in parts]), np.concatenate(trained)
