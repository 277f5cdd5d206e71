"""Predicts training speed by plans: sequences per second under the caps, by sequences per step.

    python -m experiments.gpu_acceptance.predicted [--gpus rtx3060 ...] [--out DIR]

Each step is compared with two runs of forward and backward alone, without a cap and at their best micro-batch: `alone`
is our own model with all activations kept, `plain` the stock `transformers` model in bf16 autocast. Ten minutes per
card; a row replaces the older one of its case.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, exit_code_of, parser_of, under_runs
from lowmem.core.layout import Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.cudasim.autocast import autocast_simulated
from lowmem.cudasim.gpus import Card, card_named
from lowmem.cudasim.recorder import Recorder
from lowmem.models.build import build_model, load_config, make_decoder
from lowmem.planning.plan import Plan
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question
from lowmem.planning.simulated_step import META, StepCase, gpu_target, record_step
from lowmem.settings import Settings
from lowmem.units import GIB

SEQ, BATCHES = 1024, (1, 2, 4, 8, 16, 32, 64)
RAM_LIMITS = {"gpt2-large": None, "gpt2-xl": 16 * GIB}
RESULTS = Path(__file__).parent / "results"
NAME = "predicted.jsonl"
KEY = ("card", "model", "batch")  # a row replaces an older one of the same
PROGRAM = "experiments.gpu_acceptance.predicted"


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument(
        "--gpus", nargs="+", metavar="CARD", default=["rtx3060", "rtx3090", "h200"], help="(%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), help="folder of predicted.jsonl")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: predict(options.gpus, options.out / NAME))


def predict(cards: list[str], path: Path) -> int:
    known = [card_named(name) for name in cards]
    check_rows(path, "--out")
    for card in known:
        for row in rows_of(card, ["--gpus", card.name]):
            others = [old for old in row_file.read(path) if any(old[name] != row[name] for name in KEY)]
            row_file.write(path, [*others, row])
    return 0


def rows_of(card: Card, arguments: list[str]):
    precision = precision_of(card)
    for model in RAM_LIMITS:
        config = load_config(model, "random")
        decoder = partial(make_decoder, config, precision, "fp32", gpu_target(card).fused_kernels)
        fastest = max((alone_per_second(decoder, size, precision, card), size) for size in (1, 2, 4, 8))
        plain = max(plain_per_second(config, size, card) for size in (8, 32)) if precision == "bf16" else None
        for batch in BATCHES:
            plan = planned(model, card, batch)
            said = plan.to_dict()
            row = {
                "kind": "predicted", "card": card.name, "model": model, "seq": SEQ, "batch": batch,
                "caps": said["limits"], "choice": said["choice"], **said["predicted"],
                "sequences_per_second": batch / plan.step_seconds,
                "alone_sequences_per_second": fastest[0], "alone_micro_batch": fastest[1],
                "plain_sequences_per_second": plain,
            }  # fmt: skip
            share = row["sequences_per_second"] / fastest[0]
            print(
                f"{card.name} {model} {batch:>3} x {SEQ}: {plan.step_seconds:.2f} s, {share:.3f} of it alone",
                flush=True,
            )
            yield row | {"sources": sources()} | row_file.made_by(PROGRAM, arguments)


def sources() -> str:
    return row_file.plan_sources("experiments/gpu_acceptance/*.py")


def precision_of(card: Card) -> str:
    return "bf16" if "bf16" in card.rates else "fp16"


def planned(model: str, card: Card, batch: int) -> Plan:
    settings = Settings(
        model=model, init="random", seq=SEQ, batch=batch, gpu=card.name, gpu_limit_bytes=11 * GIB,
        ram_limit_bytes=RAM_LIMITS[model], plan_only=True,
    )  # fmt: skip
    return make_plan(Question(settings, load_config(model, "random"), precision_of(card), card))


def alone_per_second(decoder, micro_batch: int, precision: str, card: Card) -> float:
    """Returns sequences per second of forward and backward with all activations kept."""

    def seconds(micro_batches: int) -> float:
        case = StepCase(
            SEQ, micro_batches * micro_batch, Layout(micro_batch, kept=99, states_on_gpu=10**6),
            WORKING_DTYPES[precision], OPTIMIZERS["adamw"],
        )  # fmt: skip
        return record_step(decoder(), case, gpu_target(card), {}).seconds

    # The cost of two more micro-batches leaves fixed costs out.
    return 2 * micro_batch / (seconds(4) - seconds(2))


def plain_per_second(config: PretrainedConfig, batch: int, card: Card) -> float:
    """Returns sequences per second of the stock model's second forward and backward."""
    target, model = gpu_target(card), build_model(config).to(META)
    recorder = Recorder(target.device_model)
    tokens = torch.zeros((batch, SEQ), dtype=torch.int64, device=META)
    ends = [0.0]
    with recorder, target.device_model.functions():
        for _ in range(2):
            with autocast_simulated(), torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            model.zero_grad()
            ends.append(max(recorder.clock.host, recorder.clock.gpu))
    return batch / (ends[2] - ends[1])


if __name__ == "__main__":
    sys.exit(main())
