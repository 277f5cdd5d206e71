"""The operations that a step is made of; step.py has their order.

The planner wraps this class: `ReplayedOperations` (planning/replay.py) has the same methods, and runs each once per
shape.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from lowmem.core import optimizers, recompute
from lowmem.core.accumulation import Accumulation
from lowmem.core.batch import Batch
from lowmem.core.decoder import Decoder, Extra
from lowmem.core.kernels import fused
from lowmem.core.loss import linear_cross_entropy
from lowmem.core.optimizers import Hyperparameters, State, UpdateRule
from lowmem.core.parameters import GRADIENT, WORKING, Piece, Store
from lowmem.core.recompute import Dropout, SavedSegment, Segment, SkippableProducts


class Operations:
    """Those of `decoder`, whose numbers are in `store`.

    `skippable_products`: the last matrix product that a segment may skip when it runs again (recompute.py); `kind`:
    what two segments must share to learn from each other.
    """

    def __init__(self, decoder: Decoder, store: Store, rule: UpdateRule | None = None):
        """`rule`: updates a piece; None for the one of the device and the decoder's kernels."""
        self.decoder, self.store, self.optimizer = decoder, store, store.optimizer
        eager = optimizers.update_in_slices if store.device.type == "cpu" else optimizers.update
        self.rule = rule or (fused.update if decoder.fused_kernels else eager)
        self.skippable_products: SkippableProducts = {}
        self.kind: Callable[[Segment, Sequence[Extra]], Hashable] = lambda segment, extras: segment
        self._names = {id(p): name for unit in decoder.units for name, p in unit.parameters.items()}

    def group(
        self, run: Callable[[], tuple], micro_batches: Sequence[Batch], segments: Sequence[Segment],
        self_contained: bool,
    ) -> tuple:  # fmt: skip
        """Returns `run()`, forward and backward of one group of micro-batches. `self_contained`: whether nothing is
        updated, dropped or copied meanwhile."""
        return run()

    def norm_of_all(self, run: Callable[[], float]) -> float:
        """Returns `run()`, the norm of gradients that were all held."""
        return run()

    def embed(self, micro_batch: Batch, dropout: Dropout) -> tuple[Tensor, list[Extra]]:
        """The first block's input [B, T, D] and the blocks' extra arguments."""
        dropout.begin(-1, self.store.device)
        with torch.no_grad():
            return self.decoder.embed(*micro_batch.inputs)

    def segment_forward(
        self, segment: Segment, hidden: Tensor, extras: Sequence[Extra], dropout: Dropout
    ) -> tuple[Tensor, SavedSegment]:
        """The segment's output [B, T, D] for its input `hidden`, and what its backward needs."""
        last_is_needed = self.skippable_products.get(self.kind(segment, extras), 0) is None
        return recompute.forward(self.decoder, segment, hidden, extras, dropout, last_is_needed)

    def head(self, hidden: Tensor, labels: Tensor, dropout: Dropout, scale: float) -> tuple[Tensor, Tensor]:
        """The loss of one micro-batch, summed over its tokens, and the gradient of `scale` times that for `hidden`
        [B, T, D], the last block's output; the last positions have `labels`. The head's own gradient goes into its
        accumulator."""
        dropout.begin(len(self.decoder.blocks), self.store.device)
        boundary = hidden.requires_grad_()
        final = self.decoder.final(_with_labels(boundary, labels))
        loss, gradient = self._cross_entropy(final.detach(), labels, scale)
        final.backward(gradient.view_as(final).to(final.dtype))
        return loss, boundary.grad

    def segment_backward(
        self, segment: Segment, saved: SavedSegment, extras: Sequence[Extra], dropout: Dropout, gradient: Tensor
    ) -> Tensor:
        """From the gradient for the segment's output to the one for its input, both [B, T, D]."""
        kind = self.kind(segment, extras)
        return recompute.backward(
            self.decoder, segment, saved, extras, dropout, gradient, self.skippable_products, kind
        )

    def join(self, accumulation: Accumulation) -> None:
        """The gradients of what blocks share, once no block adds to them."""
        accumulation.join()

    def embed_backward(self, micro_batch: Batch, dropout: Dropout, gradient: Tensor) -> None:
        """Backward of the embeddings from `gradient` [B, T, D], for the first block's input."""
        dropout.begin(-1, self.store.device)
        hidden, _ = self.decoder.embed(*micro_batch.inputs)
        hidden.backward(gradient)

    def evaluate(self, micro_batch: Batch) -> Tensor:
        """The loss of one micro-batch, summed over its tokens."""
        hidden, extras = self.decoder.embed(*micro_batch.inputs)
        for index, extra in enumerate(extras):
            hidden = self.decoder.block(index, hidden, extra)
        return self._cross_entropy(self.decoder.final(_with_labels(hidden, micro_batch.labels)), micro_batch.labels)[0]

    def norm(self, piece: Piece) -> Tensor:
        """Of the gradient of one piece, in fp32."""
        return torch.linalg.vector_norm(piece.part.gradient[piece.start : piece.stop])

    def update(self, piece: Piece, state: State, hyperparameters: Hyperparameters) -> None:
        """Updates one piece. Its state is on the device; its gradient too, or it has come with the state."""
        place = slice(piece.start, piece.stop)
        working = state.get(WORKING, piece.part.working[place])
        gradient = state[GRADIENT] if piece.part.gradient_left else piece.part.gradient[place]
        moments = {name: tensor for name, tensor in state.items() if name not in (WORKING, GRADIENT)}
        self.rule(self.optimizer, working, moments, gradient, hyperparameters, piece.decay)

    def _cross_entropy(self, final: Tensor, labels: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Chunked cross-entropy of `final` [B, T, D]; with `scale`, gradients too."""
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
            fused=self.decoder.fused_kernels and weight.dtype is not torch.float32,
            **accumulators,
        )

    def _accumulator_of(self, parameter: Tensor) -> Tensor:
        name = self._names[id(parameter)]
        return self.store.part_of(name).gradient_of(name)


def _with_labels(hidden: Tensor, labels: Tensor) -> Tensor:
    """The positions of `hidden` [B, S + T, D] that have `labels` [B, T]; a decoder's all do."""
    return hidden if hidden.shape[1] == labels.shape[1] else hidden[:, -labels.shape[1] :]
