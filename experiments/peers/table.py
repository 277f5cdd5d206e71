"""Makes the tables of tables.md and the README from the rows in results/: `python -m experiments.peers.table`."""

import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.tables import Page, markdown, put_all
from experiments.peers import published
from experiments.peers.catalogue import PEERS
from lowmem.units import GIB

BEGIN, BEGIN_PUBLISHED = "<!-- peers -->", "<!-- made by python -m experiments.peers.table -->"
FOLDER = Path(__file__).resolve().parent
README, TABLES = FOLDER / "README.md", FOLDER / "tables.md"
FILES = ("rows.jsonl", "update.jsonl")
NOT_MEASURED = "not measured yet"
WANTED = ("gpt2-large, GPU 11 GiB", "gpt2-xl, GPU 11 GiB and RAM 16 GiB")


def table(rows: list[dict]) -> str:
    """Returns all tables in Markdown: trainings, updates on a CPU, and how each peer is set up."""
    on_a_gpu = [row for row in rows if not row["device"].startswith("the CPU")]
    nothing = markdown(("", *WANTED), [[name, *[NOT_MEASURED] * len(WANTED)] for name in PEERS])
    trained = [training_table(rows)] + ([] if training_table(on_a_gpu) else [nothing])
    lines = [[peer.name, peer.settings, peer.gives_up, peer.source] for peer in PEERS.values()]
    parts = {
        "Training under both caps": "\n\n".join(filter(None, reversed(trained))),
        "The update alone, on a CPU": update_table(rows),
        "How each is set up": markdown(("", "set up", "gives up", "source"), lines),
    }
    return "\n\n".join(f"**{title}**\n\n{content}" for title, content in parts.items())


def training_table(rows: list[dict]) -> str:
    """Returns a table for each model, device and caps, of the newest row of each peer."""
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["section"] == "peers" and row_file.is_measured(row) and ": " not in row["name"]:
            model, peer = row["name"].rsplit(maxsplit=1)
            key = model, row["device"], row["caps"]["gpu_bytes"], row["caps"]["ram_bytes"]
            group = groups.setdefault(key, {})
            if row["error"] is None or peer not in group or group[peer]["error"] is not None:
                group[peer] = row  # a time that ran out does not undo a measurement
    return "\n\n".join(_one_training(*key, found) for key, found in groups.items())


def _one_training(
    model: str, device: str, gpu_limit_bytes: int | None, ram_limit_bytes: int | None, found: dict[str, dict]
) -> str:
    header = (
        "", "fits", "micro-batch", "sequences/s", "GPU reserved, GiB", "managed, GiB", "RAM, GiB", "last loss",
        "distance of the weights",
    )  # fmt: skip
    lines = [[name, *_cells(found.get(name))] for name in PEERS]
    shape = next((row["values"] for row in found.values() if "seq" in row["values"]), None)
    trained = f", {shape['batch']} x {shape['seq']} tokens, {shape['steps']} steps" if shape else ""
    gpu, ram = (f"{limit / GIB:g} GiB" if limit else "no cap" for limit in (gpu_limit_bytes, ram_limit_bytes))
    return f"{model} on {device}{trained}; caps: GPU {gpu}, RAM {ram}\n\n{markdown(header, lines)}"


def _cells(row: dict | None) -> list[str]:
    if row is None:
        return [NOT_MEASURED] + [""] * 7
    if row["error"]:
        return [row["error"].splitlines()[0]] + [""] * 7
    values = row["values"]
    sizes = [
        "" if values.get(name) is None else f"{values[name] / GIB:.2f}"
        for name in ("gpu_reserved_peak_bytes", "gpu_managed_bytes", "ram_peak_bytes")
    ]
    numbers = [
        "" if values.get(name) is None else f"{values[name]:{form}}"
        for name, form in (("sequences_per_second", ".3g"), ("last_loss", ".4f"), ("distance", ".2g"))
    ]
    fits = "the reference, no caps" if values["peer"] == "plain" else _fits(values)
    return [fits, str(values.get("micro_batch") or "its plan's"), numbers[0], *sizes, *numbers[1:]]


def _fits(values: dict) -> str:
    if values.get("why"):
        return f"no: {values['why']}"
    gpu = "GPU with managed memory" if values.get("gpu_managed_bytes") else "GPU"
    missed = [what for what, key in ((gpu, "gpu_fits"), ("RAM", "ram_fits")) if not values[key]]
    return f"no: {' and '.join(missed)} over the cap" if missed else "yes"


def update_table(rows: list[dict]) -> str:
    """Returns a table for each machine, of the newest run of update.py."""
    groups: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["section"] == "peers update" and row_file.is_measured(row):
            groups.setdefault(row["device"], {})[row["name"]] = row
    parts = []
    for device, found in groups.items():
        newest = max(row["values"].get("run", "") for row in found.values())
        found = {name: row for name, row in found.items() if row["values"].get("run") == newest}
        shared = next(row["values"] for row in found.values())
        lines = [
            [name, row["error"], "", "", ""] if row["error"] else [
                name, f"{row['values']['ns_per_parameter']:.2f}", str(row["values"]["bytes_per_parameter"]),
                f"{row['values']['bytes_per_second'] / GIB:.2f}", f"{row['values']['share_of_copy']:.0%}",
            ]
            for name, row in found.items()
        ]  # fmt: skip
        said = (
            f"{device}; {shared['parameters']:,} parameters, median of "
            f"{shared['repeats']} rounds; `copy_` moves {shared['copy_bytes_per_second'] / GIB:.1f} GiB/s, `add_` in "
            f"place {shared['add_bytes_per_second'] / GIB:.1f}; load average {shared['load_average']:.1f} at the start"
        )
        header = ("update", "ns per parameter", "bytes it must move", "GiB/s", "share of `copy_`'s speed")
        parts.append(f"{said}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts) or NOT_MEASURED


def committed_rows() -> list[dict]:
    """Returns the committed rows on peers, and the GPU acceptance command's."""
    files = [
        *(FOLDER / "results" / name for name in FILES),
        FOLDER.parent / "gpu_acceptance" / "results" / "rows.jsonl",
    ]
    return [row for file in files for row in row_file.read(file) if row["section"].startswith("peers")]


def pages() -> list[Page]:
    speeds = published.table(published.ROWS.committed())
    return [(TABLES, BEGIN, table(committed_rows())), (README, BEGIN_PUBLISHED, speeds)]


def main() -> None:
    put_all(pages())


if __name__ == "__main__":
    sys.exit(without_options("experiments.peers.table", __doc__, main))
