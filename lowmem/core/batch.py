"""Holds the token ids and labels of one optimizer step, and cuts them into micro-batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowmem.core.encoder_decoder import decoder_start
from lowmem.core.loss import IGNORED as IGNORED_LABEL
from lowmem.core.recompute import Dropout
from lowmem.errors import InputError, first_line

# {device: number of positions}. A micro-batch with fewer positions takes hardly less time. A GPU reads all weights and
# accumulators, which takes as long as 120 positions of a large model on an RTX 3060, 260 on an H100. It also launches
# kernels, which takes as long as 200 positions of GPT-2-Large on an RTX 4090, 400 of GPT-2. A CPU only launches.
LEAST_POSITIONS = {"cuda": 512, "cpu": 64}
_DTYPES = {"document_ids": (torch.int32, torch.int64), "source_mask": (torch.bool,)}  # other fields: int64
WIDTH_MULTIPLE = 8  # divides a micro-batch's width: tensor cores need multiples of 16 bytes, which are 8 numbers


@dataclass(frozen=True, eq=False)
class Batch:
    """Holds token ids and labels of B rows of T positions. For an encoder-decoder, each row also has S source tokens.
    The tensors are on the CPU, except in a copy that `to` makes."""

    input_ids: Tensor  # int64 [B, T]; for an encoder-decoder [B, S + T]
    labels: Tensor  # int64 [B, T]: the token that each position must predict (already shifted), -100 = none
    position_ids: Tensor | None = None  # int64 [B, T], from 0 in each document; None without a document mask
    document_ids: Tensor | None = None  # int32 or int64 [B, T]: number of the position's document, or None
    lengths: Tensor | None = None  # int64 [B]: positions of each row without padding; None: rows are used as they are
    source_mask: Tensor | None = None  # bool [B, S]: real positions of each source; None for decoders

    @classmethod
    def from_hf(cls, batch: Mapping, decoder_start: int | None = None, padding: int | None = None) -> "Batch":
        """Makes a Batch from a dict as transformers' collators return it. Raises InputError for other keys or shapes,
        and for padding on the left.

            input_ids       int [B, T], padded on the right; for an encoder-decoder, the source
            attention_mask  [B, T], 1 for real tokens, 0 for padding, which is not trained on; optional
            labels          int [B, T], *not* shifted, -100 if not trained; for an encoder-decoder, the target [B, T']

        `decoder_start`: first id that an encoder-decoder's decoder reads; None for other models. `padding`: id that
        it reads in the place of a label of -100; None for `decoder_start`.
        """
        try:
            batch = {name: torch.as_tensor(value).cpu() for name, value in batch.items() if value is not None}
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"a batch has tensors, or lists of rows of equal length: {first_line(error)}") from None
        if "token_type_ids" in batch and not batch["token_type_ids"].any():
            del batch["token_type_ids"]  # some tokenizers of decoders give zeros
        unknown = batch.keys() - {"input_ids", "attention_mask", "labels"}
        missing = {"input_ids", "labels"} - batch.keys()
        if unknown or missing:
            said = f"{', '.join(sorted(unknown))} cannot be used" if unknown else f"it has no {', '.join(missing)}"
            raise InputError(f"a batch has input_ids, labels and, for padding, attention_mask; {said}")
        input_ids, labels = batch["input_ids"], batch["labels"]
        mask = batch.get("attention_mask", torch.ones_like(input_ids)).bool()
        if input_ids.dim() != 2 or mask.shape != input_ids.shape or labels.dim() != 2 or len(labels) != len(input_ids):
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
            raise InputError(f"input_ids and attention_mask must be [B, T] both, and labels [B, T]: {shapes}")
        if not input_ids.numel() or not labels.numel():
            raise InputError("the batch has no tokens")
        if input_ids.is_floating_point() or labels.is_floating_point():
            raise InputError(f"input_ids are {input_ids.dtype} and labels {labels.dtype}: both are integers")
        input_ids, labels = input_ids.long(), labels.long()
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            raise InputError('attention_mask is 0 before a 1: pad on the right (tokenizer.padding_side = "right")')
        if decoder_start is not None:
            start = torch.full_like(labels[:, :1], decoder_start)
            unread = decoder_start if padding is None else padding
            before = torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED_LABEL, unread)], 1)
            return cls(torch.cat([input_ids, before], 1), labels, source_mask=mask)
        if labels.shape != input_ids.shape:
            raise InputError(f"input_ids are {list(input_ids.shape)} and labels {list(labels.shape)}: both are [B, T]")
        following = labels.masked_fill(~mask, IGNORED_LABEL)[:, 1:]
        nothing = torch.full_like(labels[:, :1], IGNORED_LABEL)  # no token follows the last one
        lengths = None if mask.all() else mask.sum(1).clamp(min=1)
        return cls(input_ids, torch.cat([following, nothing], 1), lengths=lengths)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """Returns the arguments of `Decoder.embed`: token ids, position ids, document ids and, for an encoder-decoder,
        the source mask."""
        inputs = self.input_ids, self.position_ids, self.document_ids
        return inputs if self.source_mask is None else (*inputs, self.source_mask)

    @property
    def sources(self) -> int:
        return 0 if self.source_mask is None else self.source_mask.shape[-1]  # S, and 0 for a decoder

    def check_fields(self) -> None:
        """Raises InputError if a field has a wrong type, dtype, shape or value."""
        for name, tensor in vars(self).items():
            dtypes = _DTYPES.get(name, (torch.int64,))
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            if found not in dtypes and not (tensor is None and name not in ("input_ids", "labels")):
                raise InputError(f"{name} of a Batch is {found}: it must be a tensor of {dtypes[0]}")
        if self.input_ids.dim() != 2 or self.labels.dim() != 2:
            raise InputError("input_ids and labels have two dimensions, [rows, tokens]: write ids[None] for one row")
        rows, width = self.labels.shape
        shapes = {"input_ids": self.input_ids.shape[1:], "source_mask": (self.sources,), "lengths": ()}
        for name, tensor in vars(self).items():
            shape = [rows, *shapes.get(name, (width,))]
            if tensor is not None and list(tensor.shape) != shape:
                raise InputError(f"{name} of a Batch is {list(tensor.shape)}: it must be {shape}")
        if not self.input_ids.numel() or not width:
            raise InputError("the batch has no tokens")
        if self.position_ids is not None and not 0 <= self.position_ids.min() <= self.position_ids.max() < width:
            raise InputError(f"position_ids are from 0 to {width - 1}, the last place in a row")
        if self.lengths is None:
            return
        if self.source_mask is not None:
            raise InputError("lengths are for decoders: an encoder-decoder's batch has a source_mask")
        if not 1 <= self.lengths.min() <= self.lengths.max() <= width:
            raise InputError(f"lengths are from 1 to {width}, the width of the rows")
        beyond = torch.arange(width, device=self.lengths.device) >= self.lengths[:, None]
        if (beyond & (self.labels != IGNORED_LABEL)).any():
            raise InputError(f"a label is beyond its row's length: it must be {IGNORED_LABEL}")

    def check(self, has_sources: bool) -> None:
        """Raises InputError if the batch does not suit the model: an encoder-decoder if `has_sources`, else a decoder.
        Also raises it if a decoder's labels are the `input_ids` themselves, not shifted by one token."""
        if has_sources and self.source_mask is None:
            raise InputError("this model is an encoder-decoder: its batches need a source_mask")
        if not has_sources and self.source_mask is not None:
            raise InputError("this model is a decoder: its batches have no source_mask")
        if self.input_ids.shape[1] != self.sources + self.labels.shape[1]:
            behind = f" behind sources of {self.sources}" if has_sources else ""
            raise InputError(
                f"input_ids are {self.input_ids.shape[1]} in a row, and labels {self.labels.shape[1]}{behind}; each "
                "position needs one"
            )
        if not has_sources and self._is_not_shifted():
            raise InputError(
                "labels are the input_ids themselves: each position must have the token after it; lowmem.Batch.from_hf "
                "shifts the labels of a dict"
            )

    def _is_not_shifted(self) -> bool:
        trained = self.labels != IGNORED_LABEL
        if (trained & (self.labels != self.input_ids)).any():
            return False
        # The labels are the input_ids. That is right only if each next token is the same one.
        return bool((trained[:, :-1] & (self.labels[:, :-1] != self.input_ids[:, 1:])).any())

    @property
    def labeled_tokens(self) -> int:
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def trained_tokens(self) -> int:
        """Returns the number of positions with a label. Raises InputError if there is none."""
        count = self.labeled_tokens
        if count == 0:
            raise InputError(f"every label of the batch is {IGNORED_LABEL}: there is no token to train on")
        return count

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in vars(self).values()))

    def micro_batches(self, size: int, least: int = 1) -> list["Batch"]:
        """Cuts the batch into micro-batches. Without `lengths`, each is a view of at most `size` rows. With `lengths`,
        sorts the rows, longest first, and cuts them by `micro_batch_shapes`. Then each has at most `size` x T positions
        (T: the batch's width). One with fewer than `least` positions is assumed to take as long as one with `least`."""
        if self.lengths is None:
            tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids, None, self.source_mask)
            count = math.ceil(len(self.labels) / size)
            parts = ([None] * count if tensor is None else tensor.split(size) for tensor in tensors)
            return [Batch(*part) for part in zip(*parts, strict=True)]
        # The cut depends only on the lengths, the layout and the device, so a repeated step has the same bits.
        order = self.lengths.argsort(descending=True, stable=True)
        shapes = micro_batch_shapes(self.lengths[order].tolist(), self.labels.shape[1], size, least)
        rows_of = order.split([rows for rows, _ in shapes])
        return [self._trimmed(rows, width) for rows, (_, width) in zip(rows_of, shapes, strict=True)]

    def _trimmed(self, rows: Tensor, width: int) -> "Batch":
        tensors = (self.input_ids, self.labels, self.position_ids, self.document_ids)
        return Batch(*(None if tensor is None else tensor[rows, :width] for tensor in tensors))


