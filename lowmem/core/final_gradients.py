"""What becomes of gradients when no more is added to them.

One pass of forward and backward finishes the gradients of one unit after the other, from the last one down to the
embeddings. What happens to them then is what the three ways to update differ in (layout.py):

    HeldGradients      nothing: they wait for the norm, and the next forward pass updates with them
    DroppedGradients   they are freed: this pass was for the norm alone
    AppliedGradients   the unit is updated at once, and its gradient freed before the next one is made
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.parameters import Piece, Store


class FinalGradients:
    """Collects the norms of gradients; what else becomes of them is a subclass's to say.

    `waits`: whether gradients are kept until the pass has ended; if not, `finish` consumes those of each unit.
    """

    waits = True

    def __init__(self, store: Store, units: int, norm_of: Callable[[Piece], Tensor]):
        """`norm_of`: the norm of a piece's gradient, a tensor of one number on the device."""
        self._store, self._norm_of = store, norm_of
        self._lowest = units  # the first unit whose gradients are final
        self._norms: dict[int, Tensor] = {}  # of the pieces whose gradients are, by their place in the store

    def begin(self, losses: Sequence[Tensor]) -> None:
        """The losses of all micro-batches are known, and backward begins."""

    def finish(self, lowest: int) -> None:
        """No more is added to the gradients of the units from `lowest` on."""
        raise NotImplementedError

    def norm(self) -> float:
        """Of all gradients, in fp64 over those of the pieces. To be called when the pass has ended."""
        norms = [self._norms[index] for index in sorted(self._norms)]
        norm = torch.linalg.vector_norm(torch.stack(norms).double()).item()
        self._norms = {}
        return norm

    def _take_norms(self, lowest: int) -> list[Tensor]:
        norms = {
            index: self._norm_of(piece)
            for index, piece in enumerate(self._store.pieces)
            if lowest <= piece.part.unit < self._lowest and piece.part.gradient is not None
        }
        self._norms |= norms
        self._lowest = lowest
        return list(norms.values())


class HeldGradients(FinalGradients):
    """Keeps gradients."""

    def finish(self, lowest: int) -> None:
        self._take_norms(lowest)


class DroppedGradients(FinalGradients):
    """Frees gradients when their norms have been taken."""

    waits = False

    def finish(self, lowest: int) -> None:
        self._take_norms(lowest)
        for part in self._store.parts:
            part.gradient = part.gradient if part.unit < lowest else None


class AppliedGradients(FinalGradients):
    """Updates each unit by `gradient_scale` times its gradient as soon as that is final. Where the loss is not finite
    nothing is updated: the gradients are held, and the step is skipped whole."""

    waits = False

    def __init__(
        self, store: Store, units: int, norm_of: Callable[[Piece], Tensor], updates: Updates, gradient_scale: float,
        learning_rate: float,
    ):  # fmt: skip
        super().__init__(store, units, norm_of)
        self._updates, self._units = updates, units
        self._gradient_scale, self._learning_rate = gradient_scale, learning_rate

    def begin(self, losses: Sequence[Tensor]) -> None:
        if math.isfinite(torch.stack(list(losses)).sum().item()):
            self._updates.begin(self._gradient_scale, self._learning_rate, downwards=True)
        else:
            self.waits = True

    def finish(self, lowest: int) -> None:
        norms = self._take_norms(lowest)
        if self.waits:
            return
        if norms and not math.isfinite(torch.stack(norms).sum().item()):
            raise UpdateInterrupted(
                f"a gradient of unit {lowest} is not finite, and the units above it have been updated already, so "
                "they are not saved; the same command goes on from the newest checkpoint, and with --clip-norm and "
                "room for all gradients such a step is skipped whole"
            )
        self._updates.run(self._units - lowest)
