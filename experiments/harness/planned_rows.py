"""Makes a plan (prediction of memory and time) and a row of results for each of many cases, in several processes."""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import logging as transformers_logging

from experiments.harness import rows as row_file
from experiments.harness.countdown import Countdown
from experiments.harness.options import make_folder, positive, under_runs
from lowmem.errors import InputError, LowmemError


class Case(Protocol):
    """Describes a plan to be made. Cases are sent to other processes, so they must be picklable."""

    @property
    def name(self) -> str: ...

    def row(self) -> dict:
        """Returns the row's values that are known before planning."""

    def plan(self) -> dict:
        """Returns the plan's values. Raises LowmemError if there is no plan."""


@dataclass(frozen=True)
class PlannedRows:
    """Implements a command that makes a plan and a row of results for each case. `file`: rows in the repository.
    `cases`: the slowest first. `line`: formats a row for people. `jobs`: default number of processes; with 1, progress
    is printed. `code`: further source files that the rows depend on."""

    program: str
    description: str
    file: Path
    cases: Sequence[Case]
    line: Callable[[dict], str]
    jobs: int = 2
    code: Sequence[str] = ()

    def sources(self) -> str:
        own = f"{self.program.replace('.', '/')}.py"
        return row_file.plan_sources(own, "experiments/harness/planned_rows.py", *self.code)

    def committed(self) -> list[dict]:
        """Returns the newest row of each case in `file`, the rows in the repository."""
        return list({row["name"]: row for row in row_file.read(self.file)}.values())

    def expected_seconds(self, cases: Sequence[Case]) -> dict[str, float]:
        """Returns {case's name: its plan's seconds} by the rows in the repository; the median if a case has no row."""
        known = {row["name"]: row["planning_seconds"] for row in self.committed() if "planning_seconds" in row}
        usual = statistics.median(known.values()) if known else 0.0
        return {case.name: known.get(case.name, usual) for case in cases}

    def main(self, arguments: list[str] | None = None) -> int:
        """Makes plans and rows for the cases that the options choose. Leaves out cases that have a row made by the same
        source code. Returns the exit code."""
        arguments = sys.argv[1:] if arguments is None else arguments
        options = self._parser().parse_args(arguments)
        try:
            chosen = self._chosen(options)
            if options.list:
                print("\n".join(case.name for case in chosen))
                return 0
            make_folder(options.out)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        path = options.out / self.file.name
        common = row_file.made_by(self.program, arguments) | {"sources": self.sources()}
        done = {row["name"] for row in row_file.read(path) if row.get("sources") == common["sources"]}
        for case, values in self._planned([case for case in chosen if case.name not in done], options.jobs):
            row = {"name": case.name} | case.row() | values | common
            row_file.append(path, row)
            print(self.line(row), flush=True)
        return 0

    def _chosen(self, options: argparse.Namespace) -> list[Case]:
        if options.only is None:
            return list(self.cases)
        found = [case for case in self.cases if any(text in case.name for text in options.only)]
        if not found:
            raise InputError(f"--only {' '.join(options.only)}: no case has that in its name; --list names them")
        return found

    def _planned(self, cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, dict]]:
        if jobs > 1:
            # Ctrl-C ends these processes. Python's own handler would end the plan alone, and begin the next one.
            at_ctrl_c = (signal.SIGINT, signal.SIG_DFL)
            with ProcessPoolExecutor(jobs, get_context("spawn"), signal.signal, at_ctrl_c) as pool:
                futures = {pool.submit(planned, case): case for case in cases}
                yield from ((futures[future], future.result()) for future in as_completed(futures))
            return
        countdown = Countdown(self.expected_seconds(cases))
        countdown.announce()
        for case in cases:
            with countdown.case(case.name):
                values = planned(case)
            yield case, values

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.program}", description=self.description, allow_abbrev=False
        )
        parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the names of cases")
        parser.add_argument("--list", action="store_true", help="print the names of the cases, and plan nothing")
        parser.add_argument("--jobs", type=positive, default=self.jobs, metavar="N", help="processes (%(default)s)")
        folder = under_runs(self.file.parent)
        what = f"folder of {self.file.name} (%(default)s)"
        parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help=what)
        return parser


def planned(case: Case) -> dict[str, Any]:
    """Makes the plan of `case` and returns its values. If there is no plan, `error` says why; else it is None.
    `planning_seconds` is processor time."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    began, values = time.process_time(), {"error": None}
    try:
        values |= case.plan()
    except LowmemError as error:
        values["error"] = str(error)
    return values | {"planning_seconds": time.process_time() - began}