@dataclass(frozen=True)
class Work:
    """Holds the micro-batches of one step that this rank (process) computes, or only one group of them."""

    micro_batches: Sequence[Batch]
    dropouts: Sequence[Dropout]  # seeds of the dropout masks of each micro-batch
    scale: float  # multiplies the sum of all tokens' losses before backward
    groups: Sequence[slice] = ()  # micro-batches that run through each segment (consecutive blocks) together
    positions: int = 0  # in the micro-batches of all ranks, with padding

    def group(self, places: slice) -> "Work":
        return Work(self.micro_batches[places], self.dropouts[places], self.scale)


def as_batch(batch: Batch | Mapping, decoder, most: tuple[float, int, int | None] | None = None) -> Batch:
    """Returns `batch`, converted by `Batch.from_hf` if it is a dict. `decoder`: a Decoder. `most`: (rows, tokens in a
    row, tokens in a target) of the largest batch that the plan allows. Unless it is None, raises InputError for a
    larger batch, a wrong field or a wrong token id."""
    if not isinstance(batch, Batch | Mapping):
        raise InputError(f"a batch is a lowmem.Batch or a dict, and this is a {type(batch).__name__}")
    if not isinstance(batch, Batch):
        config = decoder.model.config
        batch = Batch.from_hf(batch, decoder_start(config), getattr(config, "pad_token_id", None))
    if most is None:
        return batch
    batch.check_fields()
    (rows, width), words = batch.input_ids.shape, decoder.model.config.vocab_size
    most_rows, widest, most_target = most
    if rows > most_rows:
        raise InputError(f"the batch has {rows} rows, and the plan is for at most {most_rows}: set Settings(batch=)")
    if width > widest:
        raise InputError(f"the batch is {width} tokens wide, and the plan is for at most {widest}: set Settings(seq=)")
    target = batch.labels.shape[1]
    if most_target is not None and (target > most_target or batch.sources > widest - most_target):
        raise InputError(
            f"sources have {batch.sources} tokens and targets {target}, and the plan is for at most "
            f"{widest - most_target} and {most_target}: set Settings(seq=, target_tokens=)"
        )
    lowest, highest = int(batch.input_ids.min()), int(batch.input_ids.max())
    if not 0 <= lowest <= highest < words:
        raise InputError(f"token ids are from 0 to {words - 1:,}; the batch has some from {lowest:,} to {highest:,}")
    trained, words = batch.labels[batch.labels != IGNORED_LABEL], len(decoder.head_weight)
    if trained.numel() and not 0 <= (lowest := int(trained.min())) <= (highest := int(trained.max())) < words:
        said = f"labels are {IGNORED_LABEL} or token ids from 0 to {words - 1:,}"
        raise InputError(f"{said}; the batch has some from {lowest:,} to {highest:,}")
    return batch


