"""Computes norms of final gradients, and decides their fate: what happens to them next.

A gradient is final when nothing more is added to it. One pass of forward and backward finishes the gradients of one
unit after the other, from the last unit down to the embeddings.

    held     stays until the norm is known; the next forward pass updates with it and hides the copies of states
    sent     the same, but it waits in RAM
    dropped  freed: this pass is for the norm alone. A second pass has the same dropout masks, makes the same gradient
             again and applies it: 4 bytes per parameter saved for twice the time
    applied  updates its unit at once, while the segments below run backward. If it is not finite though the loss was,
             the units above have been updated already, and the training run ends (`UpdateInterrupted`)
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.layout import Fate
from lowmem.core.parameters import Piece, Store
from lowmem.core.segment_windows import GradientWindow


class FinalGradients:
    """Handles the gradients of one pass of forward and backward when they are final. `fate` says what happens to them:
    HELD, SENT, DROPPED or APPLIED. If the loss is not finite, APPLIED becomes HELD, so that no unit is updated."""

    def __init__(
        self, fate: Fate, store: Store, norm_of: Callable[[Piece], Tensor], window: GradientWindow, updates: Updates,
        begin_updates: Callable[[], None],
    ):  # fmt: skip
        """Prepares one pass. `norm_of`: computes the norm of the gradient of one piece (a range of elements), as a
        tensor of one number. `begin_updates`: called before backward if gradients are APPLIED."""
        self.fate, self._begin_updates = fate, begin_updates
        self._store, self._norm_of, self._window, self._updates = store, norm_of, window, updates
        self._lowest = updates.units  # the first unit whose gradients are final
        self._norms: dict[int, Tensor] = {}  # of the pieces whose gradients are final, by id

    def begin(self, losses: Sequence[Tensor]) -> None:
        """Must be called before backward, with the micro-batches' `losses`. Begins the updates if gradients are APPLIED
        and the losses are finite."""
        if self.fate is Fate.APPLIED:
            if math.isfinite(torch.stack(list(losses)).sum().item()):
                self._begin_updates()
            else:
                self.fate = Fate.HELD

    def finish(self, lowest: int) -> None:
        """Must be called when the gradients of unit number `lowest` and of all later units are final. Unit 0 are the
        embeddings, unit i is block i - 1. Computes the norms of those that were not final before, then sends, drops or
        applies them."""
        final = range(lowest, self._lowest)
        self._lowest = lowest
        parts = [part for part in self._store.parts if part.unit in final and part.gradient is not None]
        norms = {id(piece): self._norm_of(piece) for part in parts for piece in part.pieces}
        self._norms |= norms
        if self.fate is Fate.SENT:
            self._window.leave(part for part in parts if part.gradient_home is not None)
        elif self.fate is Fate.DROPPED:
            for part in parts:
                part.drop_gradient()
        elif self.fate is Fate.APPLIED:
            self._refuse_what_is_not_finite(final.start, norms.values())
            self._updates.run(self._updates.units - lowest)

    def norm(self) -> float:
        """Handles the gradients of all units that are left, and ends the pass. Returns the norm of all gradients,
        computed in fp64 from the norms of their pieces."""
        self.finish(0)
        if self.fate is Fate.SENT:
            self._window.release()
        norms = [self._norms[id(piece)] for piece in self._store.pieces if id(piece) in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms).double()).item()
        self._norms = {}
        if self.fate is Fate.APPLIED:
            self._updates.downwards = False  # the step is made; until here memory may run out halfway
        return norm

    @staticmethod
    def _refuse_what_is_not_finite(unit: int, norms: Iterable[Tensor]) -> None:
        if norms and not math.isfinite(torch.stack(list(norms)).sum().item()):
            raise UpdateInterrupted(
                f"a gradient of unit {unit} is not finite, and the units above it have been updated already, so they "
                "are not saved; the same command goes on from the newest checkpoint, and with --clip-norm and room for "
                "all gradients such a step is skipped whole"
            )
