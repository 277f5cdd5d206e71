"""What tests of steps and saves share: trainings (experiments/harness/trainings.py) and random batches."""

import torch

from experiments.harness.trainings import make_step
from lowmem.core.batch import Batch
from reference import VOCABULARY

__all__ = ["make_batch", "make_step"]


def make_batch(seed: int, rows: int, seq: int) -> Batch:
    """Random tokens, each row's labels one token further."""
    tokens = torch.randint(0, VOCABULARY, (rows, seq + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
