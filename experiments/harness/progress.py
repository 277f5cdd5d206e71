"""Writes and reads the files by which a command follows its job's process: case, time limit and finished cases.

A case that raises, hangs or is killed ends its process. The command then restarts the job without finished cases.
"""

import json
import time
from pathlib import Path

from lowmem.cudasim.gpus import CARDS, card_of_name_reported

# Time limit of a case: FLOOR_SECONDS + FACTOR x its planned seconds. The plan's clock may be a third off, and a card
# slower than its datasheet. The floor covers importing, compiling kernels, and planning on a slow processor.
FACTOR = 3.0
FLOOR_SECONDS = 120.0
_OLDEST = (7, 5)  # capability of cards that PyTorch's CUDA 13 builds have code for


def time_limit(planned_seconds: float) -> float:
    return FLOOR_SECONDS + FACTOR * planned_seconds


def flops_per_second(device_name: str) -> float:
    """Returns the 16-bit FLOP/s that a card reaches in large matmuls. For an unknown card, returns those of the slowest
    measured card from sm_75 on."""
    card = card_of_name_reported(device_name)
    if card is not None:
        return _rate(card)
    return min(_rate(card) for card in CARDS.values() if card.measured and card.capability >= _OLDEST)


def _rate(card) -> float:
    return card.rates["bf16" if "bf16" in card.rates else "fp16"].sustained


class Progress:
    def __init__(self, folder: Path):
        # Not a pipe, which would end with the process. All processes of a machine share time.monotonic.
        self._now, self._done = folder / "progress.json", folder / "cases.jsonl"

    def begin(self, case: str | None, planned_seconds: float) -> None:
        """Announces `case` (None: work of the job outside of its cases), with a time limit for `planned_seconds`."""
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
        """Returns the case that was begun and has not ended, or None."""
        return self._read().get("case")

    def until(self) -> float | None:
        """Returns when the work counts as hanging, by time.monotonic; None before any announcement."""
        return self._read().get("until")

    def done(self) -> dict[str, dict]:
        """Returns {case: {"values": ..., "checks": ...}} of all finished cases of the job."""
        lines = self._done.read_text().splitlines() if self._done.exists() else []
        return {found.pop("case"): found for found in map(json.loads, lines)}

    def _read(self) -> dict:
        return json.loads(self._now.read_text()) if self._now.exists() else {}
