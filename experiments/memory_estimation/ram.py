"""How much RAM does training on the CPU take? Predicted and measured, in real runs of the real shapes.

    python -m experiments.memory_estimation.ram [--models gpt2 ...] [--out DIR]

XL takes 21 GiB of RAM, and 23 GiB of disk in the folder for temporary files (TMPDIR), which must not be a RAM disk. A
row replaces the older one of its model.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from experiments.harness.models import MODELS
from experiments.harness.options import exit_code_of, make_folder, parser_of, under_runs
from experiments.harness.rows import made_by
from experiments.harness.whole_runs import check_room, ram_of, report_of
from experiments.memory_estimation import rows as row_file
from lowmem.limits import ram_available_bytes
from lowmem.units import format_size

NAME = "ram.jsonl"
SCRIPTS = {name: "train_gpt2_large.py" for name in ("gpt2", "gpt2-medium", "gpt2-large")}
SCRIPTS["gpt2-xl"] = "train_gpt2_xl.py"
SEQ, BATCH, STEPS = 64, 2, 2
DISK_BYTES_PER_PARAMETER = 16  # the checkpoint's fp32 weights, m and v, and the export


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    make_folder(options.out)
    for name in options.models:
        row = trained(name)
        row_file.replace(options.out / NAME, [row])
        sizes = " predicted, ".join(format_size(row[f"{kind}ram_peak_bytes"]) for kind in ("predicted_", ""))
        print(f"{name:<12} {sizes} measured", flush=True)
    return 0


def trained(name: str) -> dict:
    """Returns the row of one run of model `name`. Raises LowmemError if the disk is too small or the run fails."""
    check_room(tempfile.gettempdir(), DISK_BYTES_PER_PARAMETER * MODELS[name].parameters, name)
    command = [SCRIPTS[name], "--model", name, "--init", "random", "--seq", str(SEQ), "--batch", str(BATCH)]
    command += ["--steps", str(STEPS), "--device", "cpu", "--ram-limit", "none"]
    ram_free_bytes, _ = ram_available_bytes()
    with tempfile.TemporaryDirectory(prefix="lowmem-") as out:
        report = report_of([sys.executable, *command], Path(out), name)
    return (
        {"kind": "trained", "model": name, "method": "lowmem", "seq": SEQ, "batch": BATCH}
        | {"ram_free_bytes": ram_free_bytes}
        | ram_of(report)
        | made_by("", [])
        | {"command": shlex.join(["python", *command])}
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("experiments.memory_estimation.ram", __doc__)
    names = list(SCRIPTS)
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, metavar="MODEL", help=f"of {', '.join(names)}"
    )
    parser.add_argument(
        "--out", type=Path, default=under_runs(row_file.FOLDER / "results"), help="folder to write to (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
