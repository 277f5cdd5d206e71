"""fp32 weights held as two halves: the 16-bit number that computes, and what rounding left behind.

Mixed-precision training usually stores a weight twice: 2 bytes that compute and 4 bytes of fp32 master, although the
first half of the master *is* the working weight. Here a master weight is the pair (working, low) and nothing else:

    bf16:  working = the upper 16 bits, rounded half up;   low = master bits - (working bits << 16), in int16
    fp16:  working = master rounded to nearest even;       low = (master - working) / 2**(e - 39), in int16

so it costs 4 bytes instead of 6, and the low half may lie in RAM while the GPU computes. Bytes per parameter:
working 2 + low 2 (against 2 + 4), and `join(*split(w, dtype)) == w` to the last bit:

  * bf16: every fp32 bit pattern, NaN and infinities too. Rounding is half *up*, not half to even: with ties to even the
    low half would need 17 bits. The two differ on exact ties only.
  * fp16: every fp32 number whose fp16 neighbour is normal, 2**-14 <= |w| < 65520 (e is the exponent field of the fp16
    number). Below 2**-14 the master is kept to a multiple of 2**-39, an error of at most 2**-40 (9e-13); from 65520
    on fp16 has no number to compute with and `working` is infinite.

The idea of a 16-bit correction beside the working weight is FlashOptim's; its int16 form is exact for 99.7% of all
patterns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

RUN_ELEMENTS = 2**18  # of a tensor that is converted or carried at once: 1 MiB in fp32, whatever the tensor's size
WORKING_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_precision(precision: str, device: torch.device) -> str:
    """``auto`` made concrete: bf16 on cards that have it, fp16 on older ones, fp32 on the CPU (16-bit products are
    up to 70 times slower there)."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """fp32 `master` (any shape) as ``(working, low)``: `working` in `dtype`, `low` int16, or None where `dtype` is fp32
    and the working weight is the master itself."""
    if dtype is torch.float32:
        return master, None
    working, low = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    split_into(master.clone(), working, low, torch.empty_like(master))
    return working, low


def split_into(master: Tensor, working: Tensor, low: Tensor, room: Tensor) -> None:
    """`split` of fp32 `master` into the 16-bit `working` and the int16 `low`, without allocating anything; `master` and
    `room`, another fp32 tensor of its shape, are overwritten."""
    whole = room.view(torch.int32)
    if working.dtype is torch.bfloat16:
        bits = master.view(torch.int32)
        torch.add(bits, 0x8000, out=whole).bitwise_right_shift_(16)
        working.view(torch.int16).copy_(whole)
        low.copy_(bits.sub_(whole.bitwise_left_shift_(16)))
    else:
        working.copy_(master)
        master.sub_(room.copy_(working))
        unit = _fp16_unit_of(whole.copy_(working.view(torch.int16)))
        low.copy_(master.div_(unit).round_())


def join(working: Tensor, low: Tensor | None = None) -> Tensor:
    """The fp32 master of ``(working, low)``: a new tensor, or `working` itself where it is fp32."""
    if low is None:
        return working
    if working.dtype is torch.bfloat16:
        return ((working.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
    return working.float() + low.float() * _fp16_unit_of(working.view(torch.int16).to(torch.int32))


def runs(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in C order, as flat runs of at most RUN_ELEMENTS elements; views wherever its memory allows it, so that
    what is done to a large tensor run by run never needs a second one."""
    if tensor.numel() <= RUN_ELEMENTS:
        yield tensor.reshape(-1)
        return
    rows = RUN_ELEMENTS // tensor[0].numel()
    for block in tensor.split(rows) if rows else tensor:
        yield from runs(block)


def _fp16_unit_of(bits: Tensor) -> Tensor:
    """2**(e - 39) as fp32, in the memory of `bits` (int32), where e is the exponent field of each fp16 number with
    these bits: the unit that `low` counts in.

    A normal number is 2**(e - 15) times a significand of 11 bits; its fp32 neighbours are multiples of 2**(e - 39) even
    where `working` was rounded up to a power of two, and at most 2**13 of those units away.
    """
    exponent = bits.bitwise_right_shift_(10).bitwise_and_(0x1F)
    return exponent.add_(127 - 39).bitwise_left_shift_(23).view(torch.float32)


class LossScale:
    """Dynamic loss scaling for fp16 gradients (Micikevicius et al., 2018, arXiv:1710.03740).

    The loss is multiplied by `scale` before backward and the gradients divided by it before the norm is taken. After an
    overflow the scale is halved and the step not taken; after `growth_interval` good steps in a row it is doubled.
    """

    def __init__(self, enabled: bool, scale: float = 65536.0, growth_interval: int = 1000):
        self.scale = scale if enabled else 1.0
        self.enabled = enabled
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps == self.growth_interval:
            self.scale = min(self.scale * 2, 2.0**24)
            self.good_steps = 0

    def state(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: dict[str, float | int]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
