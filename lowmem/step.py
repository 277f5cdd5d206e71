"""The one training step: forward and backward of all micro-batches, the norm, the update. Trained, timed, simulated.

    for group in groups of micro-batches:
        forward    for segment: for micro-batch: keep the boundary
        loss       for micro-batch: final norm and head, chunked; the head's gradient straight into its accumulator
        backward   for segment reversed: for micro-batch: recompute, backward, add into the fp32 accumulators
    embeddings     for micro-batch: backward, from the gradients kept for the first block's input
    norm           over all accumulators; not finite: no update
    update         per unit, just before the next forward needs it (or in `flush`)

One micro-batch per group is ordinary gradient accumulation; one group for the whole step is what lets later versions
keep accumulators for two segments only. Every schedule gives the same bits, because a parameter's gradient is always
summed over micro-batches in their order. A tied embedding gets its two contributions in one order too: the head's of
all micro-batches, then the lookup's of all, which is why the embeddings' backward waits for the last group. It costs
the gradients of the first block's input of the whole batch: B x T x D x 4 bytes (320 MiB for GPT-2-Large at 64 x
1,024; half of that in 16 bit).

A step's loss is the mean over its trained tokens, so each micro-batch counts by its tokens. The update is deferred into
the next forward so that, on a GPU, bringing streamed states over hides behind computation; nothing reads a weight
before its update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowmem import recompute
from lowmem.adam import CPU_SLICE, Hyperparameters, Optimizer, update
from lowmem.blocks import Decoder, Extra
from lowmem.loss import linear_cross_entropy
from lowmem.precision import LossScale
from lowmem.recompute import Dropout, Saved
from lowmem.store import Part, Piece, Store
from lowmem.streaming import Ring, State


@dataclass(frozen=True)
class Schedule:
    """`micro_batch` in sequences, `group` in micro-batches, `segment_blocks` in blocks; `defer`: whether updates wait
    for the next forward."""

    micro_batch: int
    group: int
    segment_blocks: int
    recompute: bool
    defer: bool = True


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean over the step's tokens, in nats; `grad_norm`: before clipping; `updated`: was that finite."""

    loss: float
    grad_norm: float
    updated: bool


