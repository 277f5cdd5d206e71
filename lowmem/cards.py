"""How fast a GPU works, without one at hand: a table of cards, and the time that an operation takes on one of them.

The model is a roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is longer, and
never less than a kernel's start and end.

    seconds = KERNEL_SECONDS + max(flops / (sustained flops x share of the card in use), bytes / (bandwidth x share))

FLOPs are those of matrix products and attention; everything else is taken to be bound by memory: it reads each input
once and writes each output once. What a datasheet promises and what products reach differ by card: 0.45 of it on cards
that are short of power (T4, L4: 70 W), 0.7 to 0.8 on large ones, nearly all on GeForce. `Rate.share` has that figure
for square products of 8,192 in PyTorch as others measured it (MEASURED below); at training's shapes the rest is lost
to tiles that do not divide and to multiprocessors without one (`_share_in_use`), checked against their figures for
1,024 and 2,048.

Rates are dense, with sums in fp32, as PyTorch computes them. GeForce cards with tensor cores do such products at half
of the rate that is advertised (sums in fp16). Pascal has no tensor cores: 16-bit products run on the fp32 units after
conversion, also on the P100, whose double rate is for sums in fp16 only (tensorflow#15585 explains it). bf16 where
the hardware has none is emulated at half the fp32 rate. TF32 is off, as lowmem.device leaves it.

Every constant here is assumed until a row of experiments measures it; the card that is here is timed (calibrate.py).
The model's use is to order plans; expect its seconds to be off by a third. Left out: clocks that fall as a card warms,
cache hits, kernels that read an input twice (layer norm's backward), the cost of determinism.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem import operators  # noqa: F401  defines torch.ops.lowmem
from lowmem.errors import InputError
from lowmem.units import MIB

HOST_SECONDS_PER_OPERATION = 10e-6  # Python, dispatcher and launch of an eager forward operation; assumed
HOST_SECONDS_PER_BACKWARD_OPERATION = 6e-6  # the same from autograd's C++ engine; assumed
HOST_SECONDS_PER_PYTHON_BACKWARD = 27e-6  # of layers.py's product, both ways, beside its operations: on a CPU (x86_64)
KERNEL_SECONDS = 2e-6  # a kernel's start and end on the GPU; assumed
MEMORY_SHARE = 0.8  # of the bandwidth; copies reach 0.89 (mli/transformers-benchmarks#4), reductions less; assumed
ATTENTION_SHARE = 0.6  # fused attention against a large product on the same card; assumed
UNALIGNED_SHARE = 0.7  # 16-bit products with a size that 8 does not divide: 116 of 156 TFLOP/s in pytorch#181718
EMULATED_SHARE = 0.5  # bf16 products without bf16 units, of the fp32 rate: P40 0.5, 1080 Ti 0.5, P100 0.7 (MEASURED)
DUPLEX_SHARE = (
    0.85  # of one direction's speed while both copy; nvbandwidth saw 0.90 (gen3), 0.49 to 0.71 (gen4), 0.9 (gen5)
)
_TILE = 128  # the side of the piece of a product that one multiprocessor computes at a time
_SMALLEST_TILE = 16
_SMALLEST_SPLIT = 256  # terms of a sum that are worth a multiprocessor of their own

GEN3, GEN4, GEN5 = 12e9, 25e9, 55e9  # bytes/s of a page-locked copy over 16 lanes, alone: 12.4, 25 to 26, 55 to 57 seen
MEASURED = "github.com/zzc0721/torch-performance-test-data: database.md and the issues named"


class Rate(NamedTuple):
    """`peak`: FLOP/s of the datasheet, dense; `share`: how much of it large products reach."""

    peak: float
    share: float

    @property
    def sustained(self) -> float:
        return self.peak * self.share


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    `memory_bytes`: the total that CUDA reports. `rates`: by working precision; "bf16" is absent where the hardware has
    none. `memory_bytes_per_second`: the datasheet's, of which `memory_share` is reached. `bus_bytes_per_second`: what a
    page-locked copy reaches in one direction alone. `reported_names`: what torch.cuda.get_device_name says, without
    "NVIDIA". `source`: of the figures, beside MEASURED.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    rates: dict[str, Rate] = field(hash=False)
    memory_bytes_per_second: float
    bus_bytes_per_second: float
    reported_names: tuple[str, ...]
    source: str
    memory_share: float = MEMORY_SHARE

    @property
    def copy_bytes_per_second(self) -> float:
        """Of each direction while both are at work, as they are in the ring of streamed states."""
        return self.bus_bytes_per_second * DUPLEX_SHARE

    def sustained_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s of large products of `dtype`; a dtype that is never trained in counts as fp32."""
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
        if precision not in self.rates:
            return self.rates["fp32"].sustained * EMULATED_SHARE
        return self.rates[precision].sustained


