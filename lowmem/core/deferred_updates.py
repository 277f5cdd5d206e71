"""Applies the updates of one optimizer step, mostly during the forward pass of the next step."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lowmem.core.operations import Operations
from lowmem.core.optimizers import Hyperparameters
from lowmem.core.parameters import Piece, Store
from lowmem.core.transfers import Lane, Transfers
from lowmem.core.window import StateWindow
from lowmem.errors import LowmemError


class UpdateInterrupted(LowmemError):
    """Is raised if only some weights are updated; training must resume from the newest checkpoint."""


class Updates:
    """Makes the updates of each optimizer step, in one pass over all units (the embeddings, blocks, final norm)."""

    def __init__(self, store: Store, units: int, hyper: Hyperparameters, transfers: Transfers, operations: Operations):
        self.state_window, self._transfers = StateWindow(transfers, store.device, store.pieces), transfers
        self._updated = None  # event of the last update; later kernels wait for it
        self.hyper = hyper  # hyperparameters of the newest pass; `hyper.update` counts passes from 1 on
        self.units = units
        self._store, self._operations = store, operations
        self._pieces: Sequence[Piece] = ()
        self._next = 0  # Index of the next piece in the pass.
        self._torn = False  # True if an error or Ctrl-C ended the update of a piece, which may be half made.
        self._downwards = False  # True if the pass goes from the last unit to the first.
        self.halfway = False

    @property
    def waiting(self) -> bool:
        return self._next < len(self._pieces)

    def begin(self, gradient_scale: float, learning_rate: float, *, downwards: bool) -> None:
        """Begins a step's updates, a pass over all units (embeddings, blocks, final norm); `run_until` makes them.
        Multiplies gradients by `gradient_scale`; those of a unit must be final (fully summed) when it is updated.
        `downwards`: True for the last unit first, during backward. False for the first unit first, after backward."""
        hyper = replace(
            self.hyper, learning_rate=learning_rate, update=self.hyper.update + 1, gradient_scale=gradient_scale
        )
        pieces = self._store.pieces
        pieces = sorted(pieces, key=lambda piece: -piece.part.unit) if downwards else pieces
        if self._downwards is not downwards and self._pieces:  # else StateWindow.begin needs the order of the last pass
            self.state_window.synchronize()
        self.state_window.begin(pieces)
        self._wait_for_gradients()
        # Set last: if Ctrl-C ends this method earlier, no update is pending.
        self.hyper, self._downwards, self.halfway, self._pieces, self._next = hyper, downwards, downwards, pieces, 0

    def end(self) -> None:
        """Must be called when backward has made all updates of a step. Sets `halfway` to False."""
        self.halfway = False

    def refuse_halfway(self) -> None:
        if self.halfway:
            raise UpdateInterrupted("the step before was ended while it made its updates; load the weights again")

    def run_until(self, units: int) -> None:
        """Makes pending updates until the first `units` units of the pass (embeddings, blocks, final norm) are updated.
        Kernels launched later wait for them. After an OutOfMemoryError, a new call repeats the update that failed.
        Raises UpdateInterrupted if an error or Ctrl-C ended an earlier call while it changed a tensor."""
        if self._torn:
            raise UpdateInterrupted("an update was ended in the middle of a tensor; load the weights again")
        if not self._due(units):
            return
        if not self.state_window.fits:
            self.move_states(self._store.states_on_gpu)
        if self._downwards:  # their gradients are newer than `begin`
            self._wait_for_gradients()
        try:
            while self._due(units):
                self._update_next()
        finally:  # kernels launched later may read the weights and use the memory that the updates freed
            self._transfers.wait(Lane.COMPUTE, self._updated)
        self.state_window.fetch_ahead()

    def flush(self) -> None:
        """Applies all pending updates, and waits until every optimizer state is back where it is stored."""
        self.run_until(self.units)
        self.state_window.synchronize()

    def move_states(self, states_on_gpu: int) -> bool:
        """Moves optimizer states into RAM, except those of the first `states_on_gpu` units (embeddings, blocks, final
        norm). Returns False if CUDA refuses to page-lock them. May be called in the middle of a pass."""
        self.state_window.synchronize()
        if self._store.device.type == "cuda":
            torch.cuda.synchronize(self._store.device)
        try:
            locked = self._store.move_states_to_ram(states_on_gpu)
            self.state_window.fit(self._store.pieces)
        finally:
            self.state_window.begin(self._pieces[self._next :])  # also in the middle of a pass
        return locked

    def _due(self, units: int) -> bool:
        if not self.waiting:
            return False
        unit = self._pieces[self._next].part.unit
        return (self.units - 1 - unit if self._downwards else unit) < units

    @torch.no_grad()
    def _update_next(self) -> None:
        piece = self._pieces[self._next]
        part, state = piece.part, self.state_window.take(piece)
        self._torn = True
        if part.has_gradient:  # else this step has used none of its parameters
            # An update that runs out of memory has changed nothing (optimizers.py). The next `run_until` repeats it.
            with self._transfers.updating():
                try:
                    self._operations.update(piece, state, self.hyper)
                except torch.OutOfMemoryError:  # nothing was changed
                    self._torn = False
                    raise
                part.version += 1
            self._updated = self._transfers.mark(Lane.UPDATES)
        self.state_window.give_back(piece)
        self._next += 1
        self._torn = False
        if piece is part.pieces[-1]:  # of a unit's matrices or vectors
            part.drop_gradient()

    def _wait_for_gradients(self) -> None:
        self._transfers.wait(Lane.UPDATES, self._transfers.mark(Lane.COMPUTE))
