"""The README's tables, made from rows: `python -m experiments.tensor_parallel.table`."""

import argparse
import json
from pathlib import Path

from experiments.harness import killed
from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from experiments.tensor_parallel import run
from experiments.tensor_parallel.models import SMALL
from lowmem.units import MIB

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
ROWS = RESULTS / "rows.jsonl"
BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, Adam's two moments
BEGIN = "<!-- made by python -m experiments.tensor_parallel.table -->"


def sections(rows: list[dict]) -> str:
    """Of each section's command lines the newest row."""
    tables = {
        "equal": (
            "**50 steps beside one process and the ordinary model**: the largest relative difference of a loss, of the "
            "gradients of the first step, and of the weights at the end; allowed are 1e-5 in fp32 and 1e-12 in fp64",
            _equal,
        ),
        "memory": (
            "**What a rank has and sends** at batch 2 and 512 tokens. Parameters beside those that are cut / N + those "
            "that are whole; peak RAM above the process without a model, and how much of it weights, gradients and "
            "Adam's two moments are; collectives of a step, MiB that a rank sends for them in a ring, and how many "
            "theory says; the largest relative difference of a loss from one rank's",
            _memory,
        ),
        "killed": ("**Until nothing runs any more**, once a process of four is killed (SIGKILL)", killed.table),
    }
    parts = []
    for section, (title, table) in tables.items():
        if found := newest(rows, section):
            parts += [title, table(found + (newest(rows, "dtensor") if section == "memory" else []))]
    if rows:
        last = rows[-1]
        parts.append(f"On {last['machine']}; torch {last['versions']['torch']}, Python {last['versions']['python']}.")
    return "\n\n".join(parts)


def newest(rows: list[dict], section: str) -> list[dict]:
    return list({row["options"]: row for row in rows if row["section"] == section}.values())


def _equal(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        block = row["collectives_per_block"]
        given = _given(row)
        rate = [f"batch {given.batch}, rate {given.learning_rate:g}"] if given.learning_rate else []
        lines.append(
            [", ".join([_name(row)] + rate), str(row["ranks"]), row["dtype"]]
            + [f"{row[f'max_rel_{what}_difference']:.1e}" for what in ("loss", "gradient", "weight")]
            + [f"{block['forward']} and {block['backward']}"]
        )
    return markdown(("", "ranks", "", "losses", "gradients", "weights", "collectives of a block"), lines)


def _memory(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        alone = next(one for one in rows if one["model"] == row["model"] and one["ranks"] == 1)
        most = max(row["parameters_per_rank"])
        peak = max(p - b for p, b in zip(row["peak_bytes_per_rank"], row["bytes_before_per_rank"], strict=True))
        calls = sum(n for place in row["collectives"].values() for kinds in place.values() for n in kinds.values())
        losses = zip(*(next(iter(one["losses"].values())) for one in (row, alone)), strict=True)
        lines.append(
            [_name(row), str(row["ranks"]), f"{most:,}", f"{most / expected_parameters(row, alone) - 1:+.2%}"]
            + [f"{peak / MIB:,.0f}", f"{BYTES_PER_PARAMETER * most / MIB:,.0f}", str(calls)]
            + [f"{sent / MIB:,.1f}" for sent in (row["bytes_per_step"], sent_by_theory(row))]
            + [f"{max(abs(one - other) / other for one, other in losses):.0e}" if row is not alone else ""]
        )
    header = ("", "ranks", "parameters", "beside", "peak, MiB", "of it state", "collectives", "sent, MiB", "theory")
    return markdown((*header, "losses"), lines)


def expected_parameters(row: dict, alone: dict) -> float:
    """How many a rank has where all that is cut is cut evenly, by the row of one rank."""
    whole = row["replicated_parameters"]
    return (alone["parameters_per_rank"][0] - whole) / row["ranks"] + whole


def sent_by_theory(row: dict) -> float:
    """Bytes that a rank sends per step in a ring, for hidden states of h = batch x seq x width x 4 bytes: of each block
    two all-reduces forward and two backward (Megatron-LM, section 3), one of the embedding's output and one of the
    gradient of the head's input: each sends 2 (N - 1) / N of h. All-gather and reduce-scatter together send the same
    (sequence parallelism); there, gradients of weights that all have are added up besides."""
    given = _given(row)
    layers, width = shape_of(row["model"], given.shape)
    hidden = given.batch * given.seq * width * 4
    rounds = 4 * layers + 2
    sent = rounds * 2 * hidden + (2 * 4 * row["replicated_parameters"] if row["sequence_parallel"] else 0)
    return sent * (row["ranks"] - 1) / row["ranks"]


def shape_of(model: str, shape: str | None) -> tuple[int, int]:
    """Blocks and width."""
    if shape is None:
        config = SMALL[model]
    elif shape.endswith(".json"):
        config = json.loads((FOLDER / Path(shape).name).read_text())
        return config["num_hidden_layers"], config["hidden_size"]
    else:
        from lowmem.models.build import load_config

        config = load_config(shape, "random")
    return config.num_hidden_layers, config.hidden_size


def _given(row: dict) -> argparse.Namespace:
    return run.parser().parse_args(row["options"].split())


def _name(row: dict) -> str:
    name = row["model"] + (", sequence parallel" if row["sequence_parallel"] else "")
    return name + (", by parallelize_module" if row["section"] == "dtensor" else "")


def main() -> int:
    put(README, BEGIN, sections(row_file.read(ROWS)))
    return 0


if __name__ == "__main__":
    main()
