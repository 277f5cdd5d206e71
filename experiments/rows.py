"""Makes stale committed rows again if they are cheap: `make rows`. --list only says which rows are stale.

Rows are stale if their sources have changed since. Plans and schedules are cheap. Rows of a GPU, of the stand-in or of
long trainings are not made here. Run `make results` afterwards.
"""

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.bigger_models import plans, today
from experiments.gpu_acceptance import planned_levers, predicted
from experiments.harness import rows as row_file
from experiments.harness.options import exit_code_of, parser_of
from experiments.harness.planned_rows import PlannedRows
from experiments.memory_estimation import run as memory_estimation
from experiments.memory_estimation.several_gpus import published as several_gpus
from experiments.parallel_3d import measure as parallel_3d
from experiments.peers import published
from experiments.several_gpus import scaling
from experiments.unified_memory import measure as unified_memory

MINUTES = 15.0


@dataclass(frozen=True)
class Made:
    """Rows of a file that `program` makes in `minutes` on two idle cores. `is_of`: selects them."""

    program: str
    arguments: tuple[str, ...]
    rows: Path
    minutes: float
    sources: Callable[[], str]
    is_of: Callable[[dict], bool] = lambda row: True

    def stale(self) -> tuple[int, int]:
        """Returns the number of stale rows, and of all rows."""
        now = self.sources()
        found = [row for row in row_file.read(self.rows) if self.is_of(row)]
        return sum(row.get("sources") != now for row in found), len(found)


def made(module, folder: Path, name: str, minutes: float, **more) -> Made:
    return Made(module.PROGRAM, ("--out", str(folder)), folder / name, minutes, module.sources, **more)


def planned(rows: PlannedRows, minutes: float, **more) -> Made:
    return Made(rows.program, ("--out", str(rows.file.parent)), rows.file, minutes, rows.sources, **more)


def everything() -> list[Made]:
    traffic = ("--only", "traffic", "--rows", str(unified_memory.ROWS))
    return [
        Made(
            unified_memory.PROGRAM, traffic, unified_memory.ROWS, 1, partial(row_file.sources, unified_memory.PROGRAM),
            lambda row: row["section"] == "traffic",
        ),
        Made(
            parallel_3d.PROGRAM, ("--rows", str(parallel_3d.ROWS)), parallel_3d.ROWS, 5, parallel_3d.sources
        ),
        made(several_gpus, several_gpus.RESULTS, several_gpus.NAME, 2),
        planned(scaling.ROWS, 15),
        made(memory_estimation, memory_estimation.RESULTS, "rows.jsonl", 15, is_of=lambda r: r["kind"] == "predicted"),
        planned(plans.ROWS, 20, is_of=lambda row: row["kind"] == plans.KIND),
        planned(today.ROWS, 15),
        planned(published.ROWS, 2),
        planned(planned_levers.ROWS, 20),
        made(predicted, predicted.RESULTS, predicted.NAME, 30),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("experiments.rows", __doc__)
    parser.add_argument("--list", action="store_true", help="say what is stale, and make nothing")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the most that is cheap (%(default)g)")
    options = parser.parse_args(arguments)
    for each in everything():
        stale, count = each.stale()
        name = each.rows.relative_to(row_file.ROOT)
        print(f"{name}: {stale} of {count} rows are older than their sources; {each.minutes:g} minutes", flush=True)
        if stale and not options.list and each.minutes <= options.minutes:
            command = ["-m", each.program, *each.arguments]
            print(shlex.join(["python", *map(row_file.portable, command)]), flush=True)
            if code := subprocess.run([sys.executable, *command], cwd=row_file.ROOT).returncode:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
