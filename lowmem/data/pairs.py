"""Makes batches for encoder-decoders: each row is a source and a target, padded on the right (docs/data.md).

`Batch.source_mask` excludes padding from sources, and labels of -100 exclude it from the loss.
"""

import numpy as np
import torch

from lowmem.core.batch import WIDTH_MULTIPLE, Batch
from lowmem.core.loss import IGNORED as IGNORED_LABEL
from lowmem.data.batches import Batches, Rows


class PairBatches(Batches):
    """Makes batches of sources (up to S tokens) and targets (up to T = `target_tokens`). `parts`: Rows with `seq` = S +
    T - 1. The decoder reads `decoder_start`, then the target without its last token. Other arguments: see Batches."""

    def __init__(self, *arguments, target_tokens: int, decoder_start: int, **keywords):
        super().__init__(*arguments, **keywords)
        self.row_tokens += 1
        self.target_tokens, self.decoder_start = target_tokens, decoder_start
        self.source_tokens = self.row_tokens - target_tokens
        self.remarks = (
            f"a row is a source of at most {self.source_tokens:,} tokens and a target of at most "
            f"{self.target_tokens:,}; of plain text, those that follow",
        )

    def batch(self, step: int) -> Batch:
        pairs = [self._pair(*self.row(part, row), part.documents.packed) for part, row in self._rows_of(step)]
        sources = _width([len(source) for source, _, _ in pairs], self.source_tokens)
        targets = _width([len(target) for _, target, _ in pairs], self.target_tokens)
        input_ids = np.full((len(pairs), sources + targets), self.end_of_text, np.int64)
        labels = np.full((len(pairs), targets), IGNORED_LABEL)
        mask = np.zeros((len(pairs), sources), bool)
        for row, (source, target, trained) in enumerate(pairs):
            input_ids[row, : len(source)] = source
            mask[row, : len(source)] = True
            input_ids[row, sources : sources + len(target)] = [self.decoder_start, *target[:-1]]
            labels[row, : len(target)] = np.where(trained, target, IGNORED_LABEL)
        return Batch(*map(torch.from_numpy, (input_ids, labels)), source_mask=torch.from_numpy(mask))

    def typical_lengths(self) -> None:
        """Returns None: all rows of a batch have the same length, padding included."""

    def row(self, part: Rows, row: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, trained = part.read(row)
        trained[: self.source_tokens if part.documents.packed else 0] = False
        return tokens, trained

    def _pair(self, tokens: np.ndarray, trained: np.ndarray, packed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Splits a row into (source, target, loss mask of the target). Plain text (`packed`) is split after
        `source_tokens` tokens, an example before its first trained token."""
        if packed:
            cut = self.source_tokens
            return tokens[:cut], tokens[cut:], trained[cut:]
        first = int(trained.argmax())
        return np.append(tokens[:first], self.end_of_text), tokens[first:], trained[first:]


def _width(lengths: list[int], most: int) -> int:
    return min(-(-max(lengths) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, most)
