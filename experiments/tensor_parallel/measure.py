"""Measures the tables of tables.md, and keeps rows: `python -m experiments.tensor_parallel.measure`.

python -m experiments.tensor_parallel.measure --only equal

equal     50 steps of every model on 1, 2 and 4 ranks, compared with one process
memory    memory and bytes sent per rank, for GPT-2 of 124M and Llama of 135M parameters
dtensor   the same Llama by PyTorch's `parallelize_module`
killed    how long processes survive after one of them, or the command, is killed
"""

import os
import shlex
import sys

from experiments.harness import killed, sections
from experiments.harness.options import exit_code_of
from experiments.tensor_parallel import run, table

PROGRAM = "experiments.tensor_parallel.measure"
DTENSOR = "experiments.tensor_parallel.dtensor:work"
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
        "--model llama --ranks 2 --steps 100 --batch 16 --learning-rate 3e-3 --dtype fp64 --compare"
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
    return sections.measure(PROGRAM, CASES, values_of, table.ROWS, table.sections, arguments)


def values_of(section: str, words: str) -> dict:
    if section == "killed":
        return killed.ended(run.PROGRAM, words)
    if section in table.LARGE:  # before the processes begin, since glibc reads it when it is loaded
        os.environ.update(RETURN_FREED_MEMORY)
    options = run.parser().parse_args(shlex.split(words))
    job = run.planned(options)
    results = run.train(job, DTENSOR if section == "dtensor" else run.WORK)
    report = run.report_of(job, results, options.compare)
    return {key: report[key] for key in KEPT}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
