"""A run's data: what the settings name, read, tokenized, held out in part, and cut into batches."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem.data.batches import Batches, Rows
from lowmem.data.chat_templates import set_chat_template
from lowmem.data.documents import Documents, hold_out, read_documents
from lowmem.data.pairs import PairBatches
from lowmem.data.prepared import Part, Preparation, content_key
from lowmem.data.records import Record, Source
from lowmem.data.sources import open_source
from lowmem.data.stored import ArrayFolder
from lowmem.data.tokenizer import is_byte_level
from lowmem.errors import InputError
from lowmem.settings import Settings, each

STREAMED_EVALUATION_ROWS = 1024


@dataclass(frozen=True)
class Data:
    """A run's batches. `evaluations`: of each text that is held out, none where nothing could or should be.
    `fingerprint` changes with any token, the vocabulary, or how rows are cut; `description` is to be said in the log.
    `keep` gives the tokens their place in the run's folder, for who goes on from there; `close` removes them if it was
    not called.
    """

    train: Batches
    evaluations: tuple[Batches, ...]
    fingerprint: str
    description: str
    keep: Callable[[], None]
    close: Callable[[], None]


def load_data(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, folder: Path | None = None,
    decoder_start: int | None = None,
) -> Data:  # fmt: skip
    """Read, tokenize, hold out and cut into rows, as the settings say; `vocabulary_size`: ids that the model embeds;
    `folder`: the run's, where the tokens are looked for first and, once `Data.keep` is called, kept; `decoder_start`:
    the id that targets begin behind, of an encoder-decoder, None for decoders.

    Held out is what `eval_data` names, or of each source its own validation split, or `eval_fraction` of it (by
    document); nothing, if that is 0. `steps` bounds what is read of a streamed source. Raises InputError with the place
    in the data.
    """
    if settings.chat_template is not None:
        set_chat_template(tokenizer, settings.chat_template)
    seq, batch, steps = settings.seq, settings.batch, settings.steps
    if decoder_start is not None:
        seq -= 1  # all tokens of a row are in it, and none is a label alone (pairs.py)
    sources, evaluated = (
        [open_source(spec, settings.text_field, steps, folder) for spec in each(specs)]
        for specs in (settings.data, settings.eval_data)
    )
    for source in evaluated:
        if source.weight != 1:
            raise InputError(f"--eval-data {source.name}: held-out texts have no weight; each is read once")
        if sum(other.spec == source.spec for other in evaluated) > 1:
            raise InputError(f"--eval-data {source.spec} is given twice; give each held-out text once")
    needed_rows = batch if settings.fixed_batch else math.ceil((steps or 0) * batch / (1 - settings.eval_fraction)) + 1

    def read(folder: ArrayFolder) -> list[Part]:
        files = [path for source in (*sources, *evaluated) for path in source.content if isinstance(path, Path)]
        folder.source_bytes = sum(path.stat().st_size for path in files)
        folder.times_written = 1 if evaluated or settings.eval_fraction == 0 else 2  # again when a share is held out

        def load(source: Source, records: Iterable[Record], rows_limit: int) -> Documents:
            return read_documents(
                source,
                records,
                text_field=settings.text_field,
                train_on=settings.train_on,
                rows_limit=rows_limit if source.streamed else None,
                tokenizer=tokenizer,
                seq=seq,
                target_tokens=settings.target_tokens,
                vocabulary_size=vocabulary_size,
                folder=folder,
            )

        def held_out_of(source: Source) -> Part:
            records = source.train if source.evaluation is None else source.evaluation
            documents = load(source, records, STREAMED_EVALUATION_ROWS)
            said = [f"evaluated on {source.name}"] + [f"split {source.held_out}"] * bool(source.held_out)
            return Part(None, documents, ", ".join([*said, *documents.notes]))

        parts = []
        for source in sources:
            train = load(source, source.train, needed_rows)
            if evaluated:
                parts.append(Part(train, None, ""))
            elif source.evaluation is not None and settings.eval_fraction > 0:
                parts.append(held_out_of(source)._replace(train=train))
            else:
                parts.append(Part(*hold_out(train, settings.eval_fraction, seq, folder)))
        named = [held_out_of(source) for source in evaluated]
        return [*(_with_a_word_on(part, named) for part in _apart(parts, folder)), *named]

    key = content_key(settings, tokenizer, vocabulary_size, needed_rows, sources, evaluated)
    preparation = Preparation(folder, key)
    parts = preparation.find(tokenizer) or preparation.make(read)
    try:
        rows_of = [
            _CutPart(
                source.spec,
                source.name + source.remark,
                part.train and Rows(source.spec, part.train, seq, source.weight),
                part.evaluation and Rows(source.spec, part.evaluation, seq),
                part.held_out + (source.remark if part.train is None else ""),
            )
            for source, part in zip([*sources, *evaluated], parts, strict=True)
        ]
        trained = [rows.train for rows in rows_of if rows.train is not None]
        # A text that is trained on twice is held out of twice, and evaluated once.
        held_out = list({rows.spec: rows.evaluation for rows in rows_of if rows.evaluation is not None}.values())
        for rows in (*trained, *(held_out if evaluated else [])):
            if rows.count == 0 and len(rows.documents.lengths) == 0:
                raise InputError(f"{rows.name}: all of its documents are held out of other --data; give each text once")
            if rows.count == 0:
                raise InputError(
                    f"{rows.name}: its {len(rows.documents.tokens)} tokens do not fill one row of {seq} (+ 1); "
                    f"give more text or a smaller --seq"
                )
        end_of_text, mask = tokenizer.eos_token_id, settings.document_mask
        make = Batches
        if decoder_start is not None:
            make = functools.partial(PairBatches, target_tokens=settings.target_tokens, decoder_start=decoder_start)
        train = make(trained, batch, settings.seed, end_of_text, mask, settings.fixed_batch, settings.pack)
        evaluations = [make([rows], batch, None, end_of_text, mask, pack=settings.pack) for rows in held_out]
        return Data(
            train,
            tuple(batches for batches in evaluations if len(batches)),
            _fingerprint(tokenizer, train, *evaluations),
            _describe(rows_of, train, tokenizer),
            keep=functools.partial(preparation.keep, parts, tokenizer),
            close=preparation.close,
        )
    except BaseException:
        preparation.close()
        raise


class _CutPart(NamedTuple):
    """A source's Part, cut into rows."""

    spec: str
    source: str
    train: Rows | None
    evaluation: Rows | None
    held_out: str


