"""Runs the training loop of `lowmem train`, of `lowmem.train` and of the scripts such as train_gpt2_large.py."""

import math
import time
from contextlib import nullcontext
from dataclasses import asdict

from lowmem import device as devices
from lowmem.core.step import StepAbandoned, StepResult
from lowmem.distributed.launch import launched_rank
from lowmem.errors import LowmemError, some_of
from lowmem.run import evaluation
from lowmem.run.ending import Ending
from lowmem.run.figures import best_evaluation
from lowmem.run.metrics import step_row, write_json
from lowmem.run.plan_command import show_plan
from lowmem.run.prepare import Session, prepare
from lowmem.run.preview import show_preview
from lowmem.run.recovery import page_locked
from lowmem.run.saver import Saver
from lowmem.run.signals import StopRequest
from lowmem.settings import Settings

_NOTHING = "changes nothing"
SKIPPED_IN_A_ROW = 10  # a run ends after so many steps without a finite gradient in a row


def run(settings: Settings, stop: StopRequest) -> None:
    """Plans and trains. With `settings.plan_only` or `settings.preview`, only prints the plan (predicted memory and
    time) or examples of the data. `stop` counts the signals that ask to stop."""
    if settings.trains_nothing and launched_rank() > 0:
        return
    if settings.preview is not None:
        show_preview(settings)
        return
    if settings.plan_only:
        show_plan(settings)
        return
    with prepare(settings) as session:
        train(session, stop)


def train(session: Session, stop: StopRequest) -> None:
    """Does the remaining steps of a run, then the export and the report. `stop` counts signals that ask to stop."""
    step, log, steps, settings = session.step, session.log, session.steps, session.settings
    saver, ending = Saver(session, stop), Ending(session)
    if session.ranks.on_first(ending.was_finished):
        return
    devices.keep_freed_memory(session.model.plan.keeps_freed_memory)
    _begin(session, ending)
    done, seconds = session.model.done, session.model.plan.step_seconds
    ended = done == steps or evaluation.out_of_patience(session)
    session.budget.enter("train")
    stop.agree(session.ranks)
    if stop.requested:
        saver.save(done, ended)
    step.abandoned = (lambda: stop.urgent) if session.ranks.count == 1 else None
    while not ended:
        if session.skipped >= SKIPPED_IN_A_ROW:
            raise LowmemError(f"{session.skipped} steps in a row had no finite gradient; stopped at step {done}")
        done += 1
        started = time.perf_counter()
        batch, rate = session.data.train.batch(done - 1), session.course.rate(step.updates)
        _announce(session, stop, done, seconds)
        try:
            with saver.saved_if_memory_runs_out(done - 1):
                result = step(batch, done - 1, rate)
        except StepAbandoned:
            saver.save(done - 1)  # raises Stopped
        evaluating = evaluation.due(session, done)
        saving = saver.due(done) or done == steps
        if evaluating or saving:
            step.flush()  # its update is part of this step's time
        seconds = time.perf_counter() - started
        epoch = done / session.data.train.steps_per_epoch
        row = step_row(done, epoch, batch, rate, seconds, result, session.budget.peaks())
        if done == 1 and session.eval_first is not None:
            row["eval_first"] = session.eval_first
        with saver.saved_if_memory_runs_out(done):
            try:
                if evaluating:
                    with ending.part("the last evaluation") if done == steps else nullcontext():
                        row |= evaluation.evaluated_after(session, stop, done)
            finally:
                log.step(row)
        ended = done == steps
        if "eval_loss" in row:
            saving |= settings.keep_best and evaluation.best_kept(session, done).step == done
            ended |= evaluation.out_of_patience(session)
        if settings.sample_every is not None and done % settings.sample_every == 0 and not ended:
            evaluation.take_samples(session, done)
        with saver.saved_if_memory_runs_out(done):
            session.budget.check(f"step {done}")
        _return_ram_above_the_plan(session)
        _count_skipped(session, done, result)
        stop.agree(session.ranks)
        if saving or ended or stop.requested or session.skipped == SKIPPED_IN_A_ROW:
            with ending.part("the last save") if ended else nullcontext():
                saver.save(done, ended, must=False)
    _end(session, stop, done)
    ending.finish(done)


