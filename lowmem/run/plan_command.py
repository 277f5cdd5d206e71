"""Runs `python -m lowmem.plan` and --plan-only: predicts the memory and time that training a model takes."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from lowmem.cudasim.gpus import CARDS
from lowmem.errors import LowmemError, PlanError
from lowmem.run.cli import parse_plan
from lowmem.run.early import check_target, packages_needed
from lowmem.run.environment import variables_blamed, warnings_end_nothing
from lowmem.run.signals import interrupt_ends_at_once
from lowmem.run_folder import not_writable
from lowmem.settings import Settings
from lowmem.terminal import escape_what_stdout_lacks, for_terminal, output, say

_PROGRAM = {
    "prog": "python -m lowmem.plan",
    "description": "Plans any Hugging Face decoder, T5 or mT5, without a GPU and without weights.",
    "epilog": f"Cards of --gpu: {', '.join(sorted(CARDS))}.",
}


def main(arguments: list[str] | None = None) -> int:
    """Prints a plan, and returns the exit code. `arguments`: None for the process's command line."""
    escape_what_stdout_lacks()
    try:
        with warnings_end_nothing(), interrupt_ends_at_once(), packages_needed():
            settings, options = parse_plan(sys.argv[1:] if arguments is None else arguments, _PROGRAM)
            settings = check_target(settings, say)
            show_plan(settings, options.json, options.write, options.gpus, options.machines)
            return 0
    except LowmemError as error:
        say(f"lowmem.plan: {error}")
        return error.exit_code


def show_plan(settings: Settings, as_json: bool = False, write: bool = True, gpus: int = 1, machines: int = 1) -> None:
    """Prints the plan (predicted memory and time) for one of torchrun's processes. `gpus`: processes on each machine.
    `as_json`: True to print it as JSON. `write`: True to also write plan.json and memory.png into the output folder,
    unless it holds a run. Raises PlanError if training does not fit; with `as_json`, prints the refusal first."""
    with variables_blamed():  # imports that take seconds
        from transformers import logging

        from lowmem.device import set_environment
        from lowmem.planning.answer import refused
        from lowmem.run.metrics import write_json
        from lowmem.run.plots import draw, draw_memory
        from lowmem.run.prepare import ask, in_words
        from lowmem.run.several_ranks import plan_for

    logging.set_verbosity_error()
    set_environment()
    question = ask(settings)
    try:
        plan = plan_for(question, gpus, machines)
    except PlanError as error:
        if as_json:
            with suppress(LowmemError), output(needed=True):  # the refusal is raised in any case
                print(json.dumps(refused(question.settings, error), indent=2), flush=True)
        raise
    with output(needed=True):
        said = json.dumps(plan.to_dict(), indent=2) if as_json else in_words(plan, settings.verbose)
        print(said if as_json else for_terminal(said, sys.stdout), flush=True)
    if not write:
        return
    folder = Path(settings.out)
    try:
        if (folder / "settings.json").exists():
            say(f"{folder} holds a run, so its plan.json stays as it is")
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", plan.to_dict())
    except OSError as error:
        raise not_writable(folder, error.strerror) from None
    picture = folder / "memory.png"
    problem = draw(picture, draw_memory, plan.to_dict(), None, picture, plan.timeline)
    say(f"memory over a step, by name and by phase: {picture}" if problem is None else problem)
