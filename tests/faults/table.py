"""Makes README.md's tables from the rows that sigkill.py, full_disk.py, fuzz.py and saving.py leave in results.jsonl.

    python -m tests.faults.sigkill --kills 200 --record    adds a row
    python -m tests.faults.table                           puts the tables of the rows into README.md

The last row of a program, kind and model counts; a test fails if README.md and the rows disagree.
"""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from lowmem.units import format_size

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results.jsonl", FOLDER / "README.md"
BEGIN = "<!-- made by python -m tests.faults.table -->"
PROGRAMS = {
    "sigkill": "SIGKILL at random moments of training with `--save-every 1`, then the same command again",
    "full_disk": "a run on a disk that fills up on the way, killed at random moments, then the same command again",
    "fuzz": "random command lines; random and damaged data, configs, weights, checkpoints, settings",
    "saving": "RAM and time of a save beside those of training and of the disk",
}


def parser(program: str, doc: str) -> ArgumentParser:
    """Returns a program's parser with --record. `doc`: its docstring, whose first paragraph is the description."""
    made = ArgumentParser(prog=f"python -m tests.faults.{program}", description=doc.split("\n\n")[0])
    # A row in the tree makes the tree differ from its commit, which the next row would say; in FILE it does not.
    made.add_argument(
        "--record", nargs="?", const=RESULTS, type=Path, metavar="FILE",
        help=f"add the rows to FILE ({RESULTS.relative_to(row_file.ROOT)} if none is named)",
    )  # fmt: skip
    return made


def common(program: str, record: Path | None) -> dict:
    """Returns the fields that all rows of one call share. It has to be called before anything is written."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--record", str(record))]
    sources = row_file.digest("lowmem/**/*.py", "train_gpt2_*.py", "tests/faults/*.py", "tests/runs.py")
    made_by = row_file.made_by(f"tests.faults.{program}", arguments)
    return {"program": program, "sources": sources, "device": "cpu"} | made_by


def report(row: dict, record: Path | None) -> None:
    """Prints a row, and appends it to `record` if there is one."""
    print(json.dumps(row), flush=True)
    if record is not None:
        row_file.append(record, row)


def tables(rows: list[dict]) -> str:
    """Returns both tables in Markdown, of the last row of each program, kind and model."""
    last = list({tuple(row.get(key) for key in ("program", "kind", "model")): row for row in rows}.values())
    lines = []
    for program, what in PROGRAMS.items():
        found = [row for row in last if row["program"] == program]
        command = found[-1]["command"] if found else f"python -m tests.faults.{program}"
        said = "; ".join(_result(row) for row in found) if program != "fuzz" else _fuzz_result(found)
        lines.append([f"`{command}`", what, said or "no row yet"])
    parts = [markdown(["command", "what it does", "last result"], lines)]
    fuzzed = [row for row in last if row["program"] == "fuzz"]
    if fuzzed:
        codes = sorted({code for row in fuzzed for code in row["exit_codes"]} - {"failed"})
        kinds = [
            [row["kind"], str(row["examples"]), *(str(row["exit_codes"].get(code, 0)) for code in codes)]
            + [str(row["failed"])]
            for row in fuzzed
        ]
        parts.append(markdown(["kind", "examples", *(f"exit code {code}" for code in codes), "failed"], kinds))
    return "\n\n".join(parts)


def _result(row: dict) -> str:
    if row["program"] == "sigkill":
        said = (
            f"{row['kills']} kills in {row['runs']} runs of {row['steps_of_a_run']} steps ({row['while_saving']} of "
            f"them while saving, {row['of_the_script_itself']} of the script itself): {row['lost']} lost, "
            f"{row['wrong_exits']} wrong exit codes, {row['different_runs']} runs that differ from one left alone"
        )
    elif row["program"] == "full_disk":
        said = (
            f"{row['model']}, a disk of {format_size(row['disk_bytes'])}: {row['kills']} kills in {row['runs']} runs "
            f"of {row['steps_of_a_run']} steps, the disk filled {row['disk_filled']} times, "
            f"{row['saves_without_room']} saves and {row['refused_for_room']} starts without room: {row['lost']} lost, "
            f"{row['wrong_exits']} wrong exit codes, {row['different_models']} exported models that differ from one of "
            "a run left alone"
        )
    else:
        said = (
            f"{row['model']}, {format_size(row['saved_bytes'])} a save: {format_size(row['ram_added_bytes'])} of RAM "
            f"beside {format_size(row['ram_of_training_bytes'])} ({row['share_of_ram_added']:.3%}); "
            f"{row['save_seconds']:.1f} s, where the same bytes in one file and an fsync take "
            f"{row['plain_seconds']:.1f} ({row['share_of_plain']:.2f} of it), and begun early "
            f"{row['best_seconds']:.1f} ({row['share_of_best']:.2f} of it); medians of {len(row['each'])}"
        )
    return f"{said}; {row['seconds']} s on {row['machine']}, commit {row['commit']}"


def _fuzz_result(rows: list[dict]) -> str:
    if not rows:
        return ""
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    return f"{sum(row['failed'] for row in rows)} of {sum(row['examples'] for row in rows):,} failed, commit {commits}"


if __name__ == "__main__":
    put(README, BEGIN, tables(row_file.read(RESULTS)))
