"""The published peaks of forward and backward, and the same in the simulation.

Hugging Face's documentation has tables of `torch.cuda.max_memory_allocated` in training with fused and with eager
attention, in fp16, without an optimizer: loops of `model.zero_grad()`, forward, `logits.sum().backward()`
(gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331). The output of one step lives until the next one's is there.
"""

from dataclasses import replace

import torch

from experiments.memory_estimation.estimate import plain_target
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import under_cap
from tests.published.older_models import FP16, MODELS
from tests.published.points import Peak
from tests.published.simulated import record

META = torch.device("meta")
# What they were measured on, as far as it bears on memory, and with: a GeForce RTX 3080 Ti of a laptop, an L40S.
LAPTOP = replace(CARDS["rtx3090"], name="rtx3080ti-16gb", multiprocessors=58), (2, 2)
L40S = replace(CARDS["l4"], name="l40s", multiprocessors=142), (2, 4)
MEASURED_ON = {"gpt2-large": LAPTOP, "pythia-410m": LAPTOP, "opt-350m": L40S}


def peak_bytes(peak: Peak) -> int:
    """The most that the allocator has given out at once, in two steps."""
    with META:
        model = MODELS[peak.model](peak.eager)
    model.to(FP16)
    for block in model.blocks:  # tables of rotations stay in fp32
        for table in ("cosine", "sine"):
            if hasattr(block, table):
                setattr(block, table, getattr(block, table).float())
    ids = torch.zeros((peak.batch, peak.tokens), dtype=torch.int64, device=META)
    output: list = []

    def step() -> None:
        model.zero_grad()
        output[:] = [model(ids)]
        logits, _ = output[0]
        logits.sum().backward()

    _, tape = record(plain_target(*MEASURED_ON[peak.model]), model, step)
    return under_cap(tape, expandable_segments=False).allocated_peak_bytes
