"""Tokenizes the documents of a data set, and holds some of them out for evaluation.

A token takes 2 bytes on the disk (4 if the model has more than 65,536 ids), and one more for the loss mask, unless the
text is packed. A document takes 32 bytes of RAM. While held-out documents are written, the disk holds the data twice.
"""

import dataclasses
import hashlib
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
from lowmem.data.records import Reading, Record, Source
from lowmem.data.seams import Example, Seams, Segments
from lowmem.data.stored import ArrayFolder, ArrayWriter, StoredArray
from lowmem.errors import InputError
from lowmem.settings import Settings
from lowmem.units import MIB

# This much RAM is enough, but for very long words or rows (docs/data.md).
TOKENIZING_BYTES = 300 * MIB  # a test checks this limit
_BATCH_CHARACTERS = 2**20  # of texts that are tokenized together
_PLACE = re.compile(r"(.*?)([1-9][0-9]{0,8})?", re.DOTALL)  # "a.jsonl:17": the file's part, and the number
_PROGRESS_AFTER_SECONDS = 2


@dataclass(frozen=True, eq=False)
class Documents:
    """Holds the tokens of n documents end to end, and the length, hash and place of each document."""

    tokens: StoredArray  # uint16 or uint32 [N], an end-of-text token after each document
    lengths: np.ndarray  # int64 [n], in tokens
    keys: np.ndarray  # uint64 [n], a hash of the content; it decides what is held out
    trained: StoredArray | None  # bool [N]; None for packed text, which is all trained on
    places: np.ndarray  # int32 [n, 2]: the index in `files`, and the line or row (0 for a whole file)
    files: tuple[str, ...]
    description: str  # of the rows' format, for the log
    notes: tuple[str, ...] = ()
    chat: bool = False  # conversations, rendered with the chat template

    @property
    def packed(self) -> bool:
        """Returns True for plain text, which is joined and cut into rows; False if each document is an example."""
        return self.trained is None

    def select(self, chosen: np.ndarray, folder: ArrayFolder) -> "Documents":
        """Returns the documents for which `chosen` (bool [n]) is True, with copies of their tokens in `folder`."""
        ends = np.cumsum(self.lengths)
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)  # of runs of neighbours
        spans = [(ends[first] - self.lengths[first], ends[after - 1]) for first, after in edges]

        def copied(values: StoredArray) -> StoredArray:
            chunks = itertools.chain.from_iterable(values.part(*span).chunks() for span in spans)
            return folder.write(chunks, values.dtype)

        return dataclasses.replace(
            self,
            tokens=copied(self.tokens),
            lengths=self.lengths[chosen],
            keys=self.keys[chosen],
            trained=None if self.trained is None else copied(self.trained),
            places=self.places[chosen],
        )

    def between(self, start: int, stop: int) -> "Documents":
        """Returns tokens `start` to `stop` - 1 of packed text. The first and last document may be cut."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        inside = (ends > start) & (starts < stop)
        return dataclasses.replace(
            self,
            tokens=self.tokens.part(start, stop),
            lengths=np.minimum(ends, stop)[inside] - np.maximum(starts, start)[inside],
            keys=self.keys[inside],
            places=self.places[inside],
        )

    def where(self, chosen: slice) -> list[str]:
        """Names the places of the documents `chosen`, in one text per file, such as ["a.jsonl:17-23", "b.txt"]."""
        found = []
        for file, places in itertools.groupby(self.places[chosen].tolist(), key=lambda place: place[0]):
            numbers = [number for _, number in places if number]
            found.append(self.files[file] + "-".join(map(str, dict.fromkeys((*numbers[:1], *numbers[-1:])))))
        return found


def row_inputs(settings: Settings) -> int:
    """Returns how many tokens of a data row are inputs: `seq` for a decoder, `seq` - 1 for an encoder-decoder. A row
    has one more token, the last label."""
    return settings.seq if settings.target_tokens is None else settings.seq - 1


def read_documents(
    source: Source, records: Iterable[Record], rows_limit: int | None, settings: Settings,
    tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, folder: ArrayFolder,
) -> Documents:  # fmt: skip
    """Tokenizes the `records` of the data set `source` into files in `folder`. Stops when the tokens fill `rows_limit`
    rows; None: reads all records. `vocabulary_size`: number of ids that the model embeds. Raises InputError for a
    record that cannot be read, or if there is nothing to train on."""
    reading = Reading.of(settings)
    first, records = with_first_filled(iter(records), reading)
    if first is None:
        raise InputError(f"{source.name}: there is no document in it")
    format = find_format(first, reading, settings.train_on, tokenizer)
    if settings.target_tokens is not None and settings.train_on == "all" and not format.packed:
        raise InputError("--train-on all: an encoder-decoder trains on its targets, the answers; leave it out")
    writer = _Writer(format, tokenizer, vocabulary_size, settings, folder)
    skipped, why = 0, ""
    for record in _with_progress(records, source.name, writer):
        try:
            segments = format.segments(record)
            folder.count_read(sum(len(text.encode(errors="replace")) for text, _ in segments))
            writer.add(record, segments)
        except UntrainableRow as row:
            if not record.may_be_blank:
                raise
            skipped, why = skipped + 1, why or f" ({row})"
        if rows_limit is not None and writer.rows >= rows_limit:
            break
    notes = [f"{source.name} is streamed and was read as far as needed"] if rows_limit is not None else []
    notes += [f"{skipped:,} empty one{'s' * (skipped > 1)} skipped"] if skipped else []
    return writer.finish(source.name, notes, why)


def hold_out(
    name: str, documents: Documents, fraction: float, seq: int, folder: ArrayFolder
) -> tuple[Documents, Documents, str]:
    """Splits `documents` into (training, held out, remark for the log). Holds out about `fraction` of the tokens of
    packed text, or of the examples. Equal documents stay together. If the documents of packed text are too long for
    that, holds out its last tokens. Holds out nothing if there is too little, or too few different examples. Raises
    InputError if `fraction` leaves too little to train on. `seq`: input tokens of a row."""
    packed = documents.packed
    sizes = documents.lengths if packed else np.ones_like(documents.lengths)
    smallest = seq + 1 if packed else 1
    target = max(fraction * sizes.sum(), smallest)

    def nothing(why: str) -> tuple[Documents, Documents, str]:
        return documents, documents.select(np.zeros(len(documents.lengths), bool), folder), f"nothing held out ({why})"

    if fraction == 0 or sizes.sum() < 2 * smallest:
        return nothing("there is too little of it" if fraction else "--eval-fraction 0")
    if sizes.sum() < target + smallest:
        raise InputError(f"{name}: --eval-fraction {fraction:g} leaves too little to train on; give a smaller one")
    hashes, group = np.unique(documents.keys, return_inverse=True)
    group_sizes = np.bincount(group, weights=sizes)
    chosen, share = np.zeros(len(hashes), bool), 0
    # In the order of hashes, which `unique` has sorted. Skips documents that would make the share more than twice as
    # large as wanted.
    for index in range(len(hashes)):
        if share + group_sizes[index] <= 2 * target:
            chosen[index] = True
            share += group_sizes[index]
        if share >= target:
            break
    held_out = chosen[group]
    if share >= target and sizes.sum() - share >= smallest:
        said = f"{held_out.sum():,} of its documents held out for evaluation"
        return documents.select(~held_out, folder), documents.select(held_out, folder), said
    if not packed:
        return nothing("its examples are too few or all the same")
    # Holds out the last tokens, as of one book: no whole document could be taken.
    total = len(documents.tokens)
    cut = total - math.ceil(target)
    said = f"its last {total - cut:,} tokens held out for evaluation, since its documents are few and long"
    return documents.between(0, cut), documents.between(cut, total), said


def _with_progress(records: Iterable[Record], name: str, writer: "_Writer") -> Iterator[Record]:
    with tqdm(
        desc=f"tokenizing {name[-40:]}", unit=" tokens", unit_scale=True, delay=_PROGRESS_AFTER_SECONDS,
        disable=None if sys.stderr else True,  # None: unless stderr is a terminal
        dynamic_ncols=True, leave=False, bar_format="{desc}: {n_fmt} tokens, {rate_fmt}, {elapsed}",
    ) as bar:  # fmt: skip
        for record in records:
            yield record
            bar.update(writer.token_count - bar.n)


class _Writer:
    """Tokenizes documents, _BATCH_CHARACTERS at a time, and writes their token ids end to end into files."""

    def __init__(
        self, format: Format, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, settings: Settings,
        folder: ArrayFolder,
    ):  # fmt: skip
        self.packed, self.format, self.vocabulary_size = format.packed, format, vocabulary_size
        self.seq, self.target_tokens = row_inputs(settings), settings.target_tokens
        self.encode = Encoder(tokenizer)
        self.mark = Seams(self.encode, pairs=self.target_tokens is not None)
        self.begin, self.begin_text = format.begin, "".join(tokenizer.convert_ids_to_tokens(format.begin))
        self.end, self.end_text = [tokenizer.eos_token_id], tokenizer.eos_token
        self.pending: list[tuple[Record, Segments]] = []
        self.pending_characters = 0
        self.tokens = ArrayWriter(folder, np.uint16 if vocabulary_size <= 2**16 else np.uint32)
        self.trained = None if format.packed else ArrayWriter(folder, np.bool_)
        self.lengths, self.keys, self.places = array("q"), array("Q"), array("i")
        self.files: dict[str, int] = {}
        self.token_count = self.truncated = self.dropped = 0
        self._begin_document()

    def _begin_document(self) -> None:
        self.long_text: LongText | None = None  # None unless the document has several records
        self.document_tokens, self.document_hash, self.last_characters = 0, hashlib.blake2b(digest_size=8), ""

    @property
    def rows(self) -> int:
        return self.token_count // self.seq if self.packed else len(self.lengths)

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
            said = f" ({', '.join(notes)})" if notes else ""
            raise InputError(
                f"{name}: no example has a token to train on within {self.seq} tokens{said}; raise --seq"
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
            self.format.description,
            tuple(notes),
            self.format.chat,
        )

    def _flush(self) -> None:
        pending, self.pending, self.pending_characters = self.pending, [], 0
        examples = self.mark([segments for _, segments in pending])
        for (record, segments), (ids, trained) in zip(pending, examples, strict=True):
            self._write(record, segments, ids, trained)

    def _write(self, record: Record, segments: Segments, ids: np.ndarray, trained: np.ndarray) -> None:
        """Writes the token `ids` of a record: a document, or a piece of one. Adds the ids that begin and end a document
        if its text lacks them. Cuts an example to the length limit, and drops it if no trained token remains.
        `segments`: the record's text as pairs (text, True if trained on). `trained`: the loss mask of `ids`."""
        texts = [text for text, _ in segments]
        if not record.begun and not "".join(texts).startswith(self.begin_text):
            texts = [self.begin_text, *texts]
            ids, trained = _joined((self.begin, segments[0][1]), (ids, trained))
        self.last_characters = (self.last_characters + "".join(texts)[-64:])[-64:]
        ended = self.last_characters.rstrip().endswith(self.end_text)  # as a chat template does
        if not record.goes_on and not ended:
            ids, trained = _joined((ids, trained), (self.end, segments[-1][1]))
        if ids.max(initial=0) >= self.vocabulary_size:
            raise InputError(
                f"{record.where}: the tokenizer gives token id {ids.max()}, but the model has only "
                f"{self.vocabulary_size} ids; use the tokenizer that belongs to the model"
            )
        if self.trained is not None:
            room = self._room_for(trained)
            self.truncated += len(room) < len(ids)
            ids, trained = ids[room], trained[room]
            if not trained[self.target_tokens is None :].any():  # a decoder's first token is never a label
                self.dropped += 1
                self._begin_document()
                return
            self.trained.append(trained)
        self.tokens.append(ids)
        self.token_count += len(ids)
        self.document_tokens += len(ids)
        for text in texts:
            self.document_hash.update(text.encode())
        if not record.goes_on:
            self._end_document(record)

    def _room_for(self, trained: np.ndarray) -> np.ndarray:
        indices = np.arange(len(trained))
        if self.target_tokens is None:
            return indices[: self.seq + 1]
        # Source and target have separate limits, so a long prompt does not shorten the answer.
        first = int(trained.argmax())
        source = min(first, self.seq - self.target_tokens)
        return np.concatenate([indices[:source], indices[first : first + self.target_tokens]])

    def _end_document(self, record: Record) -> None:
        self.lengths.append(self.document_tokens)
        self.keys.append(int.from_bytes(self.document_hash.digest(), "little"))
        file, number = _PLACE.fullmatch(record.where).groups(default="0")
        self.places.extend((self.files.setdefault(file, len(self.files)), int(number)))
        self._begin_document()


def _joined(*parts: tuple[Iterable[int], np.ndarray | bool]) -> Example:
    """Concatenates pairs (token ids, loss mask). A mask may be one bool for all ids."""
    trained = [np.broadcast_to(trained, len(ids)) for ids, trained in parts]
    return np.concatenate([np.asarray(ids, np.int32) for ids, _ in parts]), np.concatenate(trained)
