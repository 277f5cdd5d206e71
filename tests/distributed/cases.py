"""Small trainings, for ranks and for one process: of GPT-2 with a tied head, and of Llama without.

The vocabulary has 97 words, which divides by no number of ranks.
"""

from dataclasses import dataclass, field

import torch

from experiments.harness.trainings import make_step
from lowmem.core.batch import Batch
from lowmem.core.ranks import Ranks
from reference import VOCABULARY, tiny_model

ROWS, SEQ, BLOCKS = 4, 16, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the first: on the stand-in
DROPOUT, CLIP_NORM, LEARNING_RATE = 0.1, 0.5, 1e-3


@dataclass(frozen=True)
class Case:
    """One training of `steps`. `settings`: keywords of make_step. `sorted_rows`: rows of several lengths. `packed`: two
    documents in each row, which do not see each other."""

    family: str = "gpt2"
    settings: dict = field(default_factory=dict)
    sorted_rows: bool = False
    packed: bool = False
    rows: int = ROWS
    steps: int = 4

    def step(self, ranks: Ranks | None = None):
        model = tiny_model(self.family, DROPOUT)
        more = {"device": DEVICE} | ({} if ranks is None else {"ranks": ranks})
        return make_step(model.to(DEVICE), **{"clip_norm": CLIP_NORM, "micro_batch": 1} | self.settings | more)

    def batches(self) -> list[Batch]:
        return [self._batch(seed) for seed in range(self.steps)]

    def _batch(self, seed: int) -> Batch:
        """Random tokens, of which the first ones of each row have no label: ranks have unequal numbers of labels."""
        drawn = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (self.rows, SEQ + 1), generator=drawn)
        labels = tokens[:, 1:].clone()
        for row in labels:
            row[: int(torch.randint(0, SEQ - 1, (), generator=drawn))] = -100
        if self.packed:
            edges = torch.randint(1, SEQ, (self.rows, 1), generator=drawn)
            places = torch.arange(SEQ).expand(self.rows, SEQ)
            second = places >= edges
            labels[:, :-1][second.diff(dim=1)] = -100  # the last token of a document does not predict the next one
            return Batch(tokens[:, :-1].contiguous(), labels, places - second * edges, second.int())
        if not self.sorted_rows:
            return Batch(tokens[:, :-1].contiguous(), labels)
        lengths = torch.randint(4, SEQ + 1, (self.rows,), generator=drawn)
        for row, length in zip(labels, lengths, strict=True):
            row[length:] = -100
            row[length - 1] = 1
        return Batch(tokens[:, :-1].contiguous(), labels, lengths=lengths)


CASES = {
    "untied": Case("llama", steps=20), "bf16, 4 steps": Case(settings={"precision": "bf16"}),
    "four micro-batches a rank": Case(rows=8), "sixteen micro-batches a rank": Case(rows=32, steps=1),
    "states and gradients in RAM": Case(settings={"states_on_gpu": 0, "fate": "sent", "boundaries_in_ram": True}),
    "kept": Case(settings={"kept": 2.0, "gathered": BLOCKS}), "one block kept": Case(settings={"gathered": 1}),
    "no clipping": Case(settings={"clip_norm": None}),
    "no clipping, applied": Case(settings={"clip_norm": None, "fate": "applied"}), "fp32": Case(steps=20),
    "bf16": Case(settings={"precision": "bf16"}, steps=20),
    "bf16, untied": Case("llama", {"precision": "bf16"}, steps=20),
    "fp16": Case(settings={"precision": "fp16"}, steps=20), "a rank has no micro-batch": Case(rows=1),
    "rows sorted": Case(rows=7, sorted_rows=True), "rows packed": Case("llama", rows=7, packed=True),
    "twice, segments of 3": Case(settings={"fate": "dropped", "segment_blocks": 3, "kept": 1}),
    "8-bit states": Case(settings={"optimizer": "adamw8bit"}),
}  # fmt: skip
