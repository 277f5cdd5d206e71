"""The README's tables, made from rows: `python -m experiments.unified_memory.table`."""

from pathlib import Path

from experiments.harness import rows as row_file
from experiments.harness.tables import markdown, put
from lowmem.units import GIB

FOLDER = Path(__file__).resolve().parent
RESULTS, README = FOLDER / "results", FOLDER / "README.md"
ROWS = RESULTS / "rows.jsonl"
BEGIN = "<!-- made by python -m experiments.unified_memory.table -->"
NOT_MEASURED = "not measured yet"
SEEDS = {  # what the system that the groups come from does instead, by group
    "drop-ln": "a dropout and a norm that was never trained, without the residual",
    "attention-ln": "the same code under another name",
    "attention-projection": "attention without its output product",
    "ffn-ln": "an MLP and a norm that was never trained, without the residual",
}


def sections(rows: list[dict]) -> str:
    """Of each section's cases the newest row."""
    tables = {
        "traffic": (
            "**What a pass moves to the GPU and back**, GiB, in fp32 at half of the weights (with the backward: of "
            "weights and gradients), by schedule and a model of page faults; in brackets the faults, of 2 MiB each",
            _traffic,
        ),
        "card": (
            "**The same on a card**: 1,024 tokens, forward, half of the weights. On the stand-in: what the card was "
            "asked to prefetch in six passes, and the most managed memory that lay on it, GiB; times are a GPU's",
            _card,
        ),
        "fusion": (
            "**The seed's four fusions**, forward and backward of one block of GPT-2 (1,024 tokens, fp32, one CPU "
            "thread): plain and compiled by turns, how far apart",
            _fusion,
        ),
        "paged": ("**bitsandbytes' PagedAdamW32bit**, its states twice the room that is left", _paged),
    }
    parts = []
    for section, (title, table) in tables.items():
        if found := newest(rows, section):
            parts += [title, table(found)]
    if rows:
        last = rows[-1]
        parts.append(f"On {last['machine']}; torch {last['versions']['torch']}, Python {last['versions']['python']}.")
    return "\n\n".join(parts)


def newest(rows: list[dict], section: str) -> list[dict]:
    """A row of a real card hides one of the stand-in."""
    found: dict[str, dict] = {}
    for row in rows:
        if row["section"] == section and (row["case"] not in found or not row["stand_in"]):
            found[row["case"]] = row
        elif row["section"] == section and found[row["case"]]["stand_in"]:
            found[row["case"]] = row
    return list(found.values())


def _traffic(rows: list[dict]) -> str:
    ways = list(dict.fromkeys(way for row in rows for way in row["traffic"]))
    lines = []
    for row in rows:
        cells = []
        for way in ways:
            moved = row["traffic"].get(way)
            faults = f" ({moved['faults']:,})" if moved and moved["faults"] else ""
            cells.append(f"{moved['to_device'] / GIB:.2f}, {moved['to_host'] / GIB:.2f}{faults}" if moved else "")
        lines.append([row["case"].replace("--", ""), f"{row['total_bytes'] / GIB:.2f}", *cells])
    return markdown(("", "in all", *ways), lines)


def _card(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        if "not_run" in row:
            lines.append([row["case"], row["not_run"], "", "", "", NOT_MEASURED])
            continue
        card = row["memory"]
        moved = [row["fetched_bytes"], row["evicted_bytes"]]
        limit = row["limit_bytes"]
        lines.append(
            [row["case"], f"{limit / GIB:.2f}" if limit else ""]
            + [", ".join(f"{size / GIB:.2f}" for size in moved) if any(moved) else ""]
            + [f"{card['peak_managed_resident_bytes'] / GIB:.2f}" if card.get("peak_managed_resident_bytes") else ""]
            + [f"{card['peak_allocated_bytes'] / GIB:.2f}"]
            + [f"{row['latency_seconds'] * 1e3:,.0f} ms" if row["latency_seconds"] else NOT_MEASURED]
        )
    return markdown(("", "limit", "moved, and back", "most resident", "`max_memory_allocated`", "a pass"), lines)


def _fusion(rows: list[dict]) -> str:
    return markdown(
        ("", "plain / compiled", "relative difference", "what that system has instead"),
        [
            [
                row["case"], f"{row['plain_seconds'] / row['compiled_seconds']:.2f}x",
                f"{row['relative_difference']:.0e}", SEEDS[row["case"]],
            ]
            for row in rows
        ],
    )  # fmt: skip


def _paged(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        if "not_run" in row:
            lines.append([row["case"], row["not_run"], "", "", NOT_MEASURED])
            continue
        card = row.get("card", {})
        moved = f"{card['prefetched_to_device_bytes'] / GIB:.2f}" if card else NOT_MEASURED
        seconds = f"{row['step_seconds']:.3f} s" if row["step_seconds"] else NOT_MEASURED
        lines.append(
            [row["case"], *(f"{row[key] / GIB:.2f}" for key in ("states_bytes", "room_bytes")), moved, seconds]
        )
    return markdown(("", "states, GiB", "room", "moved to the GPU in a step", "a step"), lines)


def main() -> int:
    put(README, BEGIN, sections(row_file.read(ROWS)))
    return 0


if __name__ == "__main__":
    main()
