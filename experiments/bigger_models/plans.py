"""What training the models would take: GPU memory, RAM, disk and time, planned on a machine without a GPU.

    python -m experiments.bigger_models.plans [--only NAME ...] [--list] [--jobs N] [--out DIR]

A case is a model on a card, under caps of GPU memory and RAM. A case with a row of the same sources is not planned
again. Under a cap of RAM, states may be on a disk that moves 2 GiB/s. A refused case has the reason in `error`.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lowmem
from experiments.bigger_models.shapes import SHAPES
from experiments.harness.options import exit_code_of
from experiments.harness.planned_rows import PlannedRows
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.planning.plan import Plan
from lowmem.settings import Settings
from lowmem.units import GIB, MIB, format_size, parse_size

RESULTS = Path(__file__).resolve().parent / "results"
SEQ, BATCH = 1024, 64
NO_CAP, SMALLEST, RESIDENT = "none", "smallest", "resident"
TOO_LITTLE_BYTES = 16 * MIB  # of GPU memory: no model of the table fits
SERVERS = ("a100", "h100")
LADDER_LIMITS, LADDER_CARD = ("24GiB", SMALLEST), "rtx3090"
KIND = "planned"


@dataclass(frozen=True)
class Case:
    """A plan to be made. Limits are sizes as typed; `gpu_limit` SMALLEST: the smallest under which the model trains.
    `target_tokens`: the decoder's share of the `seq` positions. `gradients`: as in Settings; RESIDENT for
    comparison."""

    shape: str
    gpu_limit: str
    ram_limit: str
    card: str
    seq: int = SEQ
    batch: int = BATCH
    target_tokens: int | None = None
    gradients: str = "auto"

    @property
    def name(self) -> str:
        ram = "any RAM" if self.ram_limit == NO_CAP else f"{self.ram_limit} of RAM"
        resident = ", no gradients in RAM" if self.gradients == RESIDENT else ""
        return f"{self.shape}, {self.gpu_limit}, {ram}, {self.card}{resident}"

    def settings(self, folder: Path, gpu_limit_bytes: int) -> Settings:
        """Returns the plan's settings. `folder`: has the model's config.json. Raises InputError for impossible
        settings."""
        more: dict[str, Any] = {"gradients": self.gradients}
        if self.ram_limit != NO_CAP:
            more |= {"ram_limit_bytes": parse_size(self.ram_limit), "states_folder": str(folder / "states")}
        if self.target_tokens is not None:
            more["target_tokens"] = self.target_tokens
        return Settings(
            model=str(folder), init="random", seq=self.seq, batch=self.batch, gpu=self.card, plan_only=True,
            gpu_limit_bytes=gpu_limit_bytes, **more,
        )  # fmt: skip

    def row(self) -> dict:
        names = ("shape", "card", "seq", "batch", "gpu_limit", "ram_limit", "gradients")
        return {"kind": KIND} | {name: getattr(self, name) for name in names}

    def plan(self) -> dict:
        with tempfile.TemporaryDirectory(prefix="lowmem-") as name:
            folder = Path(name) / self.shape
            try:
                SHAPES[self.shape].write(folder)
                smallest = self.gpu_limit == SMALLEST
                limit_bytes = self._smallest_cap_bytes(folder) if smallest else parse_size(self.gpu_limit)
                return values_of(lowmem.plan(self.settings(folder, limit_bytes)))
            except LowmemError as error:
                raise LowmemError(
                    str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), self.shape)
                ) from None

    def _smallest_cap_bytes(self, folder: Path) -> int:
        try:
            lowmem.plan(self.settings(folder, TOO_LITTLE_BYTES))
        except PlanError as error:
            # The refusal names the smallest cap under which the model trains.
            found = re.search(r"--gpu-limit (\d+)MiB", str(error))
            if found is None:
                raise
            return int(found[1]) * MIB
        raise InputError(f"{self.shape} trains under {format_size(TOO_LITTLE_BYTES)}, below which no cap is tried")


def _cases() -> Iterator[Case]:
    encoder_decoder = {"t5-11b": 512}
    for shape, gpu_limit, ram_limits, cards in (
        ("gpt-j-6b", "24GiB", (NO_CAP, "64GiB", "32GiB"), ("rtx3090", "rtx4090", *SERVERS)),
        ("llama-7b", "12GiB", (NO_CAP, "64GiB", "32GiB"), ("rtx3060", "rtx3090", *SERVERS)),
        ("t5-11b", "24GiB", (NO_CAP, "64GiB"), ("rtx3090", "rtx4090", *SERVERS)),
        ("t5-11b", "11GiB", (NO_CAP, "64GiB"), ("rtx2080ti", "rtx3060", *SERVERS)),
    ):
        every = [
            Case(shape, gpu_limit, ram_limit, card, target_tokens=encoder_decoder.get(shape))
            for ram_limit in ram_limits
            for card in cards
            if ram_limit == NO_CAP or card not in SERVERS  # a machine with such a card has more
        ]
        yield from every
        yield replace(every[0], gradients=RESIDENT)
    for gpu_limit in LADDER_LIMITS:
        for shape in SHAPES:
            yield Case(shape, gpu_limit, NO_CAP, LADDER_CARD, target_tokens=encoder_decoder.get(shape))


CASES = tuple(dict.fromkeys(_cases()))  # the ladder has some of the plans


def values_of(plan: Plan) -> dict:
    said = plan.to_dict()
    return {
        "parameters": plan.parameters,
        "blocks": plan.blocks,
        "tokens_per_second": said["tokens_per_step"] / plan.step_seconds,
    } | {
        name: said[name]
        for name in (
            *("tokens_per_step", "limits", "choice", "predicted", "seconds_waiting_for_copies", "breakdown"),
            *("ram_breakdown", "disk"),
        )
    }


def line(row: dict) -> str:
    if row["error"]:
        return f"{row['name']}: {row['error']}"
    sizes = {name: row["predicted"][f"{name}_peak_bytes"] for name in ("gpu_reserved", "ram")}
    said = ", ".join(f"{name.split('_')[0]} {size / GIB:.1f} GiB" for name, size in sizes.items())
    on_disk = row["disk"].get("states", 0)
    said += f", states on the disk {on_disk / GIB:.1f} GiB" if on_disk else ""
    return f"{row['name']}: {said}, {row['tokens_per_second']:,.0f} tokens/s  ({row['planning_seconds']:.0f} s)"


ROWS = PlannedRows(
    "experiments.bigger_models.plans", __doc__.split("\n")[0], RESULTS / "rows.jsonl", CASES, line, jobs=1,
    code=("experiments/bigger_models/shapes.py", "experiments/harness/models.py"),
)  # fmt: skip
main = ROWS.main

if __name__ == "__main__":
    sys.exit(exit_code_of(main))
