"""Tries every mutation of mutation_list.py in a private copy, to see if the tests find it.

    python -m tests.mutations --out tests/mutations/results.jsonl        all of them, a quarter of an hour on one core
    python -m tests.mutations --only "dropout"

Tests that found a mutation are run once more in a copy without one, where they must pass. Ends with exit code 1 if a
mutation is not found, if such a test fails without it too, or if a text to change is not there exactly once.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments.harness import rows as row_file
from tests.mutations.mutation_list import MUTATIONS, Mutation

SECONDS = 1800  # after which the tests of one mutation count as hung
ALL_PASSED, SOME_FAILED = 0, 1  # pytest's exit codes
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(\S+?\.py(?:::\S+?(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE)


class CannotTry(Exception):
    """pytest came to no verdict."""


@contextmanager
def private_copy(mutation: Mutation | None) -> Iterator[Path]:
    """Yields a folder with every file of the working tree that git does not ignore, changed as `mutation` says. Raises
    ValueError if its text is not there exactly once."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=row_file.ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in filter(None, listed.split("\0")):
            if (row_file.ROOT / path).is_file():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(row_file.ROOT / path, folder / path)
        if mutation is not None:
            mutation.apply(folder / mutation.package)
        yield folder


def failing(folder: Path, tests: Sequence[str]) -> str | None:
    """Returns the first of `tests` that fails in the copy `folder`, by pytest's name for it; None if all pass."""
    command = [sys.executable, *"-m pytest -x -q --tb=no -rfE -p no:cacheprovider -p no:xdist".split()]
    try:
        result = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)], cwd=folder, capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{tests[0]} (hung)"
    if result.returncode == ALL_PASSED:
        return None
    found = FAILED.search(result.stdout)
    if found is None:
        said = (result.stdout + result.stderr).strip().splitlines()[-1:]
        raise CannotTry(f"pytest ended with exit code {result.returncode} and named no test: {' '.join(said)}")
    return found[1]


def tried(mutation: Mutation) -> dict:
    """Tries a mutation, and returns its row."""
    started = time.monotonic()
    with private_copy(mutation) as folder:
        caught_by = failing(folder, mutation.tests)
    return {
        "file": mutation.file, "mutation": mutation.name, "old": mutation.old, "new": mutation.new,
        "tests": mutation.tests, "caught_by": caught_by, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main(arguments: list[str] | None = None, mutations: Sequence[Mutation] = MUTATIONS) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the rows to FILE")
    parser.add_argument("--only", default="", metavar="TEXT", help="the mutations whose name has TEXT in it")
    options = parser.parse_args(arguments)
    common = row_file.made_by("tests.mutations", ["--only", options.only] if options.only else [])
    chosen = [mutation for mutation in mutations if options.only in mutation.name]
    bad, caught_by = 0, []
    for mutation in chosen:
        try:
            row = common | tried(mutation)
        except (ValueError, CannotTry) as error:
            bad += 1
            print(f"NOT TRIED  {mutation.name}: {error}", flush=True)
            continue
        verdict = "LIVES    " if row["caught_by"] is None else "found    "
        print(f"{verdict}  {mutation.name}: {row['caught_by']}", flush=True)
        bad += row["caught_by"] is None
        caught_by += [row["caught_by"]] if row["caught_by"] else []
        if options.out is not None:
            row_file.append(options.out, row)
    if caught_by:
        with private_copy(None) as folder:
            fails = failing(folder, list(dict.fromkeys(caught_by)))
        if fails is not None:
            bad += 1
            print(f"WORTHLESS  {fails} fails without a mutation, too")
    print(f"{len(chosen)} mutations, {bad} not as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