class Step:
    """Callable on a batch; holds the updates that wait for the next forward."""

    def __init__(
        self,
        decoder: Decoder,
        store: Store,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        clip_norm: float | None,
        weight_decay: float,
        seed: int,
        loss_scale: LossScale,
    ):
        count = len(decoder.blocks)
        self.segments = [
            range(start, min(start + schedule.segment_blocks, count))
            for start in range(0, count, schedule.segment_blocks)
        ]
        self.ring = Ring(store.device, store.pieces)
        self.schedule, self.loss_scale = schedule, loss_scale
        self._decoder, self._store, self._optimizer = decoder, store, optimizer
        self._clip_norm, self._seed = clip_norm, seed
        self._hyper = Hyperparameters(learning_rate=0.0, weight_decay=weight_decay, update=0)
        self._pending: Iterator[int] | None = None
        self._updated = len(decoder.units)  # units whose weights are those of the step being run
        self._device = store.device
        self._names = {id(p): name for unit in decoder.units for name, p in unit.parameters.items()}
        for unit in decoder.units:
            for name, parameter in unit.parameters.items():
                parameter.register_post_accumulate_grad_hook(_add_into(store.part_of(name), name))

    @property
    def updates(self) -> int:
        """Updates so far; a skipped step is none."""
        return self._hyper.update

    @updates.setter
    def updates(self, value: int) -> None:
        self._hyper = replace(self._hyper, update=value)

    def __call__(self, batch, step: int, learning_rate: float) -> StepResult:
        """`batch`: what data.py makes (input_ids, labels [B, T], ...), on the CPU; `step` names the dropout masks."""
        micro_batches = [piece.to(self._device) for piece in batch.micro_batches(self.schedule.micro_batch)]
        scale = self.loss_scale.scale / batch.trained_tokens
        self._decoder.model.train()
        dropouts = [Dropout(self._seed, step, index) for index in range(len(micro_batches))]
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for start in range(0, len(micro_batches), self.schedule.group):
            group = slice(start, start + self.schedule.group)
            group_losses, group_gradients = self._group(micro_batches[group], dropouts[group], scale)
            losses += group_losses
            gradients += group_gradients
        for index, micro_batch in enumerate(micro_batches):
            self._embed_backward(micro_batch, dropouts[index], gradients[index])
            gradients[index] = None
        norm = self._norm()
        updated = math.isfinite(norm)
        if updated:
            self._hand_over(norm, learning_rate)
        else:
            for part in self._store.parts:
                part.gradient = None
        self.loss_scale.update(updated)
        loss = torch.stack(losses).double().sum().item() / batch.trained_tokens
        return StepResult(loss, norm, updated)

    @torch.no_grad()
    def evaluate(self, batch) -> tuple[float, int]:
        """Sum of the losses of a batch's tokens, and their number; weights as of the last update."""
        self.flush()
        self._decoder.model.eval()
        total = 0.0
        for micro_batch in batch.micro_batches(self.schedule.micro_batch):
            micro_batch = micro_batch.to(self._device)
            hidden, extras = self._decoder.embed(
                micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids
            )
            for index, extra in enumerate(extras):
                hidden = self._decoder.block(index, hidden, extra)
            total += self._loss(self._decoder.final(hidden), micro_batch.labels)[0].item()
        return total, batch.trained_tokens

    def flush(self) -> None:
        """Applies every update that still waits: before anything but a training step reads a weight or a state."""
        self._update_through(len(self._decoder.units) - 1)
        self.ring.synchronize()

    def _group(
        self, micro_batches: Sequence, dropouts: Sequence[Dropout], scale: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per micro-batch: the loss, summed over tokens, and the gradient for the first block's input."""
        # No loop may leave a tensor in a variable of its own: it would live until the group is done.
        self._update_through(0)
        embedded = [self._embed(*pair) for pair in zip(micro_batches, dropouts, strict=True)]
        hidden = [first for first, _ in embedded]
        extras = [extra for _, extra in embedded]
        del embedded

        saved: list[list[Saved]] = [[] for _ in micro_batches]
        for segment in self.segments:
            self._update_through(segment.stop)  # unit 0 is the embedding, so block i is unit i + 1
            for index, dropout in enumerate(dropouts):
                hidden[index], kept = self._segment_forward(segment, hidden[index], extras[index], dropout)
                saved[index].append(kept)
        del kept

        self._update_through(len(self._decoder.units) - 1)
        losses: list[Tensor] = []
        for index, (micro_batch, dropout) in enumerate(zip(micro_batches, dropouts, strict=True)):
            # from here on `hidden` is the gradient on its way down
            micro_loss, hidden[index] = self._head(hidden[index], micro_batch.labels, dropout, scale)
            losses.append(micro_loss)

        for segment in reversed(self.segments):
            for index, dropout in enumerate(dropouts):
                hidden[index] = self._segment_backward(
                    segment, saved[index].pop(), extras[index], dropout, hidden[index]
                )
        return losses, hidden

    # What a step spends its time in. The simulator runs each of these once per shape and then replays it.

    def _embed(self, micro_batch, dropout: Dropout) -> tuple[Tensor, list[Extra]]:
        """The first block's input [B, T, D] and the blocks' extra arguments."""
        dropout.begin(-1, self._device)
        with torch.no_grad():
            return self._decoder.embed(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids)

    def _segment_forward(
        self, segment: range, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout
    ) -> tuple[Tensor, Saved]:
        return recompute.forward(self._decoder, segment, hidden, extras, dropout, self.schedule.recompute)

    def _head(self, hidden: Tensor, labels: Tensor, dropout: Dropout, scale: float) -> tuple[Tensor, Tensor]:
        """Loss of one micro-batch, summed over tokens, and the gradient for the last block's output [B, T, D]."""
        dropout.begin(len(self._decoder.blocks), self._device)
        boundary = hidden.requires_grad_()
        final = self._decoder.final(boundary)
        loss, gradient = self._loss(final.detach(), labels, scale)
        final.backward(gradient.view_as(final).to(final.dtype))
        return loss, boundary.grad

    def _segment_backward(
        self, segment: range, saved: Saved, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
    ) -> Tensor:
        return recompute.backward(self._decoder, segment, saved, extras, dropout, gradient)

    def _embed_backward(self, micro_batch, dropout: Dropout, gradient: Tensor) -> None:
        dropout.begin(-1, self._device)
        hidden, _ = self._decoder.embed(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids)
        hidden.backward(gradient)

    def _norm_of(self, piece: Piece) -> Tensor:
        return torch.linalg.vector_norm(piece.part.gradient[piece.start : piece.stop])

    def _update(self, piece: Piece, state: State) -> None:
        at_once = CPU_SLICE if self._device.type == "cpu" else None
        place = slice(piece.start, piece.stop)
        working, gradient = piece.part.working[place], piece.part.gradient[place]
        update(self._optimizer, working, state, gradient, self._hyper, piece.decay, at_once)

    def _loss(self, final: Tensor, labels: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Chunked cross-entropy of `final` [B, T, D]; with `scale`, gradients too."""
        weight, bias = self._decoder.head_weight, self._decoder.head_bias
        accumulators = {}
        if scale is not None:
            accumulators["weight_gradient"] = self._gradient_of(weight)
            accumulators["bias_gradient"] = None if bias is None else self._gradient_of(bias)
        return linear_cross_entropy(
            final.flatten(0, 1).to(weight.dtype),
            weight.detach(),
            labels.flatten(),
            bias=None if bias is None else bias.detach(),
            scale=1.0 if scale is None else scale,
            **accumulators,
        )

    def _gradient_of(self, parameter: Tensor) -> Tensor:
        name = self._names[id(parameter)]
        return self._store.part_of(name).gradient_of(name)

    def _norm(self) -> float:
        """Global norm of the gradients, loss scale taken out: fp32 within a piece, fp64 over pieces."""
        norms = [self._norm_of(piece) for piece in self._store.pieces if piece.part.gradient is not None]
        return torch.linalg.vector_norm(torch.stack(norms).double()).item() / self.loss_scale.scale

    def _hand_over(self, norm: float, learning_rate: float) -> None:
        """Makes the updates ready to be applied, in the order in which the forward needs them."""
        clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))
        self._hyper = replace(
            self._hyper,
            learning_rate=learning_rate,
            update=self._hyper.update + 1,
            gradient_scale=clip / self.loss_scale.scale,
        )
        self._pending = self._apply_updates()
        self._updated = 0
        if not self.schedule.defer:
            self.flush()

    @torch.no_grad()
    def _apply_updates(self) -> Iterator[int]:
        """Updates piece by piece; yields the number of a unit when it is done. A part's gradient is freed after it."""
        unit = 0
        for piece, state in self.ring.pass_over(self._store.pieces):
            part = piece.part
            if part.unit > unit:  # whatever units lie between have no parameters
                yield part.unit - 1
                unit = part.unit
            if part.gradient is None:  # nothing of it took part in this step
                continue
            self._update(piece, state)
            if piece is part.pieces[-1]:
                part.gradient = None
        yield len(self._decoder.units) - 1

    def _update_through(self, unit: int) -> None:
        while self._updated <= unit:
            self._updated = next(self._pending) + 1


def mean_loss(step: Step, rows, batches: int) -> float | None:
    """Loss per token of `rows` (data.Rows), in nats, over at most `batches` of its batches; None where it has none."""
    if len(rows) == 0:
        return None
    sums = [step.evaluate(rows.batch(index)) for index in range(min(batches, len(rows)))]
    return math.fsum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


def _add_into(part: Part, name: str):
    """A hook that moves a parameter's fresh gradient into its fp32 accumulator."""

    def hook(parameter: Tensor) -> None:
        part.gradient_of(name).add_(parameter.grad)
        parameter.grad = None

    return hook
