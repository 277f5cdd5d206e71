"""The table of cards: what kinds of GPU there are, and how fast each is.

Rates are dense, with sums in fp32, as PyTorch computes them. What a datasheet promises and what products reach differ
by card: 0.45 of it on cards that are short of power (T4, L4: 70 W), 0.7 to 0.8 on large ones, nearly all on GeForce.
`Rate.share` has that figure for square products of 8,192 in PyTorch as others measured it (MEASURED below).

GeForce cards with tensor cores do such products at half of the rate that is advertised (sums in fp16). Pascal has no
tensor cores: 16-bit products run on the fp32 units after conversion, also on the P100, whose double rate is for sums
in fp16 only (tensorflow#15585 explains it). bf16 where the hardware has none is emulated at half the fp32 rate. TF32
is off, as lowmem.device leaves it.

Every figure here is assumed until a row of experiments measures it. What an operation takes on a card stands in
roofline.py. This file needs no PyTorch: the stand-in reads it before that can be imported. GeForce RTX cards that were
not measured stand in geforce.py; their `share`s are those of a measured card of their generation.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from lowmem.cudasim.geforce import GEFORCE, TENSOR_PER_CLOCK, GeForce, Generation
from lowmem.errors import InputError
from lowmem.units import GIB, MIB

if TYPE_CHECKING:
    import torch

MEMORY_SHARE = 0.8  # of the bandwidth; copies reach 0.89 (mli/transformers-benchmarks#4), reductions less; assumed
EMULATED_SHARE = 0.5  # bf16 products without bf16 units, of the fp32 rate: P40 0.5, 1080 Ti 0.5, P100 0.7 (MEASURED)
DUPLEX_SHARE = (
    0.85  # of one direction's speed while both copy; nvbandwidth saw 0.90 (gen3), 0.49 to 0.71 (gen4), 0.9 (gen5)
)

GEN3, GEN4, GEN5 = 12e9, 25e9, 55e9  # bytes/s of a page-locked copy over 16 lanes, alone: 12.4, 25 to 26, 55 to 57 seen
PCIE = {3: GEN3, 4: GEN4, 5: GEN5}
# What CUDA does not report of a board's memory: 245 MiB of the RTX 3060 and 2080 Ti below, 1.3 and 1.5% of the 3090 and
# the 4090.
KEPT_BYTES, KEPT_SHARE = 245 * MIB, 0.02
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
    "NVIDIA". `source`: of the figures, beside MEASURED. `measured`: whether its shares are its own.
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
    measured: bool = True

    @property
    def copy_bytes_per_second(self) -> float:
        """Of each direction while both are at work, as they are in the ring of streamed states."""
        return self.bus_bytes_per_second * DUPLEX_SHARE

    def sustained_flops(self, dtype: "torch.dtype") -> float:
        """FLOP/s of large products of `dtype`; a dtype that is never trained in counts as fp32."""
        precision = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(dtype), "fp32")
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
            _rates(Rate(312 * _T, 0.70), Rate(312 * _T, 0.67), Rate(19.5 * _T, 0.93)),
            1555e9, GEN4, ("A100-SXM4-40GB", "A100-PCIE-40GB"),
            "NVIDIA A100 data sheet, 40 GB; measured: issue 108 (PCIe, 250 W; SXM reaches 0.8); fp32: database.md, and "
            "kernels of a training step (17.0 to 18.3 TFLOP/s; yyin-dev/cs336-a2, writeup.md)",
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


def _card_of(data: GeForce, generation: Generation) -> Card:
    clocks = data.multiprocessors * data.megahertz * 1e6
    shares = {precision: rate.share for precision, rate in CARDS[generation.like].rates.items()}
    memory_bytes = data.gigabytes * GIB
    return Card(
        data.name,
        memory_bytes - max(KEPT_BYTES, int(memory_bytes * KEPT_SHARE)),
        generation.capability,
        data.multiprocessors,
        {
            precision: Rate(clocks * (generation.fp32_per_clock if precision == "fp32" else TENSOR_PER_CLOCK), share)
            for precision, share in shares.items()
        },
        data.gigabytes_per_second * 1e9,
        PCIE[generation.pcie] * data.lanes / 16,
        (f"GeForce RTX {data.reported_name}",),
        f"techpowerup.com/gpu-specs; shares of the {generation.like}",
        measured=False,
    )


CARDS |= {data.name: _card_of(data, generation) for generation, listed in GEFORCE.items() for data in listed}
_BY_SHORT_NAME = {name.replace("-", ""): card for name, card in CARDS.items()}


def card_named(name: str) -> Card:
    """The card of a name like ``rtx3090``, ``RTX 4070 Ti SUPER``, ``GeForce RTX 4060 Laptop GPU`` or ``Tesla T4``;
    InputError for one that is not in CARDS."""
    short = re.sub(r"nvidia|geforce|tesla|gpu|with|design|[^a-z0-9]", "", name.lower())
    if short not in _BY_SHORT_NAME:
        near = ", ".join(_BY_SHORT_NAME[known].name for known in get_close_matches(short, _BY_SHORT_NAME, n=3))
        meant = f"did you mean one of {near}? " if near else ""
        raise InputError(
            f"--gpu {name}: there is no such card in the table; {meant}python -m lowmem.plan --help names all of them"
        )
    return _BY_SHORT_NAME[short]


def card_of_name_reported(name: str, memory_bytes: int | None = None) -> Card | None:
    """The card that torch.cuda.get_device_name calls `name`; None for any that is not exactly one of CARDS (a slice of
    one, a card for servers). Of several with one name that whose memory is nearest to `memory_bytes`, or the first."""
    name = name.strip().removeprefix("NVIDIA ").lower()
    found = [card for card in CARDS.values() if name in map(str.lower, card.reported_names)]
    return min(found, key=lambda card: abs(card.memory_bytes - (memory_bytes or card.memory_bytes)), default=None)
