"""Plans training with torchrun on one to eight cards: `python -m experiments.several_gpus.scaling`.

Each plan is that of one card of so many: its step is simulated, with what it gathers, sums and waits for. The machine
has 256 GiB of RAM and one bus through it for all cards. Nothing of this was measured on cards. A row is written as soon
as its plan is made, and a plan that has a row of the same sources is not made again.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import logging as transformers_logging

import lowmem
from experiments.harness import rows as row_file
from experiments.harness.options import at_least, make_folder, under_runs
from experiments.harness.tables import markdown, put
from lowmem.errors import InputError, LowmemError
from lowmem.settings import Settings
from lowmem.units import GIB, parse_size

PROGRAM = "experiments.several_gpus.scaling"
HERE = Path(__file__).resolve().parent
RESULTS, README, NAME = HERE / "results", HERE / "README.md", "scaling.jsonl"
BEGIN = "<!-- made by python -m experiments.several_gpus.scaling -->"
SEQ, BATCH, RAM_LIMIT = 1024, 64, "256GiB"
MODELS = {"GPT-2-XL": "gpt2-xl", "Llama 3.2 3B": "meta-llama/Llama-3.2-3B"}
CARDS = ("rtx3060", "rtx3090", "rtx4090")
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """Holds a plan to be made: of MODELS, of CARDS, and how many cards."""

    title: str
    card: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.title}, {self.gpus} x {self.card}"

    def settings(self) -> Settings:
        return Settings(
            model=MODELS[self.title], init="random", seq=SEQ, batch=BATCH, gpu=self.card, plan_only=True,
            gpu_limit_bytes=None, ram_limit_bytes=parse_size(RAM_LIMIT),
        )  # fmt: skip


CASES = tuple(Case(title, card, gpus) for title in MODELS for card in CARDS for gpus in COUNTS)


def planned(case: Case) -> dict:
    """Returns the values of a case's row; `error` says why there is no plan."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    try:
        plan = lowmem.plan(case.settings(), case.gpus)
    except LowmemError as error:
        return {"error": str(error)}
    content = plan.to_dict()
    kept = ("predicted", "choice", "breakdown", "sent_bytes", "seconds_waiting_for_copies")
    return {"error": None} | {name: content[name] for name in kept}


def table(rows: list[dict]) -> str:
    """Returns a table of seconds per step, with the GiB of GPU memory, of RAM of all processes, and sent by a card.
    Above it, a sentence says how many times as fast more cards are."""
    found = {row["name"]: row for row in rows}
    lines, times = [], {gpus: [] for gpus in COUNTS[1:]}
    for title in MODELS:
        for card in CARDS:
            one, *more = cells = [found.get(Case(title, card, gpus).name) for gpus in COUNTS]
            for row in more:
                if (faster := _times_faster(row, one)) is not None:
                    times[row["gpus"]].append(faster)
            lines.append([title, card, *(_cell(row, _times_faster(row, one)) for row in cells)])
    header = ["", "card", *(f"{gpus} cards" if gpus > 1 else "1 card" for gpus in COUNTS)]
    spans = [f"{gpus} cards {min(each):.2f} to {max(each):.2f}" for gpus, each in times.items() if each]
    return f"Times as fast as one card: {', '.join(spans)}.\n\n{markdown(header, lines)}"


def _times_faster(row: dict | None, one: dict | None) -> float | None:
    if row is one or any(each is None or each["error"] for each in (row, one)):
        return None
    return one["predicted"]["step_seconds"] / row["predicted"]["step_seconds"]


def _cell(row: dict | None, times_faster: float | None) -> str:
    if row is None or row["error"]:
        return "" if row is None else "no"
    peaks = row["predicted"]
    sizes = (peaks["gpu_reserved_peak_bytes"], row["gpus"] * peaks["ram_peak_bytes"], row["sent_bytes"])
    said = f"{peaks['step_seconds']:.3g} s; {' / '.join(f'{size / GIB:.3g}' for size in sizes)}"
    return said if times_faster is None else f"{said}; {times_faster:.2f}x"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    chosen = [case for case in CASES if any(text in case.name for text in options.only)]
    try:
        if not chosen:
            raise InputError(f"--only {' '.join(options.only)}: no case has that in its name")
        make_folder(options.out)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    path = options.out / NAME
    common = row_file.made_by(PROGRAM, arguments) | {"sources": sources()}
    done = {row["name"] for row in row_file.read(path) if row.get("sources") == common["sources"]}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        cases = {pool.submit(planned, case): case for case in chosen if case.name not in done}
        for future in as_completed(cases):
            case, values = cases[future], future.result()
            row = {"name": case.name, "model": MODELS[case.title], "card": case.card, "gpus": case.gpus, "seq": SEQ}
            row |= {"batch": BATCH, "ram_limit": RAM_LIMIT} | values | common
            row_file.append(path, row)
            seconds = values["error"] or f"{values['predicted']['step_seconds']:.3g} s a step"
            print(f"{case.name}: {seconds}", flush=True)
    print(table(row_file.read(path)))
    return 0


def sources() -> str:
    """Returns a digest of the code and the tables that make these rows."""
    return row_file.plan_sources("experiments/several_gpus/scaling.py")


def committed_rows() -> list[dict]:
    """Returns the newest row of each name."""
    return list({row["name"]: row for row in row_file.read(RESULTS / NAME)}.values())


def write_readme() -> None:
    put(README, BEGIN, table(committed_rows()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="parts of the names of cases (all)")
    parser.add_argument("--jobs", type=at_least(int, 1), default=2, metavar="N", help="processes (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=under_runs(RESULTS), metavar="DIR", help=f"folder of {NAME} (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
