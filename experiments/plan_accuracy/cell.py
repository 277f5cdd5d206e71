"""Compares the cases of one card: the plan's peaks, and those of PyTorch's allocator in the run with that plan.

    python -m stand_in --gpu CARD -- -m experiments.plan_accuracy.cell NAME ...

Each case runs in a separate process, and prints one JSON object. Random weights, checkpoint and export are left out.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from experiments.harness.models import MODELS
from experiments.harness.whole_runs import memory_alone
from experiments.plan_accuracy.cases import CASES, NO_CAP, TIGHT, Case
from lowmem.core.layout import Fate
from lowmem.cudasim.allocator import LARGE_SEGMENT
from lowmem.device import ALLOCATOR_VARIABLES, set_environment
from lowmem.errors import PlanError
from lowmem.models.build import load_config
from lowmem.planning import gpu_plan
from lowmem.planning.caps import margins, smallest_cap
from lowmem.planning.choices import ByHome, choices_by_home, step_case, with_fates
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question, precision_and_card
from lowmem.run.cli import parse_arguments
from lowmem.run.main import main as program
from lowmem.settings import Settings

WORDS = "All parameters of a model are trained under a cap of memory that holds. "
RUN = ["--init", "random", "--steps", "2", "--fixed-batch", "--resume", "never", "--wandb", "disabled"]
PEAKS = ("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes")


def main(names: list[str]) -> int:
    set_environment()
    cases = {case.name: case for case in CASES}
    for name in names:
        read, write = os.pipe()
        # Forked after everything is imported, and before CUDA begins.
        child = os.fork()
        if child == 0:
            os.close(read)
            os.dup2(2, 1)  # what the run says is no row
            with open(write, "w") as pipe:
                json.dump(_measured(cases[name]), pipe)
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            found = pipe.read()
        _, status, usage = os.wait4(child, 0)
        row = json.loads(found) if found else {"exit_code": None, "error": f"ended with status {status}"}
        print(json.dumps({"name": name, "processor_seconds": usage.ru_utime + usage.ru_stime} | row), flush=True)
    return 0


def _measured(case: Case) -> dict:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = _run(case, Path(folder))
        except Exception:  # a row says so, and the next case has its turn
            found = {"exit_code": None, "error": traceback.format_exc()[-2000:]}
    return found | {"seconds": time.perf_counter() - started}


def _run(case: Case, folder: Path) -> dict:
    for name in ALLOCATOR_VARIABLES:
        os.environ[name] = f"expandable_segments:{case.grow}"
    arguments = [*_model(case, folder), *RUN, *_data(folder), *case.options]
    arguments += ["--gradients", "resident"] if case.two_passes else []
    fate = Fate.DROPPED if case.two_passes else Fate.APPLIED
    with patch.object(gpu_plan, "choices_by_home", partial(_with_fate, fate)):
        limit = _tight_cap(arguments) if case.cap == TIGHT else case.cap
        arguments += ["--gpu-limit", str(limit), "--out", str(folder / "run")]
        with memory_alone():
            code = program(Settings(), arguments)
    if not (folder / "run" / "report.json").exists():
        return {"exit_code": code, "error": "no report", "cap_bytes": None if limit == NO_CAP else limit}
    said = json.loads((folder / "run" / "report.json").read_text())
    plan, out_of_memory = said["plan"], said["out_of_memory"]
    cap = plan["limits"]["gpu_bytes"]
    measured = {name: said["measured"][name] for name in PEAKS}
    return {
        "exit_code": code,
        "error": f"out of memory: {out_of_memory}" if out_of_memory else None,
        "cap_bytes": cap,
        "choice": plan["choice"],
        "predicted": {name: plan["predicted"][name] for name in PEAKS},
        "measured": measured,
        "cap_held": cap is None or measured["gpu_reserved_peak_bytes"] <= cap,
        "versions": said["versions"],
    }


def _model(case: Case, folder: Path) -> list[str]:
    if case.script is not None:
        return ["--model", case.model]
    return ["--model", str(MODELS[case.model].write(folder / case.model))]


def _data(folder: Path) -> list[str]:
    """Writes texts of one byte a token, enough for a batch and an evaluation of as many sequences."""
    for name in ("train.txt", "evaluation.txt"):
        (folder / name).write_text(WORDS * 2000)
    return ["--data", str(folder / "train.txt"), "--eval-data", str(folder / "evaluation.txt"), "--eval-batches", "1"]


def _with_fate(fate: Fate, settings: Settings, simulations) -> ByHome:
    """Returns the Choices whose gradients are, when they are final, treated by `fate`; all Choices if there are
    none."""
    by_home = choices_by_home(settings, simulations)
    return with_fates(by_home, {fate}) or by_home


def _tight_cap(arguments: list[str]) -> int:
    """Returns a cap between allocated and reserved bytes without one, under which there is a plan."""
    settings = parse_arguments([*arguments, "--gpu-limit", "none"], Settings())
    config = load_config(settings.model, settings.init)
    target = precision_and_card(settings)
    free = make_plan(Question(settings, config, *target))
    left_free = margins(step_case(settings, target[0]).needs_all_gradients)
    allocated, reserved = free.gpu_allocated_peak_bytes, free.gpu_reserved_peak_bytes
    for share in (0.5, 1.0):
        cap = smallest_cap(int(allocated + share * (reserved - allocated)), left_free)
        try:
            make_plan(Question(replace(settings, gpu_limit_bytes=cap), config, *target))
        except PlanError:
            continue
        return cap
    return smallest_cap(reserved + LARGE_SEGMENT, left_free)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
