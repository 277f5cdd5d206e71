"""Plans a training run from settings and a model's config, without weights and without a GPU (docs/plan.md)."""

import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from lowmem.errors import PlanError
from lowmem.limits import ram_now_bytes
from lowmem.models.build import make_decoder
from lowmem.models.compatibility import architecture_blamed, compare_small_copy
from lowmem.planning.caps import described
from lowmem.planning.choices import step_case
from lowmem.planning.columns import within
from lowmem.planning.cpu_plan import cpu_plan
from lowmem.planning.gpu_plan import gpu_plan
from lowmem.planning.plan import Plan
from lowmem.planning.question import Question
from lowmem.planning.ram import DATA_BYTES, Process
from lowmem.planning.simulated_step import gpu_target, record_step
from lowmem.units import MIB, format_size

_COLLECTIONS = 200_000, 20, 100  # for gc.set_threshold: new objects, younger collections


def make_plan(question: Question) -> Plan:
    """Returns the plan for `question`: how to train, and the memory and time that this takes. Raises PlanError if
    nothing fits; the message names sufficient memory. Also raises it if the plan needs more RAM than is free, or if
    reading the data has exceeded the cap. Raises InputError if the architecture cannot be trained block by block."""
    settings, precision, card = question.settings, question.precision, question.card
    if card is not None and sys.stderr is not None and sys.stderr.isatty():
        print(f"planning {settings.model} for {card.name}; a large model takes a while", file=sys.stderr)
    if question.process is None and (card is None or torch.cuda.is_initialized()):
        not_loaded = DATA_BYTES if question.ram_free_bytes is None else 0  # a plan without training
        question = replace(question, process=Process(ram_now_bytes() + not_loaded, 0))
    not_compared = compare_small_copy(question.config, settings.masks_documents, precision, settings.residual)
    with architecture_blamed(settings.model, precision), _rare_collections():
        plan = (cpu_plan if card is None else gpu_plan)(question)
    free_bytes, process = question.ram_here_bytes, question.process
    if free_bytes is not None and plan.ram_bytes > free_bytes:
        raise PlanError(
            f"{described(question)} needs {format_size(plan.ram_bytes)} of RAM in this plan, and "
            f"{format_size(question.ram_free_bytes)} are free here; free some, or lower --micro-batch or --seq."
        )
    if process is not None and not within(process.peak_bytes, settings.ram_limit_bytes):
        taken = process.peak_bytes * question.ranks_here
        raise PlanError(
            f"{described(question)}: reading the data has taken {format_size(taken)} of RAM already, which is over the "
            f"cap of {format_size(question.ram_limit_bytes)}; give --ram-limit {math.ceil(taken / MIB)}MiB or more, or "
            "less text."
        )
    if process is not None and process.peak_bytes:
        plan = replace(plan, ram={"prepare": {"process": process.peak_bytes}} | plan.ram)
    mesh = question.mesh
    return replace(plan, not_compared=not_compared, steps=settings.steps, ranks=mesh.count, sharing=mesh.sharing)


@contextmanager
def _rare_collections() -> Iterator[None]:
    # Otherwise Python's cycle collector would take a sixth of the time of planning.
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def timed_with(plan: Plan, config: PretrainedConfig, lengths: Sequence[int]) -> Plan:
    """Returns a copy of `plan` with the seconds of a step whose sequences have `lengths` tokens. Its bytes stay those
    of full sequences, which take the most memory. On the CPU, only `typical_tokens` changes."""
    settings = plan.settings
    plan = replace(plan, typical_tokens=sum(lengths))
    if plan.card is None:
        return plan
    decoder = make_decoder(config, plan.precision, settings.residual, plan.fused_kernels)
    case = replace(step_case(settings, plan.precision), layout=plan.layout, lengths=tuple(lengths))
    target = gpu_target(plan.card, plan.fused_kernels, settings.disk_rate_bytes)
    simulated = record_step(decoder, case, target, known={})
    share = simulated.seconds / plan.step_seconds
    faster = plan.faster_with_ram
    return replace(
        plan,
        step_seconds=simulated.seconds,
        waiting_seconds=simulated.waiting_seconds,
        faster_with_ram=faster and (faster[0], faster[1] * share),
    )
