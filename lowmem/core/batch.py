"""What one optimizer step is computed from: token ids and labels of B rows."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem.core.loss import IGNORED as IGNORED_LABEL
from lowmem.errors import InputError


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T positions, on the CPU.

    input_ids    int64 [B, T]
    labels       int64 [B, T]; labels[b, t] is the token that position t must predict (already shifted), -100 = none;
                 a step needs one at least
    position_ids int64 [B, T], from 0 at every document; None without a document mask, and for examples
    document_ids int32 [B, T], which document of its row a position belongs to; None likewise
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None

    @property
    def trained_tokens(self) -> int:
        """How many positions have a label: what the loss of the step is the mean over. InputError where none has."""
        count = int((self.labels != IGNORED_LABEL).sum())
        if count == 0:
            raise InputError(f"every label of the batch is {IGNORED_LABEL}: there is no token to train on")
        return count

    def to(self, device: torch.device) -> "Batch":
        """The same on `device`."""
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in tensors))

    def micro_batches(self, size: int) -> list["Batch"]:
        """The rows in their order, `size` at a time (the last may be smaller); views, nothing is copied."""
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        parts = (
            (None,) * math.ceil(len(self.labels) / size) if tensor is None else tensor.split(size) for tensor in tensors
        )
        return [Batch(*part) for part in zip(*parts, strict=True)]
