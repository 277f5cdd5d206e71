"""Ends a training run: makes export, report, pictures and summary. If one of these parts fails, makes the others."""

import importlib.util
import json
import math
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lowmem.core.precision import WORKING_DTYPES
from lowmem.errors import NO_ERRORS, CapExceeded, LowmemError, Stopped, first_line
from lowmem.fields import shown
from lowmem.models.export import TRAINED, BeyondRange, export_model
from lowmem.run.checkpoint import load_checkpoint, newest_state, verify_checkpoint
from lowmem.run.evaluation import best_kept, take_samples
from lowmem.run.figures import best_evaluation, build_report, is_report_of, summary
from lowmem.run.folder import checkpoint_of
from lowmem.run.metrics import write_json
from lowmem.run.page import write_page
from lowmem.run.plots import draw, draw_loss, draw_memory
from lowmem.run.prepare import Session
from lowmem.run.report import device_name, versions
from lowmem.run_folder import read_run_json
from lowmem.units import counted


class Ending:
    def __init__(self, session: Session):
        self.failed: list[str] = []  # sentences on failures
        self._exported = False  # True as soon as the weights are in model/
        self._all_ranks_here = session.ranks.count > 1  # True in code that all ranks execute, if there are several
        self._session = session

    def was_finished(self) -> bool:
        """Returns True if an earlier command has finished this run with the same settings, except `resume`: training,
        export, report and pictures. If so, logs how to train longer."""
        session = self._session
        report, settings = (read_run_json(session.folder / name) for name in ("report.json", "settings.json"))
        rows = session.log.rows
        pictures = ("loss.png", "memory.png") if importlib.util.find_spec("matplotlib") else ()
        made = all((session.folder / name).exists() for name in ("model", "report.html", *pictures))
        if (
            not session.resumed or not made or "failed" in report
            or not is_report_of(report, rows) or session.model.done != rows[-1]["step"]
            or settings | {"resume": ""} != json.loads(json.dumps(asdict(session.settings) | {"resume": ""}))
        ):  # fmt: skip
            return False
        longer = "more --steps" if session.settings.schedule == "constant" else "more --steps and --schedule constant"
        if session.model.done < session.steps:
            longer = "a higher --patience"
        session.log.say(
            f"already finished: {session.model.done} steps are done, and {session.folder}/model has the result. To "
            f"train longer, give {longer}; for another run, another --out; to start over, --resume never"
        )
        return True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Logs an error in the `with` block and adds it to `failed`, instead of raising it. `name`: the block's name in
        the log. Still raises CapExceeded, Stopped, and exceptions in NO_ERRORS, such as KeyboardInterrupt. If all ranks
        (processes) run the block, also raises an error that only this rank has, because the others would wait."""
        try:
            yield
        except (CapExceeded, Stopped, *NO_ERRORS):
            raise
        except BaseException as error:
            # Errors that all ranks raise together have `said_by`. After any other, the others would wait for this rank.
            if self._all_ranks_here and not hasattr(error, "said_by"):
                raise
            expected = isinstance(error, LowmemError)
            reason = error if expected else first_line(error)
            self._note(f"{name} failed: {reason}", "" if expected else traceback.format_exc())

    def finish(self, done: int) -> None:
        """Exports the model after `done` steps (with --keep-best, the best one), writes report and pictures, and logs a
        summary, even if a part fails. Then raises LowmemError, which says where the weights are, if any failed."""
        session = self._session
        session.log.end_bar()
        exported = self._take_best(done)
        with self.part("the last sample"):
            take_samples(session, done if exported is None else exported, last=True)
        session.ranks.on_first(lambda: self._write(exported))

    def _write(self, exported: int | None) -> None:
        session, log, plan = self._session, self._session.log, self._session.model.plan
        self._all_ranks_here = False
        session.budget.enter("export")
        with self.part("the export"):
            if exported is None:
                raise LowmemError("the weights that were loaded for it are incomplete")
            self._export(exported)
        session.budget.enter("report")
        session.budget.check("the export")
        report = None
        with self.part("report.json"):
            report = self._report(exported)
            write_json(session.folder / "report.json", report)
        with self.part("report.html"):
            write_page([session.folder], session.folder / "report.html")
        with self.part("showing the pictures to the trackers"):
            log.pictures(self._draw(plan.to_dict()))
        with self.part("the summary"):
            if report is not None:
                self._summarize(report["loss"])
        with self.part("closing the log and the trackers"):
            log.close()
        session.budget.check("the report")
        self._check()

    def _take_best(self, done: int) -> int | None:
        """Returns the step whose weights are exported. Without --keep-best, it is `done`, the final step. With it, it
        is the step with the lowest held-out loss and a kept checkpoint, which is loaded; `done` if that checkpoint is
        damaged. Returns None if loading has failed halfway, so that the weights are incomplete."""
        session, say = self._session, self._session.log.say
        if not session.settings.keep_best:
            return done
        best, of_all = best_kept(session, done), best_evaluation(session.log.rows, None)
        if not of_all.loss >= best.loss and not math.isnan(of_all.loss):
            say(f"warning: held-out {of_all} was better, but no checkpoint of it was kept")
        if best.step in (0, done):
            return done
        try:
            path = checkpoint_of(session.folder, best.step)
            session.ranks.on_all(lambda: verify_checkpoint(path))  # before it replaces the last weights
        except (LowmemError, OSError) as problem:
            say(f"warning: the best checkpoint, held-out {best}, is damaged, so the last one is exported: {problem}")
            return done
        for step in (best.step, done):
            with self.part(f"loading the weights after step {step}"):
                checkpoint = checkpoint_of(session.folder, step)
                load = partial(load_checkpoint, checkpoint, session.step.store, session.identity)
                session.ranks.on_all(load)
                if step == best.step:
                    say(f"the best checkpoint is exported: held-out {best}")
                return step
        return None

    def _export(self, step: int) -> None:
        session, store = self._session, self._session.step.store
        write = partial(
            export_model, session.folder / "model", session.model.config, order=store.names(),
            readme=self._readme(step), tokenizer=session.model.tokenizer,
            tokenizer_files=session.rehearsal.folder, generation_config=session.rehearsal.generation_config,
        )  # fmt: skip
        wanted = session.settings.export_dtype
        try:
            problems = write(store.masters(), dtype=WORKING_DTYPES[wanted])
        except BeyondRange as error:
            self._note(f"{error}, so the model is exported in fp32, not in {wanted}; give --export-dtype fp32")
            problems = write(store.masters(), dtype=torch.float32)
        self._exported = True
        for problem in problems:
            self._note(f"in the exported model: {problem}")

    def _readme(self, step: int) -> str:
        plan, rows = self._session.model.plan, self._session.log.rows
        command = shown(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))  # or of a program that calls lowmem.train
        losses = [f"{row['loss']:.4f} after {counted(step, 'steps')}" for row in rows if row["step"] == step]
        return (
            f"# {plan.model}, {TRAINED}\n\n"
            f"Training loss: {losses[-1] if losses else 'not trained'}. Command:\n\n    {command}\n\n"
            f"Plan:\n\n```\n{plan.describe()}\n```\n"
        )

    def _report(self, exported_step: int | None) -> dict:
        session, plan = self._session, self._session.model.plan
        report = build_report(
            plan.to_dict(), session.log.rows, session.budget.peaks(), device_name(session.step.store.device),
            versions(), session.settings.batch, session.eval_first, exported_step,
        )  # fmt: skip
        report["ram_phases"] = {  # bytes
            phase: {"predicted": plan.ram_phases.get(phase), "measured": size}
            for phase, size in session.budget.ram_phases.items()
        }
        report["out_of_memory"] = session.recovery.measures
        if self.failed:
            report["failed"] = self.failed
        return {"summary": summary(report, session.log.rows)} | report

    def _draw(self, plan: dict) -> list[Path]:
        session, folder = self._session, self._session.folder
        peaks, phases = session.budget.peaks(), session.budget.ram_phases
        loss, memory = folder / "loss.png", folder / "memory.png"
        problems = {
            loss: draw(loss, draw_loss, session.log.rows, loss, session.eval_first),
            memory: draw(memory, draw_memory, plan, peaks, memory, session.model.plan.timeline, phases),
        }
        # A missing matplotlib is no failure.
        say = self._note if importlib.util.find_spec("matplotlib") else session.log.say
        for problem in filter(None, problems.values()):
            say(problem)
        return [path for path, problem in problems.items() if problem is None]

    def _summarize(self, loss: dict) -> None:
        log, folder = self._session.log, self._session.folder
        if loss["diverged"]:
            keep = "" if self._session.settings.keep_best else "; --keep-best and --patience keep the best checkpoint"
            log.say(
                f"warning: this run made the model worse: its held-out loss was {loss['eval_first']:.4f} before and is "
                f"{loss['eval_exported']:.4f} now. A lower --lr, a longer --warmup-steps or fewer epochs may help{keep}"
            )
        trained = "" if loss["last"] is None else f": loss {loss['first']:.4f} -> {loss['last']:.4f}"
        if loss["eval_last"] is not None:
            trained += f"; held-out loss {loss['eval_first']:.4f} -> {loss['eval_last']:.4f}"
        log.say(f"trained{trained}" if self.failed else f"done{trained}; see {folder}/report.html and {folder}/model")

    def _note(self, sentence: str, details: str = "") -> None:
        self.failed.append(sentence)
        self._session.log.say(f"warning: {sentence}", f"warning: {sentence}\n{details}".rstrip())

    def _check(self) -> None:
        if not self.failed:
            return
        folder, rows = self._session.folder, self._session.log.rows
        own = [checkpoint_of(folder, step) for step in sorted(self._session.saved, reverse=True)]
        saved = newest_state([path for path in (*own, self._session.resumed) if path is not None and path.exists()])
        if self._exported:
            where = f"The weights are in {folder}/model; give the same command again to repeat the end"
        elif saved is None:
            where = "The weights are lost; give the same command again to start over"
        elif saved[1]["step"] == (rows[-1]["step"] if rows else 0):
            where = f"The weights are in {saved[0]}; give the same command again to repeat the end"
        else:
            where = (
                f"The weights after step {saved[1]['step']} are in {saved[0]}, and later ones are lost; give the same "
                "command again to go on from there"
            )
        raise LowmemError(f"all steps are done, but the end of the run failed: {'; '.join(self.failed)}. {where}")
