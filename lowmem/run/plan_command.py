"""`python -m lowmem.plan`: what training a model would take, on a machine without a GPU and without its weights."""

import argparse
import importlib
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from lowmem.cudasim.gpus import CARDS, Card
from lowmem.errors import InputError, LowmemError
from lowmem.run.early import check_target, packages_needed
from lowmem.run.environment import variables_blamed, warnings_end_nothing
from lowmem.run.signals import interrupt_ends_at_once
from lowmem.run.terminal import escape_what_stdout_lacks, say
from lowmem.settings import Settings
from lowmem.units import parse_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PRECISIONS = get_args(get_type_hints(Settings)["precision"])


def _answer(options: argparse.Namespace, settings: Settings) -> int:
    """Prints the plan, or with --gpus advice; returns the exit code. Imports what takes seconds to import."""
    with variables_blamed():
        from transformers import logging

        from lowmem.device import set_environment
        from lowmem.models.build import fitted, load_config
        from lowmem.planning.known_plans import Question
        from lowmem.planning.planner import make_plan
        from lowmem.planning.target import planning_target

    logging.set_verbosity_error()
    set_environment()
    device, precision, card = planning_target(settings)
    config = load_config(settings.model, settings.init)
    settings = fitted(settings, config)
    if options.gpus is not None:
        return _advise(options, settings, config, card)
    plan = Question(settings, config, device, precision, card).answer(make_plan)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan.describe())
    return 0


def _advise(options: argparse.Namespace, settings: Settings, config: "PretrainedConfig", card: Card) -> int:
    """--gpus: advice on PyTorch's own ways to use several cards, which only the repository contains."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    try:
        advice = importlib.import_module("experiments.memory_estimation.several_gpus.methods")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("experiments"):
            raise
        raise InputError("--gpus needs the project's repository: run python -m lowmem.plan in its folder") from None
    return advice.answer(settings, config, card, options.gpus, options.json)


def main(arguments: list[str] | None = None) -> int:
    """Plans any Hugging Face decoder, T5 or mT5, without a GPU and without weights."""
    escape_what_stdout_lacks()
    options = _parser().parse_args(arguments)
    try:
        of_card = "none" if options.gpu else "11GiB"
        settings = Settings(
            model=options.model, init="random", seq=options.seq, batch=options.batch, gpu=options.gpu, plan_only=True,
            precision=options.precision, target_tokens=options.target_tokens, states_folder=options.states_folder,
            gpu_limit_bytes=_size("--gpu-limit", of_card if options.gpu_limit is None else options.gpu_limit),
            ram_limit_bytes=_size("--ram-limit", options.ram_limit),
        )  # fmt: skip
        with warnings_end_nothing(), interrupt_ends_at_once(), packages_needed():
            return _answer(options, check_target(settings, say))
    except LowmemError as error:
        say(f"lowmem.plan: {error}")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    cards = textwrap.fill(
        ", ".join(sorted(CARDS)), 76, break_on_hyphens=False, initial_indent="  ", subsequent_indent="  "
    )
    parser = argparse.ArgumentParser(
        prog="python -m lowmem.plan", description=main.__doc__, epilog=f"cards of --gpu:\n{cards}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|DIR|FILE", help="hub name, folder or config.json")
    add("--seq", type=int, metavar="N", default=Settings.seq, help="tokens per sequence (%(default)s)")
    add("--target-tokens", type=int, metavar="N", help="of an encoder-decoder's those of the target (a quarter)")
    add("--batch", type=int, metavar="N", default=Settings.batch, help="sequences per optimizer step (%(default)s)")
    add("--gpu-limit", metavar="SIZE", help="cap of GPU memory, or none (11GiB; with --gpu: what the card has)")
    add("--ram-limit", metavar="SIZE", default="none", help="cap of RAM (%(default)s)")
    add("--states-folder", metavar="DIR", help="a folder on a disk for states that RAM has no room for")
    add("--gpu", metavar="CARD", help="plan for this card, one of those below")
    add("--precision", default="auto", choices=_PRECISIONS, help="what computes (auto: bf16 where the card has it)")
    add("--gpus", type=int, metavar="N", help="for decoders, advice for N of these cards: which method, which batch")
    add("--json", action="store_true", help="print plan.json's content alone")
    return parser


def _size(option: str, text: str) -> int | None:
    try:
        return None if text.lower() == "none" else parse_size(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
