"""Tries every mutation of mutation_list.py in a copy of the package, to see if the checker finds it.

    python -m tests.stream_order.mutations --jobs 2 --out tests/stream_order/results/mutations.jsonl
    python -m tests.stream_order.mutations --only "not held after updates" deferred
    python -m tests.stream_order.mutations --method sanitizer            on a GPU or the stand-in: PyTorch's own checker
    .venv-cuda/bin/python -m stand_in --values -- -m tests.stream_order.mutations --method orders

Ends with exit code 1 if an equivalent mutation was found or another one was not.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

from experiments.harness import rows as row_file
from tests.stream_order.mutation_list import MUTATIONS, Mutation

SECONDS = 900  # after which one mutation counts as hung
METHODS = {  # and check.py's options for it
    "checker": [],
    "sanitizer": ["--device", "cuda", "--races-only"],
    "orders": ["--orders"],
}


@contextmanager
def broken_copy(mutation: Mutation) -> Iterator[Path]:
    """Yields a folder like the repository, with `mutation` in its lowmem/."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(row_file.ROOT / "lowmem", folder / "lowmem", ignore=shutil.ignore_patterns("__pycache__"))
        for other in ("experiments", "stand_in", "tests"):
            (folder / other).symlink_to(row_file.ROOT / other)
        mutation.apply(folder / "lowmem")
        yield folder


def tried(mutations: Iterable[Mutation], arrangements: Sequence[str], method: str, jobs: int = 1) -> Iterator[dict]:
    """Runs check.py on each copy, over `arrangements` or all, in `jobs` processes at once. `found`: {way of counting
    .item(): first race}; `wrong`: first arrangement with other bits; `failed`: first incomplete one, and its error.
    Raises subprocess.TimeoutExpired if one hangs."""
    with ThreadPool(jobs) as threads:
        yield from threads.imap(lambda mutation: _tried(mutation, arrangements, method), mutations)


def _tried(mutation: Mutation, arrangements: Sequence[str], method: str) -> dict:
    started = time.monotonic()
    with broken_copy(mutation) as folder:
        # A new process, which imports the copy of lowmem before anything else can import another.
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "tests.stream_order.check", *METHODS[method], "--until-found", *arrangements]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    lines = [json.loads(text) for text in result.stdout.splitlines()]
    if result.returncode not in (0, 1) or not lines:
        error = f"ended with exit code {result.returncode}: {result.stderr[-300:]}"
        lines.append({"arrangement": "the one after these", "error": error})
    return _row(mutation, method, lines, started)


def _row(mutation: Mutation, method: str, lines: Sequence[dict], started: float) -> dict:
    found: dict[str, dict] = {}
    for line in lines:
        for way, (number, report) in line.get("races", {}).items():
            found.setdefault(way, {"arrangement": line["arrangement"], "races": number, "report": report})
    return {
        "method": method, "file": mutation.file, "mutation": mutation.name, "old": mutation.old, "new": mutation.new,
        "equivalent": mutation.equivalent, "found": found,
        "wrong": next((line["arrangement"] for line in lines if line.get("different")), None),
        "failed": next(([line["arrangement"], line["error"]] for line in lines if line["error"]), None),
        "arrangements": len(lines), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def is_found(row: dict) -> bool:
    """Returns whether a race, other bits, or an error was seen."""
    return bool(row["found"] or row["wrong"] or row["failed"])


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.stream_order.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("arrangements", nargs="*", metavar="ARRANGEMENT", help="all of them if none is named")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the rows to FILE")
    parser.add_argument("--method", choices=METHODS, default="checker")
    parser.add_argument("--only", default="", metavar="TEXT", help="the mutations whose name has TEXT in it")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.method == "sanitizer":
        os.environ["TORCH_CUDA_SANITIZER"] = "1"  # it is read where torch is imported, in the processes to come
    arguments = ["--method", options.method] if options.method != "checker" else []
    arguments += ["--only", options.only] if options.only else []
    common = {
        "sources": row_file.digest("lowmem/**/*.py", "tests/stream_order/*.py"),
        **row_file.made_by("tests.stream_order.mutations", [*arguments, *options.arrangements]),
    }
    mutations = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    missed = 0
    for row in tried(mutations, options.arrangements, options.method, options.jobs):
        row = common | row
        # What another method does not find is no mistake: the checker has to find it.
        as_expected = not is_found(row) if row["equivalent"] else is_found(row) or options.method != "checker"
        missed += not as_expected
        verdict = "MISSED" if not as_expected else "ok    " if is_found(row) or row["equivalent"] else "no    "
        print(f"{verdict} {row['mutation']}: {said(row)}", flush=True)
        if options.out is not None:
            row_file.append(options.out, row)
    print(f"{len(mutations)} mutations, {missed} not as expected")
    return 1 if missed else 0


def said(row: dict) -> str:
    parts = [f"{way}: {race['report']} ({race['arrangement']})" for way, race in row["found"].items()]
    parts += [f"other bits ({row['wrong']})"] if row["wrong"] else []
    parts += [f"{row['failed'][1]} ({row['failed'][0]})"] if row["failed"] else []
    return "; ".join(parts) or "nothing found"


if __name__ == "__main__":
    sys.exit(main())
