"""The one training step: forward and backward of all micro-batches, the norm, the update. Trained, timed, simulated.

    for group in groups of micro-batches:
        forward    for segment: for micro-batch: save the segment's input (its boundary)
        loss       for micro-batch: final norm and head, chunked; the head's gradient straight into its accumulator
        backward   for segment reversed: for micro-batch: run its forward again (activation checkpointing), backward,
                   accumulate into fp32 gradients
    embeddings     for micro-batch: backward, from the gradients kept for the first block's input
    norm           over all accumulators; not finite: no update
    update         per unit, just before the next forward needs it (or in `flush`)

    unit               what is updated together: the embeddings, each block, the final norm
    part, piece        a unit's matrices or its vectors; a run of a part's elements that one kernel updates
    segment, boundary  consecutive blocks that are recomputed together, and their saved input
    group              micro-batches that pass a segment together before the next segment runs
    extras             what blocks are called with beside their input: masks, position embeddings

Without clipping and without loss scaling, and with the whole batch in one group, no update has to wait for the norm: a
unit is updated as soon as its gradient is final, while the segments below it run backward, and its accumulator is gone
before the next one is made. The price: a gradient that is not finite, though the loss was, is found after the units
above have been updated, and ends the run (`UpdateInterrupted`), where otherwise the step would be skipped whole.

With clipping the same can be had for twice the time (`Fate.DROPPED`): forward and backward run once for the norm, their
gradients dropped unit by unit, and once more for the updates, with the same dropout masks and so the same gradients. It
saves the 4 bytes per parameter that held gradients cost. Where RAM has room for these, they wait there instead, and
everything runs once (streamed_gradients.py).

Groups of one micro-batch are ordinary gradient accumulation. With one group for the whole batch, the gradients of a
segment or two at a time are enough, if units are updated in backward or in two passes, or if gradients wait in RAM.
Every layout gives the same bits, because a parameter's gradient is always summed over micro-batches in their order. A
tied embedding gets its two contributions in one order too: the head's of all micro-batches, then the lookup's of all,
which is why the embeddings' backward waits for the last group. It costs the gradients of the first block's input of the
whole batch: B x T x D x 4 bytes (320 MiB for GPT-2-Large at 64 x 1,024; half of that in 16 bit). What an
encoder-decoder's blocks share, its tables of relative positions, is summed block by block, and these sums are joined
before that (accumulation.py).

What does not fit on the device can be in RAM: optimizer states (offload.py), the weights of most blocks, which come a
segment at a time (streamed_weights.py), boundaries until their backward (streamed_boundaries.py), and gradients until
their update.

A step's loss is the mean over its trained tokens, so each micro-batch counts by its tokens. The update is deferred into
the next forward so that, on a GPU, copying offloaded optimizer states hides behind computation; nothing reads a weight
before its update.

Where memory runs out, room is made (`make_room`; recovery.py says how) and the same work done again. Until the updates
of a step begin that is the whole step: it has changed nothing but accumulators, which are dropped; the updates of the
step before, which wait in its forward pass, go on where they were. Once updates have begun, in backward, it is the part
that failed: the backward pass of one micro-batch through one segment, say (accumulation.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lowmem.core.accumulation import Accumulation
from lowmem.core.batch import LEAST_POSITIONS, Batch
from lowmem.core.decoder import Decoder
from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.final_gradients import (
    AppliedGradients,
    DroppedGradients,
    FinalGradients,
    HeldGradients,
    LeavingGradients,
)
from lowmem.core.kernels import fused
from lowmem.core.layout import Fate, Layout
from lowmem.core.offload import StagingRing, State
from lowmem.core.operations import Operations
from lowmem.core.optimizers import Hyperparameters, Optimizer
from lowmem.core.parameters import Piece, Store
from lowmem.core.precision import LossScale
from lowmem.core.recompute import Dropout, SavedSegment, Segment
from lowmem.core.streamed_boundaries import StreamedBoundaries
from lowmem.core.streamed_gradients import StreamedGradients
from lowmem.core.streamed_weights import StreamedWeights
from lowmem.device import finish_failed_backward

# Where memory runs out: in a step that can be begun again, in one whose updates have begun, in updates alone.
STEP, PART, UPDATES, EVALUATION = "step", "part of a step", "updates", "evaluation"
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean over the step's tokens, in nats; `grad_norm`: before clipping; `updated`: was that finite;
    `positions`: that went through the model, padding too."""

    loss: float
    grad_norm: float
    updated: bool
    positions: int


