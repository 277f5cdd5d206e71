"""Repeats on the stand-in the training steps and reductions that others recorded on a GPU (recordings.json).

    python -m stand_in --gpu CARD -- -m tests.cuda.recorded_steps step --context 256 [--autocast] [--sequence FILE]
    python -m stand_in --gpu CARD -- -m tests.cuda.recorded_steps reductions --context 512 --width 2560

Each prints one JSON object.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cuda.digest_recording import describe, events_of, lines_of
from tests.cuda.recorded_model import MEDIUM, VOCABULARY, AdamW, Model, cross_entropy

BATCH = 4
DEVICE = MEDIUM.device
STEPS_BEFORE = 5  # so many steps run before the recording begins


def record_step(context: int, autocast: bool) -> dict[str, Any]:
    """Returns the events of one step after five others, and the most bytes allocated during it and reserved after
    it."""
    model = Model(context)
    optimizer = AdamW(model.parameters())

    def tokens(steps: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (steps, BATCH, context), device=DEVICE)

    inputs_before, inputs, targets_before, targets = (tokens(steps) for steps in (STEPS_BEFORE, 1) * 2)
    for i in range(STEPS_BEFORE):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            logits = model(inputs_before[i])
            loss = cross_entropy(logits, targets_before[i])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()

    del logits, loss
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(context=None)  # without the stacks
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        logits = model(inputs[0])
        loss = cross_entropy(logits, targets[0])
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    return {
        "events": events_of(_stop_recording()),
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def _stop_recording() -> dict[str, Any]:
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot


def record_reductions(context: int, width: int) -> list[dict[str, Any]]:
    """Returns the staging buffers of the reductions of a model with transposed products, as `reductions_of` describes
    them."""
    tokens = BATCH * context
    # The recorded program gives einsum the weights first, so products are [outputs, tokens] in memory, and reductions
    # over the last dimension run across its rows. This layout is inferred from the operators and bytes of the
    # recording. Three reductions need a buffer: the loss's maximum and sum, and a sum in the backward of each RMSNorm.
    logits_BTV = torch.empty(VOCABULARY, tokens, device=DEVICE).t().view(BATCH, context, VOCABULARY)
    gradient_BTD = torch.empty(width, tokens, device=DEVICE).t().view(BATCH, context, width)
    reductions = [
        ("max_dim", lambda: torch.max(logits_BTV, dim=-1, keepdim=True)),
        ("sum_dim_IntList", lambda: torch.sum(logits_BTV, dim=-1, keepdim=True)),
        ("sum_dim_IntList", lambda: torch.sum(gradient_BTD, dim=-1, keepdim=True)),
    ]
    rows = []
    for operator, reduce in reductions:
        torch.cuda.memory._record_memory_history(context=None)
        results = reduce()
        events = events_of(_stop_recording())
        results = [results] if isinstance(results, Tensor) else list(results)
        allocated = [size for action, size in events if action == "alloc"][len(results) :]  # the results come first
        for buffer_bytes, semaphore_bytes in zip(allocated[::2], allocated[1::2], strict=True):
            rows.append({"operator": operator, "buffer_bytes": buffer_bytes, "semaphore_bytes": semaphore_bytes})
        del results
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if options.program == "step":
        recorded = record_step(options.context, options.autocast)
        events = recorded.pop("events")
        if options.sequence:
            options.sequence.write_text("".join(lines_of(events)))
        found |= recorded | describe(events)
    else:
        found["reductions"] = record_reductions(options.context, options.width)
    print(json.dumps(found))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.recorded_steps", allow_abbrev=False)
    programs = parser.add_subparsers(dest="program", required=True)
    step = programs.add_parser("step", help="one training step after five others", allow_abbrev=False)
    step.add_argument("--autocast", action="store_true", help="run the forward under bf16 autocast")
    step.add_argument("--sequence", type=Path, help="write the events there, one a line")
    reductions = programs.add_parser("reductions", help="staging buffers of reductions", allow_abbrev=False)
    reductions.add_argument("--width", type=int, required=True, help="of the model")
    for program in (step, reductions):
        program.add_argument("--context", type=int, required=True, help="tokens of a sequence")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
