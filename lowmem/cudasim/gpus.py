"""Lists the kinds of GPU that can be simulated, with the memory and speed of each.

Rates are in FLOP/s, without sparsity, with sums in fp32, as PyTorch computes. A `share` is the part of them that
PyTorch reaches with square matmuls of 8,192. See docs/cuda-memory.md for sources, and to add a GPU. This file needs no
PyTorch, because stand_in/ reads it before PyTorch can be imported.
"""

import csv
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lowmem.errors import InputError
from lowmem.units import GIB, KIB, MIB

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]
MEMORY_SHARE = 0.8  # of the bandwidth; assumed. Copies reach 0.89 (mli/transformers-benchmarks#4), reductions less.
EMULATED_SHARE = 0.5  # bf16 without bf16 units, of the fp32 rate: P40 0.5, 1080 Ti 0.5, P100 0.7 (measured)
# Share of one direction's speed while both copy: nvbandwidth saw 0.90 (gen3), 0.49 to 0.71 (gen4), 0.9 (gen5).
DUPLEX_SHARE = 0.85
# Bytes per second of a PC's RAM, for both directions together: 0.78 of two channels of DDR5-5600 (89.6e9); assumed. A
# server has more channels: there an RTX 5090 copies 51e9 in and out at once (tinygrad/open-gpu-kernel-modules#29).
PC_RAM_BYTES_PER_SECOND = 70e9
# Share of one direction's speed by NVLink's data sheet: eight H100s gather at 360 of 450 GB/s (NVIDIA/nccl-tests#326).
NVLINK_SHARE = 0.8
# Bytes per second of a page-locked copy over 16 lanes, without other traffic: 12.4, 25 to 26, 55 to 57 GB/s were seen.
PCIE_BYTES_PER_SECOND = {3: 12e9, 4: 25e9, 5: 55e9}
# CUDA does not report all of a board's memory: 245 MiB less for an RTX 3060 and a 2080 Ti, 1.3% for a 3090, 1.5% for a
# 4090. Data sheets' sizes are reduced by the larger of these two.
UNREPORTED_BYTES, UNREPORTED_SHARE = 245 * MIB, 0.02
# Error correction takes a sixteenth of GDDR memory, and is on in data centers: 22.06 GiB are reported of an A10G's 24
# and 44.4 of an L40S's 48, but 47.5 of an RTX A6000's 48.
ECC_SHARE = 1 / 16
# By capability: FLOP per clock of a multiprocessor's fp32 units, and of a GeForce card's tensor cores with sums in
# fp32; and the measured card whose shares are assumed. Nobody measured Blackwell's products yet.
BY_CAPABILITY = {
    (6, 0): (128, 256, "p100"), (6, 1): (256, 256, "gtx1080ti"), (7, 0): (128, 512, "p100"),
    (7, 5): (128, 512, "rtx2080ti"), (8, 0): (128, 512, "a100"), (8, 6): (256, 512, "rtx3060"),
    (8, 9): (256, 512, "rtx4090"), (9, 0): (256, 512, "h100"), (12, 0): (256, 512, "rtx4090"),
}  # fmt: skip


class Multiprocessor(NamedTuple):
    threads: int
    shared_bytes: int  # of shared memory in all
    shared_bytes_of_block: int
    blocks: int


MULTIPROCESSORS = {  # NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
    (5, 0): Multiprocessor(2048, 64 * KIB, 48 * KIB, 32),
    (5, 2): Multiprocessor(2048, 96 * KIB, 48 * KIB, 32),
    (6, 0): Multiprocessor(2048, 64 * KIB, 48 * KIB, 32),
    (6, 1): Multiprocessor(2048, 96 * KIB, 48 * KIB, 32),
    (7, 0): Multiprocessor(2048, 96 * KIB, 96 * KIB, 32),
    (7, 5): Multiprocessor(1024, 64 * KIB, 64 * KIB, 16),
    (8, 0): Multiprocessor(2048, 164 * KIB, 163 * KIB, 32),
    (8, 6): Multiprocessor(1536, 100 * KIB, 99 * KIB, 16),
    (8, 7): Multiprocessor(1536, 164 * KIB, 163 * KIB, 16),
    (8, 9): Multiprocessor(1536, 100 * KIB, 99 * KIB, 24),
    (9, 0): Multiprocessor(2048, 228 * KIB, 227 * KIB, 32),
    (10, 0): Multiprocessor(2048, 228 * KIB, 227 * KIB, 32),
    (12, 0): Multiprocessor(1536, 100 * KIB, 99 * KIB, 24),
}


