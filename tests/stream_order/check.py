"""One line of JSON per arrangement: the races that the checker finds, and what differs from the plain run.

    python -m tests.stream_order.check [ARRANGEMENT ...]
    TORCH_CUDA_SANITIZER=1 python -m tests.stream_order.check --device cuda

On "cuda" (a GPU, or a stand-in for one) streams are real, and PyTorch's own checker looks at them where it is switched
on; `--races-only` is for a stand-in whose kernels compute nothing. Ends with exit code 1 where there is a race, a
difference or an error.
"""

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator

import torch
from torch.cuda._sanitizer import Access, CUDASanitizerErrors

from tests.stream_order.arrangements import ARRANGEMENTS, Arrangement, differences, plain, recorded, run
from tests.stream_order.checker import races

WAYS = {"reading waits": True, "reading does not wait": False}  # of counting .item()
SANITIZER = "sanitizer"  # PyTorch's


def checked(arrangement: Arrangement) -> dict:
    """`races`: {way of counting: [number of different ones, the first]}; `different`: names of what is not bitwise as
    in the plain run."""
    outcomes, trace = recorded(arrangement)
    found = {way: list(races(trace, reading_waits)) for way, reading_waits in WAYS.items()}
    return {
        "operations": len(trace.operations),
        "races": {way: [len(reports), reports[0]] for way, reports in found.items() if reports},
        "different": differences(plain(arrangement), outcomes),
    }


def sanitized(arrangement: Arrangement, device: torch.device, races_only: bool) -> dict:
    """The same of a run on `device`; `races` are what PyTorch's sanitizer raised, where it is switched on."""
    try:
        outcomes = run(arrangement, device)
    except CUDASanitizerErrors as raised:
        first = raised.errors[0]
        report = f"unordered: {_said(first.previous_access)} and {_said(first.current_access)}"
        return {"races": {SANITIZER: [len(raised.errors), report]}}
    return {"races": {}, "different": [] if races_only else differences(plain(arrangement, device), outcomes)}


def _said(access: Access) -> str:
    return f"{access.type.name.lower()} by {str(access.operator).partition('(')[0]} on stream {access.stream:#x}"


def line(name: str, device: str, races_only: bool) -> dict:
    """What is found in one arrangement; `error`: what it ended with, where it did not reach its end."""
    started, arrangement = time.monotonic(), ARRANGEMENTS[name]
    try:
        on_gpu = device == "cuda"
        found = sanitized(arrangement, torch.device("cuda", 0), races_only) if on_gpu else checked(arrangement)
        error = None
    except Exception as raised:  # a broken copy of the package may end in any
        found, error = {}, f"{type(raised).__name__}: {raised}"
    return {"arrangement": name, **found, "error": error, "seconds": round(time.monotonic() - started, 1)}


def is_clean(line: dict) -> bool:
    return not (line["error"] or line.get("different") or line.get("races"))


def lines(names: Iterable[str], device: str, *, races_only: bool = False, until_found: bool = False) -> Iterator[dict]:
    """Of one arrangement after the other, or, `until_found`, of as many as it takes to see a race each way of
    counting."""
    ways = {SANITIZER} if device == "cuda" else set(WAYS)
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
    parser.add_argument("--races-only", action="store_true", help="do not compare with the plain run")
    options = parser.parse_args()
    if unknown := set(options.names) - ARRANGEMENTS.keys():
        parser.error(f"no arrangement {sorted(unknown)}; there are {list(ARRANGEMENTS)}")
    torch.set_num_threads(1)
    clean = True
    for found in lines(options.names or ARRANGEMENTS, options.device, races_only=options.races_only):
        print(json.dumps(found), flush=True)
        clean = clean and is_clean(found)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
