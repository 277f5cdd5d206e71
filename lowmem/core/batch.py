"""What one optimizer step is computed from: token ids and labels of B rows.

Rows that are not all of one length are padded to be stored, and cut into micro-batches so that little of the padding is
computed: they are sorted, longest first, and each micro-batch is as wide as its longest row. How many rows it has is
chosen for the whole step: of all cuts whose micro-batches stay within the size that was planned for, in positions, the
one that takes least time. A micro-batch is taken to be computed in the time of its positions, or, where these are few,
in that of `least`, for kernels have to be launched and weights be read for any number of them; another sixteenth of
`least` stands for the rest, so that of two cuts that are equal the one with fewer micro-batches is taken. The cut
depends on the lengths, the layout and the device alone, so that a step can be made again with the same bits.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowmem.core.loss import IGNORED as IGNORED_LABEL
from lowmem.errors import InputError

# Positions of a micro-batch below which it takes hardly less time, by device. On a GPU because weights and accumulators
# are read for it (as long as 120 positions of a large model take on an RTX 3060, 260 on an H100) and kernels are
# launched (200 for GPT-2-Large on an RTX 4090, 400 for GPT-2); on the CPU, kernels alone.
LEAST_POSITIONS = {"cuda": 512, "cpu": 64}
WIDTH_MULTIPLE = 8  # of a micro-batch's width: in 16 bit, tensor cores want operands that are multiples of 16 bytes


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T positions, on the CPU; for an encoder-decoder B sources of S tokens, each with T positions of the
    decoder behind it.

    input_ids    int64 [B, T]; [B, S + T]
    labels       int64 [B, T]; labels[b, t] is the token that position t must predict (already shifted), -100 = none;
                 a step needs one at least
    position_ids int64 [B, T], from 0 at every document; None without a document mask, and for examples
    document_ids int32 [B, T], which document of its row a position belongs to; None likewise
    lengths      int64 [B], how many positions of a row are real; behind them no label is trained. None where rows are
                 computed as they are, in their order
    source_mask  bool [B, S], which positions of a source are real, for encoder-decoders; None for decoders
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    lengths: Tensor | None = None
    source_mask: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """What the embeddings are given (decoder.py, encoder_decoder.py)."""
        inputs = self.input_ids, self.position_ids, self.document_ids
        return inputs if self.source_mask is None else (*inputs, self.source_mask)

    def check(self, has_sources: bool) -> None:
        """InputError where this is no batch of a decoder or, if `has_sources`, of an encoder-decoder: labels that are
        not one for each position would be taken for those of the last ones."""
        if has_sources and self.source_mask is None:
            raise InputError("this model is an encoder-decoder: its batches need a source_mask")
        if not has_sources and self.source_mask is not None:
            raise InputError("this model is a decoder: its batches have no source_mask")
        sources = 0 if self.source_mask is None else self.source_mask.shape[1]
        if self.input_ids.shape[1] != sources + self.labels.shape[1]:
            behind = f" behind sources of {sources}" if has_sources else ""
            raise InputError(
                f"input_ids are {self.input_ids.shape[1]} in a row, and labels {self.labels.shape[1]}{behind}; each "
                "position needs one"
            )

    @property
    def trained_tokens(self) -> int:
        """How many positions have a label: what the loss of the step is the mean over. InputError where none has."""
        count = int((self.labels != IGNORED_LABEL).sum())
        if count == 0:
            raise InputError(f"every label of the batch is {IGNORED_LABEL}: there is no token to train on")
        return count

    def to(self, device: torch.device) -> "Batch":
        """The same on `device`."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in vars(self).values()))

    def micro_batches(self, size: int, least: int = 1) -> list["Batch"]:
        """The batch in pieces of at most `size` x T positions: `size` rows at a time in their order (the last may be
        smaller), views of what is here; or, where `lengths` are known, sorted and trimmed as is said above, copies
        without `lengths`."""
        if self.lengths is None:
            tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids, None, self.source_mask)
            count = math.ceil(len(self.labels) / size)
            parts = ([None] * count if tensor is None else tensor.split(size) for tensor in tensors)
            return [Batch(*part) for part in zip(*parts, strict=True)]
        order = self.lengths.argsort(descending=True, stable=True)
        rows_of, first = [], 0
        for rows, width in micro_batch_shapes(self.lengths[order].tolist(), self.labels.shape[1], size, least):
            rows_of.append((order[first : first + rows], width))
            first += rows
        return [self._trimmed(rows, width) for rows, width in rows_of]

    def _trimmed(self, rows: Tensor, width: int) -> "Batch":
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        return Batch(*(None if tensor is None else tensor[rows, :width] for tensor in tensors))


def micro_batch_shapes(lengths: list[int], seq: int, size: int, least: int = 1) -> list[tuple[int, int]]:
    """(rows, width) of each micro-batch of rows with these `lengths`, longest first and at most `seq`; none has more
    than `size` x `seq` positions. `least`: positions in the time of which fewer are computed, too."""
    count = len(lengths)
    widths = [min(-(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq) for length in lengths]
    # From the last row up: the time that rows from `first` on take, and with how many rows in the micro-batch there.
    time, rows_at = np.zeros(count + 1), [0] * count
    for first in reversed(range(count)):
        most = min(count - first, size * seq // widths[first])
        rows = np.arange(most, 0, -1)
        times = np.maximum(widths[first] * rows, least) + least / 16 + time[first + rows]
        best = times.argmin()
        rows_at[first], time[first] = int(rows[best]), times[best]
    shapes, first = [], 0
    while first < count:
        shapes.append((rows_at[first], widths[first]))
        first += rows_at[first]
    return shapes
