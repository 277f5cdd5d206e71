"""The end of a run. If one of its steps fails, a sentence says so, the others are done, and the weights are kept."""

import importlib.util
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES
from lowmem.errors import NO_ERRORS, CapExceeded, LowmemError, Stopped, first_line
from lowmem.limits import Budget
from lowmem.models.description import Rehearsal
from lowmem.models.export import BeyondRange, export_model
from lowmem.paths import shown
from lowmem.planning.plan import Plan
from lowmem.run.checkpoint import (
    Check,
    checkpoint_of,
    find_checkpoints,
    load_checkpoint,
    newest_state,
    verify_checkpoint,
)
from lowmem.run.log import RunLog, write_json
from lowmem.run.plots import draw, draw_loss, draw_memory
from lowmem.run.report import Best, build_report, device_name
from lowmem.settings import Settings


class Ending:
    """`failed`: a sentence for each failure; `exported`: true once the weights are in model/."""

    def __init__(self, log: RunLog):
        self.failed: list[str] = []
        self.exported = False
        self._say = log.say

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step that later steps do not need. An exceeded cap and a signal still end the run."""
        try:
            yield
        except (CapExceeded, Stopped, *NO_ERRORS):
            raise
        except BaseException as error:
            said = isinstance(error, LowmemError)
            self.note(f"{name} failed: {error if said else first_line(error)}", "" if said else traceback.format_exc())

    def note(self, sentence: str, details: str = "") -> None:
        """`details`: for log.txt alone."""
        self.failed.append(sentence)
        self._say(f"warning: {sentence}", f"warning: {sentence}\n{details}".rstrip())

    def check(self, folder: Path, step: int) -> None:
        """Raises LowmemError, with the place of the weights after `step`, the last one, if anything failed."""
        if not self.failed:
            return
        kept = None if self.exported else newest_state(find_checkpoints(folder, "auto", lambda sentence: None))
        where = "The weights are lost; give the same command again to begin anew"
        if self.exported or (kept and kept[1]["step"] == step):
            there = f"{folder}/model" if self.exported else kept[0]
            where = f"The weights are in {there}; give the same command again to repeat the end"
        elif kept:
            where = (
                f"The weights after step {kept[1]['step']} are in {kept[0]}, and later ones are lost; give the same "
                "command again to go on from there"
            )
        raise LowmemError(f"all steps are done, but the end of the run failed: {'; '.join(self.failed)}. {where}")


def take_best(
    ending: Ending, folder: Path, store: Store, best: Best, last: int, same_run: Check, say: Callable[[str], None]
) -> int | None:
    """Loads the best checkpoint into `store`, which has the weights after step `last`. The step of the weights in it
    then; None if they are not whole."""
    try:
        verify_checkpoint(checkpoint_of(folder, best.step))  # before the last weights make room for it
    except (LowmemError, OSError) as problem:
        say(f"warning: the best, held-out {best}, cannot be exported, and the last is: {problem}")
        return last
    for step in (best.step, last):
        with ending.step(f"loading the weights after step {step}"):
            load_checkpoint(checkpoint_of(folder, step), store, same_run)
            if step == best.step:
                say(f"the model is exported as it was at its best: held-out {best}")
            return step
    return None


def finish(
    ending: Ending, settings: Settings, config: PretrainedConfig, store: Store, rehearsal: Rehearsal, log: RunLog,
    budget: Budget, plan: Plan, eval_first: float | None, recoveries: list[dict], exported_step: int | None,
) -> None:  # fmt: skip
    """Writes model/, report.json, loss.png and memory.png into the run folder, and logs a summary. `store` has the
    weights after step `exported_step`; None if they are not whole. Raises LowmemError if a step of the end failed."""
    folder = Path(settings.out)
    budget.enter("export")
    with ending.step("the export"):
        if exported_step is None:
            raise LowmemError("the weights that were loaded for it are not whole")
        _export(ending, settings, config, store, rehearsal, _model_readme(plan, log.rows, exported_step))
    budget.enter("report")
    budget.check("the export")
    peaks, report = asdict(budget.peaks()), None
    with ending.step("report.json"):
        device = device_name(store.device)
        report = build_report(plan.to_dict(), log.rows, peaks, device, settings.batch, eval_first, exported_step)
        report["ram_phases"] = {
            phase: {"predicted": plan.ram_phases.get(phase), "measured": size}
            for phase, size in budget.ram_phases.items()
        }  # bytes
        report["out_of_memory"] = recoveries  # what was done about it, and the layout from there on
        if ending.failed:
            report["failed"] = ending.failed
        write_json(folder / "report.json", report)
    with ending.step("showing the pictures to the trackers"):
        log.pictures(*_draw(ending, folder, log, plan, peaks, eval_first, budget.ram_phases))
    with ending.step("the summary"):
        if report is not None:
            _say_how_it_went(log, settings, report["loss"], None if ending.failed else folder)
    with ending.step("closing the log and the trackers"):
        log.close()
    ending.check(folder, log.rows[-1]["step"] if log.rows else 0)


def _export(
    ending: Ending, settings: Settings, config: PretrainedConfig, store: Store, rehearsal: Rehearsal, readme: str
) -> None:
    write = partial(
        export_model, Path(settings.out) / "model", config, order=store.names(), readme=readme,
        tokenizer=rehearsal.tokenizer, tokenizer_files=rehearsal.folder, generation_config=rehearsal.generation_config,
    )  # fmt: skip
    try:
        problems = write(store.masters(), dtype=WORKING_DTYPES[settings.export_dtype])
    except BeyondRange as error:
        ending.note(
            f"{error}, so the model is exported in fp32, not in {settings.export_dtype}; give --export-dtype fp32"
        )
        problems = write(store.masters(), dtype=torch.float32)
    ending.exported = True
    for problem in problems:
        ending.note(f"in the exported model: {problem}")


def _draw(
    ending: Ending, folder: Path, log: RunLog, plan: Plan, peaks: dict, eval_first: float | None,
    ram_phases: dict[str, int],
) -> list[Path]:  # fmt: skip
    """Draws loss.png and memory.png; those that could be drawn. Without matplotlib nothing has failed."""
    pictures = {
        folder / "loss.png": lambda path: draw_loss(log.rows, path, eval_first),
        folder / "memory.png": lambda path: draw_memory(plan.to_dict(), peaks, path, plan.timeline, ram_phases),
    }
    problems = {path: draw(path, partial(picture, path)) for path, picture in pictures.items()}
    say = ending.note if importlib.util.find_spec("matplotlib") else log.say
    for problem in filter(None, problems.values()):
        say(problem)
    return [path for path, problem in problems.items() if problem is None]


def _say_how_it_went(log: RunLog, settings: Settings, loss: dict, folder: Path | None) -> None:
    if loss["diverged"]:
        log.say(
            f"warning: this run made the model worse: its held-out loss was {loss['eval_first']:.4f} before and is "
            f"{loss['eval_exported']:.4f} now. A lower --lr, a longer --warmup-steps or fewer epochs may help"
            + ("" if settings.keep_best else "; --keep-best and --patience keep the best there was")
        )
    held_out = "" if loss["eval_last"] is None else f"; held-out {loss['eval_first']:.4f} -> {loss['eval_last']:.4f}"
    trained = "" if loss["last"] is None else f": loss {loss['first']:.4f} -> {loss['last']:.4f}"
    there = "" if folder is None else f"; see {folder}/report.json and {folder}/model"
    log.say(f"{'trained' if folder is None else 'done'}{trained}{held_out}{there}")


def _model_readme(plan: Plan, rows: list[dict], exported_step: int) -> str:
    command = shown(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))  # of a program that calls lowmem.train, too
    losses = [f"{row['loss']:.4f} after {exported_step} steps" for row in rows if row["step"] == exported_step]
    last = losses[-1] if losses else "not trained"
    return (
        f"# {plan.model}, every parameter trained with lowmem\n\n"
        f"Training loss: {last}. Command:\n\n    {command}\n\nPlan:\n\n```\n{plan.describe()}\n```\n"
    )
