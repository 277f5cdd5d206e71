"""Tells the command about a job's process: the current case, its time limit, and the cases that are done.

A job may consist of cases. A case that raises, hangs or is killed ends its process. The command then writes the case's
row and starts the job again, which skips the cases that are done. So a failed case hides none of the later ones, and
leaves nothing on the card for them.

    time limit of a case = FLOOR_SECONDS + FACTOR x the seconds that are planned for it on this card

The factor: the clock of plans is expected to be a third off, and a card may be slower than its datasheet. The floor:
what a card's speed says nothing of, such as importing, compiling kernels, and planning on a slow processor.

Files of a job's folder carry all this, for a pipe would end with the process; monotonic time is the machine's.
"""

import json
import time
from pathlib import Path

from lowmem.cudasim.gpus import CARDS, card_of_name_reported

FACTOR = 3.0
FLOOR_SECONDS = 120.0
_OLDEST = (7, 5)  # capability of cards that PyTorch's CUDA 13 builds have code for


def time_limit(planned_seconds: float) -> float:
    """Returns the seconds after which work planned to take `planned_seconds` counts as hanging."""
    return FLOOR_SECONDS + FACTOR * planned_seconds


def flops_per_second(device_name: str) -> float:
    """Returns 16-bit FLOP/s of large products on the card of this name. A card that is not in the table counts as the
    slowest measured one."""
    card = card_of_name_reported(device_name)
    if card is not None:
        return _rate(card)
    return min(_rate(card) for card in CARDS.values() if card.measured and card.capability >= _OLDEST)


def _rate(card) -> float:
    return card.rates["bf16" if "bf16" in card.rates else "fp16"].sustained


class Progress:
    """The progress file in a job's folder: a process writes it, the command reads it."""

    def __init__(self, folder: Path):
        self._now, self._done = folder / "progress.json", folder / "cases.jsonl"

    def begin(self, case: str | None, planned_seconds: float) -> None:
        """Announces `case`, or (None) the job's common work, and its planned seconds."""
        content = {"case": case, "until": time.monotonic() + time_limit(planned_seconds)}
        part = self._now.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(self._now)

    def end(self, case: str, values: dict, checks: dict[str, bool]) -> None:
        with open(self._done, "a") as file:
            file.write(json.dumps({"case": case, "values": values, "checks": checks}) + "\n")

    def failed(self, case: str) -> None:
        self.end(case, {}, {"ended as it should": False})
        self._now.unlink()

    def case(self) -> str | None:
        """Returns the case that was begun and not ended."""
        return self._read().get("case")

    def until(self) -> float | None:
        """Returns the time (of time.monotonic) at which the work counts as hanging; None if nothing was announced."""
        return self._read().get("until")

    def done(self) -> dict[str, dict]:
        """Returns {case: {"values": ..., "checks": ...}} of those that are done, in this process or an earlier one."""
        lines = self._done.read_text().splitlines() if self._done.exists() else []
        return {found.pop("case"): found for found in map(json.loads, lines)}

    def _read(self) -> dict:
        return json.loads(self._now.read_text()) if self._now.exists() else {}
