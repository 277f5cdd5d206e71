"""What the plans say of speed before any GPU has: sequences per second under the caps, by tokens per step.

    python -m experiments.gpu_acceptance.predicted [--gpus rtx3060 ...] [--out DIR]

Large and XL under 11 GiB (XL: and 16 GiB of RAM), 1,024 tokens per sequence, exact AdamW with clipping, 1 to 64
sequences per step. The ratio is to the same forward and backward as fast as the card can have them, with no cap:
everything kept, the best of a few micro-batches, no update. It says what caps, recompute and update cost, by the plan's
clock, and nothing about how good that clock is; the job `denominator` measures the stock model. A few minutes per card;
its rows replace the card's older ones.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from experiments.harness import rows as row_file
from lowmem.adam import OPTIMIZERS
from lowmem.cards import Card, card_named
from lowmem.errors import LowmemError
from lowmem.models import load_config, make_decoder
from lowmem.planner import make_plan
from lowmem.precision import WORKING_DTYPES
from lowmem.settings import Settings
from lowmem.simulate import StepCase, gpu_target, record_step
from lowmem.step import Schedule
from lowmem.units import GIB

SEQ, BATCHES = 1024, (1, 2, 4, 8, 16, 32, 64)
RAM_LIMITS = {"gpt2-large": None, "gpt2-xl": 16 * GIB}
RESULTS = Path(__file__).parent / "results"
NAME = "predicted.jsonl"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_acceptance.predicted", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--gpus", nargs="+", metavar="CARD", default=["rtx3060", "rtx3090"], help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of predicted.jsonl")
    options = parser.parse_args(arguments)
    path = options.out / NAME
    try:
        for card in map(card_named, options.gpus):
            row_file.write(path, [row for row in row_file.read(path) if row["card"] != card.name])
            for row in rows_of(card, ["--gpus", card.name]):
                row_file.append(path, row)
    except LowmemError as error:
        print(f"predicted: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def rows_of(card: Card, arguments: list[str]):
    """A row per model and batch."""
    precision = "bf16" if "bf16" in card.rates else "fp16"
    for model, ram_limit in RAM_LIMITS.items():
        config = load_config(model, "random")
        fastest = max(
            (alone_per_second(partial(make_decoder, config, precision, "fp32"), size, precision, card), size)
            for size in (1, 2, 4, 8)
        )
        for batch in BATCHES:
            settings = Settings(
                model=model, init="random", seq=SEQ, batch=batch, gpu=card.name, gpu_limit_bytes=11 * GIB,
                ram_limit_bytes=ram_limit, plan_only=True,
            )  # fmt: skip
            plan = make_plan(settings, config, "cuda", precision, card)
            said = plan.to_dict()
            row = {
                "kind": "predicted", "card": card.name, "model": model, "seq": SEQ, "batch": batch,
                "caps": said["limits"], "choice": said["choice"], **said["predicted"],
                "sequences_per_second": batch / plan.step_seconds,
                "alone_sequences_per_second": fastest[0], "alone_micro_batch": fastest[1],
            }  # fmt: skip
            share = row["sequences_per_second"] / fastest[0]
            print(
                f"{card.name} {model} {batch:>3} x {SEQ}: {plan.step_seconds:.2f} s, {share:.3f} of it alone",
                flush=True,
            )
            yield row | row_file.made_by("experiments.gpu_acceptance.predicted", arguments)


def alone_per_second(decoder, micro_batch: int, precision: str, card: Card) -> float:
    """Sequences per second of forward and backward, everything kept: what two micro-batches more add to a step."""

    def seconds(micro_batches: int) -> float:
        case = StepCase(
            SEQ, micro_batches * micro_batch, Schedule(micro_batch, 1, 1, recompute=False), WORKING_DTYPES[precision],
            OPTIMIZERS["adamw"], 10**6,
        )  # fmt: skip
        return record_step(decoder(), case, gpu_target(card), {}, alike=True).seconds

    return 2 * micro_batch / (seconds(4) - seconds(2))


if __name__ == "__main__":
    sys.exit(main())
