"""Makes the README's table from rows: `python -m experiments.host_time.table`."""

import re
import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all

BEGIN = "<!-- host time -->"
FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
RESULTS = FOLDER / "results" / "rows.jsonl"
COUNTED = ("operations", "us each", "clock, us", "processor / clock")
_STEP = re.compile(r"step, (.+), (\d+) blocks(|, fused|, fused, recorded)")


def table(rows: list[dict]) -> str:
    newest = {row["name"]: row for row in rows}
    cases = [_cells(row) for row in newest.values()]
    header = ("", "processor, us", "its median", "wall, us", *COUNTED)
    further = [_cells(row)[:2] + _cells(row)[4:] for row in further_blocks(newest)]
    return "\n\n".join(
        [
            *[_machine(row) for row in list(newest.values())[-1:]],
            markdown(header, cases),
            markdown(("", "processor, us", *COUNTED), further),
        ]
    )


def further_blocks(newest: dict[str, dict]) -> list[dict]:
    """Returns a row for each model: the difference of its two steps, per block."""
    steps: dict[str, dict[int, dict]] = {}
    for name, row in newest.items():
        if match := _STEP.fullmatch(name):
            model, blocks, fused = match.groups()
            steps.setdefault(f"a further block of {model}{fused}", {})[int(blocks)] = row
    found = []
    for name, by_blocks in steps.items():
        fewest, most = min(by_blocks), max(by_blocks)
        if fewest < most:
            differences = {
                key: (by_blocks[most][key] - by_blocks[fewest][key]) / (most - fewest)
                for key, value in by_blocks[most].items()
                if key == "operations" or key.endswith("_us") and isinstance(value, float)
            }
            found.append({"name": name} | differences)
    return found


def _cells(row: dict) -> list[str]:
    return [
        row["name"],
        _microseconds(row["least_processor_us"]),
        _microseconds(row["processor_us"]),
        _microseconds(row["least_wall_us"]),
        f"{row['operations']:,.0f}",
        f"{row['least_processor_us'] / row['operations']:.1f}",
        _microseconds(row["clock_us"]),
        f"{row['least_processor_us'] / row['clock_us']:.2f}",
    ]


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


def pages() -> list[Page]:
    return [(README, BEGIN, table(row_file.read(RESULTS)))]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.host_time.table", __doc__, main))
