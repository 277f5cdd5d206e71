"""What becomes of gradients when no more is added to them.

One pass of forward and backward finishes the gradients of one unit after the other, from the last one down to the
embeddings. What happens to them then is what the ways to update differ in (layout.py):

    HeldGradients      nothing: they wait for the norm, and the next forward pass updates with them
    LeavingGradients   the same, but they wait in RAM (segment_windows.py)
    DroppedGradients   they are freed: this pass was for the norm alone
    AppliedGradients   the unit is updated at once, and its gradient freed before the next one is made
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.parameters import Piece, Store
from lowmem.core.segment_windows import GradientWindow


class FinalGradients:
    """Collects the norms of gradients; what else becomes of them is a subclass's to say.

    `by_unit`: whether `finish` is called for each unit, as its gradients are final, or at the end of the pass alone;
    `held`: whether they are there at that end, on the device or in RAM, for updates to come.
    """

    by_unit, held = False, True

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

    def _take_norms(self, lowest: int) -> None:
        self._norms |= {
            index: self._norm_of(piece)
            for index, piece in enumerate(self._store.pieces)
            if lowest <= piece.part.unit < self._lowest and piece.part.gradient is not None
        }
        self._lowest = lowest


class HeldGradients(FinalGradients):
    """Keeps gradients."""

    def finish(self, lowest: int) -> None:
        self._take_norms(lowest)


class LeavingGradients(FinalGradients):
    """Sends the gradients of parts that have a `gradient_home` to RAM when their norms have been taken."""

    by_unit = True

    def __init__(
        self, store: Store, units: int, norm_of: Callable[[Piece], Tensor], window: GradientWindow
    ):  # fmt: skip
        super().__init__(store, units, norm_of)
        self._window = window

    def finish(self, lowest: int) -> None:
        final = range(lowest, self._lowest)
        self._take_norms(lowest)
        parts = (part for part in self._store.parts if part.unit in final and part.gradient is not None)
        self._window.leave(part for part in parts if part.gradient_home is not None)

    def norm(self) -> float:
        self._window.release()
        return super().norm()


class DroppedGradients(FinalGradients):
    """Frees gradients when their norms have been taken."""

    by_unit, held = True, False

    def finish(self, lowest: int) -> None:
        self._take_norms(lowest)
        for part in self._store.parts:
            if part.unit >= lowest:
                part.drop_gradient()


class AppliedGradients(FinalGradients):
    """Updates each unit by `gradient_scale` times its gradient as soon as that is final. Where the loss is not finite
    nothing is updated: the gradients are held, and the step is skipped whole."""

    by_unit, held = True, False

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
            self.by_unit, self.held = False, True

    def finish(self, lowest: int) -> None:
        self._take_norms(lowest)
        if self.held:
            return
        # All that are not updated yet, and not the newest alone: this is called again where memory has run out in it.
        remaining = self._units - self._updates.units_done
        norms = [norm for index, norm in self._norms.items() if self._store.pieces[index].part.unit < remaining]
        if norms and not math.isfinite(torch.stack(norms).sum().item()):
            raise UpdateInterrupted(
                f"a gradient of unit {lowest} is not finite, and the units above it have been updated already, so "
                "they are not saved; the same command goes on from the newest checkpoint, and with --clip-norm and "
                "room for all gradients such a step is skipped whole"
            )
        self._updates.run(self._units - lowest)
