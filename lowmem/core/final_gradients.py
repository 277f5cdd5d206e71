"""Handles gradients that are final (fully summed). Computes their norms, and then holds the gradients on the GPU,
copies them to RAM, frees them, or updates weights with them (layout.Fate)."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowmem.core.deferred_updates import UpdateInterrupted, Updates
from lowmem.core.layout import Fate
from lowmem.core.parameters import Part, Store
from lowmem.core.segment_windows import GradientWindow


class FinalGradients:
    """Computes the norms of one pass's gradients when they are final (fully summed). Then holds the gradients on the
    GPU, sends them to RAM, drops or applies them, as `fate` says: the head's first, the embeddings' last. `norms_of`:
    returns the gradient norms of a part (a unit's matrices or vectors), one for each range that one update changes.
    `gradient_scale`, `learning_rate`: for updates, if `fate` is APPLIED."""

    def __init__(
        self, fate: Fate, store: Store, norms_of: Callable[[Part], Tensor], window: GradientWindow, updates: Updates,
        gradient_scale: float, learning_rate: float,
    ):  # fmt: skip
        self.fate, self._scale, self._rate = fate, gradient_scale, learning_rate  # scale and rate of updates if APPLIED
        self._store, self._norms_of, self._window, self._updates = store, norms_of, window, updates
        self._lowest = updates.units  # gradients of this unit and of later ones are final; no unit yet
        self._norms: dict[int, Tensor] = {}  # {id of a part with final gradients: norms_of(part)}

    def begin(self, losses: Sequence[Tensor]) -> None:
        """Must be called before blocks run backward. If `fate` is APPLIED, begins updates, which backward makes. If the
        sum of `losses` over all ranks is not finite, sets `fate` to HELD instead, so that no weight changes."""
        if self.fate is Fate.APPLIED:
            loss = torch.stack([*losses]).sum().item() if losses else 0.0
            if math.isfinite(self._store.ranks.total(loss)):
                self._updates.begin(self._scale, self._rate, downwards=True)
            else:
                self.fate = Fate.HELD

    def finish(self, lowest: int) -> None:
        """Computes the gradient norms of unit `lowest` (0: embeddings, i: block i - 1, last: final norm) and of later
        units that no call has handled yet. Their gradients must be final. Then holds, sends, drops or applies them, as
        `fate` says. Several ranks (processes) may do all this in a later call, when the sum over ranks is ready. Raises
        UpdateInterrupted if a gradient to be applied is not finite."""
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
        """Calls `finish` for the units that are left. Returns the norm of all gradients over all ranks."""
        self.finish(0)
        if self.fate is Fate.SENT:
            self._window.release()
        parts = [part for part in self._store.parts if id(part) in self._norms]
        norm = self._store.ranks.norm([(part, self._norms[id(part)]) for part in parts])
        self._norms = {}
        if self.fate is Fate.APPLIED:
            self._updates.end()
        return norm
