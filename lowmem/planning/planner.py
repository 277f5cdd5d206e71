"""Makes a plan from settings and a model's config: how to lay out the step, its memory, and its time.

A plan predicts the code that trains, because it is made by simulating that code (simulated_step.py). The search takes
the fastest layout whose simulation fits the caps of GPU memory and RAM. No weights are loaded and no GPU is needed. If
nothing fits, the plan is refused; if only RAM is short, the refusal says whether 8-bit moments would fit.

    GPU            the peak of the simulated step, with a margin left free (gpu_plan.py)
    RAM            numbers that wait there, and the process itself, in all phases of training (ram.py)
    without a GPU  everything is in RAM (cpu_plan.py)
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from lowmem.cudasim.gpus import Card
from lowmem.errors import PlanError
from lowmem.limits import ram_now_bytes
from lowmem.models.build import make_decoder
from lowmem.models.compatibility import architecture_blamed, compare_small_copy
from lowmem.planning.caps import what
from lowmem.planning.choices import step_case
from lowmem.planning.cpu_plan import cpu_plan
from lowmem.planning.gpu_plan import gpu_plan
from lowmem.planning.plan import Plan
from lowmem.planning.ram import Process
from lowmem.planning.simulated_ranks import ALONE, Mesh
from lowmem.planning.simulated_step import gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.settings import Settings
from lowmem.units import MIB, format_size

_COLLECTIONS = 200_000, 20, 100  # new objects until a collection; collections of younger objects until one of older


@dataclass(frozen=True)
class Question:
    """Holds the arguments of `make_plan`, under the same names."""

    settings: Settings
    config: PretrainedConfig
    device: str
    precision: str
    card: Card | None
    ram_free_bytes: int | None = None
    fused_kernels: bool | None = None
    process: Process | None = None
    ranks: Mesh = ALONE

    def answer(self, make: Callable[..., Plan]) -> Plan:
        """Calls `make` with these arguments, in the order of `make_plan`, and returns its plan. At a terminal, first
        prints that planning takes a while."""
        if self.card is not None and sys.stderr is not None and sys.stderr.isatty():
            print(f"planning {self.settings.model} for {self.card.name}; a large model takes a while", file=sys.stderr)
        return make(*(getattr(self, item.name) for item in fields(self)))


def make_plan(
    settings: Settings, config: PretrainedConfig, device: str, precision: str, card: Card | None,
    ram_free_bytes: int | None = None, fused_kernels: bool | None = None,
    process: Process | None = None, ranks: Mesh = ALONE,
) -> Plan:  # fmt: skip
    """Returns the plan for the model of `config` on `device`: "cuda", with a `card`, or "cpu". Raises PlanError, which
    names the smallest caps that would do, if nothing fits. Raises InputError if the architecture cannot be trained in
    pieces.

    `ram_free_bytes`: free RAM, another limit if the plan is for this machine. `fused_kernels`: whether they run; None:
    as expected of the card. `process`: the RAM of the process that will train, if that is not this one. `ranks`: the
    processes that train together; batch and caps are those of one.
    """
    if process is None and (device == "cpu" or torch.cuda.is_initialized()):
        process = Process(ram_now_bytes(), 0)
    not_compared = compare_small_copy(config, settings.masks_documents, precision, settings.residual)
    decoder = partial(make_decoder, config, precision, settings.residual)
    free_bytes = None if ram_free_bytes is None or process is None else process.now_bytes + ram_free_bytes
    with architecture_blamed(settings.model, precision), _rare_collections():
        if device == "cpu":
            plan = cpu_plan(settings, decoder, precision, ram_free_bytes, process, ranks)
        else:
            plan = gpu_plan(settings, decoder, precision, card, fused_kernels, process, free_bytes, ranks)
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
    return replace(plan, not_compared=not_compared, steps=settings.steps, ranks=ranks.count, sharing=ranks.sharing)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes Python's cycle collector run rarely, and skip the objects that exist now. Planning makes so many objects
    that the collector would take a sixth of its time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def timed_with(plan: Plan, config: PretrainedConfig, lengths: Sequence[int]) -> Plan:
    """Returns `plan` with the seconds of a step whose rows have these lengths; they take no more memory than full rows.
    For the CPU no time is predicted, so only `typical_tokens` changes. More RAM is assumed to help as much as with full
    rows."""
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
