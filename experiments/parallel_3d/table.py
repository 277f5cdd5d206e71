"""Makes the README's tables from rows: `python -m experiments.parallel_3d.table`."""

import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.sections import page
from experiments.harness.tables import Page, markdown, put_all
from experiments.parallel_3d import run
from experiments.parallel_3d.comparison import LARGEST
from experiments.parallel_3d.theory import Expected, expected
from experiments.parallel_3d.worker import AXES
from lowmem.units import KIB

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
ROWS = RESULTS / "rows.jsonl"
BEGIN = "<!-- made by python -m experiments.parallel_3d.table -->"
HELD, SENT = ("parameters", "gradients", "moments"), AXES[:3]
DISTANCES = ("losses", "weights")


def sections(rows: list[dict]) -> str:
    tables = [
        (
            ("mesh",),
            "**Eight processes, 4 micro-batches each, fp64.** KiB of the process with the most: held, and sent in a "
            "step by axis; measured / by theory, which knows the config and the mesh alone. Off: the largest "
            "difference in bytes of any process, in anything held or sent. Bubble: planned, if all layers take as "
            "long. Losses and weights: the distance from one process after 5 steps, relative to the largest value of "
            f"a tensor; {LARGEST:.0e} is allowed.",
            _meshes,
        ),
        (("more",), "**Other trainings of the same mesh**; allowed in brackets.", _more),
    ]
    return page(rows, tables)


def by_theory(row: dict) -> list[Expected]:
    """Returns every process's bytes, from the row's command line alone."""
    job = run.planned(run.parser().parse_args(row["options"].split()))
    return [expected(job, job.mesh.place(process)) for process in range(job.mesh.processes)]


def _meshes(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        theory = by_theory(row)
        held = [_both(row[f"{name}_bytes"], max(getattr(one, name) for one in theory)) for name in HELD]
        sent = [_both(row["sent_bytes"][axis], max(one.sent[axis] for one in theory)) for axis in SENT]
        found = [f"{row['off_theory_bytes']:g}", f"{row['bubble_planned']:.1%}"]
        lines.append([_name(row), *held, *sent, *found, *_distances(row)])
    return markdown(("stages x replicas x parts", *HELD, *SENT, "off", "bubble", *DISTANCES), lines)


def _more(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        allowed = [f" ({row['allowed'][name]:.0e})" for name in ("loss", "weight")]
        cells = [found + most for found, most in zip(_distances(row), allowed, strict=True)]
        words = [row["schedule"], row["dtype"], *["dropout"] * (row["dropout"] > 0)]
        lines.append([_name(row), ", ".join(words), f"{row['off_theory_bytes']:g}", *cells])
    return markdown(("stages x replicas x parts", "", "off", *DISTANCES), lines)


def _distances(row: dict) -> list[str]:
    if row["diverged"] or row["copies_differ"]:
        return ["diverged" if row["diverged"] else "copies differ"] * 2
    return [f"{row[f'{name}_distance']:.1e}" for name in ("loss", "weight")]


def _both(found: float, theory: float) -> str:
    return f"{found / KIB:,.0f} / {theory / KIB:,.0f}" if theory or found else "0"


def _name(row: dict) -> str:
    return f"{row['model']} {' x '.join(map(str, row['mesh']))}"


def pages() -> list[Page]:
    return [(README, BEGIN, sections(row_file.read(ROWS)))]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.parallel_3d.table", __doc__, main))
