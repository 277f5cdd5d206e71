"""Predicts how near a step comes to the card's limit, and the gain of single changes of its code, by plans.

    python -m experiments.gpu_acceptance.planned_levers [--only NAME ...] [--jobs N] [--out DIR]

The changes are those of levers.py, and `rotary` (core/rotary.py). A plan without a change may have another layout. 20
minutes on one core.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.gpu_acceptance.levers import kernels_without, without
from experiments.gpu_acceptance.predicted import RESULTS, precision_of
from experiments.harness.options import exit_code_of
from experiments.harness.planned_rows import PlannedRows
from experiments.harness.tables import markdown
from lowmem.core.kernels.fused import expected
from lowmem.core.precision import WORKING_DTYPES
from lowmem.cudasim.gpus import Card, card_named
from lowmem.models.build import load_config, make_decoder
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question
from lowmem.settings import Settings
from lowmem.units import GIB

SEQ, BATCH = 1024, 64
LEVERS = ("norms", "sums", "activations", "rotary", "skipped product", "head")
WITHOUT_EFFECT = {"gpt2": ("rotary",), "": ("head",)}  # GPT-2 has none; the others' vocabularies are multiples of 8
CLIPPING, FEW, CAPS = "clipping", (1, 4, 16), {"gpu_limit_bytes": 11 * GIB, "ram_limit_bytes": 16 * GIB}
CARDS = {
    "gpt2-large": ("rtx3060", "rtx3090", "rtx4090", "t4", "h100"),
    "gpt2-xl": ("rtx3060", "rtx3090", "rtx4090", "t4", "h100"),
    "Qwen/Qwen3-0.6B": ("rtx3060", "rtx4090", "h100"),
    "Qwen/Qwen3-1.7B": ("rtx3060", "rtx4090", "h100"),
    "meta-llama/Llama-3.2-1B": ("rtx3060", "rtx4090", "h100"),
}  # by model
GOALS = {"rtx3060": 0.85, "rtx3090": 0.85, "rtx4090": 0.75, "h100": 0.7}  # limit / step
LEFT = (  # why goals are missed
    "Three things are in the way. Element-wise kernels run at the rate of the card's memory. The last tiles of a "
    "product leave multiprocessors idle. And an H100 runs FlashAttention-2 at a quarter of the rate of its products."
)


@dataclass(frozen=True)
class Case:
    """A plan of `model` on `card` without the changes `levers`. `few`: sequences of a batch under CAPS; None: BATCH on
    the card's own memory."""

    model: str
    card: str
    levers: tuple[str, ...]
    few: int | None = None

    @property
    def way(self) -> str:
        return "all" if not self.levers else f"without {self.levers[0] if len(self.levers) == 1 else 'any'}"

    @property
    def name(self) -> str:
        few = "" if self.few is None else f"{self.few} x {SEQ} tokens, "
        return f"{self.model}, {self.card}, {few}{self.way}"

    def row(self) -> dict:
        shape = {"seq": SEQ, "batch": self.few or BATCH}
        return {"kind": "planned", "model": self.model, "card": self.card, "way": self.way} | shape

    def plan(self) -> dict:
        card, config = card_named(self.card), load_config(self.model, "random")
        caps = {"gpu_limit_bytes": None} if self.few is None else CAPS
        clipped = {"clip_norm": None} if CLIPPING in self.levers else {}
        settings = Settings(
            model=self.model, init="random", seq=SEQ, batch=self.few or BATCH, gpu=card.name, plan_only=True,
            **caps, **clipped,
        )  # fmt: skip
        with without(self.levers):
            kernels = kernels_without(self.levers, expected(card.capability))
            plan = make_plan(Question(settings, config, precision_of(card), card, fused_kernels=kernels))
        said = plan.to_dict()
        limit = limit_seconds(config, card, settings.batch)
        return {"limit_seconds": limit, "choice": said["choice"], **said["predicted"]}


def limit_seconds(config, card: Card, batch: int) -> float:
    """Returns the time of the FLOP of forward and backward over `batch` x SEQ tokens, at the rate of large matrix
    products. Counts the products of blocks and head, and half of attention, which is causal."""
    decoder, precision = make_decoder(config, precision_of(card), "fp32"), WORKING_DTYPES[precision_of(card)]
    matrices = [each for block in decoder.blocks for each in block.parameters() if each.dim() == 2]
    weights = sum(each.numel() for each in (*matrices, decoder.head_weight))
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    of_token = 6 * weights + 6 * SEQ * width * config.num_hidden_layers  # two forward, four backward; attention: half
    return batch * SEQ * of_token / card.sustained_flops(precision)


