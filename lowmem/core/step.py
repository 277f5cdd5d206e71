"""Makes one optimizer step: start with docs/step.md. The same code trains, is timed, and is simulated for a plan."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from lowmem.core.accumulation import Accumulation
from lowmem.core.batch import LEAST_POSITIONS, Batch, Work, as_batch
from lowmem.core.decoder import Decoder, Extra
from lowmem.core.deferred_updates import Updates
from lowmem.core.final_gradients import FinalGradients
from lowmem.core.kernels import Kernels
from lowmem.core.layout import Fate, Layout
from lowmem.core.operations import Operations
from lowmem.core.optimizers import Hyperparameters, checked_rate
from lowmem.core.parameters import Store
from lowmem.core.precision import LossScale
from lowmem.core.recompute import Dropout, SavedSegment
from lowmem.core.segment_windows import BoundaryWindow, GradientWindow, WeightWindow
from lowmem.core.transfers import Transfers, transfers_for
from lowmem.device import finish_failed_backward
from lowmem.errors import InputError

# Where memory ran out: in a step, in a step that may have updated units, in pending updates, in an evaluation.
STEP, HALFWAY, UPDATES, EVALUATION = "step", "halfway", "updates", "evaluation"
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepResult:
    """Holds a step's loss (mean over the tokens with a label, in nats) and the norm of all gradients before clipping.
    `updated`: False if that norm is not finite. `positions`: number in the micro-batches of all ranks, with padding."""

    loss: float
    grad_norm: float
    updated: bool
    positions: int


class StepAbandoned(Exception):
    """Is raised if `TrainingStep.abandoned()` returns True."""


class TrainingStep:
    """Makes one optimizer step per call. Callers may set two functions. `abandoned()` is called before a micro-batch
    passes a segment (consecutive blocks) or is evaluated. If it returns True, StepAbandoned is raised. It is not called
    after backward may have updated weights (`halfway`). `make_room(where, reason)` is called if memory runs out. It
    must free memory, by emptying the cache or by `change_layout`; then the attempt is repeated. If it cannot, or if
    `where` is HALFWAY, it must raise an error. `where`: STEP, HALFWAY (a step that may have updated weights), UPDATES
    (pending updates) or EVALUATION."""

    def __init__(
        self, decoder: Decoder, store: Store, hyper: Hyperparameters, *, clip_norm: float | None, seed: int,
        loss_scale: LossScale, operations: Operations | None = None, transfers: Transfers | None = None,
    ):  # fmt: skip
        """`clip_norm`: largest norm of all gradients together; None for no limit. `seed`: for dropout masks.
        `operations`, `transfers`: given only in a simulation."""
        self.store, self.loss_scale = store, loss_scale
        self.operations = operations or Operations(decoder, store)
        self.make_room: Callable[[str, str], None] | None = None
        self.abandoned: Callable[[], bool] | None = None
        self.most: tuple[int, int, int | None] | None = None  # the plan's most rows, tokens of a row and of a target
        self.least_positions = LEAST_POSITIONS.get(store.device.type, 1)  # a micro-batch with fewer is not faster
        self._decoder, self._clip_norm, self._seed = decoder, clip_norm, seed
        self._head = range(len(decoder.blocks), len(decoder.units) - 1)  # the last unit, numbered after the blocks
        self._set_layout(store.layout)
        # Updates may run beside other kernels if they allocate nothing.
        concurrent = Kernels.PRODUCTS in decoder.fused_kernels and store.optimizer.any_stream
        self.transfers = transfers or transfers_for(store.device, concurrent, store.host_buffer)
        self._updates = Updates(store, len(decoder.units), hyper, self.transfers, self.operations)
        self.state_window = self._updates.state_window
        self._weights = store.ranks.window(decoder, store) or WeightWindow(
            self.transfers, decoder, store, [each.blocks for each in self.segments]
        )
        self.boundaries = BoundaryWindow(self.transfers, store)
        self._gradient_window = GradientWindow(self.transfers)
        self._accumulation = Accumulation(decoder, store)

    def __call__(self, batch: Batch | Mapping, step: int, learning_rate: float) -> StepResult:
        """Makes a step on `batch`, a Batch or a dict that Batch.from_hf accepts. `step`: the step's number, which seeds
        dropout. Updates may stay pending until the next step or `flush`."""
        try:
            step = operator.index(step)
        except TypeError:
            raise InputError(f"step number {step!r}: give a whole number.") from None
        if abs(step) >= 2**63:  # the seed of dropout has 64 bits for it
            raise InputError(f"a step number of {step.bit_length()} bits: give a whole number below 2**63.")
        if not torch.is_grad_enabled():
            raise InputError("a step needs gradients: call it outside torch.no_grad() and torch.inference_mode()")
        batch, learning_rate = as_batch(batch, self._decoder, self.most), checked_rate(learning_rate)
        self._updates.refuse_halfway()
        self._discard_attempt()  # gradients of a step that an error or Ctrl-C has ended
        return self._retrying(STEP, self._attempt, batch, step, learning_rate)

    def _attempt(self, batch: Batch, step: int, learning_rate: float) -> StepResult:
        tokens = batch.trained_tokens
        work = self._prepare(batch, step, self.loss_scale.scale / tokens)
        self._decoder.model.train()
        self.operations.begin()

        gradients = self._final_gradients(self.layout.fate, 1.0, learning_rate)
        loss, norm = self._forward_and_backward(work, gradients)
        norm = norm / self.loss_scale.scale
        updated = math.isfinite(norm)
        if updated:
            clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (norm + 1e-6))
            factor = clip / self.loss_scale.scale
            if gradients.fate is Fate.DROPPED:
                gradients = self._final_gradients(Fate.APPLIED, factor, learning_rate)
                self._forward_and_backward(work, gradients)
            if gradients.fate is not Fate.APPLIED:  # also if APPLIED became HELD, because the loss is infinite
                self._updates.begin(factor, learning_rate, downwards=False)
        else:
            for part in self.store.parts:
                part.drop_gradient()
        self.loss_scale.update(updated)
        return StepResult(loss / tokens, norm, updated, work.positions)

    def _prepare(self, batch: Batch, step: int, scale: float) -> Work:
        cut = self._cut(batch, self.layout.micro_batch)
        positions = [each.input_ids.numel() for each in cut]
        # Several ranks have one group each.
        several = self.store.ranks.count > 1
        groups = [slice(None)] if several else self.layout.groups(positions, batch.input_ids.shape[1])
        own = self.store.ranks.own(range(len(cut)))
        dropouts = [Dropout(self._seed, step, index) for index in own]
        return Work([cut[index].to(self.store.device) for index in own], dropouts, scale, groups, sum(positions))

    def _final_gradients(self, fate: Fate, gradient_scale: float, learning_rate: float) -> FinalGradients:
        parts = self.store, self.operations.norms, self._gradient_window, self._updates
        return FinalGradients(fate, *parts, gradient_scale, learning_rate)

    def _forward_and_backward(self, work: Work, gradients: FinalGradients) -> tuple[float, float]:
        """Runs all micro-batches of `work` forward and backward. Returns the sum of all tokens' losses, and the norm of
        all gradients, both over all ranks. The gradients are of the sum times `work.scale`. `gradients`: handles each
        gradient when it is fully summed."""
        losses: list[Tensor] = []
        input_gradients: list[Tensor] = []  # for the first block's input, per micro-batch
        for places in work.groups:
            of_group = self._group(work.group(places), gradients)
            losses += of_group[0]
            input_gradients += of_group[1]
            del of_group  # else it would keep gradients that have been used
        if self._decoder.shared:
            self._accumulation.join()
        for index, micro_batch in enumerate(work.micro_batches):
            self.operations.embed_backward(micro_batch, work.dropouts[index], input_gradients[index])
            input_gradients[index] = None
        loss = self.store.ranks.total(torch.stack(losses).double().sum().item() if losses else 0.0)
        return loss, gradients.end()

    def _group(self, work: Work, gradients: FinalGradients) -> tuple[list[Tensor], list[Tensor]]:
        """Runs a group (micro-batches that pass each segment together) forward, and backward to the first block.
        Returns, for each micro-batch, its loss summed over tokens, and its gradient for the first block's input."""
        hidden, extras, saved = self._forward(work)
        losses, output_gradients = self._losses(work, hidden)
        gradients.begin(losses)
        self._backward(work, extras, saved, output_gradients, gradients)
        return losses, output_gradients

    def _forward(self, work: Work) -> tuple[list[Tensor], list[list[Extra]], list[list[SavedSegment]]]:
        """Returns, for each micro-batch, the last block's output, the blocks' other arguments, and the segments' saved
        tensors."""
        # No loop here, in `_losses` or in `_backward` may leave a tensor in a variable, which would keep it allocated.
        self._updates.run_until(1)
        self._weights.bring(range(-1, 0))  # the embeddings; only several ranks have to gather them
        embedded = [self.operations.embed(*pair) for pair in zip(work.micro_batches, work.dropouts, strict=True)]
        hidden = [first for first, _ in embedded]
        extras = [extra for _, extra in embedded]
        del embedded
        saved: list[list[SavedSegment]] = [[] for _ in hidden]
        if self.layout.boundaries_in_ram:
            self.boundaries.begin(hidden, self.segments)
        for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
            self._updates.run_until(segment.blocks.stop + 1)  # unit 0 is the embedding, so block i is unit i + 1
            if following is not None and self._weights.fetches_any_of(following.blocks):
                self._updates.run_until(following.blocks.stop + 1)  # before its weights are on their way
            self._weights.bring(segment.blocks, following and following.blocks)
            for index in range(len(hidden)):
                self._unless_abandoned()
                hidden[index], saved_segment = self.operations.segment_forward(
                    segment, hidden[index], extras[index], work.dropouts[index]
                )
                saved[index].append(saved_segment)
                if self.layout.boundaries_in_ram:
                    self.boundaries.leave(segment, saved_segment)
        return hidden, extras, saved

    def _losses(self, work: Work, hidden: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        self._updates.run_until(self._updates.units)
        self._weights.bring(self._head)
        losses, output_gradients = [None] * len(hidden), [None] * len(hidden)
        for index, micro_batch in enumerate(work.micro_batches):
            losses[index], output_gradients[index] = self.operations.head(
                hidden[index], micro_batch.labels, work.dropouts[index], work.scale
            )
            hidden[index] = None
        return losses, output_gradients

    def _backward(
        self, work: Work, extras: list[list[Extra]], saved: list[list[SavedSegment]], output_gradients: list[Tensor],
        gradients: FinalGradients,
    ) -> None:  # fmt: skip
        """Runs all segments backward, last first. `output_gradients`: for each micro-batch, the gradient for the last
        block's output. Replaces it in the list by the gradient for the first block's input."""
        by_unit = gradients.fate is not Fate.HELD or self.store.ranks.count > 1
        if by_unit:
            gradients.finish(self._updates.units - 1)
        for segment, following in zip(self.segments[::-1], [*self.segments[-2::-1], None], strict=True):
            self._weights.bring(segment.blocks, following and following.blocks)
            for index in range(len(output_gradients)):
                self._unless_abandoned()
                self.boundaries.bring(saved, index)
                output_gradients[index] = self.operations.segment_backward(
                    segment, saved[index].pop(), extras[index], work.dropouts[index], output_gradients[index]
                )
            if by_unit:
                gradients.finish(segment.blocks.start + 1)

    # --- between steps

    @property
    def needs_all_gradients(self) -> bool:
        """Returns True if updates wait for all gradients, to clip or check them."""
        return self._clip_norm is not None or self.loss_scale.enabled

    @property
    def updates(self) -> int:
        """Returns the number of steps so far that have updated weights, those with pending updates included."""
        return self._updates.hyper.update

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates.hyper = replace(self._updates.hyper, update=value)

    def flush(self) -> None:
        """Applies all pending updates. Must be called before other code reads weights or states. Raises
        UpdateInterrupted if a step failed after it had updated some weights."""
        self._updates.refuse_halfway()
        self._retrying(UPDATES, self._updates.flush)
        if any(part.has_gradient for part in self.store.parts):
            self._discard_attempt()

    def evaluate(self, batch: Batch | Mapping) -> tuple[float, int]:
        """Applies all pending updates. Returns the loss in nats, summed over all tokens with a label, and the number of
        those tokens."""
        batch = as_batch(batch, self._decoder, self.most and (math.inf, *self.most[1:]))
        self.flush()
        self._decoder.model.eval()
        return self._retrying(EVALUATION, self._evaluate, batch), batch.labeled_tokens

    @torch.no_grad()
    def _evaluate(self, batch: Batch) -> float:
        total = 0.0
        rows = min(self.layout.evaluation_rows or self.layout.micro_batch, self.layout.micro_batch)
        self._weights.bring(self._head)
        for micro_batch, counts in self.store.ranks.rounds(self._cut(batch, rows)):
            self._unless_abandoned()
            loss = self.operations.evaluate(micro_batch.to(self.store.device)).item()
            total += loss if counts else 0.0
        return self.store.ranks.total(total)

    def _cut(self, batch: Batch, rows: int) -> list[Batch]:
        batch.check(self._decoder.needs_sources)
        return batch.micro_batches(rows, self.least_positions)

    def _unless_abandoned(self) -> None:
        if self.abandoned is not None and not self.halfway and self.abandoned():
            raise StepAbandoned

    # --- if memory runs out

    @property
    def halfway(self) -> bool:
        """Returns True if backward may have updated weights, so that the step cannot be repeated."""
        return self._updates.halfway

    def change_layout(self, layout: Layout) -> bool:
        """Uses `layout` from now on. If it has states of fewer units on the GPU, moves the others into RAM; returns
        False if CUDA refuses to page-lock them. If memory for device buffers runs out, changes the layout nevertheless,
        and raises OutOfMemoryError. Raises ValueError if `fixed_homes` would change."""
        if layout.fixed_homes != self.layout.fixed_homes:
            raise ValueError("the store was made for other homes of weights, gradients or states on a disk")
        fewer = layout.states_on_gpu < self.store.states_on_gpu
        try:
            return self._updates.move_states(layout.states_on_gpu) if fewer else True
        finally:
            self._set_layout(layout)
            self._weights.fit([each.blocks for each in self.segments])

    def _set_layout(self, layout: Layout) -> None:
        if layout.fate is Fate.APPLIED and self.needs_all_gradients:
            raise ValueError("gradients cannot be applied in backward if updates wait for all of them")
        self.layout = replace(layout, states_on_gpu=self.store.states_on_gpu)
        self.segments = layout.segments(len(self._decoder.blocks))

    def _retrying(self, where: str, work: Callable[..., Result], *arguments) -> Result:
        while True:
            try:
                return work(*arguments)
            except torch.OutOfMemoryError as error:
                if self.make_room is None:
                    raise
                reason = str(error).splitlines()[0]
            # Only here have the error and its traceback been freed, and with them the attempt's tensors.
            finish_failed_backward(self.store.device)
            self._discard_attempt()
            self.make_room(HALFWAY if self.halfway else where, reason)

    def _discard_attempt(self) -> None:
        own = (use.own for use in self._decoder.shared if use.own is not None)
        for parameter in chain(own, *(unit.parameters.values() for unit in self._decoder.units)):
            parameter.grad = None  # a gradient that was not added to its accumulator
        self._accumulation.clear()
        self.boundaries.forget()
        self._gradient_window.release()
        self.store.ranks.discard()
        # While updates are pending, the accumulators have the gradients of the step before: a step adds to them only
        # after all pending updates.
        for part in () if self._updates.waiting else self.store.parts:
            part.drop_gradient()
