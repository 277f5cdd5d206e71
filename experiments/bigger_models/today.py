"""Will it fit? Plans today's models on the cards that people own: seconds per step, hours per million tokens and RAM.

    python -m experiments.bigger_models.today [--only NAME ...] [--jobs N] [--out DIR]

Needs no network. RAM is capped at such a machine's usual size; states beyond that are on a disk that moves 2 GiB/s. A
plan with a row of the same sources is not made again.
"""

import sys
from dataclasses import dataclass

import lowmem
from experiments.bigger_models.plans import KIND, RESULTS, line, values_of
from experiments.harness.options import exit_code_of
from experiments.harness.planned_rows import PlannedRows
from experiments.harness.tables import markdown
from lowmem.settings import Settings
from lowmem.units import GIB, parse_size

SEQ, BATCH = 1024, 16
MODELS = {  # by the name in the table; from the smallest to the largest
    "Qwen3 0.6B": "Qwen/Qwen3-0.6B",
    "GPT-2-Large": "gpt2-large",
    "Gemma 3 1B": "google/gemma-3-1b-pt",
    "Llama 3.2 1B": "meta-llama/Llama-3.2-1B",
    "GPT-2-XL": "gpt2-xl",
    "Qwen3 1.7B": "Qwen/Qwen3-1.7B",
    "SmolLM3 3B": "HuggingFaceTB/SmolLM3-3B",
    "Llama 3.2 3B": "meta-llama/Llama-3.2-3B",
    "Gemma 3 4B (text)": "gemma-3-4b-text",
    "Qwen3 4B": "Qwen/Qwen3-4B",
    "Qwen3 8B": "Qwen/Qwen3-8B",
}


@dataclass(frozen=True)
class Machine:
    """A card's name in the table and in lowmem, and the assumed cap of RAM."""

    title: str
    card: str
    ram_limit: str


MACHINES = (
    Machine("RTX 4060, 8 GB", "rtx4060", "32GiB"),
    Machine("RTX 3060, 12 GB", "rtx3060", "32GiB"),
    Machine("RTX 4060 Ti, 16 GB", "rtx4060ti-16gb", "64GiB"),
    Machine("RTX 3090, 24 GB", "rtx3090", "64GiB"),
    Machine("RTX 5090, 32 GB", "rtx5090", "64GiB"),
    Machine("T4, 16 GB", "t4", "29GiB"),  # a free notebook of Kaggle
)


@dataclass(frozen=True)
class Case:
    title: str
    machine: Machine

    @property
    def name(self) -> str:
        return f"{self.title}, {self.machine.title}, {self.machine.ram_limit} of RAM"

    def settings(self) -> Settings:
        return Settings(
            model=MODELS[self.title], init="random", seq=SEQ, batch=BATCH, gpu=self.machine.card, plan_only=True,
            gpu_limit_bytes=None, ram_limit_bytes=parse_size(self.machine.ram_limit), states_folder="states",
        )  # fmt: skip

    @property
    def command(self) -> str:
        machine = self.machine
        return (
            f"python -m lowmem.plan --model {MODELS[self.title]} --seq {SEQ} --batch {BATCH} --gpu {machine.card} "
            f"--ram-limit {machine.ram_limit} --states-folder states"
        )

    def row(self) -> dict:
        known = {"kind": KIND, "model": MODELS[self.title], "card": self.machine.card, "seq": SEQ, "batch": BATCH}
        return known | {"ram_limit": self.machine.ram_limit, "plan_command": self.command}

    def plan(self) -> dict:
        return values_of(lowmem.plan(self.settings()))


def table(rows: list[dict]) -> str:
    found = {row["name"]: row for row in rows}
    lines = []
    for title in MODELS:
        cells = [_cell(found.get(Case(title, machine).name)) for machine in MACHINES]
        lines.append([title, *cells])
    header = ["", *(f"{machine.title}; {machine.ram_limit.removesuffix('GiB')} GiB RAM" for machine in MACHINES)]
    return markdown(header, lines)


def heading() -> str:
    return (
        f"Seconds per step of {BATCH} x {SEQ:,} tokens, hours per million tokens, GiB of RAM in use; all predicted, "
        "with `--gpu-limit none`. *disk*: RAM has no room for these GiB of optimizer states, which are in "
        "`--states-folder`, on a disk that moves 2 GiB/s. 29 GiB of RAM is Kaggle's."
    )


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    if row["error"]:
        return "no"
    hours = 1e6 / row["tokens_per_second"] / 3600
    on_disk = row["disk"].get("states", 0)
    said = f"{row['predicted']['step_seconds']:.3g} s, {hours:.2g} h, {row['predicted']['ram_peak_bytes'] / GIB:.0f}"
    return said + (f" + disk {on_disk / GIB:.0f}" if on_disk else "")


CASES = tuple(Case(title, machine) for title in reversed(MODELS) for machine in MACHINES)  # the slowest plans first
ROWS = PlannedRows("experiments.bigger_models.today", __doc__.split("\n")[0], RESULTS / "today.jsonl", CASES, line)
main = ROWS.main

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
