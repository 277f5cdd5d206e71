"""The updates of one optimizer step: made unit by unit, forwards before weights are read, or backwards as gradients
become final.

They wait here until the next forward pass needs a unit's new weights or, where nothing has to be known of all gradients
first, until that unit's gradient is final. Streamed states visit the device (window.py) in the same order,
fetched ahead.

Memory that runs out within an update leaves it to be made: a piece is updated whole or not at all (optimizers.py), and
`run` goes on with the piece that it had come to, so none is updated twice and none left out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lowmem.core.optimizers import Hyperparameters, State
from lowmem.core.parameters import Piece, Store
from lowmem.core.transfers import Lane, Transfers
from lowmem.core.window import StateWindow
from lowmem.errors import LowmemError


class UpdateInterrupted(LowmemError):
    """An update of which only a part could be made: the weights are of no use any more, and what was saved is."""


class Updates:
    """`hyper`: of the last update begun, `hyper.update` their number; `units_done`: how many units have been updated,
    in the order of the pass, all of them where nothing waits."""

    def __init__(
        self,
        store: Store,
        units: int,
        hyper: Hyperparameters,
        update: Callable[[Piece, State], None],
        transfers: Transfers,
    ):
        """`update`: updates one piece, whose state is on the device, with `hyper`, or changes nothing if memory runs
        out."""
        self.states, self._transfers = StateWindow(transfers, store.device, store.pieces), transfers
        self._updated = None  # event of the last update; by the time it is awaited, UPDATES waits for the next piece
        self.hyper = hyper
        self.units, self.units_done = units, units
        self._store, self._update_piece = store, update
        self._pieces: Sequence[Piece] = ()
        self._next = 0  # the piece that the pass has come to
        self._torn = False  # whether an error or Ctrl-C has ended the update of a piece, which may be half made
        self.downwards = False  # whether it goes from the last unit to the first

    @property
    def waiting(self) -> bool:
        return self.units_done < self.units

    def begin(self, gradient_scale: float, learning_rate: float, *, downwards: bool) -> None:
        """Makes ready the updates by all gradients there are, or come to be, times `gradient_scale`: from the first
        unit on, as the forward pass needs them, or `downwards` from the last, as the backward is done with them."""
        self.hyper = replace(
            self.hyper, learning_rate=learning_rate, update=self.hyper.update + 1, gradient_scale=gradient_scale
        )
        pieces = self._store.pieces
        self._pieces = sorted(pieces, key=lambda piece: -piece.part.unit) if downwards else pieces
        self._next, self.downwards = 0, downwards
        self.states.begin(self._pieces)
        self.units_done = 0
        self._wait_for_gradients()

    def run(self, units: int) -> None:
        """Makes updates until so many units are updated; what the compute stream is given later waits for them. Where
        memory runs out, the next call makes what is left."""
        if self._torn:
            raise UpdateInterrupted("an update was ended in the middle of a tensor; load the weights again")
        if self.units_done >= units:
            return
        if not self.states.fits:
            self.move_states(self._store.states_on_gpu)
        if self.downwards:  # their gradients came to be since the pass was begun
            self._wait_for_gradients()
        try:
            while self.units_done < units:
                self._go_on()
        finally:  # kernels launched later may read the weights and use the memory that the updates freed
            self._transfers.wait(Lane.COMPUTE, self._updated)

    def flush(self) -> None:
        """Makes every update that still waits; returns when all states have arrived where they belong."""
        self.run(self.units)
        self.states.synchronize()

    def move_states(self, states_on_gpu: int) -> bool:
        """Moves states into RAM (Store.stream), also in the middle of a pass, which goes on with the piece that it had
        come to; the result is whether they are page-locked."""
        self.states.synchronize()
        if self._store.device.type == "cuda":
            torch.cuda.synchronize(self._store.device)
        try:
            locked = self._store.stream(states_on_gpu)
            self.states.fit(self._store.pieces)
        finally:
            self.states.begin(self._pieces[self._next :])
        return locked

    @torch.no_grad()
    def _go_on(self) -> None:
        """Updates the next piece, or comes to the end of a unit and says so in `units_done`. A part's gradient is freed
        after its last piece."""
        if self._next == len(self._pieces):
            self.units_done = self.units
            return
        piece = self._pieces[self._next]
        part = piece.part
        state = self.states.take(piece)
        before = self.units - 1 - part.unit if self.downwards else part.unit
        if before > self.units_done:  # units without parameters have nothing to update
            self.units_done = before
            return
        self._torn = True
        if part.has_gradient:  # else nothing of it took part in this step
            with self._transfers.updating():
                self._update(piece, state)
            self._updated = self._transfers.mark(Lane.UPDATES)
        self.states.give_back(piece)
        self._next += 1
        self._torn = False
        if piece is part.pieces[-1]:
            part.drop_gradient()

    def _wait_for_gradients(self) -> None:
        self._transfers.wait(Lane.UPDATES, self._transfers.mark(Lane.COMPUTE))

    def _update(self, piece: Piece, state: State) -> None:
        try:
            self._update_piece(piece, state)
        except torch.OutOfMemoryError:  # nothing was changed
            self._torn = False
            raise
