"""Measures the README's tables, and keeps rows: `python -m experiments.parallel_3d.measure`.

python -m experiments.parallel_3d.measure --only mesh

mesh    every mesh of eight processes in fp64, beside one process
more    other schedules, dropout, and fp32
"""

import shlex
import sys

from experiments.harness import rows as row_file
from experiments.harness import sections
from experiments.harness.options import exit_code_of
from experiments.parallel_3d import run, table
from experiments.parallel_3d.table import ROWS

PROGRAM = "experiments.parallel_3d.measure"
MESHES = {  # stages, replicas, parts
    "gpt2": ("8 1 1", "4 2 1", "4 1 2", "2 4 1", "2 2 2", "2 1 4", "1 8 1", "1 4 2", "1 2 4", "1 1 8"),
    "llama": ("8 1 1", "4 2 1", "2 2 2", "1 8 1", "1 2 4"),
}
SMALL_MESH = "--pp 2 --dp 2 --tp 2 --batch 32 --compare"
CASES = {
    "mesh": [
        "--model {} --pp {} --dp {} --tp {} --batch 32 --compare".format(model, *mesh.split())
        for model, meshes in MESHES.items()
        for mesh in meshes
    ],
    "more": [
        f"--model gpt2 --dtype fp32 {SMALL_MESH}",
        f"--model llama --dtype fp32 {SMALL_MESH}",
        f"--model gpt2 --dropout 0.1 {SMALL_MESH}",
        f"--model llama --dropout 0.1 --schedule zb-h1 {SMALL_MESH}",
        f"--model gpt2 --schedule gpipe {SMALL_MESH}",
    ],
}
KEPT = (
    *("model", "mesh", "schedule", "micro_batches", "steps", "dtype", "dropout", "layers_per_stage", "diverged"),
    *("copies_differ", "loss_distance", "weight_distance", "allowed", "bubble_planned", "peak_in_flight"),
    *("off_theory_bytes", "parameters_bytes", "gradients_bytes", "moments_bytes", "sent_bytes"),
)


def sources() -> str:
    folders = ("harness", "parallel_3d", "pipeline_parallel", "tensor_parallel")
    return row_file.digest(*(f"experiments/{folder}/*.py" for folder in folders))


def main(arguments: list[str] | None = None) -> int:
    return sections.measure(PROGRAM, CASES, values_of, ROWS, table.sections, arguments, sources())


def values_of(section: str, words: str) -> dict:
    options = run.parser().parse_args(shlex.split(words))
    job = run.planned(options)
    report = run.report_of(job, run.train(job), options.compare)
    return {key: report[key] for key in KEPT}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
