"""The README's tables, made from rows: `python -m experiments.tensor_parallel.table`."""

import argparse
from pathlib import Path

from experiments.harness import killed
from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from experiments.tensor_parallel import run
from experiments.tensor_parallel.models import SEQ, kind_of
from lowmem.units import MIB

LARGE = ("memory", "dtensor")  # sections whose rows are of the same models, batch and length
FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
ROWS = RESULTS / "rows.jsonl"
BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, Adam's two moments
BEGIN = "<!-- made by python -m experiments.tensor_parallel.table -->"


def sections(rows: list[dict]) -> str:
    """Returns the README's tables, from the newest row of each command line."""
    tables = {
        "equal": (
            "**50 steps, compared with one process and the ordinary model**: the largest relative difference of a "
            "loss, of the first step's gradients, and of the weights at the end. Up to 1e-5 is allowed in fp32, and "
            "1e-12 in fp64.",
            _equal,
        ),
        "memory": (
            "**Memory of a rank** at batch 2 and 512 tokens, MiB. Parameters, and divided parameters / N + whole ones; "
            "weights, gradients and Adam's moments (16 bytes each); tensors kept for backward, and their theory; peak "
            "RAM above the process without a model.",
            _memory,
        ),
        "communication": (
            "**Sent by a rank** in one of these steps: collectives, MiB in a ring, and theory; the largest relative "
            "difference of a loss from one rank's.",
            _communication,
        ),
        "killed": ("**Until nothing runs any more**, once a process of four is killed (SIGKILL)", killed.table),
    }
    parts = []
    for section, (title, table) in tables.items():
        if found := newest(rows, *{"memory": LARGE, "communication": LARGE}.get(section, [section])):
            parts += [title, table(found)]
    if rows:
        last = rows[-1]
        parts.append(f"On {last['machine']}; torch {last['versions']['torch']}, Python {last['versions']['python']}.")
    return "\n\n".join(parts)


def newest(rows: list[dict], *of: str) -> list[dict]:
    return list({(row["section"], row["options"]): row for row in rows if row["section"] in of}.values())


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
        one = alone(row, rows)
        most, saved = max(row["parameters_per_rank"]), max(row["saved_bytes_per_rank"])
        peak = max(p - b for p, b in zip(row["peak_bytes_per_rank"], row["bytes_before_per_rank"], strict=True))
        lines.append(
            [_name(row), str(row["ranks"]), f"{most:,}", f"{most / expected_parameters(row, one) - 1:+.2%}"]
            + [f"{BYTES_PER_PARAMETER * most / MIB:,.0f}"]
            + [f"{count / MIB:,.0f}" if saved else "" for count in (saved, saved_by_theory(row, one))]
            + [f"{peak / MIB:,.0f}"]
        )
    return markdown(("", "ranks", "parameters", "beside", "state", "kept", "theory", "peak"), lines)


def _communication(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        one = alone(row, rows)
        if row is one:
            continue
        calls = sum(n for place in row["collectives"].values() for kinds in place.values() for n in kinds.values())
        losses = zip(*(next(iter(of["losses"].values())) for of in (row, one)), strict=True)
        lines.append(
            [_name(row), str(row["ranks"]), str(calls)]
            + [f"{sent / MIB:,.1f}" for sent in (row["bytes_per_step"], sent_by_theory(row))]
            + [f"{max(abs(a - b) / b for a, b in losses):.0e}"]
        )
    return markdown(("", "ranks", "collectives", "sent", "theory", "losses"), lines)


def alone(row: dict, rows: list[dict]) -> dict:
    """Returns the row of one rank and the same model."""
    return next(one for one in rows if one["model"] == row["model"] and one["ranks"] == 1)


def saved_by_theory(row: dict, one: dict) -> float:
    """Returns the bytes that forward keeps for backward, by theory. Every rank has the whole inputs and outputs of the
    norms: two per block, and the last one. Llama's norms also keep a product. Everything else is divided. With sequence
    parallelism only the outputs are whole: they are gathered for the next layers. Korthikanti et al., section 4.2.2,
    gather them again in backward."""
    hidden, blocks = _hidden_bytes(row)
    norms = 2 * blocks + 1
    whole = hidden * norms * (3 if row["model"] == "llama" else 2)
    gathered = hidden * norms if row["sequence_parallel"] else whole
    return gathered + (one["saved_bytes_per_rank"][0] - gathered) / row["ranks"]


def expected_parameters(row: dict, one: dict) -> float:
    """Returns how many a rank has where all that is cut is cut evenly, by the row of one rank."""
    whole = row["replicated_parameters"]
    return (one["parameters_per_rank"][0] - whole) / row["ranks"] + whole


def sent_by_theory(row: dict) -> float:
    """Returns the bytes that a rank sends per step in a ring, for hidden states of h bytes.

    Each block has two all-reduces forward and two backward (Megatron-LM, section 3). The embedding's output has one,
    and the gradient of the head's input one. Each sends 2 (N - 1) / N of h. All-gather and reduce-scatter together send
    the same (sequence parallelism); there, gradients of shared weights are added up, too.
    """
    hidden, blocks = _hidden_bytes(row)
    rounds = 4 * blocks + 2
    sent = rounds * 2 * hidden + (2 * 4 * row["replicated_parameters"] if row["sequence_parallel"] else 0)
    return sent * (row["ranks"] - 1) / row["ranks"]


def _hidden_bytes(row: dict) -> tuple[int, int]:
    """Returns the bytes of all hidden states between two layers in fp32, and the number of blocks."""
    given = _given(row)
    config = kind_of(row["model"], shape=given.shape).config
    return given.batch * (given.seq or SEQ) * config.hidden_size * 4, config.num_hidden_layers


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