def _rates(bf16: Rate | None, fp16: Rate, fp32: Rate) -> dict[str, Rate]:
    return ({} if bf16 is None else {"bf16": bf16}) | {"fp16": fp16, "fp32": fp32}


_T = 1e12
CARDS = {
    card.name: card
    for card in (
        Card(
            "gtx1080ti", 11178 * MIB, (6, 1), 28,
            _rates(None, Rate(11.3 * _T, 0.71), Rate(11.3 * _T, 0.82)),
            484e9, GEN3, ("GeForce GTX 1080 Ti",),
            "NVIDIA GeForce GTX 1080 Ti specifications; 28 SMs at 1,582 MHz; measured: issue 60",
        ),
        Card(
            "rtx2080ti", 11019 * MIB, (7, 5), 68,
            _rates(None, Rate(53.8 * _T, 0.92), Rate(13.4 * _T, 0.83)),
            616e9, GEN3, ("GeForce RTX 2080 Ti",),
            "NVIDIA Turing GPU Architecture whitepaper, reference card (not Founders Edition); measured: issue 181",
        ),
        Card(  # the 8 GB edition has the same name and two thirds of the bandwidth
            "rtx3060", 12044 * MIB, (8, 6), 28,
            _rates(Rate(25.5 * _T, 0.97), Rate(25.5 * _T, 0.97), Rate(12.7 * _T, 0.63)),
            360e9, GEN4, ("GeForce RTX 3060",),
            "28 SMs at 1,777 MHz at the GA102 whitepaper's rates per SM; 12 GB; measured: issue 131",
        ),
        Card(
            "rtx3090", 24260 * MIB, (8, 6), 82,
            _rates(Rate(71 * _T, 1.0), Rate(71 * _T, 1.0), Rate(35.6 * _T, 0.69)),
            936e9, GEN4, ("GeForce RTX 3090",),
            "NVIDIA Ampere GA102 GPU Architecture whitepaper; measured: issue 42 (76 TFLOP/s)",
        ),
        Card(
            "rtx4090", 24217 * MIB, (8, 9), 128,
            _rates(Rate(165.2 * _T, 0.96), Rate(165.2 * _T, 0.95), Rate(82.6 * _T, 0.64)),
            1008e9, GEN4, ("GeForce RTX 4090",),
            "NVIDIA Ada GPU Architecture whitepaper; measured: issue 78",
        ),
        Card(
            "p100", 16280 * MIB, (6, 0), 56,
            _rates(None, Rate(9.3 * _T, 0.83), Rate(9.3 * _T, 0.90)),
            732e9, GEN3, ("Tesla P100-PCIE-16GB",),
            "NVIDIA Tesla P100 PCIe data sheet, 16 GB; measured: issues 164 and 174",
        ),
        Card(  # 42 TFLOP/s were seen in bursts; what 70 W sustain is assumed
            "t4", 15095 * MIB, (7, 5), 40,
            _rates(None, Rate(65 * _T, 0.45), Rate(8.1 * _T, 0.53)),
            320e9, GEN3, ("Tesla T4", "T4"),
            "NVIDIA T4 data sheet (70 W: its rates are not sustained); measured: database.md",
        ),
        Card(
            "l4", 22563 * MIB, (8, 9), 58,
            _rates(Rate(121 * _T, 0.47), Rate(121 * _T, 0.44), Rate(30.3 * _T, 0.36)),
            300e9, GEN4, ("L4",),
            "NVIDIA L4 data sheet, 242 TFLOP/s with sparsity (72 W: not sustained); measured: issue 120",
        ),
        Card(
            "a100", 40442 * MIB, (8, 0), 108,
            _rates(Rate(312 * _T, 0.70), Rate(312 * _T, 0.67), Rate(19.5 * _T, 0.88)),
            1555e9, GEN4, ("A100-SXM4-40GB", "A100-PCIE-40GB"),
            "NVIDIA A100 data sheet, 40 GB; measured: issue 108 (PCIe, 250 W; SXM reaches 0.8)",
        ),
        Card(
            "h100", 81082 * MIB, (9, 0), 132,
            _rates(Rate(989 * _T, 0.76), Rate(989 * _T, 0.71), Rate(67 * _T, 0.75)),
            3350e9, GEN5, ("H100 80GB HBM3",),
            "NVIDIA H100 data sheet, SXM, 1,979 TFLOP/s with sparsity; measured: issue 79",
        ),
        Card(
            "h200", 143156 * MIB, (9, 0), 132,
            _rates(Rate(989 * _T, 0.78), Rate(989 * _T, 0.74), Rate(67 * _T, 0.75)),
            4800e9, GEN5, ("H200",),
            "NVIDIA H200 data sheet, SXM, 141 GB; measured: database.md",
        ),
    )
}  # fmt: skip


