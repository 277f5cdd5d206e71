"""`python -m lowmem.plan`: what training a model would take, on a machine without a GPU and without its weights.

This file settles what is planned for (device, precision, card) and prints the answer. planner.py makes the plan,
prediction.py says what it says, and advice.py answers for several GPUs (`--gpus`).
"""

import argparse
import json
import sys
from dataclasses import replace
from difflib import get_close_matches

import torch
from transformers import PretrainedConfig, logging

from lowmem.budget import CONTEXT_BYTES, Budget
from lowmem.cards import CARDS, Card, card_named, card_of_name_reported
from lowmem.device import expandable_segments, select_device, set_environment
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.models import check_tokens, load_config
from lowmem.planner import make_plan
from lowmem.precision import WORKING_DTYPES, resolve_precision
from lowmem.settings import Settings
from lowmem.simulate import gpu_target
from lowmem.trial import architecture_blamed
from lowmem.units import parse_size


def planned(settings: Settings) -> tuple[str, str, Card | None]:
    """Device ("cuda" or "cpu"), precision and, for CUDA, card that a plan is for: what is here to train on, or, with
    plan_only, a GPU whether or not there is one, unless the CPU was asked for. InputError for a card that is not in the
    table, for one that a run without a GPU is to train on, for bf16 on a card that has none, and for a cap that is more
    than the card has, where that card is here."""
    for_this_card = settings.gpu is None or not settings.plan_only
    if for_this_card and settings.device != "cpu" and torch.cuda.is_available():
        Budget(torch.device("cuda"), settings.gpu_limit_bytes, None).check_card()  # before anything slow
    if not settings.plan_only:
        device = select_device(settings.device)
        if device.type == "cpu" and settings.gpu is not None:
            raise InputError(
                f"--gpu {settings.gpu}: there is no GPU here to train on; add --plan-only to plan for that card, or "
                "leave --gpu out to train on the CPU"
            )
        card = card_for(settings) if device.type == "cuda" else None
        return _possible(device.type, resolve_precision(settings.precision, device), card)
    if settings.device == "cpu":
        return "cpu", resolve_precision(settings.precision, torch.device("cpu")), None
    card = card_for(settings)
    automatic = "bf16" if "bf16" in card.rates else "fp16"
    return _possible("cuda", automatic if settings.precision == "auto" else settings.precision, card)


def _possible(device: str, precision: str, card: Card | None) -> tuple[str, str, Card | None]:
    if card is not None and precision == "bf16" and "bf16" not in card.rates:
        raise InputError(f"--precision bf16: {card.name} has no bf16; --precision auto takes fp16 there")
    if card is not None:
        expandable_segments()  # refuses settings of the allocator that no plan can be made for
    return device, precision, card


def card_for(settings: Settings) -> Card:
    """The card that is planned for: the one asked for, the one that is here, or the smallest in the table that has
    bf16 and as much memory as the cap."""
    if settings.gpu is not None:
        try:
            return card_named(settings.gpu)
        except InputError as error:
            near = get_close_matches(settings.gpu.lower().replace(" ", ""), CARDS, n=1)
            raise InputError(f"{error}; did you mean {near[0]}?" if near else str(error)) from None
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return card_of_name_reported(name) or _nearest(capability, torch.cuda.get_device_properties(0))
    wanted = (settings.gpu_limit_bytes or 0) + CONTEXT_BYTES
    enough = [card for card in CARDS.values() if "bf16" in card.rates and card.memory_bytes >= wanted]
    return min(enough or CARDS.values(), key=lambda card: card.memory_bytes * (1 if enough else -1))


def _nearest(capability: tuple[int, int], properties) -> Card:
    """A card that is not in the table, taken for the one that is most like it. It is not timed: what is
    chosen must not depend on a stopwatch (planner.py)."""
    alike = min(
        CARDS.values(),
        key=lambda card: (
            abs(10 * (card.capability[0] - capability[0]) + card.capability[1] - capability[1]),
            abs(card.multiprocessors - properties.multi_processor_count),
        ),
    )
    return replace(
        alike, name=f"{properties.name} (taken for {alike.name})", capability=capability,
        multiprocessors=properties.multi_processor_count, memory_bytes=properties.total_memory,
    )  # fmt: skip


def _advice(options: argparse.Namespace, settings: Settings, config: PretrainedConfig, card: Card) -> int:
    """What --gpus prints: peaks per rank and advice for PyTorch's own ways to use several cards."""
    from lowmem.advice import advise, describe, to_dict  # torch.distributed costs a second

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
    parser.add_argument("--seq", type=int, default=1024, help="tokens per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences per optimizer step (%(default)s)")
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
        device, precision, card = planned(settings)
        config = load_config(options.model, "random")
        check_tokens(config, settings.seq, largest_token_id=0)
        if options.gpus is not None:
            return _advice(options, settings, config, card)
        plan = make_plan(settings, config, device, precision, card)
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


if __name__ == "__main__":
    sys.exit(main())
