"""What the recipes of this folder share: a call into the main scripts, and --blocks."""

import argparse
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

from experiments.bigger_models.shapes import SHAPES
from experiments.harness.options import positive
from lowmem.errors import InputError, LowmemError
from lowmem.run.cli import parse_arguments
from lowmem.run.main import main as train
from lowmem.settings import Settings
from lowmem.terminal import escape_what_stdout_lacks, say

# Of a slice, whose weights are random: Adam's first updates move every weight by the whole rate, which at GPT-J's
# widths raises the loss (README.md).
SLICE_WARMUP = 0.5  # of all steps


def main(name: str, defaults: Settings, arguments: list[str] | None = None) -> int:
    """Runs the main scripts' program over a recipe's `defaults`, and returns the exit code. `arguments` None: the
    command line's. With `--blocks N` the model is a slice of the shape `name`, from random weights, with a longer
    warm-up."""
    own, words = _parser(name).parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        escape_what_stdout_lacks()
        print(_help(name, defaults), end="")
        sys.exit(0)
    if own.blocks is None:
        return train(defaults, words)
    sliced = replace(defaults, init="random", warmup_steps=SLICE_WARMUP, out=f"{defaults.out}-{own.blocks}-blocks")
    try:
        with _slice(name, own.blocks, sliced, words) as settings:
            return train(settings, words)
    except LowmemError as error:
        say(f"{Path(sys.argv[0]).name}: {error}")
        return error.exit_code


@contextmanager
def _slice(name: str, blocks: int, defaults: Settings, words: list[str]) -> Iterator[Settings]:
    """Yields `defaults` with the slice as their model. Raises InputError if `words` are wrong or name another model, or
    if config.json cannot be written."""
    settings = parse_arguments(words, defaults)
    folder = Path(f"{settings.out}-config")
    if settings.model not in (defaults.model, str(folder)):
        raise InputError(f"--blocks is for a slice of {name}, and --model {settings.model} names another model")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        SHAPES[name].write(folder, blocks)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}; give another --out") from None
    try:
        yield replace(defaults, model=str(folder))
    finally:
        # Without a plan there is no run that needs the config.json.
        if made and not Path(settings.out, "plan.json").exists():
            (folder / "config.json").unlink(missing_ok=True)  # another of torchrun's processes may have removed it
            with suppress(OSError):
                for path in made:
                    path.rmdir()


def _help(name: str, defaults: Settings) -> str:
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        parse_arguments(["--help"], defaults)
    usage = f"usage: python -m experiments.bigger_models.{Path(sys.argv[0]).stem} [--blocks N] [options]"
    _, _, rest = said.getvalue().partition("\n\n")  # theirs is how a script is run
    return f"{usage}\n\n{rest}\n{_parser(name).format_help()}"


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("slices")
    group.add_argument(
        "--blocks", type=positive, metavar="N",
        help=f"train so many blocks of the widths of {name}, from random weights, instead of the model",
    )  # fmt: skip
    return parser
