"""Times the host's part of operators, updates and steps on the stand-in, where kernels return at once.

    .venv-cuda/bin/python -m stand_in --gpu rtx3090 -- -m experiments.host_time.run [--rounds N] [--out ROWS.jsonl]

Each row also has the seconds that the simulator's clock counts for the same lines, and this machine's speed: an empty
Python loop, and an addition of two small tensors on the CPU.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from experiments.harness import rows
from experiments.harness.options import check_rows, exit_code_of, parser_of, positive, under_runs
from experiments.host_time.cases import Case, Run, operator_cases, product_case, step_case, update_case
from experiments.host_time.table import table
from lowmem import device as devices
from lowmem.core import optimizers
from lowmem.core.kernels import Kernels, fused
from lowmem.planning.question import card_for
from lowmem.planning.simulated_step import Target, gpu_target
from lowmem.settings import Settings

RESULTS = Path(__file__).resolve().parent / "results" / "rows.jsonl"
STEPS = [("gpt2", 2), ("gpt2", 4), ("gpt2-large", 2), ("gpt2-large", 4)]  # shape and blocks
LOOP_TURNS, CPU_ADDITIONS = 100_000, 1000


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    devices.set_environment()
    if not (torch.cuda.is_available() and rows.on_stand_in()):
        print("host_time: this runs on the stand-in only; on a GPU the host's time is not seen alone", file=sys.stderr)
        return 2
    check_rows(options.out, "--out")
    device = devices.select_device("cuda")
    devices.make_deterministic(device)
    card = card_for(Settings())
    common = {
        "section": "host time",
        "device": torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "constants_us": _constants(gpu_target(card)),
        "rounds": options.rounds,
    } | rows.made_by("experiments.host_time.run", arguments)

    cases = {kernels: cases_of(kernels) for kernels in (Kernels.NONE, Kernels.ALL)}
    times = in_rounds([case for made in cases.values() for case in made], device, options.rounds)
    speed = {
        "python_loop_ns": min(it.processor for it in times.pop("python loop")) / LOOP_TURNS * 1e9,
        "cpu_addition_us": min(it.processor for it in times.pop("cpu additions")) / CPU_ADDITIONS * 1e6,
    }
    for kernels, made in cases.items():
        target = without_gpu_time(gpu_target(card, kernels))
        for case in made:
            found = row_of(case, times[case.name], *clock_of(case, target))
            rows.append(options.out, common | {"machine_speed": speed} | found)
    print(table(rows.read(options.out)))
    return 0


def cases_of(kernels: Kernels) -> list[Case]:
    """Returns the cases with or without the project's own kernels."""
    rule, name = (fused.update, "one kernel") if kernels else (optimizers.update, "eager")
    parts = [product_case(kernels), update_case(rule, name), *(step_case(*which, kernels) for which in STEPS)]
    return (
        parts + [step_case(*which, kernels, recorded=True) for which in STEPS] if kernels else operator_cases() + parts
    )


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds: of the processors, all threads of this process together, and of the clock on the wall."""

    processor: float
    wall: float


def timed(run: Run) -> Times:
    processor, wall = time.process_time(), time.perf_counter()
    run()
    return Times(time.process_time() - processor, time.perf_counter() - wall)


def in_rounds(cases: list[Case], device: torch.device, rounds: int) -> dict[str, list[Times]]:
    prepare = {case.name: case.make(device) for case in cases}
    prepare |= {"python loop": lambda: _python_loop, "cpu additions": lambda: _cpu_additions}
    for make_ready in prepare.values():
        make_ready()()  # handles, workspaces and compiled kernels come to be
    times: dict[str, list[Times]] = {name: [] for name in prepare}
    # The cases take turns, so other work on the machine meets all of them.
    for _ in range(rounds):
        for name, make_ready in prepare.items():
            times[name].append(timed(make_ready()))
    return times


def _python_loop() -> None:
    for _ in range(LOOP_TURNS):
        pass


def _cpu_additions() -> None:
    x = torch.zeros(64)
    with torch.no_grad():
        for _ in range(CPU_ADDITIONS):
            torch.add(x, x)


def without_gpu_time(target: Target) -> Target:
    """Returns the target with a GPU that needs no time, so that its clock shows the host's."""
    timeless = dataclasses.replace(target.device_model, seconds=lambda *_: 0.0)
    return dataclasses.replace(target, device_model=timeless, copies=None)


def clock_of(case: Case, target: Target) -> tuple[float, float]:
    """Returns the simulator's clock for one call: host seconds, and the number of operations."""
    one_each = dataclasses.replace(target.device_model, host_seconds=(1.0, 1.0), more_host_seconds={})
    counting = dataclasses.replace(target, device_model=one_each)
    return case.count(target) / case.calls, case.count(counting) / case.calls


def row_of(case: Case, times: list[Times], clock_seconds: float, operations: float) -> dict:
    processor, wall = ([getattr(it, kind) / case.calls * 1e6 for it in times] for kind in ("processor", "wall"))
    return {
        "name": case.name,
        "processor_us": statistics.median(processor),
        "least_processor_us": min(processor),
        "wall_us": statistics.median(wall),
        "least_wall_us": min(wall),
        "clock_us": clock_seconds * 1e6,
        "operations": operations,
    }


def _constants(target: Target) -> dict[str, float]:
    forward, backward = target.device_model.host_seconds
    more = {str(operator): seconds for operator, seconds in target.device_model.more_host_seconds.items()}
    named = {"an operation": forward, "one in backward": backward} | more
    return {name: seconds * 1e6 for name, seconds in named.items()}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("experiments.host_time.run", __doc__)
    parser.add_argument("--rounds", type=positive, default=50, help="how often each case is timed (%(default)s)")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), help="rows are added to it (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
