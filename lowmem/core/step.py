"""The one training step: forward and backward of all micro-batches, the norm, the update. Trained, timed, simulated.

    for group in groups of micro-batches:
        forward    for segment: for micro-batch: keep the boundary
        loss       for micro-batch: final norm and head, chunked; the head's gradient straight into its accumulator
        backward   for segment reversed: for micro-batch: recompute, backward, add into the fp32 accumulators
    embeddings     for micro-batch: backward, from the gradients kept for the first block's input
    norm           over all accumulators; not finite: no update
    update         per unit, just before the next forward needs it (or in `flush`)

Without clipping, and with the whole batch in one group, no update has to wait for the norm: a unit is updated as soon
as its gradient is final, while the segments below it run backward, and its accumulator is gone before the next one is
made. The price: a gradient that is not finite, though the loss was, is found after the units above have been updated,
and ends the run (`UpdateInterrupted`), where otherwise the step would be skipped whole.

With clipping the same can be had for twice the time (`norm_first`): forward and backward run once for the norm, their
gradients dropped unit by unit, and once more for the updates, with the same dropout masks and so the same gradients. It
saves the 4 bytes per parameter that held gradients cost.

One micro-batch per group is ordinary gradient accumulation; one group for the whole step is what keeps accumulators for
one segment only, in either of these ways. Every schedule gives the same bits, because a parameter's gradient is always
summed over micro-batches in their order. A tied embedding gets its two contributions in one order too: the head's of
all micro-batches, then the lookup's of all, which is why the embeddings' backward waits for the last group. It costs
the gradients of the first block's input of the whole batch: B x T x D x 4 bytes (320 MiB for GPT-2-Large at 64 x
1,024; half of that in 16 bit).

A step's loss is the mean over its trained tokens, so each micro-batch counts by its tokens. The update is deferred into
the next forward so that, on a GPU, bringing streamed states over hides behind computation; nothing reads a weight
before its update.

Where memory runs out, room is made (`relieve`; recovery.py says how) and the same work done again. Until the updates
of a step begin that is the whole step: it has changed nothing but accumulators, which are dropped; the updates of the
step before, which wait in its forward pass, go on where they were. Once updates have begun, in backward, it is the part
that failed: the backward pass of one micro-batch through one segment, say (accumulation.py).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lowmem.core import optimizers, recompute
from lowmem.core.accumulation import Accumulation
from lowmem.core.decoder import Decoder, Extra
from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.kernels import fused
from lowmem.core.layout import Layout, Schedule
from lowmem.core.loss import linear_cross_entropy
from lowmem.core.offload import Ring, State
from lowmem.core.optimizers import Optimizer, UpdateRule
from lowmem.core.parameters import Piece, Store
from lowmem.core.precision import LossScale
from lowmem.core.recompute import Dropout, Lessons, Saved, Segment

HOLD, DROP, UPDATE = "hold", "drop", "update"  # what becomes of a unit's gradient when no more is added to it
# Where memory runs out: in a step that can be begun again, in one whose updates have begun, in updates alone.
STEP, PART, UPDATES, EVALUATION = "step", "part of a step", "updates", "evaluation"
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean over the step's tokens, in nats; `grad_norm`: before clipping; `updated`: was that finite."""

    loss: float
    grad_norm: float
    updated: bool


