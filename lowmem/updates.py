"""The updates of one optimizer step: made unit by unit, in the order in which something else asks for them.

They wait here until the next forward pass needs a unit's new weights or, where nothing has to be known of all gradients
first, until that unit's gradient is final. Streamed states pass through the ring (streaming.py) in the same order,
fetched ahead of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from lowmem.adam import Hyperparameters
from lowmem.errors import LowmemError
from lowmem.store import Piece, Store
from lowmem.streaming import Ring, State


class UpdateInterrupted(LowmemError):
    """An update of which only a part could be made: the weights are of no use any more, and what was saved is."""


class Updates:
    """`hyper`: of the last update begun, `hyper.update` their number; `units_done`: how many units have been updated,
    in the order of the pass, all of them where nothing waits."""

    def __init__(
        self, store: Store, units: int, weight_decay: float, update: Callable[[Piece, State], None], beside: bool
    ):
        """`update`: updates one piece, whose state is on the device, with `hyper`; `beside`: whether it may run beside
        what computes (streaming.py)."""
        self.ring = Ring(store.device, store.pieces, beside)
        self.hyper = Hyperparameters(learning_rate=0.0, weight_decay=weight_decay, update=0)
        self.units, self.units_done = units, units
        self._store, self._update = store, update
        self._pass: Iterator[int] | None = None
        self._downwards = False

    @property
    def waiting(self) -> bool:
        return self.units_done < self.units

    def begin(self, gradient_scale: float, learning_rate: float, *, downwards: bool) -> None:
        """Makes ready the updates by all gradients there are, or come to be, times `gradient_scale`: from the first
        unit on, as the forward pass needs them, or `downwards` from the last, as the backward is done with them."""
        self.hyper = replace(
            self.hyper, learning_rate=learning_rate, update=self.hyper.update + 1, gradient_scale=gradient_scale
        )
        self._pass, self._downwards = self._pass_over(downwards), downwards
        self.units_done = 0
        self.ring.copies.wait_for_compute()

    def run(self, units: int) -> None:
        """Sees to it that so many units are updated for all that is computed from here on. UpdateInterrupted where
        memory runs out."""
        if self.units_done >= units:
            return
        if self._downwards:  # their gradients came to be since the pass was begun
            self.ring.copies.wait_for_compute()
        try:
            while self.units_done < units:
                self.units_done = next(self._pass)
        except torch.OutOfMemoryError as error:
            raise UpdateInterrupted(
                f"out of memory within update {self.hyper.update}, which left some weights new and some old, so they "
                "are not saved; the same command goes on from the newest checkpoint, and --recompute on or --states "
                f"streamed leaves it more room ({str(error).splitlines()[0]})"
            ) from error
        self.ring.copies.hold_compute()

    def flush(self) -> None:
        """Makes every update that still waits; returns when all states have arrived where they belong."""
        self.run(self.units)
        self.ring.synchronize()

    @torch.no_grad()
    def _pass_over(self, downwards: bool) -> Iterator[int]:
        """Updates piece by piece; yields how many units are done. A part's gradient is freed after it."""
        pieces = sorted(self._store.pieces, key=lambda piece: -piece.part.unit) if downwards else self._store.pieces
        done = 0
        for piece, state in self.ring.pass_over(pieces):
            part = piece.part
            before = self.units - 1 - part.unit if downwards else part.unit
            if before > done:  # whatever units lie between have no parameters
                yield before
                done = before
            if part.gradient is None:  # nothing of it took part in this step
                continue
            with self.ring.copies.updating():
                self._update(piece, state)
            if piece is part.pieces[-1]:
                part.gradient = None
        yield self.units
