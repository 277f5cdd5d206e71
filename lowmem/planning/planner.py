"""Settings and a model's config in, a plan out: how the step is laid out, what it will take, and how long.

The plan is a prediction about the code that trains, not a formula beside it: search.py tries layouts of the step in a
simulation of it (simulated_step.py) and takes the fastest whose run completes under both caps. No weights are loaded
and no GPU is needed. Where the GPU does not hold all gradients they wait in RAM or, where that has no room for them,
forward and backward run twice a step. The optimizer is never another than was asked for; where RAM alone is short, a
refusal says whether 8-bit moments would fit.

    GPU   the simulated run, and a margin left free (gpu_plan.py)
    RAM   streamed states, and the process: what it holds now, and what training adds to that; and what loading,
          saving and export take on top (ram.py); on the CPU everything (cpu_plan.py)
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PretrainedConfig

from lowmem.core.decoder import Decoder
from lowmem.cudasim.gpus import Card
from lowmem.errors import PlanError
from lowmem.limits import ram_now_bytes
from lowmem.models.build import make_decoder
from lowmem.models.compatibility import architecture_blamed, compare_small_copy
from lowmem.planning.alternatives import step_case
from lowmem.planning.caps import what
from lowmem.planning.cpu_plan import cpu_plan
from lowmem.planning.gpu_plan import gpu_plan
from lowmem.planning.plan import Plan
from lowmem.planning.ram import Process
from lowmem.planning.simulated_step import gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.units import MIB, format_size


def make_plan(
    settings: Settings, config: PretrainedConfig, device: str, precision: str, card: Card | None,
    ram_free_bytes: int | None = None, fused_kernels: bool | None = None,
    process: Process | None = None,
) -> Plan:  # fmt: skip
    """The plan for the model of `config` on `device` ("cuda", with a `card`, or "cpu"); PlanError, naming the smallest
    caps that would do, where nothing fits; InputError for an architecture that cannot be trained in pieces.
    `ram_free_bytes`: what this machine has, if the plan is for this machine: it keeps to that. `fused_kernels`: whether
    operators.py's can be had, None: as is to be expected of the card. `process`: what the process that is going to
    train has taken, where that is not this one."""
    if process is None and (device == "cpu" or torch.cuda.is_initialized()):
        process = Process(ram_now_bytes(), 0)
    not_compared = compare_small_copy(config, settings.masks_documents, precision, settings.residual)
    decoder = partial(make_decoder, config, precision, settings.residual)
    free_bytes = None if ram_free_bytes is None or process is None else process.now_bytes + ram_free_bytes
    with architecture_blamed(settings.model, precision), _what_is_there_left_to_itself():
        if device == "cpu":
            plan = cpu_plan(settings, decoder, precision, ram_free_bytes, process)
        else:
            plan = gpu_plan(settings, decoder, precision, card, fused_kernels, process)
            if free_bytes is not None and plan.ram_bytes > free_bytes:
                plan = _within_what_is_free(plan, free_bytes, decoder, precision, card, fused_kernels, process)
    if free_bytes is not None and plan.ram_bytes > free_bytes:
        raise PlanError(
            f"{what(settings)} needs {format_size(plan.ram_bytes)} of RAM in "
            f"this plan, and {format_size(ram_free_bytes)} are free here; free some, or lower --micro-batch or --seq."
        )
    ram_limit = settings.ram_limit_bytes
    if process is not None and ram_limit is not None and process.peak_bytes > ram_limit:
        raise PlanError(
            f"{what(settings)}: reading the data has taken {format_size(process.peak_bytes)} of RAM already, which is "
            f"over the cap of {format_size(ram_limit)}; give --ram-limit {math.ceil(process.peak_bytes / MIB)}MiB or "
            "more, or less text."
        )
    if process is not None and process.peak_bytes:
        plan = replace(plan, ram={"prepare": {"process": process.peak_bytes}} | plan.ram)
    return replace(plan, not_compared=not_compared)


def _within_what_is_free(
    plan: Plan, free_bytes: int, decoder: Callable[[], Decoder], precision: str, card: Card,
    fused_kernels: bool | None, process: Process,
) -> Plan:  # fmt: skip
    """A plan that keeps to the RAM that is free, instead of `plan`, which does not; that one where there is none. Its
    micro-batch is the same: the bits of the result must not depend on what happens to be free."""
    settings = replace(plan.settings, ram_limit_bytes=free_bytes, micro_batch=plan.layout.micro_batch)
    try:
        less = gpu_plan(settings, decoder, precision, card, fused_kernels, process, roomy=plan)
    except PlanError:
        return plan
    return replace(less, settings=plan.settings)


@contextmanager
def _what_is_there_left_to_itself() -> Iterator[None]:
    """Python's cycle collector passes over the objects that there are now, those of all that has been imported: a plan
    makes so many that it would look at them again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def timed_with(plan: Plan, config: PretrainedConfig, lengths: Sequence[int]) -> Plan:
    """`plan` with the seconds of a step whose rows have these lengths, which takes no more memory than full rows do;
    where nobody knows seconds, on the CPU, with its tokens alone. With more RAM it is taken to be as much faster as a
    step of full rows."""
    settings = plan.settings
    plan = replace(plan, typical_tokens=sum(lengths))
    if plan.card is None:
        return plan
    decoder = partial(make_decoder, config, plan.precision, settings.residual, plan.fused_kernels)
    case = replace(step_case(settings, plan.precision), lengths=tuple(lengths))
    target = gpu_target(plan.card, plan.fused_kernels, settings.disk_rate_bytes)
    recording = Simulations(decoder, case, target).record(plan.layout)
    more_ram = plan.seconds_with_more_ram
    return replace(
        plan,
        step_seconds=recording.seconds,
        waiting_seconds=recording.waiting_seconds,
        seconds_with_more_ram=more_ram and more_ram * recording.seconds / plan.step_seconds,
    )
