"""Measures the modes' peaks of memory, forward and backward: `python -m experiments.nested_tensors.memory`.

    python -m experiments.nested_tensors.memory --data functions --num_samples 16 --batch_size 8

A row is a process of one mode (main.py), with its memory over time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import check_rows, exit_code_of, parser_of, positive, under_runs
from experiments.nested_tensors.main import add_sample_options, chosen_device, on_device
from experiments.nested_tensors.ragged import MODES, SHAPES
from experiments.nested_tensors.table import PEAK_ROWS, STAGE_ROWS, modes_table

PROGRAM = "experiments.nested_tensors.memory"
CHILD = "experiments.nested_tensors.main"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", choices=SHAPES, action="append", help="default: all of them")
    add_sample_options(parser)
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=under_runs(PEAK_ROWS), metavar="ROWS.jsonl", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    common = {"sources": row_file.sources(PROGRAM), "threads": options.threads} | row_file.made_by(PROGRAM, arguments)
    common |= on_device(chosen_device(parser, options), options.dtype)
    common |= {"num_samples": options.num_samples, "batch_size": options.batch_size}
    check_rows(options.out, "--out")
    made = []
    for model in options.model or SHAPES:
        for mode in MODES:
            made.append(common | in_process(model, mode, options))
            row_file.append(options.out, made[-1])
    print(modes_table(made, row_file.read(STAGE_ROWS)))
    return 0


def in_process(model: str, mode: str, options: argparse.Namespace) -> dict:
    """Runs main.py in a separate process, and returns its figures. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as out:
        words = [
            *("--model", model, "--mode", mode, "--data", options.data, "--backward", "--use_warmup", "--out", out),
            "--memory_over_time",
            *("--num_samples", str(options.num_samples), "--batch_size", str(options.batch_size)),
            *("--device", options.device, "--dtype", options.dtype),
        ]
        # Freed memory goes back to the system at once; else a peak of the resident set would contain it.
        environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(options.threads)}
        command = [sys.executable, "-m", CHILD, *words]
        subprocess.run(command, cwd=row_file.ROOT, env=os.environ | environment, check=True)
        found = json.loads((Path(out) / "data" / f"{model}-{mode}.json").read_text())
    kept = ("model", "mode", "data", "backward", "tokens", "positions", "held_bytes", "peak_bytes", "memory")
    return {key: found[key] for key in kept}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
