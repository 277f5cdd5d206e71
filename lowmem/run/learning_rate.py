"""The learning rate of each optimizer step."""

import math


def learning_rate(update: int, *, peak: float, updates: int, warmup_updates: int, schedule: str) -> float:
    """Rate of update number `update` (from 0) of `updates`: linear warm-up to `peak`, then `cosine` or `linear` to 0,
    or `constant`. The first update already moves the weights, and the last one still does."""
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    progress = min((update - warmup_updates) / max(updates - warmup_updates, 1), 1.0)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (1.0 - progress) if schedule == "linear" else peak


def warmup_updates(warmup: float, updates: int) -> int:
    """`warmup` in updates; below 1 it is a share of all `updates`."""
    return math.ceil(warmup * updates) if warmup < 1 else int(warmup)