def card_named(name: str) -> Card:
    """The card of a name like ``rtx3090``, ``RTX 3090`` or ``Tesla T4``; InputError for one that is not in CARDS."""
    short = re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
    if short not in CARDS:
        raise InputError(f"--gpu {name}: there is no such card in the table; it has {', '.join(CARDS)}")
    return CARDS[short]


def card_of_name_reported(name: str) -> Card | None:
    """The card that torch.cuda.get_device_name calls `name`; None for any that is not exactly one of CARDS (a Ti, a
    laptop's, a slice of one)."""
    name = name.strip().removeprefix("NVIDIA ")
    return next((card for card in CARDS.values() if name in card.reported_names), None)


def operation_seconds(card: Card, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> float:
    """Seconds that the GPU works on an aten operation, 0 where it has no kernel (views, empty tensors, `.item()`).

    `args`, `kwargs` and `result` are the call's; their tensors need no data. Costs about 5 microseconds.
    """
    traffic = _traffic(func)
    if traffic is None:
        return 0.0
    seconds = _bytes_moved(traffic, args, kwargs, result) / (card.memory_bytes_per_second * card.memory_share)
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        first = _PRODUCTS[packet]
        seconds = max(seconds, _product_seconds(card, args[first], args[first + 1]))
    elif packet in _ATTENTION:
        flops, dtype = _attention_flops(func, args, kwargs)
        seconds = max(seconds, flops / (card.sustained_flops(dtype) * ATTENTION_SHARE))
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        seconds = max(seconds, flops / card.sustained_flops(args[0].dtype))
    return KERNEL_SECONDS + seconds if seconds else 0.0


_aten = torch.ops.aten
# Where the two matrices stand among the arguments.
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.addmm_: 1, _aten.baddbmm: 1, _aten.baddbmm_: 1}
_PRODUCTS |= {torch.ops.lowmem.add_product: 1}
# Where query, key and value stand, and how many products over (head size of query and key, of value) there are.
_ATTENTION = {
    getattr(_aten, f"_scaled_dot_product_{kind}{suffix}"): (first, products)
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for suffix, first, products in (("", 0, (1, 1)), ("_backward", 1, (3, 2)))
}
_NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "_local_scalar_dense")  # beginnings of names
_OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_"}
_GATHERS = {"embedding", "gather", "index", "index_select"}
_SCATTERS = {"scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_", "_index_put_impl_"}


class _Traffic(NamedTuple):
    """How often each argument, by position and by name, and each result passes through memory."""

    arguments: tuple[int, ...]
    named: dict[str, int]
    results: int