def multiprocessor(capability: Capability) -> Multiprocessor:
    """Returns the limits of a streaming multiprocessor of this compute capability, or of the nearest older one."""
    known = max((listed for listed in MULTIPROCESSORS if listed <= capability), default=min(MULTIPROCESSORS))
    return MULTIPROCESSORS[known]


class Rate(NamedTuple):
    peak: float  # FLOP/s of the data sheet, without sparsity
    share: float  # the part of `peak` that large matmuls reach

    @property
    def sustained(self) -> float:
        return self.peak * self.share


@dataclass(frozen=True)
class Card:
    """Describes one kind of GPU: its memory, and the speed of matmuls and copies."""

    name: str
    memory_bytes: int  # the total that CUDA reports
    capability: Capability
    multiprocessors: int
    rates: dict[str, Rate] = field(hash=False)  # by precision; a card without bf16 units has no "bf16"
    memory_bytes_per_second: float  # by the data sheet; kernels reach MEMORY_SHARE of it
    bus_bytes_per_second: float  # of a page-locked copy if the other direction is idle
    reported_names: tuple[str, ...]  # by torch.cuda.get_device_name, without "NVIDIA"
    source: str
    measured: bool = True  # whether the shares in `rates` were measured on such a card, not assumed
    nvlink_bytes_per_second: float | None = None  # of one direction, by the data sheet; None if there is none
    cache_bytes: int = 0  # of the last-level cache; 0 if measurements show it no faster than memory

    @property
    def clocks_per_second(self) -> float:
        """Returns the clock rate of the multiprocessors in Hz, computed from the data sheet's fp32 rate."""
        per_clock = BY_CAPABILITY.get(self.capability, BY_CAPABILITY[9, 0])[0]
        return self.rates["fp32"].peak / (self.multiprocessors * per_clock)

    @property
    def sustained_bytes_per_second(self) -> float:
        """Returns the bytes of GPU memory per second that kernels read and write."""
        return self.memory_bytes_per_second * MEMORY_SHARE

    @property
    def link_bytes_per_second(self) -> float | None:
        """Returns the bytes per second that a card receives over NVLink; None without NVLink."""
        return None if self.nvlink_bytes_per_second is None else NVLINK_SHARE * self.nvlink_bytes_per_second

    @property
    def copy_bytes_per_second(self) -> float:
        """Returns the bytes per second of page-locked copies in each direction of the PCIe bus, if both are busy."""
        both = self.bus_bytes_per_second * DUPLEX_SHARE
        return min(both, PC_RAM_BYTES_PER_SECOND / 2) if self.reported_names[0].startswith("GeForce") else both

    def sustained_flops(self, dtype: "torch.dtype") -> float:
        """Returns the FLOP/s that large matmuls of `dtype` reach. Any dtype but fp16 and bf16 counts as fp32."""
        precision = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(dtype), "fp32")
        if precision not in self.rates:
            return self.rates["fp32"].sustained * EMULATED_SHARE
        return self.rates[precision].sustained


