"""What the CUDA path costs the host: the time of operators, updates and steps whose kernels return at once.

    .venv-cuda/bin/python -m stand_in --gpu rtx3060 -- -m experiments.host_time.run [--repeats N] [--out DIR]

On the stand-in a kernel takes no time, so what a step takes there is what Python, the dispatcher, autograd, the caching
allocator and the launch cost the host. Beside each stands what the simulator's clock counts for the very same lines,
run on meta tensors with a GPU that needs no time: operations times the constants of the card's Machine (simulate.py).

What is compared is the processor time of the process, of the thread that runs forward and of autograd's, which take
turns. Other processes lengthen the wall's time most, this less, and the least of many repeats least; all are in the row.

A constant is seconds of some machine. So every row says how fast this one is: nanoseconds per turn of an empty Python
loop, and microseconds per addition of two small tensors on the CPU, taken before and after all cases.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config

from experiments.harness import rows
from experiments.host_time.cases import OPTIMIZER, Case, Run, operator_cases, product_case, update_case
from experiments.host_time.table import table
from lowmem import adam, fused
from lowmem import device as devices
from lowmem.adam import get_optimizer
from lowmem.data import Batch
from lowmem.models import GPT2_SHAPES, make_decoder
from lowmem.plan import card_for
from lowmem.precision import LossScale
from lowmem.settings import Settings
from lowmem.simulate import StepCase, Target, gpu_target, record_step
from lowmem.step import Schedule, Step
from lowmem.store import Store
from lowmem.trace import Recorder

RESULTS = Path(__file__).resolve().parent / "results" / "rows.jsonl"
STEPS = [("gpt2", 2), ("gpt2", 4), ("gpt2-large", 2), ("gpt2-large", 4)]  # shape and blocks
SEQ, SEQUENCES = 1024, 2
WARM_UP_STEPS = 2  # the first has no update to apply
LOOP_TURNS, CPU_ADDITIONS = 1_000_000, 5_000
META = torch.device("meta")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    devices.set_environment()
    if not (torch.cuda.is_available() and os.environ.get("STAND_IN_CARD")):
        print(
            "host_time: run it on the stand-in (python -m stand_in -- -m ...): a GPU's time is not the host's",
            file=sys.stderr,
        )
        return 2
    device = devices.select_device("cuda")
    devices.make_deterministic(device)
    card = card_for(Settings())
    common = {
        "section": "host time",
        "stand_in": True,
        "device": torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
    } | rows.made_by("experiments.host_time.run", arguments)

    common["constants_us"] = _constants(gpu_target(card, True))
    before = machine_speed()
    found = []
    for use_kernels in (False, True):
        target = without_gpu_time(gpu_target(card, use_kernels))
        rule, name = (fused.update, "one kernel") if use_kernels else (adam.update, "eager")
        cases = [product_case(use_kernels), update_case(rule, name)]
        for case in cases if use_kernels else operator_cases() + cases:
            found.append(of_case(case, device, target, options.repeats))
        for model, blocks in STEPS:
            found.append(of_step(model, blocks, device, target, options.repeats))
    after = machine_speed()
    speed = {name: (before[name] + after[name]) / 2 for name in before}
    for row in found:
        rows.append(
            options.out, common | row | {"machine_speed": speed, "machine_speed_before_and_after": [before, after]}
        )
    print(table(rows.read(options.out)))
    return 0


def _constants(target: Target) -> dict[str, float]:
    """What the clock counts for an operation in forward and in backward, and beside that for some, in microseconds."""
    forward, backward = target.machine.host_seconds
    more = {str(operator): seconds for operator, seconds in target.machine.more_host_seconds.items()}
    named = {"an operation": forward, "one in backward": backward} | more
    return {name: seconds * 1e6 for name, seconds in named.items()}


def machine_speed() -> dict[str, float]:
    """How fast the host is: an empty loop of Python, and additions of small CPU tensors. The least of five."""

    def loop() -> None:
        for _ in range(LOOP_TURNS):
            pass

    x = torch.zeros(64)

    def additions() -> None:
        with torch.no_grad():
            for _ in range(CPU_ADDITIONS):
                torch.add(x, x)

    return {
        "python_loop_ns": min(_timed(loop).processor for _ in range(5)) / LOOP_TURNS * 1e9,
        "cpu_addition_us": min(_timed(additions).processor for _ in range(5)) / CPU_ADDITIONS * 1e6,
    }


def without_gpu_time(target: Target) -> Target:
    """The same target, on whose GPU everything is done at once: its clock shows the host's time alone."""
    machine = dataclasses.replace(target.machine, seconds=lambda *_: 0.0)
    return dataclasses.replace(target, machine=machine, copies_in=None, copies_out=None)


