"""Finds trainings that diverged, and the largest of several differences; never passes over NaN. Imports no PyTorch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MOST_RISE = 2.0  # of a loss, over the first one: a small sample's noise is less


def worst(numbers: Iterable[float]) -> float:
    """Returns the largest number; NaN if any is NaN, 0 if there are no numbers."""
    numbers = [float(number) for number in numbers]
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)  # which max() may pass over


def divergence(losses: Sequence[float | None], weights: Mapping[str, "Tensor"] | None = None) -> str | None:
    """Returns why a training diverged, or None. It diverged if a loss (None: not finite) or a final weight is not
    finite, or if all losses of its second half exceed MOST_RISE times the first."""
    for step, loss in enumerate(losses, 1):
        if loss is None or not math.isfinite(loss):
            return f"the training diverged: the loss of step {step} is not finite"
    for name, tensor in (weights or {}).items():
        if not tensor.isfinite().all():
            return f"the training diverged: {name} is not finite after the last step"
    lowest = min(losses[len(losses) // 2 :])
    if lowest > MOST_RISE * losses[0]:
        return f"the training diverged: its loss rose from {losses[0]:.4g} to {lowest:.4g} or more"
    return None
