"""What a run does where the machine gives less than was planned.

**Out of memory in a forward or backward pass**, of a step or of an evaluation. Another process took the memory, or the
plan was wrong. A step changes nothing before its update, so it can be begun again with smaller micro-batches and the
same batch: gradients so far are dropped, dropout masks and the batch are functions of the step's number. From there on
the run is, bit for bit, one that had the smaller micro-batch from that step on; checkpoints keep it. It costs the time
of the attempt, and smaller products afterwards.

**Out of memory within an update** is another matter: some weights are new then and some old, and an update that is
applied twice is wrong. That is Step's UpdateInterrupted, which nothing here catches: the run ends with exit code 1, and
the same command goes on from the newest checkpoint.

**Page-locked memory refused**: states are copied from pageable memory, slower and without overlap.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from lowmem.prediction import Plan
from lowmem.step import Step

Result = TypeVar("Result")
PAGEABLE_SHARE = 0.5  # of the bus's speed that copies from pageable memory reach; assumed


def within_memory(
    step: Step, recoveries: list[dict], say: Callable[[str], None], number: int, work: Callable[..., Result], *arguments
) -> Result:
    """What `work(*arguments)` returns: a call of `step` or an evaluation by it, in optimizer step `number`.

    Where memory runs out it is begun again with the next smaller micro-batch that divides the last one; each time is
    said, and noted in `recoveries` as {"step", "micro_batch"}. Raises torch.OutOfMemoryError where single sequences
    are too much already."""
    while True:
        try:
            return work(*arguments)
        except torch.OutOfMemoryError as error:
            last = step.schedule.micro_batch
            if last == 1:
                raise
            reason = str(error).splitlines()[0]
        # Only here is the error gone, and with its traceback the tensors of the attempt.
        smaller = next(size for size in range(last - 1, 0, -1) if last % size == 0)
        step.begin_again(smaller)
        recoveries.append({"step": number, "micro_batch": smaller})
        say(
            f"step {number}: out of memory ({reason}); begun again, and going on, with micro-batches of {smaller} "
            f"instead of {last} and the same batch"
        )


def with_pageable_copies(plan: Plan) -> Plan:
    """`plan` with the time of a step predicted anew for states that are copied from pageable memory: the computation,
    then the copies in and out at PAGEABLE_SHARE of the bus's speed, with no overlap."""
    copying = 2 * plan.ram_breakdown["streamed_states"] / (plan.card.bus_bytes_per_second * PAGEABLE_SHARE)
    computing = plan.step_seconds - plan.waiting_seconds
    return replace(plan, step_seconds=computing + copying, waiting_seconds=copying)
