"""Prints one line of JSON per arrangement: the races that the checker finds, and differences from the plain run.

    python -m tests.stream_order.check [ARRANGEMENT ...]
    TORCH_CUDA_SANITIZER=1 python -m tests.stream_order.check --device cuda
    .venv-cuda/bin/python -m stand_in --values -- -m tests.stream_order.check --orders

On "cuda" (a GPU or the stand-in) streams are real; `--races-only` is for the stand-in without values. Ends with exit
code 1 if there is a race, a difference or an error.
"""

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tests.stream_order.arrangements import (
    ARRANGEMENTS,
    Arrangement,
    computed_by_plain_kernels,
    differences,
    plain,
    recorded,
    run,
)
from tests.stream_order.checker import races

if TYPE_CHECKING:
    from torch.cuda._sanitizer import Access

WAYS = {"reading waits": True, "reading does not wait": False}  # of counting .item()
SANITIZER = "sanitizer"  # PyTorch's
ORDERS = ("late", "lowest", "highest", "random:1")  # of the stand-in's streams (stand_in/card/streams.c)
IN_ORDERS = "orders"


def checked(arrangement: Arrangement) -> dict:
    """Returns `races`: {way of counting: [number of different ones, the first]}, and `different`: names of values that
    are not bitwise as in the plain run."""
    outcomes, trace = recorded(arrangement)
    found = {way: list(races(trace, reading_waits)) for way, reading_waits in WAYS.items()}
    return {
        "operations": len(trace.operations),
        "races": {way: [len(reports), reports[0]] for way, reports in found.items() if reports},
        "different": differences(plain(arrangement), outcomes),
    }


def sanitized(arrangement: Arrangement, device: torch.device, races_only: bool) -> dict:
    """Returns the same of a run on `device`; `races` are those that PyTorch's sanitizer raised, if it is switched
    on."""
    # Imported here alone: from then on, PyTorch calls Python at every allocation and event of this process. Such a call
    # fails while an exception is raised, as after the allocator has refused memory.
    from torch.cuda._sanitizer import CUDASanitizerErrors

    try:
        outcomes = run(arrangement, device)
    except CUDASanitizerErrors as raised:
        first = raised.errors[0]
        report = f"unordered: {_said(first.previous_access)} and {_said(first.current_access)}"
        return {"races": {SANITIZER: [len(raised.errors), report]}}
    return {"races": {}, "different": [] if races_only else differences(plain(arrangement, device), outcomes)}


def ordered(arrangement: Arrangement, orders: Sequence[str] = ORDERS) -> dict:
    """Runs on the stand-in in each of `orders`. The first with other bits is reported as a race."""
    from stand_in.card_library import order

    expected = plain(arrangement)
    for name in orders:
        with computed_by_plain_kernels(), order(name):
            different = differences(expected, run(arrangement, torch.device("cuda", 0)))
        if different:
            return {
                "races": {IN_ORDERS: [len(different), f"other bits in the order {name}: {', '.join(different[:3])}"]}
            }
    return {"races": {}, "different": []}


def _said(access: "Access") -> str:
    return f"{access.type.name.lower()} by {str(access.operator).partition('(')[0]} on stream {access.stream:#x}"


def line(name: str, device: str, races_only: bool) -> dict:
    """Returns the findings for one arrangement. `device`: "cpu", "cuda" or IN_ORDERS. `error`: None if the run was
    complete."""
    started, arrangement = time.monotonic(), ARRANGEMENTS[name]
    try:
        if device == IN_ORDERS:
            found = ordered(arrangement)
        elif device == "cuda":
            found = sanitized(arrangement, torch.device("cuda", 0), races_only)
        else:
            found = checked(arrangement)
        error = None
    except Exception as raised:  # a broken copy of the package may end in any
        found, error = {}, f"{type(raised).__name__}: {raised}"
    return {"arrangement": name, **found, "error": error, "seconds": round(time.monotonic() - started, 1)}


def is_clean(line: dict) -> bool:
    return not (line["error"] or line.get("different") or line.get("races"))


def lines(names: Iterable[str], device: str, *, races_only: bool = False, until_found: bool = False) -> Iterator[dict]:
    """Yields the findings for each arrangement. `until_found`: stops when each way of counting has seen a race."""
    ways = {"cpu": set(WAYS), "cuda": {SANITIZER}, IN_ORDERS: {IN_ORDERS}}[device]
    for name in names:
        found = line(name, device, races_only)
        yield found
        ways -= found.get("races", {}).keys()
        if until_found and not ways:
            return


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.stream_order.check", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ARRANGEMENT", help="all of them if none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--orders", action="store_true", help="on the stand-in, in several orders of streams")
    parser.add_argument("--until-found", action="store_true", help="stop where one is found in every way of looking")
    parser.add_argument("--races-only", action="store_true", help="do not compare with the plain run")
    options = parser.parse_args()
    if unknown := set(options.names) - ARRANGEMENTS.keys():
        parser.error(f"no arrangement {sorted(unknown)}; there are {list(ARRANGEMENTS)}")
    torch.set_num_threads(1)
    clean = True
    device = IN_ORDERS if options.orders else options.device
    chosen = {"races_only": options.races_only, "until_found": options.until_found}
    for found in lines(options.names or ARRANGEMENTS, device, **chosen):
        print(json.dumps(found), flush=True)
        clean = clean and is_clean(found)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
