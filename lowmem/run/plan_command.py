"""`python -m lowmem.plan`: what training a model would take, on a machine without a GPU and without its weights."""

import argparse
import json
import sys

from transformers import PretrainedConfig, logging

from lowmem.core.precision import WORKING_DTYPES
from lowmem.device import set_environment
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.limits import CONTEXT_BYTES
from lowmem.models.build import check_length, load_config
from lowmem.models.compatibility import architecture_blamed
from lowmem.planning.known_plans import Question
from lowmem.planning.planner import make_plan
from lowmem.planning.target import planning_target
from lowmem.settings import Settings
from lowmem.simulate.gpus import CARDS, Card
from lowmem.simulate.step import gpu_target
from lowmem.units import parse_size


def _advice(options: argparse.Namespace, settings: Settings, config: PretrainedConfig, card: Card) -> int:
    """What --gpus prints: peaks per rank and advice for PyTorch's own ways to use several cards."""
    from lowmem.distributed.methods import advise, describe, to_dict  # torch.distributed costs a second

    limit = settings.gpu_limit_bytes
    memory = card.memory_bytes if limit is None else min(limit + CONTEXT_BYTES, card.memory_bytes)
    with architecture_blamed(settings.model, "16 bit"):
        rows, sentence = advise(config, options.gpus, memory, settings.seq, settings.batch, gpu_target(card))
    if options.json:
        print(json.dumps(to_dict(rows, sentence), indent=2))
    else:
        print(describe(rows, sentence))
    if any(row.peak is not None for row in rows):
        return 0
    print(f"lowmem.plan: {sentence}", file=sys.stderr)
    return PlanError.exit_code


def main(arguments: list[str] | None = None) -> int:
    """`python -m lowmem.plan`: the plan of any Hugging Face decoder, without a GPU and without weights."""
    parser = argparse.ArgumentParser(prog="python -m lowmem.plan", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="hub name, folder or config.json")
    parser.add_argument("--seq", type=int, default=Settings.seq, help="tokens per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="sequences per optimizer step (%(default)s)")
    parser.add_argument("--gpu-limit", help="cap of GPU memory, or none (11GiB; with --gpu: what the card has)")
    parser.add_argument("--ram-limit", default="none", help="cap of RAM (%(default)s)")
    parser.add_argument("--gpu", metavar="CARD", help=f"plan for this card: {', '.join(CARDS)}")
    parser.add_argument("--precision", default="auto", choices=("auto", *WORKING_DTYPES), help="(%(default)s)")
    parser.add_argument("--gpus", type=int, metavar="N", help="advice for N of these cards: which method, which batch")
    parser.add_argument("--json", action="store_true", help="print plan.json's content alone")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    try:
        set_environment()
        of_card = "none" if options.gpu else "11GiB"
        settings = Settings(
            model=options.model, init="random", seq=options.seq, batch=options.batch, gpu=options.gpu, plan_only=True,
            precision=options.precision,
            gpu_limit_bytes=_size("--gpu-limit", of_card if options.gpu_limit is None else options.gpu_limit),
            ram_limit_bytes=_size("--ram-limit", options.ram_limit),
        )  # fmt: skip
        device, precision, card = planning_target(settings)
        config = load_config(options.model, "random")
        check_length(config, settings.seq)
        if options.gpus is not None:
            return _advice(options, settings, config, card)
        plan = Question(settings, config, device, precision, card).answer(make_plan)
    except LowmemError as error:
        print(f"lowmem.plan: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan.describe())
    return 0


def _size(option: str, text: str) -> int | None:
    try:
        return None if text.lower() == "none" else parse_size(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
