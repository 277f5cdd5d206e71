"""Plans training with torchrun on 1 to 64 cards: `python -m experiments.several_gpus.scaling`.

Nothing was measured on cards. A row is written as soon as its plan is made; a plan with a row of the same sources is
not made again.
"""

import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import lowmem
from experiments.harness.options import exit_code_of
from experiments.harness.planned_rows import PlannedRows
from experiments.harness.tables import Page, markdown
from lowmem.settings import Settings
from lowmem.units import GIB, parse_size

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN = "<!-- made by python -m experiments.several_gpus.scaling -->"
BEGIN_MACHINES = "<!-- made by python -m experiments.several_gpus.scaling, of several machines -->"
SEQ, BATCH, RAM_LIMIT = 1024, 64, "256GiB"
LARGE_BATCH = 512
MODELS = {"GPT-2-XL": "gpt2-xl", "Llama 3.2 3B": "meta-llama/Llama-3.2-3B"}
CARDS = ("rtx3060", "rtx3090", "rtx4090")
COUNTS = (1, 2, 4, 8)
MACHINES, ON_EACH = (1, 2, 4, 8), 8
NETWORKS = {"rtx4090": 10, "h100": 100}  # Gbit/s of a machine, by its cards


@dataclass(frozen=True)
class Case:
    """A plan to be made. `title`: of MODELS; `card`: of CARDS or NETWORKS; `gpus`: of each machine; `batch`: sequences
    of each machine in a step."""

    title: str
    card: str
    gpus: int
    machines: int = 1
    batch: int = BATCH

    @property
    def name(self) -> str:
        machines = f"{self.machines} x " if self.machines > 1 else ""
        batch = "" if self.batch == BATCH else f", batch {self.batch} each"
        return f"{self.title}, {machines}{self.gpus} x {self.card}{batch}"

    def settings(self) -> Settings:
        return Settings(
            model=MODELS[self.title], init="random", seq=SEQ, batch=self.batch * self.machines, gpu=self.card,
            gpu_limit_bytes=None, ram_limit_bytes=parse_size(RAM_LIMIT), plan_only=True,
            network_rate_bytes=NETWORKS.get(self.card, 1) * 10**9 // 8,
        )  # fmt: skip

    def row(self) -> dict:
        known = {"model": MODELS[self.title], "card": self.card, "gpus": self.gpus, "seq": SEQ}
        known |= {"machines": self.machines, "batch": self.batch * self.machines, "ram_limit": RAM_LIMIT}
        return known if self.machines == 1 else known | {"network_gbit": NETWORKS[self.card]}

    def plan(self) -> dict:
        content = lowmem.plan(self.settings(), self.gpus, self.machines).to_dict()
        kept = ("predicted", "choice", "breakdown", "ranks_that_share_a_model", "sent_bytes")
        return {name: content[name] for name in (*kept, "seconds_waiting_for_copies")}


def table(rows: list[dict]) -> str:
    """Returns a table of seconds per step, and GiB of GPU memory, of RAM of all processes, and sent by a card."""
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


def machines_table(rows: list[dict]) -> str:
    found, lines = {row["name"]: row for row in rows}, []
    for cases in ON_SEVERAL:
        one, *_ = cells = [found.get(case.name) for case in cases]
        network = f"{cases[0].card}, {NETWORKS[cases[0].card]} Gbit/s"
        times = (_cell(row, _times_faster(row, one)) for row in cells)
        lines.append([cases[0].title, f"{cases[0].batch} x {SEQ:,}", network, *times])
    header = ["", "a machine's batch", "cards, network", *(f"{machines} x {ON_EACH} cards" for machines in MACHINES)]
    return markdown(header, lines)


def _times_faster(row: dict | None, one: dict | None) -> float | None:
    if row is one or any(each is None or each["error"] for each in (row, one)):
        return None
    seconds = one["predicted"]["step_seconds"] / row["predicted"]["step_seconds"]
    return seconds * row["batch"] / one["batch"]


def _cell(row: dict | None, times_faster: float | None) -> str:
    if row is None or row["error"]:
        return "" if row is None else "no"
    peaks = row["predicted"]
    sizes = (peaks["gpu_reserved_peak_bytes"], row["gpus"] * peaks["ram_peak_bytes"], row["sent_bytes"])
    said = f"{peaks['step_seconds']:.3g} s; {' / '.join(f'{size / GIB:.3g}' for size in sizes)}"
    return said if times_faster is None else f"{said}; {times_faster:.2f}x"


def line(row: dict) -> str:
    return f"{row['name']}: {row['error'] or format(row['predicted']['step_seconds'], '.3g') + ' s a step'}"


def pages() -> list[Page]:
    rows = ROWS.committed()
    return [(README, BEGIN, table(rows)), (README, BEGIN_MACHINES, machines_table(rows))]


ON_ONE = [Case(title, card, gpus) for title in MODELS for card in CARDS for gpus in COUNTS]
ON_SEVERAL = [  # by lines of the table
    [Case(title, card, ON_EACH, machines, batch) for machines in MACHINES]
    for title in MODELS
    for card in NETWORKS
    for batch in (BATCH, LARGE_BATCH)
]
CASES = tuple(dict.fromkeys([*ON_ONE, *chain.from_iterable(ON_SEVERAL)]))
ROWS = PlannedRows(
    "experiments.several_gpus.scaling", __doc__.split(":")[0], HERE / "results" / "scaling.jsonl", CASES, line
)
main = ROWS.main

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