@cache
def _traffic(func: torch._ops.OpOverload) -> _Traffic | None:
    """Read off the schema; None for an operation that moves nothing."""
    schema, name = func._schema, func._overloadpacket.__name__
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    aliases = any(r.alias_info is not None for r in schema.returns)
    tensors = any("Tensor" in str(r.type) for r in schema.returns)
    is_view = torch.Tag.inplace_view in func.tags or (aliases and not any(written))
    if is_view or name.startswith(_NO_KERNEL) or not (tensors or any(written)):
        return None
    once = name in _OVERWRITES
    times = [1 if not write or once or a.is_out else 2 for a, write in zip(schema.arguments, written, strict=True)]
    results = 0 if aliases else 1
    if name in _GATHERS:  # the rows that are read, not the table
        times[0], results = 0, 2
    if name in _SCATTERS:  # what is put somewhere is read, and its place is read and written; the rest is not touched
        times = [0] + [3] * (len(times) - 1)
    return _Traffic(tuple(times), dict(zip((a.name for a in schema.arguments), times, strict=True)), results)


def _bytes_moved(traffic: _Traffic, args: tuple, kwargs: dict, result: Any) -> int:
    seen: set[int] = set()
    total = sum(times * _bytes_of(arg, seen) for times, arg in zip(traffic.arguments, args, strict=False))
    total += sum(traffic.named[name] * _bytes_of(arg, seen) for name, arg in kwargs.items())
    return total + (traffic.results * _bytes_of(result, seen) if traffic.results else 0)


def _bytes_of(value: Any, seen: set[int]) -> int:
    """Of the tensors in `value` that are not `seen`; of an expanded one, only what exists."""
    if isinstance(value, Tensor):
        if id(value) in seen:
            return 0
        seen.add(id(value))
        return min(value.nbytes, value.untyped_storage().nbytes())
    if isinstance(value, list | tuple):
        return sum(_bytes_of(one, seen) for one in value)
    return 0


def _product_seconds(card: Card, left: Tensor, right: Tensor) -> float:
    """`left` [(B,) M, K] times `right` [(B,) K, N]."""
    batch = left.shape[0] if left.dim() == 3 else 1
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    flops = 2 * batch * rows * terms * columns
    if flops == 0:
        return 0.0
    share = _share_in_use(card.multiprocessors, batch, rows, columns, terms)
    if left.dtype.itemsize == 2 and card.capability >= (7, 0) and (rows % 8 or columns % 8 or terms % 8):
        share *= UNALIGNED_SHARE
    return flops / (card.sustained_flops(left.dtype) * share)


def _share_in_use(multiprocessors: int, batch: int, rows: int, columns: int, terms: int) -> float:
    """Which part of the card a product of [rows, terms] and [terms, columns] keeps busy.

    The result is computed in tiles, one per multiprocessor at a time: the edges of tiles that stand over are lost, and
    so are the multiprocessors that have none in the last round. Where there are fewer tiles than multiprocessors, long
    sums are split among several (split-K).
    """
    height, width = _tile(rows), _tile(columns)
    tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
    splits = max(1, min(multiprocessors // tiles, terms // _SMALLEST_SPLIT))
    rounds = math.ceil(tiles * splits / multiprocessors)
    return batch * rows * columns * splits / (rounds * multiprocessors * height * width)


def _tile(size: int) -> int:
    return min(_TILE, max(_SMALLEST_TILE, 1 << (size - 1).bit_length()))


def _attention_flops(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[float, torch.dtype]:
    """FLOPs of fused attention over query [B, H, T, E], key and value; half of them where it is causal."""
    first, (over_query, over_value) = _ATTENTION[func._overloadpacket]
    query, key, value = args[first : first + 3]
    inner = over_query * query.shape[3] + over_value * value.shape[3]
    flops = 2 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * inner
    position = _position_of_causal(func)
    causal = args[position] if position < len(args) else kwargs.get("is_causal", False)
    return (flops / 2 if causal else flops), query.dtype


@cache
def _position_of_causal(func: torch._ops.OpOverload) -> int:
    return [argument.name for argument in func._schema.arguments].index("is_causal")
