"""Cuts tokens into batches: rows of token ids, with labels that say which tokens are trained on (docs/data.md).

Plain text is packed: documents are joined and cut into rows. Examples (conversations, prompts with completions) have a
row each. A batch depends only on (seed, step), so a resumed run reads the same rows.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from lowmem.core.batch import Batch
from lowmem.core.loss import IGNORED as IGNORED_LABEL
from lowmem.data.documents import Documents

PADDED, SORTED, PACKED = "padded", "sorted", "packed"


class Rows:
    """Cuts the tokenized `documents` of a data set into rows of at most `seq` input tokens. An epoch reads each row
    `weight` times. With weight 0.5 it reads one half of the rows, and the next epoch reads the other half."""

    def __init__(self, name: str, documents: Documents, seq: int, weight: float = 1.0):
        self.name, self.documents, self.seq, self.weight = name, documents, seq, weight
        self.offsets = np.concatenate([[0], np.cumsum(documents.lengths)])
        self.count = max(len(documents.tokens) - 1, 0) // seq if documents.packed else len(documents.lengths)
        self.in_epoch = max(round(weight * self.count), min(self.count, 1))

    @property
    def sizes(self) -> np.ndarray:
        documents = self.documents
        return np.full(self.count, self.seq) if documents.packed else np.asarray(documents.lengths) - 1

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (token ids int64 [n], loss mask bool [n]) of a row. The mask is True for tokens that may be trained
        on."""
        if self.documents.packed:
            tokens = self.documents.tokens[row * self.seq : (row + 1) * self.seq + 1]
            return tokens.astype(np.int64), np.ones(self.seq + 1, bool)
        span = slice(self.offsets[row], self.offsets[row + 1])
        return self.documents.tokens[span].astype(np.int64), self.documents.trained[span].copy()

    def where(self, row: int) -> list[str]:
        """Names a row's places in the user's files, such as ["a.jsonl:17-23", "book.txt at 41.20%"]."""
        if not self.documents.packed:
            return self.documents.where(slice(row, row + 1))
        start = row * self.seq
        first, last = np.searchsorted(self.offsets, [start, start + self.seq], side="right") - 1
        names = self.documents.where(slice(first, last + 1))
        if first == last:  # a piece of a long document
            names = [f"{names[0]} at {(start - self.offsets[first]) / self.documents.lengths[first]:.2%}"]
        return names

    def of_epoch(self, epoch: int, seed: int, part: int) -> np.ndarray:
        """Returns the row numbers that an epoch reads, in no particular order. `seed` and `part`, the index of this
        data set, seed the choice."""
        found = []
        # Epochs take their rows one after another from endless repetitions of all rows. A repetition is shuffled if an
        # epoch takes only some of its rows.
        place, end = epoch * self.in_epoch, (epoch + 1) * self.in_epoch
        while place < end:
            number, first = divmod(place, self.count)
            taken = min(end - place, self.count - first)
            whole = taken == self.count
            rows = np.arange(self.count) if whole else _permutation(self.count, seed, number, part + 1)
            found.append(rows[first : first + taken])
            place += taken
        return np.concatenate(found)


