"""From documents to batches: rows without hidden state, labels that say what is trained.

Text is **packed**: every document is followed by an end-of-text token, all are laid end to end and cut into rows of
T inputs; row r reads tokens rT .. rT + T, so neighbouring rows share one token (the last label of one is the first
input of the next) and no prediction is lost. Attention crosses document ends inside a row, as when GPT-2 was trained,
unless a document mask is asked for: then positions restart after each end-of-text token, and nobody is asked to predict
the first token of a document from the end of the one before.

**Examples** (conversations, prompts with completions) are never joined: one per row, padded on the right to the longest
of the batch. Right padding needs no attention mask: attention is causal, so no real token sees what stands after it,
and the outputs at padding are not trained (label -100, set by position: the padding id may be the end-of-text id, and
the true end-of-text is trained all the same).

A batch is a pure function of (seed, step). Epoch e is a permutation drawn from a generator seeded with (seed, e);
nothing remembers a position, so a resumed run reads exactly what the uninterrupted one would have read.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem.core.batch import Batch
from lowmem.core.loss import IGNORED as IGNORED_LABEL
from lowmem.data.chat_templates import set_chat_template
from lowmem.data.documents import Documents, hold_out, read_documents
from lowmem.data.prepared import Preparation, content_key
from lowmem.data.sources import open_source
from lowmem.data.stored import ArrayFolder
from lowmem.data.tokenizer import is_byte_level
from lowmem.errors import InputError
from lowmem.settings import Settings

STREAMED_EVALUATION_ROWS = 1024


class Rows:
    """A deterministic sequence of batches of `batch_rows` rows over `documents`.

    With a `seed` it is endless, every epoch in another order, and a batch may straddle two epochs. With `seed` None
    (for evaluation) rows come in their order, the last batch may be smaller, and batch i is batch i modulo `len()`.
    `fixed` makes every batch the first one, which is then a whole epoch.
    """

    def __init__(
        self,
        documents: Documents,
        seq: int,
        batch_rows: int,
        seed: int | None,
        end_of_text: int,
        document_mask: bool = False,
        fixed: bool = False,
    ):
        self.documents, self.seq, self.batch_rows, self.seed = documents, seq, batch_rows, seed
        self.end_of_text, self.document_mask, self.fixed = end_of_text, document_mask, fixed
        self.offsets = np.concatenate([[0], np.cumsum(documents.lengths)])
        self.rows = max(len(documents.tokens) - 1, 0) // seq if documents.packed else len(documents.lengths)
        self._order = functools.lru_cache(maxsize=2)(self._permutation)  # what is cached can always be made again

    def __len__(self) -> int:
        """Batches that hold every row once."""
        return math.ceil(self.rows / self.batch_rows)

    @property
    def steps_per_epoch(self) -> float:
        return 1.0 if self.fixed else self.rows / self.batch_rows

    def batch(self, step: int) -> Batch:
        """The batch of optimizer step `step`, counted from 0."""
        rows = self._rows_of(step)
        return self._packed(rows) if self.documents.packed else self._padded(rows)

    def where(self, step: int) -> list[str]:
        """Where the texts of training batch `step` were read, in its order: ["a.jsonl:17-23", "book.txt at 41.20%"]."""
        found = []
        for row in self._rows_of(step).tolist():
            if not self.documents.packed:
                found += self.documents.where(slice(row, row + 1))
                continue
            start = row * self.seq
            first, last = np.searchsorted(self.offsets, [start, start + self.seq], side="right") - 1
            names = self.documents.where(slice(first, last + 1))
            if first == last:  # a piece of a long document
                names = [f"{names[0]} at {(start - self.offsets[first]) / self.documents.lengths[first]:.2%}"]
            found += names
        return list(dict.fromkeys(found))

    def _rows_of(self, step: int) -> np.ndarray:
        step = 0 if self.fixed else step
        if self.seed is None:
            start = step % len(self) * self.batch_rows
            return np.arange(start, min(start + self.batch_rows, self.rows))
        places = np.arange(step * self.batch_rows, (step + 1) * self.batch_rows)
        return np.array([self._order(int(place) // self.rows)[place % self.rows] for place in places])

    def _permutation(self, epoch: int) -> np.ndarray:
        # RandomState and not default_rng: numpy promises that its stream never changes, so old runs can be resumed.
        generator = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
        return np.random.RandomState(generator).permutation(self.rows)

    def _packed(self, rows: np.ndarray) -> Batch:
        starts = rows * self.seq
        tokens = np.stack([self.documents.tokens[start : start + self.seq + 1] for start in starts]).astype(np.int64)
        input_ids, labels = tokens[:, :-1], tokens[:, 1:]
        if not self.document_mask:
            return Batch(_tensor(input_ids), _tensor(labels))
        ends = input_ids == self.end_of_text
        starts = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)  # the first position after an end
        places = np.arange(self.seq)
        return Batch(
            _tensor(input_ids),
            _tensor(np.where(ends, IGNORED_LABEL, labels)),
            _tensor(places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)),
            _tensor(np.cumsum(starts, axis=1, dtype=np.int32)),
        )

    def _padded(self, rows: np.ndarray) -> Batch:
        lengths = self.documents.lengths[rows] - 1  # the last token is only a label
        input_ids = np.full((len(rows), lengths.max()), self.end_of_text, np.int64)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            span = slice(self.offsets[row], self.offsets[row + 1])
            tokens = self.documents.tokens[span].astype(np.int64)
            input_ids[index, :length] = tokens[:-1]
            labels[index, :length] = np.where(self.documents.trained[span], tokens, IGNORED_LABEL)[1:]
        return Batch(_tensor(input_ids), _tensor(labels))


@dataclass(frozen=True)
class Data:
    """A run's batches. `evaluation` has no rows (and length 0) where nothing could or should be held out. `fingerprint`
    changes with any token, the vocabulary, or how rows are cut; `description` is to be said in the log. `keep` gives
    the tokens their place in the run's folder, for who goes on from there; `close` removes them if it was not called.
    """

    train: Rows
    evaluation: Rows
    fingerprint: str
    description: str
    keep: Callable[[], None]
    close: Callable[[], None]


def load_data(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int, folder: Path | None = None
) -> Data:
    """Read, tokenize, hold out and cut into rows, as the settings say; `vocabulary_size`: ids that the model embeds;
    `folder`: the run's, where the tokens are looked for first and, once `Data.keep` is called, kept.

    Held out is what `eval_data` names, or the source's own validation split, or `eval_fraction` of the training source
    (by document). `steps` bounds what is read of a streamed source. Raises InputError with the place in the data.
    """
    if settings.chat_template is not None:
        set_chat_template(tokenizer, settings.chat_template)
    seq, batch, steps, eval_data = settings.seq, settings.batch, settings.steps, settings.eval_data
    source = open_source(settings.data, settings.text_field, steps)
    evaluated = source if eval_data is None else open_source(eval_data, settings.text_field, steps)
    needed_rows = batch if settings.fixed_batch else math.ceil((steps or 0) * batch / (1 - settings.eval_fraction)) + 1
    rows_limit = needed_rows if source.streamed else None

    def read(folder: ArrayFolder) -> tuple[Documents, Documents, str]:
        load = functools.partial(
            read_documents,
            text_field=settings.text_field,
            train_on=settings.train_on,
            tokenizer=tokenizer,
            seq=seq,
            vocabulary_size=vocabulary_size,
            folder=folder,
        )
        train = load(source, source.train, rows_limit=rows_limit)
        if eval_data is None and source.evaluation is None:
            return hold_out(train, settings.eval_fraction, seq, folder)
        records = evaluated.train if evaluated.evaluation is None else evaluated.evaluation
        evaluation = load(evaluated, records, rows_limit=STREAMED_EVALUATION_ROWS if evaluated.streamed else None)
        return train, evaluation, f"evaluated on {evaluated.name}" + "".join(f", {note}" for note in evaluation.notes)

    key = content_key(settings, tokenizer, vocabulary_size, rows_limit, [source, evaluated])
    preparation = Preparation(folder, key)
    train, evaluation, held_out = preparation.find(tokenizer) or preparation.make(read)
    try:
        end_of_text = tokenizer.eos_token_id
        train_rows = Rows(train, seq, batch, settings.seed, end_of_text, settings.document_mask, settings.fixed_batch)
        evaluation_rows = Rows(evaluation, seq, batch, None, end_of_text, settings.document_mask)
        for name, rows in ((source.name, train_rows), *([(eval_data, evaluation_rows)] if eval_data else [])):
            if rows.rows == 0:
                raise InputError(
                    f"{name}: its {len(rows.documents.tokens)} tokens do not fill one row of {seq} (+ 1); "
                    f"give more text or a smaller --seq"
                )
        return Data(
            train_rows,
            evaluation_rows,
            _fingerprint(tokenizer, train_rows, evaluation_rows),
            _describe(source.name, train_rows, tokenizer) + f"; {held_out}: {evaluation_rows.rows:,} rows.",
            keep=functools.partial(preparation.keep, train, evaluation, held_out, tokenizer),
            close=preparation.close,
        )
    except BaseException:
        preparation.close()
        raise


def _fingerprint(tokenizer: PreTrainedTokenizerBase, *all_rows: Rows) -> str:
    digest = hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16)
    for rows in all_rows:
        documents = rows.documents
        settings = (rows.seq, rows.document_mask, rows.fixed, documents.packed, str(documents.tokens.dtype))
        digest.update(repr(settings).encode())
        for chunk in documents.tokens.chunks():
            digest.update(chunk)
        if documents.trained is not None:
            digest.update(documents.lengths)
            for chunk in documents.trained.chunks():
                digest.update(chunk)
    return digest.hexdigest()


def _describe(name: str, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> str:
    documents = rows.documents
    unit = "tokens, one per byte (no tokenizer came with the model)" if is_byte_level(tokenizer) else "tokens"
    if documents.packed:
        kind = "documents"
        unused = len(documents.tokens) - 1 - rows.rows * rows.seq
        rest = f"packed into {rows.rows:,} rows of {rows.seq:,} ({unused:,} unused); " + (
            "attention stops at a document's end, which is not asked to predict the next document"
            if rows.document_mask
            else "attention crosses document ends (--document-mask off)"
        )
    else:
        kind, rest = "examples", f"one per row; {documents.description}"
    text = f"{name}: {len(documents.lengths):,} {kind}, {len(documents.tokens):,} {unit}, {rest}"
    return "; ".join([text, *documents.notes])


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
