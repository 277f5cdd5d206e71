"""When a run saves a checkpoint: every so many steps or minutes, at its end, and when it is told to stop."""

import time
from contextlib import suppress
from dataclasses import asdict

from lowmem.errors import Stopped
from lowmem.run.checkpoint import NotSaved, save_checkpoint
from lowmem.run.prepare import Session
from lowmem.run.report import best_evaluation
from lowmem.run.signals import StopRequest
from lowmem.units import interval_seconds


class Saver:
    def __init__(self, session: Session, stop: StopRequest):
        self._session, self._stop = session, stop
        self._saved = session.progress.done if session.progress.resumed else None  # the step of the newest checkpoint
        self._saved_at = time.monotonic()

    def due(self, done: int) -> bool:
        every = self._session.settings.save_every
        seconds = interval_seconds(every)
        return done % every == 0 if seconds is None else time.monotonic() - self._saved_at >= seconds

    def save(self, done: int, ended: bool = False, must: bool = True) -> None:
        """Saves the state after `done` steps. Raises Stopped if a signal has come, unless the run has `ended` anyway;
        NotSaved if the disk has no room and the checkpoint is needed: because it `must` be there, or for that signal.
        """
        self._stop.now(f"the save of step {done}", "changes nothing")
        self._session.step.flush()
        try:
            if self._saved != done:
                self._write(done)
            self._saved = done
        except NotSaved as error:
            if must or (self._stop.requested and not ended):
                raise
            then = "the model is exported" if ended else "training goes on, and the next save tries again"
            self._session.log.say(f"warning: {error.reason}; earlier checkpoints are still there, and {then}")
        self._saved_at = time.monotonic()
        if self._stop.requested and not ended:
            raise Stopped(f"stopped by {self._stop.name} after step {done}; the same command goes on from there")

    def save_before_failing(self, done: int) -> None:
        """For a run that ends because memory has run out, which is the error to report."""
        with suppress(NotSaved, Stopped):
            self.save(done)

    def _write(self, done: int) -> None:
        session, step, progress = self._session, self._session.step, self._session.progress
        state = {"step": done, "updates": step.updates, "loss_scale": step.loss_scale.state()}
        state |= {"skipped": progress.skipped, "eval_first": progress.eval_first}
        state |= {"recoveries": session.recovery.measures, "identity": session.identity}
        state |= {"course": asdict(progress.course)}
        settings = session.settings
        with session.budget.phase("save"):
            best = best_evaluation(session.log.rows, None).step if settings.keep_best else None
            save_checkpoint(session.folder, step.store, state, keep_last=settings.keep_last, best=best)
