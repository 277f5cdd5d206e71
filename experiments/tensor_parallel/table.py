"""Makes the tables of README.md and tables.md from rows: `python -m experiments.tensor_parallel.table`."""

import argparse
import sys
from pathlib import Path

from experiments.harness import killed
from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.sections import page
from experiments.harness.tables import Page, learned_table, markdown, put_all
from experiments.tensor_parallel import curves, run, theory
from experiments.tensor_parallel.models import SEQ, kind_of
from experiments.tensor_parallel.rounding import MOST
from experiments.tensor_parallel.worker import DTYPES
from lowmem.units import MIB

LARGE = ("memory", "dtensor")  # sections whose rows are of the same models, batch and length
FOLDER = Path(__file__).resolve().parent
RESULTS, README, TABLES = FOLDER / "results", FOLDER / "README.md", FOLDER / "tables.md"
ROWS = RESULTS / "rows.jsonl"
BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, Adam's two moments
LEARNED_BEGIN = "<!-- learned, made by python -m experiments.tensor_parallel.table -->"
BEGIN = "<!-- made by python -m experiments.tensor_parallel.table -->"


def sections(rows: list[dict]) -> str:
    tables = [
        (
            ("equal",),
            "**50 steps, if the options say no other number, compared with one process and the ordinary model**: the "
            "largest relative difference of a loss, of the first step's gradients, and of the weights at the end. In "
            "brackets: as multiples of what rounding does to one process in as many steps. That is the larger of: "
            "fp32 from fp64 (in fp64 2^-29 of it), each batch in reverse order from itself. Up to "
            f"{MOST:g} is allowed; of gradients only in fp64.",
            _equal,
        ),
        (
            LARGE,
            "**Memory of a rank** at batch 2 and 512 tokens, MiB. Parameters, and how far they are from theory; "
            "weights, gradients and Adam's moments (16 bytes each); tensors kept for backward, and their theory; peak "
            "RAM above the process without a model. Theory knows the model's config alone.",
            _memory,
        ),
        (
            LARGE,
            "**Sent by a rank** in one of these steps: collectives, MiB in a ring, and theory; the largest relative "
            "difference of a loss from one rank's.",
            _communication,
        ),
        (("killed",), killed.TITLE, killed.table),
    ]
    return page(rows, tables)


def learned(rows: list[dict]) -> str:
    newest = {(row["model"], row["name"]): row for row in rows}
    return learned_table(newest.values(), ("model", "name"))


def _equal(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        block = row["collectives_per_block"]
        given = _given(row)
        rate = [f"batch {given.batch}, rate {given.learning_rate:g}"] if given.learning_rate else []
        lines.append(
            [", ".join([_name(row)] + rate), str(row["ranks"]), row["dtype"]]
            + [_differs(row, name) for name in run.COMPARED]
            + [f"{block['forward']} and {block['backward']}"]
        )
    return markdown(("", "ranks", "", "losses", "gradients", "weights", "collectives of a block"), lines)


def _differs(row: dict, name: str) -> str:
    if row.get("diverged"):
        return "diverged"
    times = (row.get("in_roundings") or {}).get(name)
    return f"{row[run.COMPARED[name]]:.1e}" + ("" if times is None else f" ({times:.2g})")


def _memory(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        expected = by_theory(row)
        most, saved = max(row["parameters_per_rank"]), max(row["saved_bytes_per_rank"])
        peak = max(p - b for p, b in zip(row["peak_bytes_per_rank"], row["bytes_before_per_rank"], strict=True))
        lines.append(
            [_name(row), str(row["ranks"]), f"{most:,}", f"{most / expected['parameters'] - 1:+.2%}"]
            + [f"{BYTES_PER_PARAMETER * most / MIB:,.0f}"]
            + [f"{count / MIB:,.0f}" if saved else "" for count in (saved, expected["kept"])]
            + [f"{peak / MIB:,.0f}"]
        )
    return markdown(("", "ranks", "parameters", "off theory", "state", "kept", "theory", "peak"), lines)


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
            + [f"{sent / MIB:,.1f}" for sent in (row["bytes_per_step"], by_theory(row)["sent"])]
            + [f"{max(abs(a - b) / b for a, b in losses):.0e}"]
        )
    return markdown(("", "ranks", "collectives", "sent", "theory", "losses"), lines)


def alone(row: dict, rows: list[dict]) -> dict:
    return next(one for one in rows if one["model"] == row["model"] and one["ranks"] == 1)


def by_theory(row: dict) -> dict[str, float]:
    """Returns a rank's parameters, and the bytes kept and sent, from the row's command line alone."""
    given = _given(row)
    config = kind_of(given.model, shape=given.shape).config
    of = (config, given.ranks, given.batch * (given.seq or SEQ), DTYPES[given.dtype].itemsize, given.sequence_parallel)
    return {
        "parameters": theory.parameters(config, given.ranks),
        "kept": theory.kept_bytes(*of),
        "sent": theory.sent_bytes(*of),
    }


def _given(row: dict) -> argparse.Namespace:
    return run.parser().parse_args(row["options"].split())


def _name(row: dict) -> str:
    name = row["model"] + (", sequence parallel" if row["sequence_parallel"] else "")
    return name + (", by parallelize_module" if row["section"] == "dtensor" else "")


def pages() -> list[Page]:
    return [
        (TABLES, BEGIN, sections(row_file.read(ROWS))),
        (README, LEARNED_BEGIN, learned(row_file.read(curves.RESULTS / curves.NAME))),
    ]


def main() -> None:
    put_all(pages())
    curves.draw(row_file.read(curves.RESULTS / curves.NAME), RESULTS / curves.PICTURE)


if __name__ == "__main__":
    sys.exit(without_options("experiments.tensor_parallel.table", __doc__, main))