def of_case(case: Case, device: torch.device, target: Target, repeats: int) -> dict:
    prepare = case.make(device)
    prepare()()  # warm up: handles, workspaces and compiled kernels come to be
    times = [_timed(prepare()) for _ in range(repeats)]
    return _row(case.name, times, case.calls, *clock_of(case, target))


def clock_of(case: Case, target: Target) -> tuple[float, float]:
    """What the simulator's clock counts for one call: host seconds, and operations of any kind."""

    def total(machine) -> float:
        with target.functions(), Recorder(machine) as recorder:
            prepare = case.make(META)
            run = prepare()
            began = recorder.clock.host
            run()
            return (recorder.clock.host - began) / case.calls

    one_each = dataclasses.replace(target.machine, host_seconds=(1.0, 1.0), more_host_seconds={})
    return total(target.machine), total(one_each)


def of_step(model: str, blocks: int, device: torch.device, target: Target, repeats: int) -> dict:
    """A step with the update of the step before, everything on the card, blocks recomputed, one sequence at a time."""
    kernels = target.fused_kernels
    layers, width, heads = GPT2_SHAPES[model]
    config = GPT2Config(n_layer=blocks, n_embd=width, n_head=heads)
    schedule = Schedule(micro_batch=1, group=SEQUENCES, segment_blocks=1, recompute=True)
    case = StepCase(SEQ, SEQUENCES, schedule, torch.bfloat16, get_optimizer(OPTIMIZER), resident_units=10**6)

    def counted(target: Target) -> float:
        return record_step(make_decoder(config, "bf16", "16bit", kernels), case, target).seconds

    one_each = dataclasses.replace(target.machine, host_seconds=(1.0, 1.0), more_host_seconds={})
    predicted, operations = counted(target), counted(dataclasses.replace(target, machine=one_each))

    decoder = make_decoder(config, "bf16", "16bit", kernels)
    store = Store(decoder, device, case.dtype, case.optimizer, len(decoder.units))
    step = Step(
        decoder, store, case.optimizer, schedule, clip_norm=case.clip_norm, weight_decay=0.01, seed=0,
        loss_scale=LossScale(enabled=False),
    )  # fmt: skip
    zeros = torch.zeros(SEQUENCES, SEQ, dtype=torch.int64)
    batch = Batch(zeros, zeros)
    times = [_timed(lambda number=number: step(batch, number, 1e-4)) for number in range(WARM_UP_STEPS + repeats)]
    step.flush()
    name = f"step, {model}, {blocks} blocks" + (", fused" if kernels else "")
    return _row(name, times[WARM_UP_STEPS:], 1, predicted, operations)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds: of the processors, all threads of this process together, and of the clock on the wall."""

    processor: float
    wall: float


def _timed(run: Run) -> Times:
    processor, wall = time.process_time(), time.perf_counter()
    run()
    return Times(time.process_time() - processor, time.perf_counter() - wall)


def _row(name: str, times: list[Times], calls: int, counted: float, operations: float) -> dict:
    """`counted` seconds and `operations` are the clock's, for one call."""
    processor, wall = ([getattr(it, kind) / calls * 1e6 for it in times] for kind in ("processor", "wall"))
    return {
        "name": name,
        "processor_us": statistics.median(processor),
        "least_processor_us": min(processor),
        "wall_us": statistics.median(wall),
        "least_wall_us": min(wall),
        "clock_us": counted * 1e6,
        "operations": operations,
        "repeats": len(times),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.host_time.run", allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=30, help="timings of each case (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file that rows are added to (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
