"""Makes all tables and pictures again from the committed rows: `make results`.

A test fails if a table in README.md, docs/results.md or an experiment's README disagrees with the rows.
"""

import sys
from pathlib import Path

from experiments.bigger_models import table as bigger_models
from experiments.bigger_models import today
from experiments.code_generation import table as code_generation
from experiments.gpu_acceptance import planned_levers
from experiments.gpu_acceptance import table as speed
from experiments.harness.options import without_options
from experiments.harness.tables import Page, put_all
from experiments.memory_estimation import pictures as memory_pictures
from experiments.memory_estimation import table as memory
from experiments.nested_tensors import table as nested_tensors
from experiments.parallel_3d import table as parallel_3d
from experiments.peers import table as peers
from experiments.pipeline_parallel import table as pipeline_parallel
from experiments.plan_accuracy import table as plan_accuracy
from experiments.several_gpus import killed, scaling
from experiments.tensor_parallel import table as tensor_parallel
from experiments.unified_memory import table as unified_memory

ROOT = Path(__file__).resolve().parents[1]
README, RESULTS_PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
BEGIN = "<!-- made by make results -->"
TABLES = (
    *(bigger_models, code_generation, memory, nested_tensors, parallel_3d, peers, pipeline_parallel, plan_accuracy),
    *(tensor_parallel, unified_memory),
)


def fits() -> str:
    """Returns the root README's table of today's models and cards."""
    return f"{today.heading()}\n\n{today.table(today.ROWS.committed())}"


def sections() -> str:
    measured, planned = speed.committed_rows()
    ram = [row for row in memory.committed_rows() if row["kind"] == "trained"]
    return "\n\n".join(
        (
            "**On a GPU**, under 11 GiB (XL: and 16 GiB of RAM), against plain `transformers` forward and backward in "
            "bf16 autocast without a cap, at its best micro-batch up to 32",
            speed.speed_table(measured),
            "A step without single changes of its code, as a multiple of the step with all "
            "(`experiments/gpu_acceptance/levers.py`); everything is on the card",
            speed.levers_table(measured),
            speed.checks_table(measured),
            "**Predicted by plans**, by sequences per step: a whole step's speed, as a share of its own forward and "
            "backward. These keep everything, and have neither cap nor update. The last column is a multiple of the "
            "stock `transformers` model's forward and backward (bf16 autocast, uncompiled, no cap), by the same clock",
            speed.plans_table(planned),
            "![Speed by tokens per step](../experiments/gpu_acceptance/results/speed.png)",
            f"**Predicted: {planned_levers.BATCH} x {planned_levers.SEQ:,} tokens on the card's own memory**, without "
            "single changes of the code as a multiple of the step with all. The limit is the time of the model's own "
            "FLOP at the rate of large matrix products (`experiments/gpu_acceptance/planned_levers.py`)",
            planned_levers.table(planned_levers.ROWS.committed()),
            planned_levers.reached(planned_levers.ROWS.committed()),
            "**Predicted: GPT-2-XL with few sequences**, under 11 GiB of GPU memory and 16 GiB of RAM. Without "
            "clipping, updates need not wait for the norm of all gradients; the plan chooses when they are made",
            planned_levers.clipping_table(planned_levers.ROWS.committed()),
            "**Predicted against measured**",
            speed.memory_table(measured),
            "RAM of training runs on the CPU, GiB:",
            memory.ram_table(ram),
            "**How large a model**: predicted peaks, plain training and lowmem "
            "([tables](../experiments/memory_estimation/tables.md))",
            "![Predicted peaks against the size of the model](../experiments/memory_estimation/results/sizes.png)",
        )
    )


def pages() -> list[Page]:
    return [(README, BEGIN, fits()), (RESULTS_PAGE, BEGIN, sections()), *killed.pages(), *scaling.pages()]


def main() -> None:
    put_all(pages())
    for table in TABLES:
        table.main()
    rows = memory.committed_rows()
    memory_pictures.draw_batches(rows, memory.RESULTS / "memory.png")
    memory_pictures.draw_sizes(rows, memory.RESULTS / "sizes.png")
    speed.draw_speed(*speed.committed_rows(), speed.RESULTS / "speed.png")


if __name__ == "__main__":
    sys.exit(without_options("experiments.results", __doc__, main))