def _begin(session: Session, ending: Ending) -> None:
    log, held_out = session.log, {}
    if session.ranks.on_first(lambda: evaluation.is_missing(session)):
        with ending.part("the last evaluation") if session.model.done == session.steps else nullcontext():
            held_out = evaluation.evaluated(session)
    if not session.resumed:
        session.eval_first = held_out.get("eval_loss")
    session.model = page_locked(session.model, log.say)
    plan = session.model.plan.to_dict()
    session.ranks.on_first(lambda: _write_start(session, plan))
    if log.rows and held_out:
        log.rows[-1] |= held_out
    log.start(session.model.done, session.steps, plan, held_out)
    if session.model.done == 0:
        evaluation.take_samples(session, 0)


def _write_start(session: Session, plan: dict) -> None:
    write_json(session.folder / "plan.json", plan)
    write_json(session.folder / "settings.json", asdict(session.settings))
    session.data.keep()


def _announce(session: Session, stop: StopRequest, number: int, seconds: float | None) -> None:
    session.recovery.number = number
    about = "" if seconds is None else f", about {seconds:.2g} s"
    drops = "drops this step, unless its updates have begun, and saves" if session.ranks.count == 1 else _NOTHING
    stop.now(f"step {number}{about}, then saving", drops)


def _return_ram_above_the_plan(session: Session) -> None:
    """Returns freed RAM to the system after each step, once a run that keeps it has taken more RAM than planned. The
    plan has only a rule of thumb for what is kept."""
    plan = session.model.plan
    if not plan.keeps_freed_memory or session.budget.peaks()["ram_peak_bytes"] <= plan.ram_bytes:
        return
    if not session.over_plan:
        session.over_plan = True
        devices.keep_freed_memory(False)
        session.log.say("this takes more RAM than planned, so freed memory goes back to the system after each step")
    devices.return_freed_memory()


def _count_skipped(session: Session, done: int, result: StepResult) -> None:
    session.skipped = 0 if result.updated else session.skipped + 1
    scale = session.step.loss_scale
    if session.skipped and scale.enabled and math.isfinite(result.loss):
        said = f"step {done}: gradients were beyond the range of fp16, so no update was made"
        session.log.say(f"{said}; the loss scale is now {scale.scale:g}, as fp16 needs now and then")
    elif session.skipped:
        texts = session.data.train.where(done - 1)
        said = f"step {done}: the gradient norm is {result.grad_norm}, so no update was made; its batch:"
        session.log.say(f"{said} {some_of(texts)} (all in log.txt)", f"{said} {', '.join(texts)}")


def _end(session: Session, stop: StopRequest, done: int) -> None:
    """Raises LowmemError if the last step's loss is not finite, unless --keep-best exports an earlier checkpoint. If
    --patience ended training early, logs why. Returns freed RAM to the system, which the export may need."""
    log = session.log
    if session.model.plan.keeps_freed_memory:
        devices.keep_freed_memory(False)
        devices.release_freed_memory()
    earlier = session.settings.keep_best and evaluation.best_kept(session, done).step not in (0, done)
    if session.skipped and log.rows and not math.isfinite(log.rows[-1]["loss"]) and not earlier:
        raise LowmemError(f"the loss of the last step is {log.rows[-1]['loss']}: nothing was exported")
    stop.now("the export; all steps are done and saved", _NOTHING)
    if evaluation.out_of_patience(session):
        best = best_evaluation(log.rows, session.eval_first)
        said = f"the last {best.since} held-out losses are not below {best}; a higher --patience goes on"
        log.say(f"ended early, after {done} of {session.steps} steps: {said}")