class Batches:
    """Makes a deterministic sequence of batches from the rows of several data sets, `parts`.

    If `seed` is None (evaluation), rows keep their order, and the final batch may be smaller. Otherwise, the sequence
    never ends, and each epoch has a new order. `end_of_text`: the token id after each document, and of padding.
    `document_mask`: attention stops at the ends of packed documents. `fixed`: every batch is the first one. `pack`:
    examples are padded to the longest (PADDED), sorted by length into micro-batches (SORTED), or share rows (PACKED).
    """

    remarks: tuple[str, ...] = ()  # sentences for the log's description of the data

    def __init__(
        self, parts: Sequence[Rows], batch_rows: int, seed: int | None, end_of_text: int, document_mask: bool = False,
        fixed: bool = False, pack: str = SORTED,
    ):  # fmt: skip
        self.parts, self.batch_rows, self.seed, self.end_of_text = tuple(parts), batch_rows, seed, end_of_text
        self.document_mask, self.fixed, self.pack = document_mask, fixed, pack
        self.row_tokens = self.parts[0].seq if parts else 0
        self._starts = np.cumsum([0, *(part.count for part in parts)])  # row numbers go through all parts
        self.rows = int(self._starts[-1]) if seed is None else sum(part.in_epoch for part in parts)
        self._order = functools.lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        return math.ceil(self.rows / self.batch_rows)

    @property
    def steps_per_epoch(self) -> float:
        return 1.0 if self.fixed else self.rows / self.batch_rows

    def row(self, part: Rows, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (token ids int64 [n], loss mask bool [n]) of a row. The first token is only an input, the last only a
        label."""
        tokens, trained = part.read(row)
        trained[0] = False
        if part.documents.packed and self.document_mask:
            trained[1:] &= tokens[:-1] != self.end_of_text  # does not predict the next document
        return tokens, trained

    def batch(self, step: int) -> Batch:
        """Returns the batch of optimizer step `step`, counted from 0."""
        chosen = self._rows_of(step)
        contents = [self.row(part, row) for part, row in chosen]
        sizes = [len(tokens) - 1 for tokens, _ in contents]
        seq = self.parts[0].seq
        ragged = self.pack != PADDED and not all(part.documents.packed for part, _ in chosen)
        masked = self.document_mask and any(part.documents.packed for part in self.parts)
        places, lengths = [(row, 0) for row in range(len(sizes))], sizes
        if ragged and self.pack == PACKED:
            places, lengths = _first_fit(sizes, seq)
            masked = True
        input_ids = np.full((len(lengths), seq if ragged else max(lengths)), self.end_of_text, np.int64)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        starts = np.zeros(input_ids.shape, bool)  # the first positions of documents, except at the start of a row
        for (part, _), (tokens, trained), (row, first) in zip(chosen, contents, places, strict=True):
            span = slice(first, first + len(tokens) - 1)
            input_ids[row, span] = tokens[:-1]
            labels[row, span] = np.where(trained, tokens, IGNORED_LABEL)[1:]
            starts[row, first] = first > 0
            if part.documents.packed and self.document_mask:  # an example is one document
                starts[row, span][1:] = tokens[:-2] == self.end_of_text
        batch = {"input_ids": input_ids, "labels": labels}
        if masked:
            positions = np.arange(input_ids.shape[1])
            batch["position_ids"] = positions - np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
            batch["document_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
        if ragged:
            batch["lengths"] = np.array(lengths)
        return Batch(**{name: torch.from_numpy(array) for name, array in batch.items()})

    def typical_lengths(self) -> list[int] | None:
        """Returns the row lengths of a typical batch, in tokens, longest first; None if all rows of a batch have the
        same length, padding included."""
        if self.pack == PADDED or all(part.documents.packed for part in self.parts):
            return None
        if self.fixed:
            lengths = self.batch(0).lengths
            return None if lengths is None else sorted(lengths.tolist(), reverse=True)
        in_epoch = [part.count if self.seed is None else part.in_epoch for part in self.parts]
        of_parts = [_quantiles(part.sizes, count) for part, count in zip(self.parts, in_epoch, strict=True)]
        lengths = _quantiles(np.concatenate(of_parts), self.batch_rows)[::-1].tolist()
        return sorted(_first_fit(lengths, self.parts[0].seq)[1], reverse=True) if self.pack == PACKED else lengths

    def where(self, step: int) -> list[str]:
        """Names the places in the user's files that the rows of a batch come from, each once, in order."""
        return list(dict.fromkeys(name for part, row in self._rows_of(step) for name in part.where(row)))

    def _rows_of(self, step: int) -> list[tuple[Rows, int]]:
        step = 0 if self.fixed else step
        if self.seed is None:
            start = step % len(self) * self.batch_rows
            numbers = np.arange(start, min(start + self.batch_rows, self.rows))
        else:
            places = range(step * self.batch_rows, (step + 1) * self.batch_rows)
            numbers = np.array([self._order(place // self.rows)[place % self.rows] for place in places])
        parts = np.searchsorted(self._starts, numbers, side="right") - 1
        return [
            (self.parts[part], int(number - self._starts[part])) for part, number in zip(parts, numbers, strict=True)
        ]

    def _epoch(self, epoch: int) -> np.ndarray:
        rows = [
            start + part.of_epoch(epoch, self.seed, index)
            for index, (part, start) in enumerate(zip(self.parts, self._starts, strict=False))
        ]
        return np.concatenate(rows)[_permutation(self.rows, self.seed, epoch)]


def _quantiles(sizes: np.ndarray, count: int) -> np.ndarray:
    return np.sort(sizes)[((np.arange(count) + 0.5) / count * len(sizes)).astype(int)]


def _first_fit(sizes: Sequence[int], seq: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Packs examples of `sizes` tokens into rows of `seq` tokens, by first-fit decreasing: at most 11/9 of the smallest
    possible number, plus one. Returns each example's (row, first position), and the rows' lengths."""
    places, filled, rows = [(0, 0)] * len(sizes), np.zeros(len(sizes), np.int64), 0
    for piece in np.argsort([-size for size in sizes], kind="stable"):
        row = int(np.argmax(filled[: rows + 1] <= seq - sizes[piece]))  # the first that is true; a new row is empty
        places[piece] = row, int(filled[row])
        filled[row] += sizes[piece]
        rows = max(rows, row + 1)
    return places, filled[:rows].tolist()


def _permutation(count: int, *seeds: int) -> np.ndarray:
    # numpy promises that RandomState's stream never changes (default_rng's may), so old runs can be resumed.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds))).permutation(count)