def table(rows: list[dict]) -> str:
    """Returns a table of steps and their limits, one line per card and model."""
    found = {row["name"]: row for row in rows}
    lines = []
    for model, cards in CARDS.items():
        for card in cards:
            ways = {case.way: found.get(case.name) for case in cases_of(model, card)}
            if any(row is None for row in ways.values()):
                continue
            step, limit = ways["all"]["step_seconds"], ways["all"]["limit_seconds"]
            each = (ways.get(f"without {lever}") for lever in LEVERS)
            multiples = ["" if row is None else f"{row['step_seconds'] / step:.3f}" for row in each]
            bare = ways["without any"]["step_seconds"]
            lines.append(
                [card, model.rpartition("/")[2], f"{limit:.3g} s", f"{bare:.3g} s", f"{step:.3g} s",
                 f"{limit / bare:.2f}", f"{limit / step:.2f}", *multiples]
            )  # fmt: skip
    header = ("card", "model", "limit", "step without any", "step", "limit / step without any", "limit / step")
    return markdown((*header, *(f"without {lever}" for lever in LEVERS)), lines)


def clipping_table(rows: list[dict]) -> str:
    """Returns a table of steps with few sequences, with and without clipping."""
    found = {row["name"]: row for row in rows}
    pairs = [[found.get(case.name) for case in pair] for pair in CLIPPED]
    lines = [
        [row["card"], f"{row['batch']}", f"{row['step_seconds']:.3g} s", f"{bare['step_seconds']:.3g} s",
         f"{bare['step_seconds'] / row['step_seconds']:.2f}", bare["choice"]["fate"]]
        for row, bare in pairs if row is not None and bare is not None
    ]  # fmt: skip
    header = ("card", "sequences", "step with clipping", "without", "without / with", "gradients without")
    return markdown(header, lines)


def reached(rows: list[dict]) -> str:
    """Returns sentences on which of GOALS are reached."""
    found = {row["name"]: row for row in rows}
    every = [(model, card) for model, cards in CARDS.items() for card in cards if card in GOALS]
    rows_of = {pair: found[Case(*pair, ()).name] for pair in every if Case(*pair, ()).name in found}
    good = [
        f"{model.rpartition('/')[2]} on the {card}"
        for (model, card), row in rows_of.items()
        if row["limit_seconds"] / row["step_seconds"] >= GOALS[card]
    ]
    goals = ", ".join(f"{goal:g} on the {card}" for card, goal in GOALS.items())
    return (
        f"Our goals for limit / step are {goals}. {len(good)} of {len(rows_of)} plans reach them: {', '.join(good)}. "
        + LEFT
    )


def cases_of(model: str, card: str) -> list[Case]:
    idle = next(levers for prefix, levers in WITHOUT_EFFECT.items() if model.startswith(prefix))
    levers = tuple(lever for lever in LEVERS if lever not in idle)
    ways: Sequence[tuple[str, ...]] = ((), *((lever,) for lever in levers), levers)
    return [Case(model, card, way) for way in ways]


def line(row: dict) -> str:
    if row["error"]:
        return f"{row['name']}: {row['error']}"
    share = row["limit_seconds"] / row["step_seconds"]
    return f"{row['name']}: {row['step_seconds']:.4g} s, {share:.3f} of the limit ({row['planning_seconds']:.0f} s)"


CLIPPED = [
    [Case("gpt2-xl", card, levers, few) for levers in ((), (CLIPPING,))] for card in CARDS["gpt2-xl"] for few in FEW
]
CASES = (
    *(case for model, cards in CARDS.items() for card in cards for case in cases_of(model, card)),
    *(case for pair in CLIPPED for case in pair),
)
ROWS = PlannedRows(
    "experiments.gpu_acceptance.planned_levers", __doc__.split("\n")[0], RESULTS / "planned_levers.jsonl", CASES, line,
    jobs=1, code=("experiments/gpu_acceptance/levers.py",),
)  # fmt: skip
main = ROWS.main

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
