"""Makes the tables of tables.md from rows: `python -m experiments.unified_memory.table`."""

import sys
from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.options import without_options
from experiments.harness.sections import page
from experiments.harness.tables import Page, markdown, put_all
from experiments.unified_memory.picture import draw_resident
from lowmem.units import GIB

FOLDER = Path(__file__).resolve().parent
RESULTS, TABLES = FOLDER / "results", FOLDER / "tables.md"
ROWS = RESULTS / "rows.jsonl"
BEGIN = "<!-- made by python -m experiments.unified_memory.table -->"
NOT_MEASURED = "not measured yet"
RESIDENT = "all on the GPU"
RESIDENT_FUSED = "all on the GPU, fused"
DRAWN_CASE = "gpt2-xl --backward: managed, prefetched"
SEEDS = {  # what the system that the groups come from does instead, by group
    "drop-ln": "a dropout and a norm that was never trained, without the residual",
    "attention-ln": "the same code under another name",
    "attention-projection": "attention without its output product",
    "ffn-ln": "an MLP and a norm that was never trained, without the residual",
}


def sections(rows: list[dict]) -> str:
    tables = [
        (
            ("traffic",),
            "**Moved by a pass to the GPU and back**, GiB, in fp32. The limit is half of the weights (with backward: "
            "of weights and gradients). By the schedule and a model of page faults; in brackets the faults, of 2 MiB "
            "each. Weights of a block are whole pages.",
            _traffic,
        ),
        (
            ("card",),
            "**The same on a card**: 1,024 tokens, fp32, GiB. The limit is half of the weights, of gpt3-13b 20 GiB. "
            "The peak of the schedule stands next to the managed memory that the stand-in's card counted. Bits are "
            "those of the last token's logits, or of the loss and all gradients, if values were computed. Fused groups "
            "stand beside fused groups.",
            _card,
        ),
        (
            ("fusion",),
            "**The seed's four fusions**, forward and backward of one block of GPT-2 (1,024 tokens, fp32; one CPU "
            "thread), plain and compiled alternately, and their relative difference.",
            _fusion,
        ),
        (
            ("paged",),
            "**bitsandbytes' PagedAdamW32bit**, a step with its states on the GPU, and one with its states on the "
            "host. A forward and a backward that need the room would move them there.",
            _paged,
        ),
    ]
    return page(rows, tables, newest)


def newest(rows: list[dict], section: str) -> list[dict]:
    """Returns the newest row of each case; a row of a real card hides those of the stand-in."""
    found: dict[str, dict] = {}
    for row in (row for row in rows if row["section"] == section):
        key = f"{row['case']}, {row['device']}" if section == "fusion" else row["case"]
        if key not in found or not row["stand_in"] or found[key]["stand_in"]:
            found[key] = row
    return list(found.values())


def committed_rows() -> list[dict]:
    """Returns this experiment's rows, and those of the GPU's acceptance command about it."""
    measured = row_file.read(FOLDER.parent / "gpu_acceptance" / "results" / "rows.jsonl")
    card = [
        row | {"section": section, "case": case} | row["values"]
        for row in measured
        if row["section"] == "unified memory" and row_file.is_measured(row) and ": " in row["name"]
        for _, section, case in [row["name"].split(": ", 2)]
    ]
    return row_file.read(ROWS) + card


def _traffic(rows: list[dict]) -> str:
    ways = list(dict.fromkeys(way for row in rows for way in row["traffic"]))
    lines = []
    for row in rows:
        cells = [_moved(row["traffic"][way]) if way in row["traffic"] else "" for way in ways]
        lines.append([row["case"].replace("--", ""), f"{row['total_bytes'] / GIB:.2f}", *cells])
    return markdown(("", "in all", *ways), lines)


def _card(rows: list[dict]) -> str:
    digests = {row["case"]: row.get("digest") for row in rows}
    lines = []
    for row in rows:
        shape, placement = row["case"].split(": ")
        name = row["case"].replace("--", "")
        if "not_run" in row:
            lines.append([name, *[""] * 5, f"{NOT_MEASURED}: {row['not_run']}"])
            continue
        card, moved = row["memory"], row["traffic"] or {"to_device": 0, "to_host": 0, "faults": 0}
        beside = RESIDENT_FUSED if "fused" in placement else RESIDENT
        bits = digests[row["case"]] and digests.get(f"{shape}: {beside}")
        resident = card.get("peak_managed_resident_bytes")
        lines.append([
            name,
            f"{row['limit_bytes'] / GIB:.2f}" if row["limit_bytes"] else "",
            _moved(moved),
            f"{row['planned_peak_bytes'] / GIB:.2f}" + (f", {resident / GIB:.2f}" if resident else ""),
            f"{card['peak_allocated_bytes'] / GIB:.2f}, {row['peak_used_bytes'] / GIB:.2f}",
            "" if not bits or placement == beside else "equal" if bits == row["digest"] else "others",
            f"{row['latency_seconds'] * 1e3:,.0f} ms" if row["latency_seconds"] else NOT_MEASURED,
        ])  # fmt: skip
    header = (
        "", "limit", "a pass moves, and back", "weights on the GPU: schedule, card",
        "`max_memory_allocated`, in use on the card", "bits", "a pass takes",
    )  # fmt: skip
    return markdown(header, lines)


def _moved(traffic: dict[str, int]) -> str:
    faults = f" ({traffic['faults']:,})" if traffic["faults"] else ""
    return f"{traffic['to_device'] / GIB:.2f}, {traffic['to_host'] / GIB:.2f}{faults}"


def _fusion(rows: list[dict]) -> str:
    return markdown(
        ("", "on", "plain / compiled", "relative difference", "what that system has instead"),
        [
            [
                row["case"], row["device"], f"{row['plain_seconds'] / row['compiled_seconds']:.2f}x",
                f"{row['relative_difference']:.0e}", SEEDS[row["case"]],
            ]
            for row in rows
        ],
    )  # fmt: skip


def _paged(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        if "not_run" in row:
            lines.append([row["case"], *[""] * 3, f"{NOT_MEASURED}: {row['not_run']}"])
            continue
        ways = [row["resident"], row["sent_back"]]
        lines.append(
            [row["case"], f"{row['states_bytes'] / GIB:.2f}"]
            + [
                NOT_MEASURED if way["to_device_bytes"] is None else f"{way['to_device_bytes'] / GIB:.2f}"
                for way in ways
            ]
            + [", ".join(f"{way['step_seconds']:.3f} s" if way["step_seconds"] else NOT_MEASURED for way in ways)]
        )
    return markdown(
        ("", "states, GiB", "moved to the GPU where they were there", "where they had gone", "a step takes"), lines
    )


def pages() -> list[Page]:
    return [(TABLES, BEGIN, sections(committed_rows()))]


def main() -> None:
    put_all(pages())
    for row in newest(committed_rows(), "card"):
        if row["case"] == DRAWN_CASE:
            draw_resident(row["resident"], RESULTS / "resident.png")


if __name__ == "__main__":
    sys.exit(without_options("experiments.unified_memory.table", __doc__, main))