def _apart(parts: list[Part], folder: ArrayFolder) -> list[Part]:
    """`parts` without training documents that are held out of another of them."""
    found = []
    for part in parts:
        others = [other.evaluation.keys for other in parts if other is not part and other.evaluation is not None]
        elsewhere = np.isin(part.train.keys, np.concatenate([*others, np.empty(0, np.uint64)]))
        if elsewhere.any():
            notes = (*part.train.notes, f"{elsewhere.sum():,} of its documents left out, as other --data hold them out")
            part = part._replace(train=replace(part.train.select(~elsewhere, folder), notes=notes))
        found.append(part)
    return found


def _with_a_word_on(part: Part, evaluated: list[Part]) -> Part:
    """`part`, whose training documents stay as they are, with a note on those that are among `evaluated`, too."""
    both = sum(int(np.isin(part.train.keys, other.evaluation.keys).sum()) for other in evaluated)
    if not both:
        return part
    notes = (*part.train.notes, f"{both:,} of its documents are trained on though they are in --eval-data, too")
    return part._replace(train=replace(part.train, notes=notes))


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


def _describe(rows_of: list[_CutPart], train: Batches, tokenizer: PreTrainedTokenizerBase) -> str:
    """A line for each text, and one for what they are mixed to; one line in all for one text that is trained on."""
    lines = []
    pairs = [train.description] if isinstance(train, PairBatches) else []
    for rows in rows_of:
        said = []
        if rows.train is not None:
            tokens = rows.train.seq + bool(pairs)  # all tokens of a source and its target are in the row
            said = [_describe_rows(rows.source, rows.train, tokens, train.document_mask, tokenizer)]
        said += [] if rows.evaluation is None else [f"{rows.held_out}: {rows.evaluation.count:,} rows."]
        lines.append("; ".join(said))
    if len(train.parts) == 1 and train.parts[0].weight == 1:
        return "\n".join(["; ".join(lines), *pairs])
    shares = (f"{rows.in_epoch:,} of {rows.name} ({rows.in_epoch / train.rows:.1%})" for rows in train.parts)
    return "\n".join([*lines, *pairs, f"an epoch has {train.rows:,} rows: {', '.join(shares)}"])


def _describe_rows(
    source: str, rows: Rows, row_tokens: int, document_mask: bool, tokenizer: PreTrainedTokenizerBase
) -> str:  # fmt: skip
    documents = rows.documents
    unit = "tokens, one per byte (no tokenizer came with the model)" if is_byte_level(tokenizer) else "tokens"
    if documents.packed:
        kind = "documents"
        unused = len(documents.tokens) - 1 - rows.count * rows.seq
        rest = f"packed into {rows.count:,} rows of {row_tokens:,} ({unused:,} unused); " + (
            "attention stops at a document's end, which is not asked to predict the next document"
            if document_mask
            else "attention crosses document ends (--document-mask off)"
        )
    else:
        kind, rest = "examples", "one per row"
    text = f"{source}: {len(documents.lengths):,} {kind}, {len(documents.tokens):,} {unit}, {rest}"
    return "; ".join(filter(None, [text, documents.description, *documents.notes]))