def micro_batch_shapes(lengths: list[int], seq: int, size: int, least: int = 1) -> list[tuple[int, int]]:
    """Cuts rows into consecutive micro-batches with the least estimated time, and returns (rows, width) of each.
    `lengths`: tokens of each row, longest first. A micro-batch has at most `size` x `seq` positions. One with fewer
    than `least` positions is assumed to take as long as one with `least`."""
    count = len(lengths)
    widths = [min(-(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq) for length in lengths]
    # Goes from the last row to the first. `time[first]`: least time for all rows from `first` on. `rows_at[first]`:
    # number of rows in the first of their micro-batches.
    time, rows_at = np.zeros(count + 1), [0] * count
    for first in reversed(range(count)):
        most = min(count - first, size * seq // widths[first])
        rows = np.arange(most, 0, -1)
        # Launching kernels and reading weights take as long as `least` positions. `least` / 16: if two cuts take
        # equally long otherwise, the one with fewer micro-batches is taken.
        times = np.maximum(widths[first] * rows, least) + least / 16 + time[first + rows]
        best = times.argmin()
        rows_at[first], time[first] = int(rows[best]), times[best]
    shapes, first = [], 0
    while first < count:
        shapes.append((rows_at[first], widths[first]))
        first += rows_at[first]
    return shapes
