"""Defines the operations of a training step, such as the forward pass of a few blocks or the update of some weights.

The planner replaces the class Operations by `ReplayedOperations` (planning/replay.py), which has the same methods.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from lowmem.core import optimizers, recompute
from lowmem.core.batch import Batch
from lowmem.core.decoder import Decoder, Extra
from lowmem.core.dry_run import equal, structure_of
from lowmem.core.kernels import Kernels, fused
from lowmem.core.lookups import SparseLookups
from lowmem.core.loss import linear_cross_entropy
from lowmem.core.operation_recorder import address_of
from lowmem.core.optimizers import Hyperparameters, State, UpdateFunction
from lowmem.core.parameters import GRADIENT, WORKING, Part, Piece, Store
from lowmem.core.recompute import INPUT, Dropout, SavedSegment, Segment
from lowmem.core.recordings import Recordings
from lowmem.errors import InputError

Result = TypeVar("Result")


class Operations:
    """Runs the operations of a training step on `decoder`, whose weights, gradients and optimizer states are in
    `store`. Backward adds parameters' gradients to fp32 accumulators. `update`: the function that updates weights; None
    for the fused kernels if `decoder` may use them, else for plain PyTorch."""

    def __init__(self, decoder: Decoder, store: Store, update: UpdateFunction | None = None):
        self.decoder, self.store, self.optimizer = decoder, store, store.optimizer
        eager = optimizers.update_in_slices if store.device.type == "cpu" else optimizers.update
        self._update = update or (fused.update if Kernels.PRODUCTS in decoder.fused_kernels else eager)
        self.recordings: Recordings | None = Recordings()
        self._trained = {id(p): p.requires_grad for p in decoder.model.parameters()}
        self._names = {id(p): name for unit in decoder.units for name, p in unit.parameters.items()}

    def begin(self) -> None:
        """Must be called before a step. If the user has changed the model's modules, attributes or hooks, drops
        recorded operations, because they would repeat old code. Raises InputError if the user has added a parameter,
        moved one to other memory, or changed its requires_grad."""
        decoder = self.decoder
        if any(self._trained.get(id(p)) != p.requires_grad for p in decoder.model.parameters()):
            raise InputError(
                "a parameter of the model was added, or its requires_grad was changed, after the model was loaded; a "
                "step trains the parameters that were loaded, all of them"
            )
        if not all(map(self._is_of_store, decoder.model.parameters())):
            raise InputError(
                "a parameter of the model has other memory than when it was loaded, as after model.to(dtype); a step "
                "would update only the memory that was loaded"
            )
        if self.recordings is not None and self.recordings.forget_if_changed(decoder.model):
            # If a user has changed the model since it was loaded, backward recomputes all matmuls from now on
            # (products.py), and blocks run their own residual additions.
            if not equal(structure_of(decoder.model), decoder.structure):
                decoder.skippable_layers = [None] * len(decoder.blocks)
                for forward in decoder.block_forwards:
                    forward.own_sums = True

    def _is_of_store(self, parameter: Tensor) -> bool:
        part = self.store.part_of(self._names[id(parameter)])
        # Weights that are on the device only while they are used have other memory each time.
        visits = part.weights_streamed or self.store.ranks.count > 1
        return visits or address_of(parameter) == address_of(part.working)

    def embed(self, micro_batch: Batch, dropout: Dropout) -> tuple[Tensor, list[Extra]]:
        """Runs the embeddings, without a graph. Returns their output [B, T, D], and each block's other arguments."""
        dropout.begin(-1, self.store.device)
        with torch.no_grad():
            return self.decoder.embed(*micro_batch.inputs)

    def segment_forward(
        self, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout
    ) -> tuple[Tensor, SavedSegment]:
        """Runs `segment` (consecutive blocks that are recomputed together) on `hidden` [B, T, D]. Returns the last
        block's output, and the tensors that `segment_backward` needs. `extras[i]`: other arguments of block i."""
        run = partial(recompute.forward, self.decoder, segment, hidden, extras, dropout)
        if segment.keep != INPUT:
            return run()
        output = self._recorded_or_run("forward", lambda: run()[0], segment, extras, (hidden, dropout))
        return output, SavedSegment(hidden)

    def head(self, hidden: Tensor, labels: Tensor, dropout: Dropout, scale: float) -> tuple[Tensor, Tensor]:
        """Runs the final norm and the head, forward and backward. Returns the loss, summed over tokens. Also returns
        the gradient of `scale` times this loss with respect to `hidden` [B, T, D], the last block's output."""
        dropout.begin(len(self.decoder.blocks), self.store.device)
        boundary = hidden.requires_grad_()
        final = self.decoder.final(_with_labels(boundary, labels))
        loss, gradient = self._cross_entropy(final.detach(), labels, scale)
        final.backward(gradient.view_as(final).to(final.dtype))
        return loss, boundary.grad

    def segment_backward(
        self, segment: Segment, saved: SavedSegment, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
    ) -> Tensor:
        """Runs the blocks of `segment` backward, and first forward again unless `saved` has their graph. `gradient`
        [B, T, D]: the gradient for the last block's output. Returns the gradient for the first block's input."""
        run = partial(recompute.backward, self.decoder, segment, saved, extras, dropout, gradient)
        if segment.keep != INPUT:
            return run()
        return self._recorded_or_run("backward", run, segment, extras, (gradient, saved.boundary, dropout))

    def embed_backward(self, micro_batch: Batch, dropout: Dropout, gradient: Tensor) -> None:
        """Runs the embeddings again, and backward. `gradient` [B, T, D]: the gradient for their output."""
        dropout.begin(-1, self.store.device)
        with SparseLookups():
            hidden, _ = self.decoder.embed(*micro_batch.inputs)
        hidden.backward(gradient)

    def evaluate(self, micro_batch: Batch) -> Tensor:
        """Returns the loss of one micro-batch, summed over its tokens."""
        hidden, extras = self.decoder.embed(*micro_batch.inputs)
        for index, extra in enumerate(extras):
            hidden = self.decoder.block(index, hidden, extra)
        return self._cross_entropy(self.decoder.final(_with_labels(hidden, micro_batch.labels)), micro_batch.labels)[0]

    def norms(self, part: Part) -> Tensor:
        """Returns the norms of the gradient of `part`, a unit's matrices or vectors, in fp32. There is one norm for
        each piece, a range of the part that one call of `update` changes."""
        norms = [torch.linalg.vector_norm(part.gradient[piece.start : piece.stop]) for piece in part.pieces]
        return torch.stack(norms)

    def update(self, piece: Piece, state: State, hyperparameters: Hyperparameters) -> None:
        """Applies the optimizer to the weights of `piece`, a range of parameters. `state`: the optimizer's tensors on
        the device. If RAM stores the weights or the gradient, their copies on the device are in `state`, too."""
        place = slice(piece.start, piece.stop)
        working = state.get(WORKING, piece.part.working[place])
        gradient = state[GRADIENT] if piece.part.gradient_in_ram else piece.part.gradient[place]
        moments = {name: tensor for name, tensor in state.items() if name not in (WORKING, GRADIENT)}
        self._update(self.optimizer, working, moments, gradient, hyperparameters, piece.decay)

    def _recorded_or_run(
        self, name: str, run: Callable[[], Tensor], segment: Segment, extras: Sequence[Extra], arguments: tuple
    ) -> Tensor:
        """Returns the result of `run()`, or repeats the operations that an earlier call with this `name`, this segment
        and equal shapes has recorded. `name`: "forward" or "backward". `arguments`: the values that `run` uses."""
        if self.recordings is None:
            return run()
        of_segment, blocks = ([each[index] for index in segment.blocks] for each in (extras, self.decoder.blocks))
        return self.recordings.run((name, segment), run, arguments, of_segment, blocks)

    def _cross_entropy(self, final: Tensor, labels: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.decoder.head_weight, self.decoder.head_bias
        accumulators = {}
        if scale is not None:
            accumulators["weight_gradient"] = self._accumulator_of(weight)
            accumulators["bias_gradient"] = None if bias is None else self._accumulator_of(bias)
        return linear_cross_entropy(
            final.flatten(0, 1).to(weight.dtype),
            weight.detach(),
            labels.flatten(),
            bias=None if bias is None else bias.detach(),
            scale=1.0 if scale is None else scale,
            function=self.decoder.logit_function,
            fused=Kernels.PRODUCTS in self.decoder.fused_kernels and weight.dtype is not torch.float32,
            **accumulators,
        )

    def _accumulator_of(self, parameter: Tensor) -> Tensor:
        name = self._names[id(parameter)]
        return self.store.part_of(name).gradient_of(name)


def _with_labels(hidden: Tensor, labels: Tensor) -> Tensor:
    # The positions of an encoder-decoder's sources, which have no labels, are before the others.
    return hidden if hidden.shape[1] == labels.shape[1] else hidden[:, -labels.shape[1] :]
