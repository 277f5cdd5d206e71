"""Computes the norms of final gradients. Then keeps, copies to RAM, frees or applies these gradients, as the layout's
Fate says (layout.py).

A gradient is final when nothing more is added to it. One forward and backward pass finishes the gradients of one unit
(such as a block) after the other, from the last unit to the embeddings.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.layout import Fate
from lowmem.core.parameters import Part, Store
from lowmem.core.segment_windows import GradientWindow


class FinalGradients:
    """Handles the gradients of one forward and backward pass when they are final, that is, fully accumulated. `fate`:
    HELD (they stay on the device), SENT (copied to RAM), DROPPED (freed) or APPLIED (used at once to update their unit,
    such as a block). If the loss is not finite, APPLIED becomes HELD, so that no unit is updated."""

    def __init__(
        self, fate: Fate, store: Store, norms_of: Callable[[Part], Tensor], window: GradientWindow, updates: Updates,
        gradient_scale: float, learning_rate: float,
    ):  # fmt: skip
        """Prepares for the gradients of one backward pass. `store`: the model's parameters. `norms_of`: function that
        returns the gradient norms of a part (a unit's matrices or vectors), one for each piece (a range of the part's
        elements). `window`: copies gradients to RAM, if `fate` is SENT. `updates`: updates each unit, if `fate` is
        APPLIED. These updates use `learning_rate`, and multiply gradients by `gradient_scale`; other fates ignore
        both."""
        self.fate, self._scale, self._rate = fate, gradient_scale, learning_rate
        self._store, self._norms_of, self._window, self._updates = store, norms_of, window, updates
        self._lowest = updates.units  # gradients of this unit and of later ones are final; no unit yet
        self._norms: dict[int, Tensor] = {}  # {id of a part with final gradients: norms [pieces]}

    def begin(self, losses: Sequence[Tensor]) -> None:
        """Prepares the updates that backward will make, if `fate` is APPLIED. Must be called before backward. If the
        sum of `losses` is not finite, sets `fate` to HELD instead, so that nothing is updated. Does nothing for other
        fates. `losses`: a scalar for each micro-batch."""
        if self.fate is Fate.APPLIED:
            loss = torch.stack([*losses]).sum().item() if losses else 0.0
            if math.isfinite(self._store.ranks.total(loss)):
                self._updates.begin(self._scale, self._rate, downwards=True)
            else:
                self.fate = Fate.HELD

    def finish(self, lowest: int) -> None:
        """Handles gradients that have become final. Must be called when the gradients of unit number `lowest` and of
        all later units are final. Unit 0 is the embeddings, unit i is block i - 1. Sums the newly final gradients over
        all ranks and computes their norms. Then keeps, copies to RAM, frees or applies them, as `fate` says. If `fate`
        is APPLIED and a gradient is not finite, raises UpdateInterrupted."""
        final = range(lowest, self._lowest)
        self._lowest = lowest
        parts = [part for part in self._store.parts if part.unit in final]
        parts = self._store.ranks.summed(parts, now=lowest == 0 or self.fate is Fate.APPLIED)
        norms = {id(part): self._norms_of(part) for part in parts}
        self._norms |= norms
        if self.fate is Fate.SENT:
            self._window.leave(part for part in parts if part.gradient_home is not None)
        elif self.fate is Fate.DROPPED:
            for part in parts:
                part.drop_gradient()
        elif self.fate is Fate.APPLIED:
            if norms and not math.isfinite(torch.cat(list(norms.values())).sum().item()):
                raise UpdateInterrupted(
                    f"a gradient of unit {lowest} is not finite, and the units above it have been updated already, so "
                    "they are not saved; the same command goes on from the newest checkpoint, and with --clip-norm and "
                    "room for all gradients such a step is skipped whole"
                )
            self._updates.run_until(self._updates.units - lowest)

    def end(self) -> float:
        """Ends the backward pass: calls `finish` for all units (such as blocks) that are not finished yet. Returns the
        norm of the gradients of all parameters over all ranks. It is computed in fp64 from the norms of pieces (ranges
        of elements)."""
        self.finish(0)
        if self.fate is Fate.SENT:
            self._window.release()
        parts = [part for part in self._store.parts if id(part) in self._norms]
        norm = self._store.ranks.norm([(part, self._norms[id(part)]) for part in parts])
        self._norms = {}
        if self.fate is Fate.APPLIED:
            self._updates.end()
        return norm