class Step:
    """Callable on a batch; holds the updates that wait for the next forward.

    `relieve(where, reason)`: called where memory has run out, `where` one of STEP, PART, UPDATES and EVALUATION, when
    nothing is left of the failed attempt; it makes room, by `take`, or raises. None: nothing is tried again.
    """

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
        self._decoder, self._store, self._optimizer = decoder, store, optimizer
        self.schedule, self.loss_scale, self.evaluation_rows = schedule, loss_scale, schedule.micro_batch
        self.relieve: Callable[[str, str], None] | None = None
        self._clip_norm, self._seed = clip_norm, seed
        beside = fused.may_run_beside(decoder.fused_kernels, optimizer)
        self._updates = Updates(store, len(decoder.units), weight_decay, lambda *piece: self._update(*piece), beside)
        self._accumulation = Accumulation(decoder, store)
        self._begun = False  # whether the updates of this step have
        self._saved: list[list[Saved]] = []  # per micro-batch what its segments keep for their backward
        self._when_final = HOLD
        self._update_with = 1.0, 0.0  # the factor that clips the gradients, and the learning rate
        self._norms: dict[int, Tensor] = {}  # of the pieces whose gradients are final, by their place in the store
        self._lowest_final = 0  # the first unit whose gradients are
        self._lessons: Lessons = {}
        self._device = store.device
        eagerly: UpdateRule = optimizers.update_in_slices if self._device.type == "cpu" else optimizers.update
        self._rule = fused.update if decoder.fused_kernels else eagerly
        self._names = {id(p): name for unit in decoder.units for name, p in unit.parameters.items()}

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._schedule, self.segments = schedule, schedule.segments(len(self._decoder.blocks))

    @property
    def layout(self) -> Layout:
        return Layout(self.schedule, self._store.resident_units, self.evaluation_rows)

    def take(self, layout: Layout) -> bool:
        """Goes on with `layout`, where no more states are on the device than now; the result is whether what lies in
        RAM is page-locked. A step whose updates have begun keeps from here on only what it must."""
        self.schedule, self.evaluation_rows = layout.schedule, layout.evaluation_rows
        for saved in chain(*self._saved):
            saved.output = saved.products = None
        more = layout.resident_units < self._store.resident_units
        return self._updates.move_states(layout.resident_units) if more else True

    @property
    def keeps_activations(self) -> bool:
        """Whether anything but boundaries is kept for a backward pass that is still to come."""
        return any(saved.output is not None or saved.products is not None for saved in chain(*self._saved))

    @property
    def halfway(self) -> bool:
        """Whether some weights are of one step and some of the next, with no way to make that good."""
        return self._begun and self._when_final == UPDATE and self._updates.waiting

    @property
    def updates(self) -> int:
        """Updates so far; a skipped step is none."""
        return self._updates.hyper.update

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates.hyper = replace(self._updates.hyper, update=value)

    @property
    def ring(self) -> Ring:
        return self._updates.ring

    def __call__(self, batch, step: int, learning_rate: float) -> StepResult:
        """`batch`: what dataset.py makes (input_ids, labels [B, T], ...), on the CPU; `step` names the dropout
        masks."""
        self._begun = False
        result = self._surely(STEP, self._attempt, batch, step, learning_rate)
        if not self.schedule.defer:
            self.flush()
        return result

    def _attempt(self, batch, step: int, learning_rate: float) -> StepResult:
        micro_batches = [piece.to(self._device) for piece in batch.micro_batches(self.schedule.micro_batch)]
        tokens = batch.trained_tokens
        scale = self.loss_scale.scale / tokens
        self._decoder.model.train()
        dropouts = [Dropout(self._seed, step, index) for index in range(len(micro_batches))]
        if self.schedule.norm_first and len(self.schedule.groups(len(micro_batches))) > 1:
            raise ValueError("the norm comes first only where the whole batch is one group")
        in_backward = self.updates_in_backward(len(micro_batches))
        self._when_final = UPDATE if in_backward else DROP if self.schedule.norm_first else HOLD
        self._update_with = 1.0, learning_rate
        loss, norm = self._forward_and_backward(micro_batches, dropouts, scale)
        loss, norm = loss / tokens, norm / self.loss_scale.scale
        updated = math.isfinite(norm)
        if updated and self._when_final != UPDATE:
            clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))
            self._update_with = clip / self.loss_scale.scale, learning_rate
            if self._when_final == DROP:
                self._when_final = UPDATE
                self._forward_and_backward(micro_batches, dropouts, scale)
            else:
                self._updates.begin(*self._update_with, downwards=False)
                self._begun = True
        for part in self._store.parts if not updated else ():
            part.gradient = None
        self.loss_scale.update(updated)
        return StepResult(loss, norm, updated)

    def updates_in_backward(self, micro_batches: int) -> bool:
        """Whether a step of so many micro-batches updates a unit as soon as its gradient is final: nothing has to be
        known of all gradients first, neither their norm nor, where the loss is scaled, that they are finite."""
        one_group = len(self.schedule.groups(micro_batches)) == 1
        return one_group and self._clip_norm is None and self.schedule.defer and not self.loss_scale.enabled

    def _forward_and_backward(
        self, micro_batches: Sequence, dropouts: Sequence[Dropout], scale: float
    ) -> tuple[float, float]:
        """Sum of the losses of all tokens, and the norm of the gradients of `scale` times that."""
        self._norms, self._lowest_final = {}, len(self._decoder.units)
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for group in self.schedule.groups(len(micro_batches)):
            group_losses, group_gradients = self._group(micro_batches[group], dropouts[group], scale)
            losses += group_losses
            gradients += group_gradients
        for index, micro_batch in enumerate(micro_batches):
            self._part(self._embed_backward, micro_batch, dropouts[index], gradients[index])
            gradients[index] = None
        loss = self._part(lambda: torch.stack(losses).double().sum().item())
        self._part(self._finish_gradients, 0)
        norms = [self._norms[index] for index in sorted(self._norms)]
        return loss, self._part(lambda: torch.linalg.vector_norm(torch.stack(norms).double()).item())

    def evaluate(self, batch) -> tuple[float, int]:
        """Sum of the losses of a batch's tokens, and their number; weights as of the last update."""
        self.flush()
        self._decoder.model.eval()
        return self._surely(EVALUATION, self._evaluate, batch), batch.trained_tokens

    @torch.no_grad()
    def _evaluate(self, batch) -> float:
        total = 0.0
        for micro_batch in batch.micro_batches(min(self.evaluation_rows, self.schedule.micro_batch)):
            total += self._evaluated(micro_batch.to(self._device)).item()
        return total

    def flush(self) -> None:
        """Makes every update that still waits: before anything but a training step reads a weight or a state."""
        self._surely(UPDATES, self._updates.flush)

    def _surely(self, where: str, work: Callable[..., Result], *arguments) -> Result:
        """What `work(*arguments)` returns, done again for as long as memory runs out and `relieve` makes room."""
        while True:
            try:
                return work(*arguments)
            except torch.OutOfMemoryError as error:
                if self.relieve is None or (where == STEP and self._begun):
                    raise
                reason = str(error).splitlines()[0]
            # Only here is the error gone, and with its traceback the tensors of the attempt.
            self._forget_the_attempt()
            self.relieve(where, reason)

    def _part(self, work: Callable[..., Result], *arguments) -> Result:
        """The same of a part of the step, which is done again by itself where updates have begun; else the step is."""
        self._accumulation.begin_part()
        return self._surely(PART, work, *arguments) if self._begun else work(*arguments)

    def _forget_the_attempt(self) -> None:
        """What gradients there are belong to the step that failed, unless they are those that updates wait with: an
        accumulator is begun only when every unit has been updated."""
        for unit in self._decoder.units:
            for parameter in unit.parameters.values():
                parameter.grad = None  # one that did not reach its accumulator
        if self._begun:
            self._accumulation.repeat_part()
        else:
            self._accumulation.begin_part()
            self._saved = []
            for part in () if self._updates.waiting else self._store.parts:
                part.gradient = None

    def _group(
        self, micro_batches: Sequence, dropouts: Sequence[Dropout], scale: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per micro-batch: the loss, summed over tokens, and the gradient for the first block's input."""
        # No loop may leave a tensor in a variable of its own: it would live until the group is done.
        self._updates.run(1)
        embedded = [self._embed(*pair) for pair in zip(micro_batches, dropouts, strict=True)]
        hidden = [first for first, _ in embedded]
        extras = [extra for _, extra in embedded]
        del embedded

        self._saved = saved = [[] for _ in micro_batches]
        for segment in self.segments:
            self._updates.run(segment.blocks.stop + 1)  # unit 0 is the embedding, so block i is unit i + 1
            for index, dropout in enumerate(dropouts):
                hidden[index], kept = self._segment_forward(segment, hidden[index], extras[index], dropout)
                saved[index].append(kept)
        del kept

        self._updates.run(len(self._decoder.units))
        losses: list[Tensor] = []
        for index, (micro_batch, dropout) in enumerate(zip(micro_batches, dropouts, strict=True)):
            # from here on `hidden` is the gradient on its way down
            micro_loss, hidden[index] = self._head(hidden[index], micro_batch.labels, dropout, scale)
            losses.append(micro_loss)

        if self._when_final == UPDATE:
            if math.isfinite(torch.stack(losses).sum().item()):
                self._updates.begin(*self._update_with, downwards=True)
                self._begun = True
            else:
                self._when_final = HOLD
        if self._when_final != HOLD:
            self._part(self._finish_gradients, len(self._decoder.units) - 1)
        for segment in reversed(self.segments):
            for index, dropout in enumerate(dropouts):
                hidden[index] = self._part(
                    self._segment_backward, segment, saved[index].pop(), extras[index], dropout, hidden[index]
                )
            if self._when_final != HOLD:
                self._part(self._finish_gradients, segment.blocks.start + 1)
        return losses, hidden

    # What a step spends its time in. The simulator runs each of these once per shape and then replays it.

    def _embed(self, micro_batch, dropout: Dropout) -> tuple[Tensor, list[Extra]]:
        """The first block's input [B, T, D] and the blocks' extra arguments."""
        dropout.begin(-1, self._device)
        with torch.no_grad():
            return self._decoder.embed(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids)

    def _segment_forward(
        self, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout
    ) -> tuple[Tensor, Saved]:
        last_is_needed = self._lessons.get(self._kind(segment, extras), 0) is None
        return recompute.forward(self._decoder, segment, hidden, extras, dropout, last_is_needed)

    def _head(self, hidden: Tensor, labels: Tensor, dropout: Dropout, scale: float) -> tuple[Tensor, Tensor]:
        """Loss of one micro-batch, summed over tokens, and the gradient for the last block's output [B, T, D]."""
        dropout.begin(len(self._decoder.blocks), self._device)
        boundary = hidden.requires_grad_()
        final = self._decoder.final(boundary)
        loss, gradient = self._loss(final.detach(), labels, scale)
        final.backward(gradient.view_as(final).to(final.dtype))
        return loss, boundary.grad

    def _segment_backward(
        self, segment: Segment, saved: Saved, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
    ) -> Tensor:
        kind = self._kind(segment, extras)
        return recompute.backward(self._decoder, segment, saved, extras, dropout, gradient, self._lessons, kind)

    def _kind(self, segment: Segment, extras: Sequence[Extra]) -> Hashable:
        """What segments share of which one teaches something about the others."""
        return segment

    def _embed_backward(self, micro_batch, dropout: Dropout, gradient: Tensor) -> None:
        dropout.begin(-1, self._device)
        hidden, _ = self._decoder.embed(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids)
        hidden.backward(gradient)

    def _evaluated(self, micro_batch) -> Tensor:
        """Loss of one micro-batch, summed over tokens."""
        hidden, extras = self._decoder.embed(micro_batch.input_ids, micro_batch.position_ids, micro_batch.document_ids)
        for index, extra in enumerate(extras):
            hidden = self._decoder.block(index, hidden, extra)
        return self._loss(self._decoder.final(hidden), micro_batch.labels)[0]

    def _norm_of(self, piece: Piece) -> Tensor:
        return torch.linalg.vector_norm(piece.part.gradient[piece.start : piece.stop])

    def _update(self, piece: Piece, state: State) -> None:
        place = slice(piece.start, piece.stop)
        working, gradient = piece.part.working[place], piece.part.gradient[place]
        self._rule(self._optimizer, working, state, gradient, self._updates.hyper, piece.decay)

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
            function=self._decoder.logit_function,
            fused=self._decoder.fused_kernels and weight.dtype is not torch.float32,
            **accumulators,
        )

    def _gradient_of(self, parameter: Tensor) -> Tensor:
        name = self._names[id(parameter)]
        return self._store.part_of(name).gradient_of(name)

    def _finish_gradients(self, lowest: int) -> None:
        """What follows when no more is added to the gradients of the units from `lowest` on: their norms (fp32 within a
        piece) and what `_when_final` says."""
        norms = {
            index: self._norm_of(piece)
            for index, piece in enumerate(self._store.pieces)
            if lowest <= piece.part.unit < self._lowest_final and piece.part.gradient is not None
        }
        self._norms |= norms
        self._lowest_final = lowest
        if self._when_final == DROP:
            for part in self._store.parts:
                part.gradient = part.gradient if part.unit < lowest else None
        elif self._when_final == UPDATE:
            if norms and not math.isfinite(torch.stack(list(norms.values())).sum().item()):
                raise UpdateInterrupted(
                    f"a gradient of unit {lowest} is not finite, and the units above it have been updated already, so "
                    "they are not saved; the same command goes on from the newest checkpoint, and with --clip-norm and "
                    "room for all gradients such a step is skipped whole"
                )
            self._updates.run(len(self._decoder.units) - lowest)


def mean_loss(step: Step, rows, batches: int) -> float | None:
    """Loss per token of `rows` (data.Rows), in nats, over at most `batches` of its batches; None where it has none."""
    if len(rows) == 0:
        return None
    sums = [step.evaluate(rows.batch(index)) for index in range(min(batches, len(rows)))]
    return math.fsum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
