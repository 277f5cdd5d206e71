"""Tests both ends of a plan's promise for the GPU, on the stand-in: planned caps suffice, refused caps do not
(promise.md).

    .venv-cuda/bin/python -m stand_in -- -m experiments.plan_accuracy.promise [--only TEXT ...]

A cell is a model on a card with options of training; the plan chooses the rest. A cell with a row of the same sources
does not run again.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from experiments.harness import rows
from experiments.harness.measured import measure, train
from experiments.harness.models import MODELS
from experiments.harness.options import check_rows, exit_code_of, under_runs
from experiments.plan_accuracy.cases import PROMISED, Case
from lowmem import device as devices
from lowmem.core.batch import Batch
from lowmem.core.kernels import fused
from lowmem.core.layout import Layout
from lowmem.errors import InputError
from lowmem.limits import OVERSHOOT_BYTES
from lowmem.models.build import make_decoder
from lowmem.planning import fastest
from lowmem.planning.caps import margins, room_under, smallest_cap
from lowmem.planning.choices import choices_by_home, step_case
from lowmem.planning.question import card_for
from lowmem.planning.search import Room
from lowmem.planning.simulated_step import StepCase, gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.run.cli import parse_arguments
from lowmem.settings import Settings
from lowmem.units import MIB, format_size

RESULTS = Path(__file__).parent / "results" / "promise.jsonl"
PROGRAM = "experiments.plan_accuracy.promise"
LESS = 0.98  # of the room under a refused cap
LONGEST = 6  # blocks in a segment
STEPS = 3


def settings_of(case: Case) -> Settings:
    return parse_arguments(["--model", case.model, "--init", "random", *case.options], Settings())


def caps(settings: Settings, simulations: Simulations) -> tuple[int, int]:
    """Returns the smallest cap that is named, and the largest that is refused, in bytes, whole MiB."""
    free = margins(simulations.base.needs_all_gradients)
    by_home = choices_by_home(settings, simulations)
    smallest = _in_mib(fastest.smallest_room(by_home, simulations, Room(0, None)).gpu, free)
    refused = smallest - MIB
    # They may differ by more than a MiB: a layout's smallest cap is searched to a few thousandths (simulations.py).
    while True:
        found = fastest.fastest_layout(by_home, simulations, Room(room_under(refused, free), None))
        if found is None:
            return smallest, refused
        least = simulations.smallest_cap_bytes(found.layout)
        refused = min(refused, _in_mib(least, free)) - MIB


def _in_mib(room_bytes: int, free: int) -> int:
    return math.ceil(smallest_cap(room_bytes, free) / MIB) * MIB


def layouts_to_try(settings: Settings, simulations: Simulations, limit_bytes: int) -> list[Layout]:
    """Returns the smallest layout, and all others whose tensors fit into the limit. The rest cannot complete."""
    size = simulations.allocated_bytes
    by_home = choices_by_home(settings, simulations)
    layouts = [small.layout for small in fastest.candidates(by_home, simulations, Room(None, None))]
    if settings.segment_blocks is None:
        smallest = min(layouts, key=size)
        if not smallest.kept:
            longest = min(LONGEST, simulations.blocks)
            layouts += [replace(smallest, segment_blocks=length) for length in range(1, longest + 1)]
    least, *others = sorted(dict.fromkeys(layouts), key=size)
    return [least, *(layout for layout in others if size(layout) <= limit_bytes)]


def run_cell(case: Case, device: torch.device) -> dict:
    settings, card = settings_of(case), card_for(Settings())
    precision = "bf16" if "bf16" in card.rates else "fp16"
    target = gpu_target(card, fused.running(device))
    config = MODELS[settings.model].config()
    decoder = partial(make_decoder, config, precision, settings.residual, target.fused_kernels)
    simulations = Simulations(decoder, step_case(settings, precision), target)
    run = partial(_reserved_bytes, decoder, settings, device)
    smallest, refused = caps(settings, simulations)
    free = margins(simulations.base.needs_all_gradients)
    room = Room(room_under(smallest, free), None)
    planned = fastest.fastest_layout(choices_by_home(settings, simulations), simulations, room)
    if planned is None:
        return {"ok": False, "named_bytes": smallest, "completes": False, "why": "no plan under the cap that is named"}
    reserved = run(simulations.case(planned.layout), smallest)
    tried_bytes = int(room_under(refused, free) * LESS)
    tried = layouts_to_try(settings, simulations, tried_bytes)
    cases = [simulations.case(layout) for layout in tried]
    # the margin has what segments that grow may map beyond the allocator's own cap, which is not taken off twice
    completed = [str(one.layout) for one in cases if run(one, tried_bytes + OVERSHOOT_BYTES) is not None]
    completes = reserved is not None and reserved <= smallest
    return {
        "ok": completes and not completed,
        "precision": precision, "named_bytes": smallest, "layout": str(planned.layout),
        "states_on_gpu": planned.layout.states_on_gpu, "units": simulations.units,
        "completes": completes, "reserved_bytes": reserved,
        "refused_bytes": refused, "tried_bytes": tried_bytes, "tried": len(tried),
        "least_allocated_bytes": simulations.allocated_bytes(tried[0]),
        "completed_though_refused": completed,
        "completed_in_the_margin": run(cases[0], int(refused * LESS)) is not None,
    }  # fmt: skip


def _reserved_bytes(
    decoder: Callable, settings: Settings, device: torch.device, case: StepCase, limit_bytes: int
) -> int | None:
    """Returns the reserved peak of training under a cap; None if it runs out of memory."""
    ids = torch.zeros((settings.batch, settings.seq), dtype=torch.int64)
    packed = (ids, ids.int()) if settings.document_mask else (None, None)
    found = measure(partial(train, decoder(), case, Batch(ids, ids, *packed), device, STEPS), device, limit_bytes)
    return None if found is None else found.reserved_peak_bytes


def run_card(cases: list[Case], path: Path, common: dict) -> int:
    """Runs the cells of this process's card, appends their rows, and returns how many did not hold."""
    devices.set_environment()
    device = devices.select_device("cuda")
    devices.make_deterministic(device)
    failed = 0
    for case in cases:
        row = {"name": case.name, "card": case.card} | run_cell(case, device) | common
        rows.append(path, row)
        failed += not row["ok"]
        print(f"{'ok    ' if row['ok'] else 'FAILED'} {case.name}: {format_size(row['named_bytes'])}", flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of the names of cells")
    parser.add_argument("--rows", type=Path, default=under_runs(RESULTS), help="%(default)s")
    parser.add_argument("--card", help=argparse.SUPPRESS)  # of the process that measures: the card it was started on
    typed = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(typed)
    if not rows.on_stand_in():
        parser.error("start it on the stand-in: .venv-cuda/bin/python -m stand_in -- -m " + PROGRAM)
    common = rows.made_by(PROGRAM, typed) | {"sources": rows.sources(PROGRAM)}
    done = {row["name"] for row in rows.read(options.rows) if row["sources"] == common["sources"]}
    cases = [case for case in PROMISED if case.name not in done and any(text in case.name for text in options.only)]
    if not any(text in case.name for case in PROMISED for text in options.only):
        raise InputError(f"--only {' '.join(options.only)}: no cell has that in its name")
    check_rows(options.rows)
    if options.card is not None:
        return 1 if run_card([case for case in cases if case.card == options.card], options.rows, common) else 0
    codes = []
    for card in dict.fromkeys(case.card for case in cases):
        command = [sys.executable, "-m", "stand_in", "--gpu", card, "--", "-m", PROGRAM, *typed, "--card", card]
        codes.append(subprocess.run(command, cwd=rows.ROOT, env=os.environ).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
