"""Both ends of a plan's promise, on the stand-in's real allocator: what fits runs, and what is refused could not run.

    .venv-cuda/bin/python -m stand_in --gpu rtx3060 -- -m experiments.plan_accuracy.promise [--only TEXT ...]

A cell is a model, a shape, an optimizer and clipping, on the stand-in's card. The planner names the smallest cap for
it; then, each from an empty allocator:

    completes   the layout that is planned under that cap makes three steps under it
    refused     under the largest cap that is refused, less the margin that plans leave free and 2%, the most frugal
                layouts are run with the planner passed by; each must run out of memory

The most frugal layouts are those that the smallest cap is looked for among: nothing kept, the smallest micro-batch,
every length of segments, as much streamed as can be (or everything resident, which needs no staging ring), one pass
and two, one micro-batch or the whole batch as a group. Of these the one with least memory is run, and every other one
whose tensors alone would not fill the cap: the rest cannot complete under it, since what is allocated is exact.

Rows go to results/promise.jsonl; a cell that has a row of this commit and card is not run again, so that the command
can be stopped at any time and given again.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

from experiments.harness import rows
from experiments.harness.child import named
from experiments.harness.tables import markdown
from lowmem import device as devices
from lowmem import fused, planner
from lowmem.adam import OPTIMIZERS
from lowmem.data import Batch
from lowmem.models import make_decoder
from lowmem.plan import card_for
from lowmem.search import Room
from lowmem.settings import Settings
from lowmem.simulate import StepCase, gpu_target
from lowmem.simulations import Simulations, smallest_cap_bytes
from lowmem.units import MIB, format_size

RESULTS = Path(__file__).parent / "results" / "promise.jsonl"
PROGRAM = "experiments.plan_accuracy.promise"
SHAPES = ((4, 512), (8, 512), (4, 1024))  # batch, tokens
MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "opt-125m", "opt-350m", "bloom-560m", "gpt-neo-125m", "biogpt")
LESS = 0.98  # of a refused cap
STEPS = 3


def cells() -> dict[str, Settings]:
    """By name: every model in two shapes, with every optimizer in turn, the last of them without clipping."""
    found = {}
    for index, model in enumerate(MODELS):
        for turn in range(2):
            batch, seq = SHAPES[(index + turn) % len(SHAPES)]
            optimizer = list(OPTIMIZERS)[(index + turn) % len(OPTIMIZERS)]
            clip_norm = None if (index + turn) % 4 == 3 else 1.0
            name = f"{model}, {batch} x {seq}, {optimizer}" + ("" if clip_norm else ", no clipping")
            found[name] = Settings(
                model=model, init="random", seq=seq, batch=batch, optimizer=optimizer, clip_norm=clip_norm
            )
    return found


def run_cell(settings: Settings, device: torch.device) -> dict:
    """The values of a cell's row."""
    card = card_for(Settings())
    precision = "bf16" if "bf16" in card.rates else "fp16"
    target = gpu_target(card, fused.why_not(device) is None)
    config = named("experiments.memory_estimation.models:MODELS")[settings.model].config()
    decoder = partial(make_decoder, config, precision, settings.residual, target.fused_kernels)
    simulations = Simulations(decoder, planner.step_case(settings, precision), target)

    def completes(case: StepCase, limit_bytes: int) -> bool:
        ids = torch.zeros((settings.batch, settings.seq), dtype=torch.int64)
        measure, train = (named(f"experiments.gpu_acceptance.measured:{name}") for name in ("measure", "train"))
        work = partial(train, decoder(), case, Batch(ids, ids), device, STEPS)
        return measure(work, device, limit_bytes) is not None

    smallest = planner.least_room(settings, simulations, Room(0, None)).gpu
    planned = planner.fastest_layout(settings, simulations, Room(smallest, None))
    refused, found = smallest - MIB, planned
    while found is not None:
        found = planner.fastest_layout(settings, simulations, Room(refused, None))
        if found is not None:
            least = smallest_cap_bytes(simulations, found.case.schedule, found.case.resident_units)
            refused = min(refused, least) - MIB
    tried_bytes = int(refused * LESS)
    frugal = sorted(
        planner.frugal_layouts(settings, simulations), key=lambda layout: simulations.allocated_bytes(*layout)
    )
    frugal = [layout for layout in frugal if simulations.allocated_bytes(*layout) <= tried_bytes] or frugal[:1]
    ran = [simulations.record(*layout)[0] for layout in frugal]
    return {
        "card": card.name, "precision": precision, "named_bytes": planner.smallest_cap(smallest),
        "layout": str(planned.case.schedule), "resident_units": planned.case.resident_units,
        "completes": completes(planned.case, planner.smallest_cap(smallest)),
        "refused_bytes": planner.smallest_cap(refused), "tried_bytes": tried_bytes, "tried": len(ran),
        "completed_though_refused": [str(case.schedule) for case in ran if completes(case, tried_bytes)],
    }  # fmt: skip


def table(found: list[dict]) -> str:
    """The newest row of each cell and card, as Markdown."""
    newest = {(row["gpu"], row["cell"]): row for row in found}
    lines = [
        (
            gpu, cell, f"{row['named_bytes'] / MIB:,.0f}", "yes" if row["completes"] else "NO",
            f"{row['tried_bytes'] / MIB:,.0f}", str(row["tried"]), str(len(row["completed_though_refused"])),
        )
        for (gpu, cell), row in sorted(newest.items())
    ]  # fmt: skip
    header = (
        "card",
        "cell",
        "smallest cap named, MiB",
        "runs under it",
        "refused, less 2%",
        "layouts run",
        "completed",
    )
    return markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cells")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="%(default)s")
    typed = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(typed)
    if not rows.on_stand_in():
        parser.error("start it on the stand-in: .venv-cuda/bin/python -m stand_in --gpu CARD -- -m " + PROGRAM)
    devices.set_environment()
    device = devices.select_device("cuda")
    devices.make_deterministic(device)
    common = rows.made_by(PROGRAM, typed) | {"gpu": os.environ["STAND_IN_GPU"]}
    known = rows.read(options.rows)
    done = {row["cell"] for row in known if (row["commit"], row["gpu"]) == (common["commit"], common["gpu"])}
    failed = 0
    for name, settings in cells().items():
        if name in done or not any(text in name for text in options.only):
            continue
        values = run_cell(settings, device)
        ok = values["completes"] and not values["completed_though_refused"]
        rows.append(options.rows, {"cell": name, "ok": ok} | values | common)
        failed += not ok
        print(f"{'ok    ' if ok else 'FAILED'} {name}: named {format_size(values['named_bytes'])}", flush=True)
    print(table(rows.read(options.rows)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
