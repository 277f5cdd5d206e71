"""Splits fp32 master weights into 16-bit working weights, which compute, and int16 low halves. Joins both again,
mostly to the last bit (docs/precision.md)."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**18  # elements that are converted or copied at a time: 1 MiB in fp32
WORKING_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_precision(precision: str, device: torch.device) -> str:
    """Returns `precision`; for "auto", bf16 on a GPU that supports it, fp16 on other GPUs, and fp32 on the CPU."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        # CPUs multiply 16-bit matrices up to 70 times more slowly.
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def split(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Splits fp32 weights into (working weights in `dtype`, low halves in int16) of the same shape, for `join`. Returns
    (master, None) if `dtype` is fp32."""
    if dtype is torch.float32:
        return master, None
    working, low = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    split_into(master.clone(), working, low, torch.empty_like(master))
    return working, low


def split_into(master: Tensor, working: Tensor, low: Tensor, scratch: Tensor) -> None:
    """Splits fp32 weights `master` into 16-bit `working` and int16 `low`, which it overwrites. Allocates nothing, and
    also overwrites `master` and `scratch`, which has the shape and dtype of `master`."""
    whole = scratch.view(torch.int32)
    if working.dtype is torch.bfloat16:
        bits = master.view(torch.int32)
        torch.add(bits, 0x8000, out=whole).bitwise_right_shift_(16)
        working.view(torch.int16).copy_(whole)
        low.copy_(bits.sub_(whole.bitwise_left_shift_(16)))
    else:
        working.copy_(master)
        master.sub_(scratch.copy_(working))
        unit = _fp16_unit_of(whole.copy_(working.view(torch.int16)))
        low.copy_(master.div_(unit).round_())


def join(working: Tensor, low: Tensor | None = None) -> Tensor:
    """Joins working weights and low halves, as `split` returns them, into a new fp32 tensor. If `low` is None, returns
    `working` itself, which must be fp32."""
    if low is None:
        return working
    if working.dtype is torch.bfloat16:
        return ((working.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
    return working.float() + low.float() * _fp16_unit_of(working.view(torch.int16).to(torch.int32))


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the elements of `tensor` in C order, as flat tensors of at most CHUNK_ELEMENTS elements."""
    if tensor.numel() <= CHUNK_ELEMENTS:
        yield tensor.reshape(-1)
        return
    rows = CHUNK_ELEMENTS // tensor[0].numel()
    for block in tensor.split(rows) if rows else tensor:
        yield from chunks(block)


def _fp16_unit_of(bits: Tensor) -> Tensor:
    """Returns the unit in which `low` counts, for each fp16 number: 2**(e - 39) in fp32, where e is the number's
    exponent field. `bits`: the numbers' bits as int32, which are overwritten."""
    # A normal number is 2**(e - 15) times a significand of 11 bits. An fp32 number that rounds to it is a whole number
    # of steps away, at most 2**13, even if `working` was rounded up to a power of two.
    exponent = bits.bitwise_right_shift_(10).bitwise_and_(0x1F)
    return exponent.add_(127 - 39).bitwise_left_shift_(23).view(torch.float32)


class LossScale:
    """Scales the loss dynamically, for fp16 gradients (arXiv:1710.03740). `update` halves `scale` if gradients are not
    finite, and doubles it after `growth_interval` finite steps in a row. If not `enabled`, `scale` stays 1."""

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
