"""Measures the speed of each kernel at three sizes, next to the speed that the clock predicts. No GPU has run it yet.

Both speeds use the clock's count of bytes. Small tensors may come from a cache, because calls repeat.
"""

import torch
from torch import Tensor

from experiments.harness.child import Result, Setting
from lowmem.core import optimizers
from lowmem.core.kernels import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.core.norms import LEAST_ROWS, PROGRAMS
from lowmem.core.optimizers import Hyperparameters
from lowmem.cudasim import roofline
from lowmem.planning.question import card_for
from lowmem.settings import Settings
from lowmem.units import GIB

SIZES, TINY_SIZES = (2**20, 2**23, 2**26), (2**12, 2**13, 2**14)  # numbers
COLUMNS, WORDS, HEADS, HEAD = 1024, 2**15, 16, 64
CALLS = 20  # in a row, while the card is busy: no kernel waits for its launch
NAMES = ["normalize", "normalize_backward", "gated", "gated_backward", "drop", "rotate", "cross_entropy", "adamw"]


def arguments_of(name: str, size: int, dtype: torch.dtype, device: torch.device) -> tuple:
    """Returns the kernel's arguments in a step, for `size` numbers: a fp32 residual stream, other tensors in
    `dtype`."""

    def made(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    fp32, rows = torch.float32, size // COLUMNS
    if name == "cross_entropy":
        words = min(WORDS, size // 4)
        labels = made(size // words, dtype=torch.int64)
        return made(size // words, words), None, labels, made(size // words, dtype=fp32), 1.0
    if name == "adamw":
        numbers = optimizers.adamw_numbers(Hyperparameters(learning_rate=1e-3, weight_decay=0.01, update=1), 0.01)
        low = made(size, dtype=torch.int16)
        return made(size), low, *(made(size, dtype=fp32) for _ in range(3)), 1.0, *numbers
    if name == "rotate":
        tokens = size // (2 * HEADS * HEAD)
        q, k, new_q, new_k = (made(1, tokens, HEADS, HEAD).transpose(1, 2) for _ in range(4))
        return q, k, made(1, tokens, HEAD), made(1, tokens, HEAD), new_q, new_k, False
    stream, other, third, fourth, fifth = (made(rows, COLUMNS, dtype=kind) for kind in (fp32, *[dtype] * 4))
    weight, statistics = made(COLUMNS, dtype=fp32), made(2, rows, dtype=fp32)
    programs = -(-rows // max(LEAST_ROWS, -(-rows // PROGRAMS)))
    seeds, sums = made(1, dtype=torch.int64), made(2, programs, COLUMNS, dtype=fp32)
    return {
        "normalize": (stream, weight, weight, other, statistics, 1e-5, 0.0, True),
        "normalize_backward": (other, stream, weight, statistics, torch.zeros_like(stream), sums, 0.0),
        "gated": (other, third, 1.0, 0.0, False),
        "gated_backward": (other, third, fourth, fifth, torch.zeros_like(other), None, 1.0, 0.0, False),
        "drop": (other, stream, torch.zeros_like(stream), seeds, 0, 0.1),
    }[name]


def speeds(setting: Setting, device: torch.device, dtype: torch.dtype) -> Result:
    """Returns GiB/s of each kernel at each size, measured and predicted for this card."""
    card, values = card_for(Settings()), {}
    blocker = torch.zeros(2 * [64 if setting.dry_run else 8192], device=device)
    for name in NAMES:
        for size in TINY_SIZES if setting.dry_run else SIZES:
            operator, arguments = getattr(torch.ops.lowmem, name).default, arguments_of(name, size, dtype, device)
            result = operator(*arguments)  # compiles
            moved = roofline._bytes_moved(roofline._traffic(operator), arguments, {}, result)
            predicted = roofline.operation_seconds(card, operator, arguments, {}, result)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.mm(blocker, blocker)
            begin.record()
            for _ in range(CALLS):
                operator(*arguments)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3 / CALLS
            measured = "left out" if setting.stand_in else moved / GIB / seconds
            values[f"{name}, {size:,}"] = {
                "bytes": moved, "gib_per_second": measured, "predicted_gib_per_second": moved / GIB / predicted,
            }  # fmt: skip
    return Result(values, {})
