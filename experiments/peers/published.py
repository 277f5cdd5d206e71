"""Plans the trainings whose speed LLMQ has published, on the same cards: how fast must a GPU show these plans to be?

    python -m experiments.peers.published [--only NAME ...] [--out DIR]

LLMQ (arXiv:2512.15306) trains Qwen2.5 with master weights and moments in bf16; a plan's are in fp32.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen2Config

from experiments.harness.options import exit_code_of
from experiments.harness.planned_rows import PlannedRows
from experiments.harness.tables import markdown
from lowmem.cudasim.gpus import card_named
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question
from lowmem.settings import Settings

SEQ, BATCH = 1024, 256
SOURCE = "github.com/IST-DASLab/llmq, README, bf16"
MODELS = {  # config.json of Qwen2.5
    "Qwen2.5 0.5B": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "Qwen2.5 1.5B": {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
}  # fmt: skip
MEASURED = {  # tokens per second
    ("Qwen2.5 0.5B", "rtx4090"): 40e3,
    ("Qwen2.5 1.5B", "rtx4090"): 14e3,
    ("Qwen2.5 0.5B", "rtx5090"): 55e3,
    ("Qwen2.5 1.5B", "rtx5090"): 17e3,
    ("Qwen2.5 0.5B", "h100"): 144e3,
    ("Qwen2.5 1.5B", "h100"): 58e3,
}


@dataclass(frozen=True)
class Case:
    model: str
    card: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.card}"

    def row(self) -> dict:
        known = {"model": self.model, "card": self.card, "seq": SEQ, "batch": BATCH, "source": SOURCE}
        return known | {"measured_tokens_per_second": MEASURED[self.model, self.card]}

    def plan(self) -> dict:
        settings = Settings(
            model=self.model, init="random", seq=SEQ, batch=BATCH, gpu=self.card, gpu_limit_bytes=None,
            ram_limit_bytes=None, plan_only=True,
        )  # fmt: skip
        config = Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **MODELS[self.model])
        plan = make_plan(Question(settings, config, "bf16", card_named(self.card)))
        return {"choice": plan.to_dict()["choice"], "tokens_per_second": BATCH * SEQ / plan.step_seconds}


def line(row: dict) -> str:
    return f"{row['name']}: {row['error'] or format(row['tokens_per_second'], ',.0f')} tokens/s"


def table(rows: list[dict]) -> str:
    """Returns the plans' tokens per second beside the published ones, in Markdown."""
    lines = [
        [row["model"], row["card"], f"{row['tokens_per_second']:,.0f}", f"{row['measured_tokens_per_second']:,.0f}",
         f"{row['tokens_per_second'] / row['measured_tokens_per_second']:.2f}"]
        for row in rows
    ]  # fmt: skip
    return markdown(("", "card", "tokens/s, a plan", "tokens/s, LLMQ measured", "plan / measured"), lines)


CASES = tuple(Case(*key) for key in MEASURED)
RESULTS = Path(__file__).resolve().parent / "results"
ROWS = PlannedRows("experiments.peers.published", __doc__.split("\n")[0], RESULTS / "published.jsonl", CASES, line)
main = ROWS.main

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
