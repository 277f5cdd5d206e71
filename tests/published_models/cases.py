"""All cases: the configs of configs.jsonl, and the layouts of byte_level.py and sentence_piece.py."""

import json
from pathlib import Path

from tests.published_models import byte_level, layouts, sentence_piece
from tests.published_models.runs import Case

FILE = Path(__file__).with_name("configs.jsonl")


def all_cases() -> list[Case]:
    """Returns every published folder. Each tokenizer's folder has a model of its family."""
    rows = {row["hub"]: row for row in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
    found = [
        Case(name, "config", row["config"], layouts.plain, tuple(row.get("weights", ())), row.get("generation"))
        for name, row in rows.items()
    ]
    for layout in (*byte_level.LAYOUTS, *sentence_piece.LAYOUTS):
        row = rows[layout.hub]
        chat = "chat_template" in (layout.config or {}) or "chat_template.jinja" in layout.extra
        found.append(
            Case(layout.name, "tokenizer", row["config"], layout.write, tuple(row.get("weights", ())), None, chat)
        )
    return found
