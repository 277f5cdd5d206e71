"""Simulates published peaks of memory of training steps.

Hugging Face's documentation has `torch.cuda.max_memory_allocated` with fused and with eager attention, in fp16, without
an optimizer: loops of `model.zero_grad()`, forward, `logits.sum().backward()`
(gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331). A step's output lives until the next one is made.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from experiments.memory_estimation.estimate import plain_target
from lowmem.cudasim.gpus import CARDS
from lowmem.cudasim.tape import under_cap
from tests.published.older_models import FP16, MODELS
from tests.published.points import Peak
from tests.published.simulated import record
from tests.published.torchtune_llama import build_torchtune
from tests.published.vision_transformer import build_vision_transformer

META = torch.device("meta")
# What they were measured on, as far as it bears on memory, and with: a GeForce RTX 3080 Ti of a laptop, an L40S.
LAPTOP = replace(CARDS["rtx3090"], name="rtx3080ti-16gb", multiprocessors=58), (2, 2)
L40S = replace(CARDS["l4"], name="l40s", multiprocessors=142), (2, 4)
MEASURED_ON = {
    **{"gpt2-large": LAPTOP, "pythia-410m": LAPTOP, "opt-350m": L40S},
    "llama-3.2-3b, torchtune": (CARDS["a100"], (2, 5)),
    "vit-giant, torchao": (CARDS["rtx4070ti-super"], (2, 4)),
}
WHOLE_STEPS = {
    "llama-3.2-3b, torchtune": build_torchtune,
    "vit-giant, torchao": lambda batch, tokens: build_vision_transformer(batch),
}


def peak_bytes(peak: Peak) -> int:
    """Returns the most bytes allocated at once in two steps."""
    build = WHOLE_STEPS.get(peak.model) or partial(_without_an_optimizer, peak.model, peak.eager)
    _, tape = record(plain_target(*MEASURED_ON[peak.model]), *build(peak.batch, peak.tokens))
    return under_cap(tape, expandable_segments=False).allocated_peak_bytes


def _without_an_optimizer(name: str, eager: bool, batch: int, tokens: int) -> tuple[nn.Module, Callable[[], None]]:
    with META:
        model = MODELS[name](eager)
    model.to(FP16)
    for block in model.blocks:  # tables of rotations stay in fp32
        for table in ("cosine", "sine"):
            if hasattr(block, table):
                setattr(block, table, getattr(block, table).float())
    ids = torch.zeros((batch, tokens), dtype=torch.int64, device=META)
    output: list = []

    def step() -> None:
        model.zero_grad()
        output[:] = [model(ids)]
        logits, _ = output[0]
        logits.sum().backward()

    return model, step
