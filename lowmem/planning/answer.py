"""Formats a plan as sentences: whether training fits, its memory and time, and what is faster (docs/plan.md)."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lowmem.core.layout import Fate
from lowmem.device import why_no_gpu
from lowmem.errors import PlanError
from lowmem.limits import CONTEXT_BYTES
from lowmem.settings import Settings
from lowmem.units import counted, format_option, format_seconds, format_size

if TYPE_CHECKING:
    from lowmem.planning.plan import Plan

_MILLION = 1_000_000
_WORTH_RAISING = 1.1  # Suggests a higher cap if the card has more than this many times as much.


def answer(plan: "Plan", done: int = 0) -> list[str]:
    """Returns the plan as a list of sentences. `done`: number of steps that a resumed run has made. If there are any,
    returns only the first sentence (memory, time and disk), for the remaining steps."""
    where = "" if plan.ranks == 1 else f" {'in' if plan.card is None else 'on'} each of {_ranks(plan)}"
    fits = f"Fits{where}: {', '.join(_figures(plan, done))}"
    if done:
        return [fits]
    unsure = () if plan.not_compared is None else (f"Not compared with the whole model ({plan.not_compared})",)
    return [fits, *_about_card(plan), *_without_effect(plan), *(f"Faster: {way}" for way in _faster(plan)), *unsure]


def refused(settings: Settings, error: PlanError) -> dict:
    """Returns the content of plan.json for a training run that does not fit. It has the message and the ways out of
    `error`, and None instead of a plan's choices and figures."""
    unknown = dict.fromkeys(("parameters", "choice", "predicted", "breakdown"))
    return {
        "fits": False,
        "model": settings.model,
        "tokens_per_step": settings.batch * settings.seq,
        "limits": {"gpu_bytes": settings.gpu_limit_bytes, "ram_bytes": settings.ram_limit_bytes},
        **unknown,
        "refusal": str(error),
        "ways_out": error.ways_out,
    }


def _figures(plan: "Plan", done: int) -> Iterator[str]:
    settings = plan.settings
    if plan.gpu_reserved_peak_bytes is not None:
        yield f"{_of(plan.gpu_reserved_peak_bytes, plan.gpu_limit_bytes)} GPU"
    yield f"{_of(plan.ram_bytes, settings.ram_limit_bytes if plan.ranks == 1 else None)} RAM"
    yield from _time(plan, done)
    disk = f"{format_size(sum(plan.disk.values()) - plan.disk_state_bytes)} of disk"
    if plan.disk_state_bytes:
        disk += f" and {format_size(plan.disk_state_bytes)} in {settings.states_folder}"
    yield disk


def _ranks(plan: "Plan") -> str:
    machines = f"{plan.ranks // plan.sharing} x " if plan.sharing < plan.ranks else ""
    return f"{machines}{plan.sharing} {'processes' if plan.card is None else 'cards'}"


def _of(size_bytes: int, limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return format_size(size_bytes)
    size, limit = format_size(size_bytes), format_size(limit_bytes)
    # such as "10.9 of 11.0 GiB"
    return f"{size.removesuffix(limit[limit.index(' ') :])} of {limit}"


def _time(plan: "Plan", done: int) -> Iterator[str]:
    left = None if plan.steps is None else plan.steps - done
    steps = None if left is None else f"the {counted(left, 'steps')} left" if done else counted(left, "steps")
    if plan.step_seconds is None:
        if steps is not None:
            yield f"{steps} (their time is not predicted on the CPU)"
        return
    yield f"about {format_seconds(plan.step_seconds)} a step on {plan.card.name}"
    if steps is not None:
        yield f"{format_seconds(left * plan.step_seconds)} for {steps}"
    else:
        tokens = plan.typical_tokens or plan.settings.batch * plan.settings.seq
        yield f"{format_seconds(_MILLION / tokens * plan.step_seconds)} for a million tokens"


def _about_card(plan: "Plan") -> Iterator[str]:
    if plan.card is None:
        return
    settings, asked = plan.settings, plan.settings.gpu_limit_bytes
    if settings.gpu is None and not torch.cuda.is_available():
        why = why_no_gpu()
        here = "No GPU is here" if why is None else f"PyTorch cannot use the GPU here ({why})"
        yield f"{here}, so {plan.card.name} is assumed: --gpu CARD names yours, --device cpu plans for this CPU"
    if asked is not None and asked > plan.gpu_limit_bytes:
        has = f"{plan.card.name} has {format_size(plan.gpu_limit_bytes)} for training"
        yield f"{has}, less than the {format_size(asked)} of --gpu-limit"


def _without_effect(plan: "Plan") -> Iterator[str]:
    settings = plan.settings
    if plan.precision == "fp32" and settings.residual == "16bit":
        yield "--residual 16bit does nothing here, because the computation is in fp32"
    if settings.states_folder is not None and not plan.disk_state_bytes:
        yield "--states-folder stays empty: no optimizer state has to go there"
    if settings.states_folder is None and settings.disk_rate_bytes != Settings.disk_rate_bytes:
        yield "--disk-rate does nothing without --states-folder"
    if plan.ranks == 1 and settings.network_rate_bytes != Settings.network_rate_bytes:
        yield "--network-rate does nothing on one machine"
    if plan.card is None and settings.gpu_limit_bytes not in (None, Settings.gpu_limit_bytes):
        yield "--gpu-limit does nothing on the CPU"


def _faster(plan: "Plan") -> Iterator[str]:
    settings, limit = plan.settings, plan.settings.ram_limit_bytes
    if plan.faster_with_ram is not None:
        ram_bytes, seconds = plan.faster_with_ram
        raised = limit is not None and ram_bytes > limit
        with_ram = f"--ram-limit {format_option(ram_bytes)}" if raised else f"{format_size(ram_bytes)} of RAM"
        instead = f", instead of {settings.states_folder}" if plan.disk_state_bytes else ""
        yield f"{format_seconds(seconds)} a step with {with_ram}{instead}"
    if plan.card is None:
        return
    usable, layout = plan.card.memory_bytes - CONTEXT_BYTES, plan.layout
    waits = layout.states_on_gpu < plan.units or layout.fate in (Fate.SENT, Fate.DROPPED)
    slower = waits or layout.recomputes(plan.blocks)
    if slower and usable > _WORTH_RAISING * plan.gpu_limit_bytes:
        yield f"with a higher --gpu-limit; {plan.card.name} has {format_size(usable)}"
