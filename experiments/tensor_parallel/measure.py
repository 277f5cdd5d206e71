"""Measures the README's tables, and keeps rows: `python -m experiments.tensor_parallel.measure`.

python -m experiments.tensor_parallel.measure --only equal

equal     compares 50 steps of every model on 1, 2 and 4 ranks with one process
memory    measures memory and bytes sent per rank, for GPT-2 of 124M and Llama of 135M parameters
dtensor   divides the same Llama by PyTorch's `parallelize_module`
killed    measures how long processes survive after one of them, or the command, is killed
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from experiments.harness import killed
from experiments.harness import rows as row_file
from experiments.harness.options import under_runs
from experiments.tensor_parallel import dtensor, run, worker
from experiments.tensor_parallel.table import LARGE as LARGE_SECTIONS
from experiments.tensor_parallel.table import ROWS, sections

PROGRAM = "experiments.tensor_parallel.measure"
MODELS = ("mlp", "mlp-norm", "gpt2", "gpt2 --sequence-parallel", "llama", "llama --sequence-parallel", "resnet")
RANKS = (1, 2, 4)
REAL = {"gpt2": "gpt2", "llama": "experiments/tensor_parallel/llama-135m.json"}
LARGE = "--steps 2 --batch 2 --seq 512 --clip 0"
CASES = {
    "equal": [
        f"--model {model} --ranks {ranks} --dtype {dtype} --compare"
        for model in MODELS
        for dtype in ("fp32", "fp64")
        for ranks in RANKS
        if ranks > 1 or "sequence" not in model
    ]
    + [  # rates at which the loss falls: rounding grows, and stays small in fp64
        "--model llama --ranks 2 --steps 100 --batch 16 --learning-rate 3e-3 --dtype fp64 --compare",
    ]
    + [
        f"--model resnet --learning-rate 5e-4 --batch 32 --ranks {ranks} --dtype {dtype} --compare"
        for ranks, dtype in ((1, "fp32"), (2, "fp64"))
    ],
    "memory": [
        f"--model {model} --shape {REAL[model.split()[0]]} --ranks {ranks} {LARGE}"
        for model in ("gpt2", "gpt2 --sequence-parallel", "llama", "llama --sequence-parallel")
        for ranks in RANKS
        if ranks > 1 or "sequence" not in model
    ],
    "dtensor": [f"--model llama --shape {REAL['llama']} --ranks {ranks} {LARGE}" for ranks in RANKS[1:]],
    "killed": killed.CASES,
}
# By itself glibc keeps freed tensors of up to 32 MiB, and does not find them all again: up to 800 MiB more of a rank.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
KEPT = (
    *("model", "ranks", "steps", "dtype", "sequence_parallel", "max_rel_loss_difference", "max_rel_weight_difference"),
    *("max_rel_gradient_difference", "in_roundings", "diverged", "collectives_per_block", "collectives"),
    *("bytes_per_step", "parameters_per_rank", "replicated_parameters", "bytes_before_per_rank"),
    *("peak_bytes_per_rank", "saved_bytes_per_rank", "losses"),
)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", allow_abbrev=False)
    parser.add_argument("--only", choices=CASES, action="append", help="default: all of them")
    parser.add_argument("--matching", default="", metavar="TEXT", help="only command lines with this text in them")
    parser.add_argument("--rows", type=Path, default=under_runs(ROWS), metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
    for section in options.only or CASES:
        for words in (words for words in CASES[section] if options.matching in words):
            print(section, words, flush=True)
            found = killed.ended(run.PROGRAM, words) if section == "killed" else trained(section, words)
            row_file.append(options.rows, common | {"section": section, "options": words} | found)
    print(sections(row_file.read(options.rows)))
    return 0


def trained(section: str, words: str) -> dict:
    """Runs with these options, and returns a row."""
    if section in LARGE_SECTIONS:  # before the processes begin, since glibc reads it when it is loaded
        os.environ.update(RETURN_FREED_MEMORY)
    options = run.parser().parse_args(shlex.split(words))
    job = run.planned(options)
    results = run.train(job, (dtensor if section == "dtensor" else worker).__name__)
    report = run.report_of(job, results, options.compare)
    return {key: report[key] for key in KEPT}


if __name__ == "__main__":
    sys.exit(main())
