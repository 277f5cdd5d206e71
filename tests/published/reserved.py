"""Predicts by `lowmem.cuda_peak` the reserved memory of an epoch of rasbt/LLMs-from-scratch's training loop on an A100.

The loop evaluates two batches every 15 steps, and generates 50 tokens at the end.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

import lowmem
from tests.published.points import measurements
from tests.published.programs import GPT, GPT2_VOCABULARY

ROWS, TOKENS, STEPS, GENERATED = 8, 1024, 3, 50  # later steps reserve no more


@dataclass(frozen=True)
class Reserved:
    """One measured `torch.cuda.memory_reserved`. `program`: a kind of GPT. `precision`: of weights and all else."""

    program: str
    precision: str
    gib: float


def reserved() -> list[Reserved]:
    return [Reserved(*row) for group in measurements()["reserved"] for row in group["points"]]


def reserved_bytes(point: Reserved) -> int:
    """Returns the bytes that the allocator has reserved at the end."""
    bf16 = point.precision == "bf16"

    def epoch() -> None:
        model = GPT(point.program, TOKENS).to("cuda").to(torch.bfloat16 if bf16 else torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), fused=bf16)

        def loss_of() -> torch.Tensor:
            ids, labels = (torch.zeros(ROWS, TOKENS, dtype=torch.int64).to("cuda") for _ in range(2))
            return F.cross_entropy(model(ids).view(-1, GPT2_VOCABULARY), labels.view(-1))

        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            if step == 0:
                model.eval()
                with torch.no_grad():
                    for _ in range(2):
                        loss_of()
                model.train()
        model.eval()
        with torch.no_grad():
            ids = torch.zeros(1, 4, dtype=torch.int64, device="cuda")
            for _ in range(GENERATED):
                ids = torch.cat((ids, model(ids)[:, -1].argmax(-1, keepdim=True)), 1)

    return lowmem.cuda_peak(epoch, "A100").reserved_bytes
