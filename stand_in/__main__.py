"""Runs a command on the stand-in: PyTorch's CUDA build, on libraries that model a GPU.

    .venv-cuda/bin/python -m stand_in [--gpu CARD] [--order ORDER] [--values] ... -- COMMAND [ARGUMENT ...]

COMMAND is a script, or -m and a module. It runs with this interpreter and sets the exit code.
"""

import argparse
import os
import sys

from lowmem.cudasim.gpus import CARDS
from lowmem.errors import InputError
from lowmem.units import format_size, parse_size
from stand_in import build, settings

ADVERSARIAL = "late"  # the order in which missing waits are found first (tests/stream_order/results)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command in place of this process. Returns an exit code only if the stand-in cannot be built."""
    options, command = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        libraries = build.build()
    except build.BuildError as error:
        print(f"stand_in: {error}", file=sys.stderr)
        return 2
    sanitize = options.order == "sanitize"
    order = {"sanitize": "issue", "adversarial": ADVERSARIAL}.get(options.order, options.order)
    environment = settings.environment(
        options.gpu, libraries=libraries, architectures=build.architectures(libraries), memory_bytes=options.memory,
        page_locked_bytes=options.page_locked, devices=options.devices, host_resident=options.ram,
        values=options.values or order != "issue", order=order, sanitize=sanitize,
    )  # fmt: skip
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], environment)  # the command takes this process's place


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m stand_in", allow_abbrev=False, usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description="Run a command on a GPU that is not there: PyTorch's CUDA build on libraries that keep its books.",
    )  # fmt: skip
    parser.add_argument("--gpu", choices=sorted(CARDS), default="rtx3060", help="the card (%(default)s)")
    parser.add_argument("--memory", type=_size, help="its memory, where that is not the table's: 8GiB")
    parser.add_argument("--devices", type=int, default=1, help="how many of them (%(default)s)")
    parser.add_argument(
        "--page-locked", type=_size_or_none, default=settings.UNLIMITED, metavar="SIZE",
        help="host memory that may be page-locked, or 0; more is refused (no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--ram", action="store_true", help="let host memory take RAM where CUDA makes it do so: what is page-locked, "
        "and what is copied to (16 GiB for GPT-2-XL); without this a large run takes little"
    )  # fmt: skip
    parser.add_argument(
        "--values", action="store_true", help="compute the operators of a training step, by the CPU; for small models "
        "(every order but issue and sanitize does)"
    )  # fmt: skip
    parser.add_argument(
        "--order", type=_order, default="issue",
        help="in which work of several streams is run: issue (as the host asks for it), late, lowest, highest, "
        "random:N, adversarial (one of these), or sanitize: as issue, with PyTorch's own checker of streams",
    )  # fmt: skip
    if "--" not in arguments:
        if {"-h", "--help"} & set(arguments):
            parser.parse_args(arguments)
        parser.error("give the command after --, as in: python -m stand_in --gpu rtx3060 -- train_gpt2_large.py --demo")
    end = arguments.index("--")
    options, command = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if not command:
        parser.error("there is no command after --")
    if options.memory is not None and options.memory <= settings.CONTEXT_BYTES:
        parser.error(f"--memory: CUDA's context alone takes {format_size(settings.CONTEXT_BYTES)}")
    if not 1 <= options.devices <= 8:
        parser.error(f"--devices {options.devices}: give 1 to 8")
    return options, command


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except (InputError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size_or_none(text: str) -> int:
    return 0 if text == "0" else _size(text)


def _order(text: str) -> str:
    name, colon, seed = text.partition(":")
    plain = text in ("issue", "late", "lowest", "highest", "adversarial", "sanitize")
    if plain or (name == "random" and colon and seed.isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"{text}: give {', '.join(settings.ORDERS)}, adversarial or sanitize")


if __name__ == "__main__":
    sys.exit(main())
