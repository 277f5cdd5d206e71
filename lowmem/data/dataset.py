"""Loads the data of a training run: tokenizes texts, holds some out for evaluation, and cuts them into batches."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem.data.batches import Batches, Rows
from lowmem.data.chat_templates import set_chat_template
from lowmem.data.documents import Documents, hold_out, read_documents, row_inputs
from lowmem.data.formats import refuse_unused_names, with_first_filled
from lowmem.data.pairs import PairBatches
from lowmem.data.prepared import Part, Preparation, content_key
from lowmem.data.records import Reading, Record, Source, first_rows
from lowmem.data.sources import open_source
from lowmem.data.stored import ArrayFolder
from lowmem.data.tables import TABLE_SUFFIXES
from lowmem.data.tokenizer import is_byte_level
from lowmem.errors import InputError
from lowmem.fields import each
from lowmem.settings import Settings
from lowmem.units import counted

STREAMED_EVALUATION_ROWS = 1024


@dataclass(frozen=True)
class Data:
    """Holds the batches of a training run, and functions that keep or delete the files with their tokens."""

    train: Batches
    evaluations: tuple[Batches, ...]  # one for each held-out text
    fingerprint: str  # a hash of all tokens, the vocabulary, and the settings that cut rows
    description: str  # lines for the log
    keep: Callable[[], None]  # stores the tokens in the run's folder, for a resumed run
    close: Callable[[], None]  # deletes the stored tokens, unless `keep` was called
    chat: bool = False  # True if all training texts are conversations


def load_data(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, folder: Path | None = None,
    decoder_start: int | None = None,
) -> Data:  # fmt: skip
    """Reads and tokenizes the data, and cuts them into batches for training and evaluation.

    The held-out texts are `settings.eval_data`, else each data set's held-out split, else a share of its documents.
    `vocabulary_size`: number of ids that the model embeds. `folder`: the run folder, perhaps with tokens of an earlier
    start; None: temporary files. `decoder_start`: the id before each target of an encoder-decoder; None for a decoder.
    """
    if settings.chat_template is not None:
        set_chat_template(tokenizer, settings.chat_template)
    reader = _Reader(settings, tokenizer, vocabulary_size, folder)
    sources = [*reader.sources, *reader.evaluated]
    key = content_key(settings, tokenizer, vocabulary_size, reader.needed_rows, reader.sources, reader.evaluated)
    preparation = Preparation(folder, key)
    parts = preparation.find(tokenizer) or preparation.make(reader.read)
    try:
        cut = [_cut(source, part, row_inputs(settings)) for source, part in zip(sources, parts, strict=True)]
        train, evaluations = _batches(cut, settings, tokenizer.eos_token_id, decoder_start)
        return Data(
            train,
            tuple(batches for batches in evaluations if len(batches)),
            _fingerprint(tokenizer, train, *evaluations),
            "\n".join([_describe(sources, cut, train, tokenizer), *_without_effect(settings, cut)]),
            keep=functools.partial(preparation.keep, parts, tokenizer),
            close=preparation.close,
            chat=all(rows.documents.chat for rows in train.parts),
        )
    except BaseException:
        preparation.close()
        raise


class _Reader:
    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, folder: Path | None
    ):
        self.settings, self.tokenizer, self.vocabulary_size = settings, tokenizer, vocabulary_size
        self.sources = [open_source(spec, Reading.of(settings), folder) for spec in each(settings.data)]
        held_out = Reading.of(settings, held_out=True)
        self.evaluated = [open_source(spec, held_out, folder) for spec in each(settings.eval_data)]
        if settings.split is not None and not any(source.splits for source in self.sources):
            raise InputError(f"--split {settings.split}: none of --data has splits; leave it out")
        for source in self.evaluated:
            if source.weight != 1:
                raise InputError(f"--eval-data {source.name}: held-out texts have no weight; each is read once")
            if sum(other.spec == source.spec for other in self.evaluated) > 1:
                raise InputError(f"--eval-data {source.spec} is given twice; give each held-out text once")
        rows = math.ceil((settings.steps or 0) * settings.batch / (1 - settings.eval_fraction)) + 1
        self.needed_rows = settings.batch if settings.fixed_batch else rows
        self._firsts: dict[str, Record | None] = {}  # {data set: the row that decides its format}, for named columns

    def read(self, folder: ArrayFolder) -> list[Part]:
        """Tokenizes the data sets into files in `folder`. Returns a Part (training and held-out documents) for each
        data set of --data, then for each of --eval-data."""
        paths = [path for source in (*self.sources, *self.evaluated) for path in source.content]
        folder.source_bytes = sum(path.stat().st_size for path in paths if isinstance(path, Path))
        # Splitting off the held-out share writes all tokens again.
        folder.times_written = 1 if self.evaluated or self.settings.eval_fraction == 0 else 2
        parts = []
        for source in self.sources:
            rows = first_rows(source.train, self.settings.max_samples)
            train = self._load(source, rows, None if self.settings.steps is None else self.needed_rows, folder)
            if self.settings.max_samples is not None:
                train = replace(
                    train, notes=(*train.notes, f"at most {counted(self.settings.max_samples, 'rows')} of it read")
                )
            if self.evaluated:
                parts.append(Part(train, None, ""))
            elif source.evaluation is not None and self.settings.eval_fraction > 0:
                held_out, share = self._held_out(source, folder), self.settings.eval_fraction
                said = f", in place of --eval-fraction {share:g}" if share != Settings.eval_fraction else ""
                parts.append(held_out._replace(train=train, held_out=held_out.held_out + said))
            else:
                held_out = hold_out(source.name, train, self.settings.eval_fraction, row_inputs(self.settings), folder)
                parts.append(Part(*held_out))
        named = [self._held_out(source, folder) for source in self.evaluated]
        return [*_without_held_out(parts, folder, named), *named]

    def _load(self, source: Source, records: Iterable[Record], rows: int | None, folder: ArrayFolder) -> Documents:
        limit, reading = rows if source.streamed else None, Reading.of(self.settings)
        if reading.named:
            first, records = with_first_filled(iter(records), reading)
            self._firsts.setdefault(source.spec, first)
            self._check_named_columns(reading)
        return read_documents(source, records, limit, self.settings, self.tokenizer, self.vocabulary_size, folder)

    def _check_named_columns(self, reading: Reading) -> None:
        """Refuses unused names of columns (formats.py) when the first row of each data set is known."""
        sources = {source.spec: source for source in (*self.sources, *self.evaluated)}
        if self._firsts.keys() < sources.keys():
            return
        for spec, first in self._firsts.items():
            tables = (path for path in sources[spec].content if str(path).lower().endswith(TABLE_SUFFIXES))
            if first is not None and not first.named and any(tables):
                return  # a text, and behind it tables whose columns are not known yet
        refuse_unused_names([*filter(None, self._firsts.values())], reading)

    def _held_out(self, source: Source, folder: ArrayFolder) -> Part:
        records = source.train if source.evaluation is None else source.evaluation
        documents = self._load(source, records, STREAMED_EVALUATION_ROWS, folder)
        said = [f"evaluated on {source.name}"] + [f"split {source.held_out}"] * bool(source.held_out)
        return Part(None, documents, ", ".join([*said, *documents.notes]))


def _without_held_out(parts: list[Part], folder: ArrayFolder, named: list[Part]) -> Iterator[Part]:
    """Yields `parts`, one for each data set of --data, without training documents that another of these data sets holds
    out. Keeps documents that are also in `named`, the data sets of --eval-data, and counts them in a note."""
    for part in parts:
        train = part.train
        others = [other.evaluation.keys for other in parts if other is not part and other.evaluation is not None]
        elsewhere = np.isin(train.keys, np.concatenate([*others, np.empty(0, np.uint64)]))
        if elsewhere.any():
            note = f"{elsewhere.sum():,} of its documents left out, because other --data hold them out"
            train = replace(train.select(~elsewhere, folder), notes=(*train.notes, note))
        if both := sum(int(np.isin(train.keys, other.evaluation.keys).sum()) for other in named):
            note = f"{both:,} of its documents are trained on although --eval-data has them, too"
            train = replace(train, notes=(*train.notes, note))
        yield part._replace(train=train)


def _cut(source: Source, part: Part, seq: int) -> Part:
    train = part.train and Rows(source.spec, part.train, seq, source.weight)
    return part._replace(train=train, evaluation=part.evaluation and Rows(source.spec, part.evaluation, seq))


def _batches(
    parts: list[Part], settings: Settings, end_of_text: int, decoder_start: int | None
) -> tuple[Batches, list[Batches]]:
    trained = [part.train for part in parts if part.train is not None]
    # A text that is given twice is evaluated once.
    held_out = list({part.evaluation.name: part.evaluation for part in parts if part.evaluation is not None}.values())
    for rows in (*trained, *(held_out if settings.eval_data else [])):
        if rows.count == 0 and len(rows.documents.lengths) == 0:
            raise InputError(f"{rows.name}: all of its documents are held out of other --data; give each text once")
        if rows.count == 0:
            raise InputError(
                f"{rows.name}: its {len(rows.documents.tokens)} tokens do not fill one row of {rows.seq} (+ 1); "
                f"give more text or a smaller --seq"
            )
    make = functools.partial(Batches, end_of_text=end_of_text, document_mask=settings.document_mask, pack=settings.pack)
    if decoder_start is not None:
        make = functools.partial(
            PairBatches, **make.keywords, target_tokens=settings.target_tokens, decoder_start=decoder_start
        )
    train = make(trained, settings.batch, settings.seed, fixed=settings.fixed_batch)
    return train, [make([rows], settings.batch, None) for rows in held_out]


def _fingerprint(tokenizer: PreTrainedTokenizerBase, train: Batches, *evaluations: Batches) -> str:
    digest = hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16)
    for batches in (train, *evaluations):
        for rows in batches.parts:
            documents = rows.documents
            settings = (rows.seq, batches.document_mask, batches.fixed, documents.packed, str(documents.tokens.dtype))
            digest.update(repr(settings if rows.weight == 1 else (*settings, rows.weight)).encode())
            for chunk in documents.tokens.chunks():
                digest.update(chunk)
            if documents.trained is not None:
                digest.update(documents.lengths)
                for chunk in documents.trained.chunks():
                    digest.update(chunk)
    return digest.hexdigest()


def _describe(sources: list[Source], parts: list[Part], train: Batches, tokenizer: PreTrainedTokenizerBase) -> str:
    lines = []
    for source, part in zip(sources, parts, strict=True):
        name = source.name + source.remark
        held_out = part.held_out + (source.remark if part.train is None else "")
        said = [] if part.train is None else [_describe_rows(name, part.train, train, tokenizer)]
        if part.evaluation is not None:
            said.append(f"{held_out}: {counted(part.evaluation.count, 'rows')}" if part.evaluation.count else held_out)
        lines.append("; ".join(said))
    if len(train.parts) == 1 and train.parts[0].weight == 1:
        return "\n".join(["; ".join(lines), *train.remarks])
    shares = (f"{rows.in_epoch:,} of {rows.name} ({rows.in_epoch / train.rows:.1%})" for rows in train.parts)
    return "\n".join([*lines, *train.remarks, f"an epoch has {counted(train.rows, 'rows')}: {', '.join(shares)}"])


def _without_effect(settings: Settings, parts: list[Part]) -> Iterator[str]:
    if settings.eval_data is not None and settings.eval_fraction not in (0, Settings.eval_fraction):
        yield f"--eval-fraction {settings.eval_fraction:g}: nothing of --data is held out next to --eval-data"
    chats = [rows.documents.chat for part in parts for rows in (part.train, part.evaluation) if rows is not None]
    if settings.chat_template is not None and not any(chats):
        yield "--chat-template: no data set has conversations, so it is only exported with the model"


def _describe_rows(name: str, rows: Rows, train: Batches, tokenizer: PreTrainedTokenizerBase) -> str:
    documents = rows.documents
    unit = "tokens of a byte-level tokenizer (none came with the model)" if is_byte_level(tokenizer) else "tokens"
    if documents.packed:
        kind = "documents"
        unused = len(documents.tokens) - 1 - rows.count * rows.seq
        rest = f"packed into {counted(rows.count, 'rows')} of {train.row_tokens:,} ({unused:,} unused); " + (
            "attention stops at a document's end, which is not asked to predict the next document"
            if train.document_mask
            else "attention crosses document ends (--document-mask off)"
        )
    else:
        kind, rest = "examples", "one example per row"
    said = f"{name}: {counted(len(documents.lengths), kind)}, {len(documents.tokens):,} {unit}, {rest}"
    return "; ".join(filter(None, [said, documents.description, *documents.notes]))
