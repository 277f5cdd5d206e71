"""Reads the published measurements: the program, the card, and the time or peak memory of a step.

In measurements.json, `fitted` names the clock's constants that were fitted to a group, or chosen with it in view.
`fitted_shape`: only its points of this shape were. `host_share`: the measuring machine's time to launch an operation,
as a multiple of the clock's.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowmem.cudasim.gpus import CARDS, Card, Rate

MEASUREMENTS = Path(__file__).parent / "measurements.json"
# The host's time to launch an operation without gradients, as a multiple of that with gradients. The clock has one
# constant for both. Fitted to the H200's forward of 12 blocks.
WITHOUT_GRADIENTS = 0.54
OTHER_CARDS = {  # cards that are not in the table; shares are those of the most similar card
    "a100-80gb": replace(CARDS["a100"], name="a100-80gb", memory_bytes_per_second=2039e9),
    "rtx3090ti": replace(
        CARDS["rtx3090"], name="rtx3090ti", multiprocessors=84, memory_bytes_per_second=1008e9,
        rates={"bf16": Rate(80e12, 1.0), "fp16": Rate(80e12, 1.0), "fp32": Rate(40e12, 0.69)},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured step time. `group`: the other fields of its entry in measurements.json."""

    group: dict[str, Any]
    shape: dict[str, int]
    seconds: float

    @property
    def card(self) -> Card:
        name = self.group["card"]
        card = OTHER_CARDS.get(name) or CARDS[name]
        return at_clock(card, self.group["clock_share"]) if "clock_share" in self.group else card

    @property
    def host_share(self) -> float:
        """Returns the time to launch an operation where this was measured, as a multiple of the clock's."""
        without_gradients = self.group.get("loss") == "none"
        return self.group.get("host_share", 1.0) * (WITHOUT_GRADIENTS if without_gradients else 1.0)

    @property
    def is_fitted(self) -> bool:
        """Returns False if the point was kept for judging: no constant of the clock was chosen with it in view."""
        return "fitted" in self.group and self.group.get("fitted_shape", {}).items() <= self.shape.items()


def at_clock(card: Card, share: float) -> Card:
    """Returns `card` with its multiprocessors locked at `share` of their clock; memory has another clock."""
    return replace(card, rates={name: Rate(rate.peak * share, rate.share) for name, rate in card.rates.items()})


def step_times() -> list[Point]:
    points = []
    for group in measurements()["step_times"]:
        for row in group["points"]:
            shape = dict(zip(group["columns"], row, strict=True))
            points.append(Point(group, shape, shape.pop("seconds")))
    return points


@dataclass(frozen=True)
class Peak:
    """One measured `torch.cuda.max_memory_allocated` of forward and backward. `eager`: attention is eager, else
    fused."""

    model: str
    batch: int
    tokens: int
    eager: bool
    allocated_bytes: int


def peaks() -> list[Peak]:
    found = []
    for group in measurements()["peaks"]:
        for batch, tokens, *megabytes in group["points"]:
            found += [
                Peak(group["model"], batch, tokens, eager, round(size * 1e6))
                for eager, size in zip((True, False), megabytes, strict=True)
                if size is not None
            ]
    return found


def measurements() -> dict[str, list[dict[str, Any]]]:
    return json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
