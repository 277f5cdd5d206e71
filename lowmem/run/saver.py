"""Saves checkpoints: every so many steps or minutes, at the end of training, and when training is told to stop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial

from lowmem.errors import CapExceeded, Stopped
from lowmem.run.checkpoint import NotSaved, save_checkpoint
from lowmem.run.evaluation import best_kept
from lowmem.run.folder import checkpoint_of
from lowmem.run.metrics import computed
from lowmem.run.prepare import Session
from lowmem.run.signals import StopRequest
from lowmem.units import interval_seconds


class Saver:
    def __init__(self, session: Session, stop: StopRequest):
        self._session, self._stop = session, stop
        self._saved_at = time.monotonic()

    def due(self, done: int) -> bool:
        """Returns True if --save-every asks for a checkpoint after `done` steps."""
        every = self._session.settings.save_every
        seconds = interval_seconds(every)
        if seconds is None:
            return done % every == 0
        return self._session.ranks.most(int(time.monotonic() - self._saved_at >= seconds)) > 0

    def save(self, done: int, ended: bool = False, must: bool = True) -> None:
        """Saves a checkpoint after `done` steps, unless that step is saved already. Then raises Stopped if a signal has
        asked to stop and training has not `ended`. If the checkpoint cannot be written: raises NotSaved if `must` is
        True or Stopped would follow, else logs a warning."""
        self._stop.now(f"the save of step {done}", "changes nothing")
        self._session.step.flush()
        try:
            if done not in self._session.saved:
                self._write(done)
                self._session.log.say(f"step {done}: saved in {checkpoint_of(self._session.folder, done)}")
        except NotSaved as error:
            if must or (self._stop.requested and not ended):
                raise
            then = "the model is exported" if ended else "training goes on, and the next save tries again"
            self._session.log.say(f"warning: {error.args[0]}; {then}")
        self._saved_at = time.monotonic()
        if self._stop.requested and not ended:
            name = self._stop.name or "a signal to another rank"
            again = "the same command" + (" with --resume auto" if self._session.settings.resume == "never" else "")
            raise Stopped(f"stopped by {name} after step {done}; {again} goes on from there")

    @contextmanager
    def saved_if_memory_runs_out(self, done: int) -> Iterator[None]:
        """Saves a checkpoint after `done` steps if the `with` block raises CapExceeded. Raises the block's error in any
        case."""
        try:
            yield
        except CapExceeded:
            # Half-updated weights cannot be saved, and a rank cannot save without the others.
            if not self._session.step.halfway and self._session.ranks.count == 1:
                with suppress(NotSaved, Stopped, CapExceeded):
                    self.save(done)
            raise

    def _write(self, done: int) -> None:
        session, settings = self._session, self._session.settings
        state = session.model.state(done) | {"skipped": session.skipped, "eval_first": session.eval_first}
        state |= {"recoveries": session.recovery.measures, "identity": session.identity}
        state |= {"course": asdict(session.course), "eval_batches": settings.eval_batches, "resume": session.origin}
        with session.budget.phase("save"):
            best = best_kept(session, done).step if settings.keep_best else None
            session.ranks.on_first(partial(
                save_checkpoint, session.folder, session.step.store, state, keep_last=settings.keep_last, best=best,
                metrics=lambda: computed(session.log.rows),
            ))  # fmt: skip
        session.saved.add(done)
