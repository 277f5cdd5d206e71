"""The README's table, made from rows: python -m experiments.host_time.table puts it between the README's marks."""

import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put

BEGIN = "<!-- host time -->"
FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
RESULTS = FOLDER / "results" / "rows.jsonl"


def table(rows: list[dict]) -> str:
    """The newest row of each case, in the order of the run, and the machine that made the last."""
    newest = {row["name"]: row for row in rows}
    lines = [
        [
            row["name"],
            _microseconds(row["least_processor_us"]),
            _microseconds(row["processor_us"]),
            _microseconds(row["least_wall_us"]),
            f"{row['operations']:,.0f}",
            f"{row['least_processor_us'] / row['operations']:.1f}",
            _microseconds(row["clock_us"]),
            f"{row['least_processor_us'] / row['clock_us']:.2f}",
        ]
        for row in newest.values()
    ]
    header = ("", "processor, us", "its median", "wall, us", "operations", "us each", "clock, us", "processor / clock")
    return "\n\n".join([_machine(row) for row in list(newest.values())[-1:]] + [markdown(header, lines)])


def _machine(row: dict) -> str:
    speed, versions = row["machine_speed"], row["versions"]
    constants = ", ".join(f"{name} {value:g}" for name, value in row["constants_us"].items())
    return (
        f"On {row['machine']}, one Python loop's turn {speed['python_loop_ns']:.0f} ns, an addition of two small CPU "
        f"tensors {speed['cpu_addition_us']:.1f} us, load {row['load_average']:.1f}; torch {versions['torch']}, Python "
        f"{versions['python']}, a stand-in for {row['device']}. The clock's constants, us: {constants}."
    )


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> int:
    put(README, BEGIN, table(row_file.read(RESULTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