@dataclass(frozen=True)
class _Work:
    """A step's micro-batches, each with the seeds of its dropout masks; gradients are those of `scale` times the sum of
    all tokens' losses. `groups`: where the step is cut."""

    micro_batches: Sequence[Batch]
    dropouts: Sequence[Dropout]
    scale: float
    groups: Sequence[slice] = ()

    def group(self, places: slice) -> "_Work":
        return _Work(self.micro_batches[places], self.dropouts[places], self.scale)


class StepAbandoned(Exception):
    """A step or an evaluation was given up; weights and states are those of the last step."""


class TrainingStep:
    """Callable on a batch; holds the updates that wait for the next forward pass.

    `abandoned()`: asked before every segment and micro-batch; where it says yes, StepAbandoned is raised, unless the
    updates of the step have begun. None: nothing is abandoned.

    `make_room(where, reason)`: called where memory has run out, `where` one of STEP, PART, UPDATES and EVALUATION, when
    nothing is left of the failed attempt; it makes room, by `change_layout`, or raises. None: nothing is tried again.
    """

    def __init__(
        self, decoder: Decoder, store: Store, optimizer: Optimizer, layout: Layout, *, clip_norm: float | None,
        weight_decay: float, seed: int, loss_scale: LossScale, operations: Operations | None = None,
        beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
    ):  # fmt: skip
        """`clip_norm`: the largest norm of all gradients, None for no limit; `seed`: of the dropout masks;
        `operations`: what the step runs, if not those of `decoder` on its device. Which states are on the device is
        the store's to say, whatever `layout` says of that; ValueError where it has something else in RAM or on a disk
        that the store was not made with."""
        if _placed(layout) != _placed(store.layout):
            raise ValueError("the store was made for another layout: other weights, gradients or states lie elsewhere")
        self.store, self.loss_scale = store, loss_scale
        self.operations = operations or Operations(decoder, store, optimizer)
        self.make_room: Callable[[str, str], None] | None = None
        self.abandoned: Callable[[], bool] | None = None
        self.least_positions = LEAST_POSITIONS.get(store.device.type, 1)  # of a micro-batch (batch.py)
        self._decoder, self._clip_norm, self._seed = decoder, clip_norm, seed
        self._set_layout(layout)
        beside = fused.may_run_beside(decoder.fused_kernels, optimizer)
        hyper = Hyperparameters(0.0, weight_decay, update=0, beta1=beta1, beta2=beta2, epsilon=epsilon)
        self._updates = Updates(store, len(decoder.units), hyper, self._update_piece, beside)
        self._weights = StreamedWeights(decoder, store, [each.blocks for each in self.segments], self._updates.ring)
        self._boundaries = StreamedBoundaries(store, self._updates.ring)
        self._gradients = StreamedGradients(self._updates.ring)
        self._accumulation = Accumulation(decoder, store)
        self._updating = False  # whether the updates of the step that is being made have begun
        self._saved: list[list[SavedSegment]] = []  # per micro-batch what its segments keep for their backward

    def __call__(self, batch: Batch, step: int, learning_rate: float) -> StepResult:
        """One optimizer step on `batch` (on the CPU); `step` names the dropout masks. Its updates may wait until the
        next step, or `flush`, makes them."""
        if self.halfway:
            raise UpdateInterrupted(
                "the step before this one was ended while it made its updates; load the weights again"
            )
        self._updating = False
        self._discard_attempt()  # of a step that an error or Ctrl-C has ended
        try:
            return self._retrying(STEP, self._attempt, batch, step, learning_rate)
        except StepAbandoned:
            self._discard_attempt()
            raise

    def _attempt(self, batch: Batch, step: int, learning_rate: float) -> StepResult:
        micro_batches = [piece.to(self.store.device) for piece in self._cut(batch, self.layout.micro_batch)]
        dropouts = [Dropout(self._seed, step, index) for index in range(len(micro_batches))]
        tokens = batch.trained_tokens
        positions = [piece.input_ids.numel() for piece in micro_batches]
        groups = self.layout.groups(positions, batch.input_ids.shape[1])
        work = _Work(micro_batches, dropouts, self.loss_scale.scale / tokens, groups)
        self._decoder.model.train()

        needs_all_gradients = self._clip_norm is not None or self.loss_scale.enabled
        fate = self.layout.fate_in(len(groups), needs_all_gradients)
        if fate is Fate.APPLIED:
            gradients = self._applied(1.0, learning_rate)
        elif fate is Fate.DROPPED:
            gradients = DroppedGradients(*self._of_gradients)
        elif fate is Fate.SENT:
            gradients = LeavingGradients(*self._of_gradients, self._gradients)
        else:
            gradients = HeldGradients(*self._of_gradients)
        loss, norm = self._forward_and_backward(work, gradients)
        loss, norm = loss / tokens, norm / self.loss_scale.scale

        updated = math.isfinite(norm)
        if updated:
            clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))
            factor = clip / self.loss_scale.scale
            if fate is Fate.DROPPED:
                self._forward_and_backward(work, self._applied(factor, learning_rate))
            elif gradients.held:
                self._updates.begin(factor, learning_rate, downwards=False)
                self._updating = True
        else:
            for part in self.store.parts:
                part.drop_gradient()
        self.loss_scale.update(updated)
        return StepResult(loss, norm, updated, sum(positions))

    def _forward_and_backward(self, work: _Work, gradients: FinalGradients) -> tuple[float, float]:
        """The sum of the losses of all tokens, and the norm of the gradients. `gradients`: what becomes of these."""
        losses: list[Tensor] = []
        input_gradients: list[Tensor] = []  # for the first block's input, per micro-batch
        for places in work.groups:
            of_group = self._group(work.group(places), gradients)
            losses += of_group[0]
            input_gradients += of_group[1]
            del of_group  # else it would keep gradients that have been spent
        if self._decoder.shared:
            self._retry_part(self.operations.join, self._accumulation)
        for index, micro_batch in enumerate(work.micro_batches):
            self._retry_part(self.operations.embed_backward, micro_batch, work.dropouts[index], input_gradients[index])
            input_gradients[index] = None
        loss = self._retry_part(lambda: torch.stack(losses).double().sum().item())
        if not gradients.by_unit:
            return loss, self.operations.norm_of_all(lambda: self._norm(gradients))
        return loss, self._norm(gradients)

    def _norm(self, gradients: FinalGradients) -> float:
        """Of all gradients, the last of which are final now."""
        self._retry_part(gradients.finish, 0)
        return self._retry_part(gradients.norm)

    def _group(self, work: _Work, gradients: FinalGradients) -> tuple[list[Tensor], list[Tensor]]:
        """Per micro-batch: the loss, summed over tokens, and the gradient for the first block's input."""
        self_contained = not gradients.by_unit and not self._updates.waiting and not self._weights.any
        self_contained &= not self.layout.boundaries_in_ram
        run = partial(self._run_group, work, gradients)
        return self.operations.group(run, work.micro_batches, self.segments, self_contained)

    def _run_group(self, work: _Work, gradients: FinalGradients) -> tuple[list[Tensor], list[Tensor]]:
        # No loop may leave a tensor in a variable of its own: it would live until the group is done.
        operations, units = self.operations, len(self._decoder.units)
        everywhere = range(len(work.micro_batches))

        self._updates.run(1)
        embedded = [operations.embed(*pair) for pair in zip(work.micro_batches, work.dropouts, strict=True)]
        hidden = [first for first, _ in embedded]
        extras = [extra for _, extra in embedded]
        del embedded

        self._saved = saved = [[] for _ in everywhere]
        if self.layout.boundaries_in_ram:
            self._boundaries.begin(hidden, self.segments)
        for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
            self._updates.run(segment.blocks.stop + 1)  # unit 0 is the embedding, so block i is unit i + 1
            if following is not None and self._weights.any_of(following.blocks):
                self._updates.run(following.blocks.stop + 1)  # before its weights are on their way
            self._bring(segment, following)
            for index in everywhere:
                self._unless_abandoned()
                hidden[index], kept = operations.segment_forward(
                    segment, hidden[index], extras[index], work.dropouts[index]
                )
                saved[index].append(kept)
                if self.layout.boundaries_in_ram:
                    self._boundaries.leave(segment, kept)
        del kept

        self._updates.run(units)
        losses: list[Tensor] = []
        # For the last block's output, and then for the input of each segment, from the last one down.
        output_gradients: list[Tensor | None] = [None for _ in everywhere]
        for index in everywhere:
            loss, output_gradients[index] = operations.head(
                hidden[index], work.micro_batches[index].labels, work.dropouts[index], work.scale
            )
            hidden[index] = None
            losses.append(loss)

        gradients.begin(losses)
        self._updating = isinstance(gradients, AppliedGradients) and gradients.by_unit
        if gradients.by_unit:
            self._retry_part(gradients.finish, units - 1)
        for segment, following in zip(self.segments[::-1], [*self.segments[-2::-1], None], strict=True):
            self._bring(segment, following)
            for index in everywhere:
                self._unless_abandoned()
                self._retry_part(self._boundaries.bring, *_next_saved(saved, index))
                output_gradients[index] = self._retry_part(
                    operations.segment_backward, segment, saved[index].pop(), extras[index], work.dropouts[index],
                    output_gradients[index],
                )  # fmt: skip
            if gradients.by_unit:
                self._retry_part(gradients.finish, segment.blocks.start + 1)
        return losses, output_gradients

    def _bring(self, segment: Segment, following: Segment | None) -> None:
        """The weights of a segment, of which some may be in RAM; the ones that follow are on their way."""
        self._weights.bring(segment.blocks, None if following is None else following.blocks)

    @property
    def _of_gradients(self) -> tuple:
        return self.store, len(self._decoder.units), self.operations.norm

    def _applied(self, gradient_scale: float, learning_rate: float) -> AppliedGradients:
        return AppliedGradients(*self._of_gradients, self._updates, gradient_scale, learning_rate)

    def _update_piece(self, piece: Piece, state: State) -> None:
        self.operations.update(piece, state, self._updates.hyper)
        piece.part.updates += 1

    # --- between steps

    @property
    def updates(self) -> int:
        """Updates so far; a skipped step is none."""
        return self._updates.hyper.update

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates.hyper = replace(self._updates.hyper, update=value)

    @property
    def boundary_bytes(self) -> int:
        """Of RAM for boundaries."""
        return self._boundaries.buffer_bytes

    @property
    def ring(self) -> StagingRing:
        """Where streamed states pass through the device."""
        return self._updates.ring

    def flush(self) -> None:
        """Makes every update that still waits: before anything but a training step reads a weight or a state."""
        self._retrying(UPDATES, self._updates.flush)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Sum of the losses of a batch's tokens, and their number; weights as of the last update."""
        self.flush()
        self._decoder.model.eval()
        return self._retrying(EVALUATION, self._evaluate, batch), batch.trained_tokens

    @torch.no_grad()
    def _evaluate(self, batch: Batch) -> float:
        total = 0.0
        rows = min(self.layout.evaluation_rows or self.layout.micro_batch, self.layout.micro_batch)
        for micro_batch in self._cut(batch, rows):
            self._unless_abandoned()
            total += self.operations.evaluate(micro_batch.to(self.store.device)).item()
        return total

    def _cut(self, batch: Batch, rows: int) -> list[Batch]:
        batch.check(self._decoder.needs_sources)
        return batch.micro_batches(rows, self.least_positions)

    def _unless_abandoned(self) -> None:
        if self.abandoned is not None and not self.halfway and self.abandoned():
            raise StepAbandoned

    # --- where memory runs out

    def change_layout(self, layout: Layout) -> bool:
        """Goes on with `layout`, where no more states are on the device than now; the result is whether what lies in
        RAM is page-locked. A step whose updates have begun keeps from here on only what it must."""
        for saved in chain(*self._saved):
            saved.output = saved.products = None
        more = layout.states_on_gpu < self.store.states_on_gpu
        try:
            return self._updates.move_states(layout.states_on_gpu) if more else True
        finally:
            self._set_layout(layout)
            self._weights.fit([each.blocks for each in self.segments])

    def _set_layout(self, layout: Layout) -> None:
        self.layout = replace(layout, states_on_gpu=self.store.states_on_gpu)
        self.segments = layout.segments(len(self._decoder.blocks))

    @property
    def keeps_activations(self) -> bool:
        """Whether anything but boundaries is kept for a backward pass that is still to come."""
        return any(saved.output is not None or saved.products is not None for saved in chain(*self._saved))

    @property
    def halfway(self) -> bool:
        """Whether some weights are of one step and some of the next, and the step cannot be made again."""
        return self._updating and self._updates.downwards and self._updates.waiting

    def _retrying(self, where: str, work: Callable[..., Result], *arguments) -> Result:
        """What `work(*arguments)` returns, done again for as long as memory runs out and `make_room` makes room."""
        while True:
            try:
                return work(*arguments)
            except torch.OutOfMemoryError as error:
                if self.make_room is None or (where == STEP and self._updating):
                    raise
                reason = str(error).splitlines()[0]
            # Only here is the error gone, and with its traceback the tensors of the attempt.
            finish_failed_backward(self.store.device)
            self._discard_attempt()
            self.make_room(where, reason)

    def _retry_part(self, work: Callable[..., Result], *arguments) -> Result:
        """What one part of the step returns. Once updates have begun, this part alone is done again where memory runs
        out; before that, the whole step is."""
        self._accumulation.begin_part()
        return self._retrying(PART, work, *arguments) if self._updating else work(*arguments)

    def _discard_attempt(self) -> None:
        """What gradients there are belong to the step that failed, unless they are those that updates wait with: an
        accumulator is begun only when every unit has been updated."""
        own = (use.own for use in self._decoder.shared if use.own is not None)
        for parameter in chain(own, *(unit.parameters.values() for unit in self._decoder.units)):
            parameter.grad = None  # one that did not reach its accumulator
        if self._updating:
            self._accumulation.repeat_part()
        else:
            self._accumulation.begin_part()
            self._accumulation.clear()
            self._saved = []
            self._boundaries.begin()
            self._gradients.let_go()
            for part in () if self._updates.waiting else self.store.parts:
                part.drop_gradient()


def _next_saved(saved: Sequence[list[SavedSegment]], index: int) -> tuple[SavedSegment, SavedSegment | None]:
    """What the backward of micro-batch `index` needs, and what the one behind it does: the next micro-batch's, or the
    first one's of the segment below."""
    here = saved[index][-1]
    if index + 1 < len(saved):
        return here, saved[index + 1][-1]
    below = saved[0] if index else saved[0][:-1]  # of the first one, whose turn is over but where it is the only one
    return here, below[-1] if below else None


def summed_loss(step: TrainingStep, batches, limit: int) -> tuple[float, int]:
    """(loss in nats, tokens) of at most `limit` of `batches` (lowmem/data/batches.py)."""
    sums = [step.evaluate(batches.batch(index)) for index in range(min(limit, len(batches)))]
    return math.fsum(loss for loss, _ in sums), sum(tokens for _, tokens in sums)


def _placed(layout: Layout) -> tuple:
    """What of a layout is decided when the store is made."""
    return layout.weights_on_gpu, layout.fate is Fate.SENT, layout.states_on_disk