def _rows(name: str) -> list[dict[str, str]]:
    with open(Path(__file__).with_name(name), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _capability(text: str) -> Capability:
    major, minor = text.split(".")
    return int(major), int(minor)


def _card(row: dict[str, str], memory_bytes: int, rates: dict[str, Rate], lanes: int, **more) -> Card:
    return Card(
        row["name"], memory_bytes, _capability(row["capability"]), int(row["multiprocessors"]), rates,
        float(row["memory_gigabytes_per_second"]) * 1e9, PCIE_BYTES_PER_SECOND[int(row["pcie"])] * lanes / 16,
        tuple(row["reported_names"].split("; ")), cache_bytes=int(row["cache_mib"] or 0) * MIB, **more,
    )  # fmt: skip


def _measured(row: dict[str, str]) -> Card:
    rates = {
        precision: Rate(float(row[f"{precision}_teraflops"]) * 1e12, float(row[f"{precision}_share"]))
        for precision in ("bf16", "fp16", "fp32")
        if row[f"{precision}_share"]
    }
    nvlink = float(row["nvlink_gigabytes_per_second"] or 0) * 1e9 or None
    memory_bytes = int(row["memory_mib"]) * MIB
    return _card(row, memory_bytes, rates, lanes=16, source=row["source"], nvlink_bytes_per_second=nvlink)


def _from_data_sheet(row: dict[str, str], measured: dict[str, Card]) -> Card:
    capability, memory_bytes = _capability(row["capability"]), int(row["memory_gib"]) * GIB
    fp32_per_clock, tensor_per_clock, like = BY_CAPABILITY[capability]
    clocks_per_second = int(row["multiprocessors"]) * int(row["megahertz"]) * 1e6
    per_clock = int(row.get("tensor_flop_per_clock") or tensor_per_clock)
    rates = {"fp32": Rate(clocks_per_second * fp32_per_clock, measured[like].rates["fp32"].share)}
    for precision in ("fp16", "bf16") if capability >= (8, 0) else ("fp16",):
        share = float(row.get("share") or measured[like].rates[precision].share)
        rates[precision] = Rate(clocks_per_second * per_clock, share)
    memory_bytes -= int(memory_bytes * ECC_SHARE) if row.get("ecc") else 0
    memory_bytes -= max(UNREPORTED_BYTES, int(memory_bytes * UNREPORTED_SHARE))
    source = "techpowerup.com/gpu-specs; shares: docs/cuda-memory.md"
    return _card(row, memory_bytes, rates, int(row["lanes"]), source=source, measured=False)


_MEASURED = {row["name"]: _measured(row) for row in _rows("cards.csv")}
CARDS = _MEASURED | {
    row["name"]: _from_data_sheet(row, _MEASURED) for file in ("geforce.csv", "professional.csv") for row in _rows(file)
}
_BY_SHORT_NAME = {name.replace("-", ""): card for name, card in CARDS.items()}
_ROUNDING = (0.9, 1.01)  # least and most memory that CUDA reports, as shares of the memory in a card's name
_WITHOUT_A_NAME = "leave --gpu out, and give its memory: --gpu-limit 10GiB"
_SAYS_NOTHING = re.compile(  # parts of a name that tell no cards apart
    r"nvidia|geforce|tesla|quadro|gpu|with|design|generation|blackwell|workstation|server|edition|"
    r"[^a-z0-9]"
)


def card_named(name: str, option: str = "--gpu", otherwise: str = _WITHOUT_A_NAME) -> Card:
    """Returns the GPU with this name, as people and vendors write it: ``rtx3090``, ``3060 12GB``, ``Tesla
    V100-SXM2-32GB``. Raises InputError, with `option` and the advice `otherwise`, for an unknown name."""
    plain = name.lower().replace("mobile", "laptop")
    short = _SAYS_NOTHING.sub("", plain)
    if (found := _exactly(short) or _of_size(plain)) is not None:
        return found
    number = re.search(r"\d{3,4}(ti)?", short)
    numbered = [known for known in _BY_SHORT_NAME if number is not None and number[0] in known]
    like = numbered[:3] or get_close_matches(short, _BY_SHORT_NAME, n=3)
    near = ", ".join(_BY_SHORT_NAME[known].name for known in like)
    meant = f"did you mean {'one of ' * (len(like) > 1)}{near}? " if near else ""
    raise InputError(
        f"{option} {name}: there is no such card in the table; {meant}python -m lowmem.plan --help names all of them. "
        f"For another card {otherwise}"
    )


def _forms(short: str) -> tuple[str, ...]:
    return short, f"rtx{short}", f"gtx{short}", short.removeprefix("rtx")


def _exactly(short: str) -> Card | None:
    return next((_BY_SHORT_NAME[form] for form in _forms(short) if form in _BY_SHORT_NAME), None)


def _of_size(name: str) -> Card | None:
    # a memory size or a board type, as in "rtx 3060 12gb" or "v100-sxm2-32gb"
    size = re.search(r"(?<!\d)(\d{1,3})\s*gi?b\b", name)
    short = name if size is None else name[: size.start()] + name[size.end() :]
    short = _SAYS_NOTHING.sub("", re.sub(r"sxm\d?|pcie|hbm\d?e?", "", short))
    if size is None:
        return _exactly(short)
    alike = (card for known, card in _BY_SHORT_NAME.items() if re.sub(r"\d{1,2}gb$", "", known) in _forms(short))
    least, most = (int(size[1]) * GIB * share for share in _ROUNDING)
    return next((each for each in (_exactly(short), *alike) if each and least <= each.memory_bytes <= most), None)


def card_of_name_reported(name: str, memory_bytes: int | None = None) -> Card | None:
    """Returns the GPU that torch.cuda.get_device_name calls `name`, or None if the table lacks it. If several cards
    have this name, returns the one with memory nearest to `memory_bytes` (None: the first)."""
    name = name.strip().removeprefix("NVIDIA ").lower()
    found = [card for card in CARDS.values() if name in map(str.lower, card.reported_names)]
    return min(found, key=lambda card: abs(card.memory_bytes - (memory_bytes or card.memory_bytes)), default=None)
