"""The table of cards, the names it answers to, and the time of single operations against numbers worked out by hand."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem.cudasim.gpus import (
    CARDS,
    DUPLEX_SHARE,
    EMULATED_SHARE,
    MEMORY_SHARE,
    MULTIPROCESSORS,
    PC_RAM_BYTES_PER_SECOND,
    Card,
    Rate,
    card_named,
    card_of_name_reported,
    multiprocessor,
)
from lowmem.cudasim.roofline import (
    CACHE_REACH,
    CACHE_SPEED,
    KERNEL_SECONDS,
    MIXED_PER_CLOCK,
    STRIDED_PER_CLOCK,
    UNALIGNED_SHARE,
    UNALIGNED_SHARE_ON_HOPPER,
    operation_seconds,
)
from lowmem.errors import InputError
from lowmem.run import plan_command

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# 1e9 bytes/s, and 1e12 sustained FLOP/s in bf16: bytes are nanoseconds. Four multiprocessors.
PLAIN = Card(
    "plain", 2**30, (8, 0), 4, {"bf16": Rate(2e12, 0.5), "fp16": Rate(2e12, 0.5), "fp32": Rate(1e11, 1.0)},
    memory_bytes_per_second=1e9 / MEMORY_SHARE, bus_bytes_per_second=1e8, reported_names=(), source="made up",
)  # fmt: skip
FAST_MEMORY = replace(PLAIN, memory_bytes_per_second=1e30)


def meta(*shape, dtype=FP32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def work(card, func, *args, **kwargs) -> float:
    """Seconds beside the kernel's start and end, of an operation run on tensors without data."""
    seconds = operation_seconds(card, func, args, kwargs, func(*args, **kwargs))
    assert seconds > KERNEL_SECONDS
    return seconds - KERNEL_SECONDS


def nanoseconds(func, *args, **kwargs):
    return pytest.approx(1e9 * work(PLAIN, func, *args, **kwargs))


# --- the table ---


def test_the_table_holds_exactly_the_cards_that_are_promised():
    promised = "gtx1080ti rtx2080ti rtx3060 rtx3090 rtx4090 p100 t4 l4 a100 h100 h200"
    assert sorted(name for name, card in CARDS.items() if card.measured) == sorted(promised.split())
    assert all(card.name == name for name, card in CARDS.items())


def test_every_card_has_the_multiprocessor_of_its_capability_and_newer_ones_the_last_before():
    assert {card.capability for card in CARDS.values()} <= MULTIPROCESSORS.keys()
    assert multiprocessor((12, 1)).threads == 1536 and multiprocessor((3, 7)) == multiprocessor((5, 0))


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_is_plausible(card):
    assert ("bf16" in card.rates) == (card.capability >= (8, 0))
    assert all(0.3 <= rate.share <= 1 for rate in card.rates.values())
    assert card.rates["fp16"].peak >= card.rates["fp32"].peak
    # fp32: a multiprocessor has 64 or 128 units, each two FLOPs a clock, at 0.9 to 2.7 GHz
    units = 128 if card.capability in ((6, 1), (8, 6), (8, 9), (9, 0), (12, 0)) else 64
    assert 0.9e9 < card.rates["fp32"].peak / (2 * units * card.multiprocessors) < 2.7e9
    assert card.copy_bytes_per_second < card.bus_bytes_per_second < card.memory_bytes_per_second
    assert card.source and isinstance(hash(card), int)


def test_copies_in_both_directions_are_no_faster_than_the_ram_of_a_pc():
    """PCIe 5 with 16 lanes would be faster than two channels of DDR5. Servers have more channels."""
    shares = {name: CARDS[name].copy_bytes_per_second / CARDS[name].bus_bytes_per_second for name in CARDS}
    assert 2 * CARDS["rtx5090"].copy_bytes_per_second == PC_RAM_BYTES_PER_SECOND < 89.6e9  # of DDR5-5600
    assert shares["rtx3090"] == shares["rtx4090"] == shares["rtx5060"] == shares["h100"] == DUPLEX_SHARE


def test_the_peaks_are_those_of_nvidias_whitepapers():
    """Appendix A of the Turing, GA102, Ada and RTX Blackwell whitepapers: 16-bit products summed in fp32, dense."""
    peaks = {  # TFLOP/s of tensor cores, and in fp32
        "rtx2080ti": (53.8, 13.4), "rtx3090ti": (80.0, 40.0), "rtx4060ti": (44.1, 22.1), "rtx4080": (97.5, 48.7),
        "rtx5080": (112.6, 56.3), "rtx5090": (209.5, 104.8),
    }  # fmt: skip
    for name, published in peaks.items():
        rates = CARDS[name].rates
        assert [rates[kind].peak / 1e12 for kind in ("fp16", "fp32")] == pytest.approx(published, rel=3e-3), name


def test_every_geforce_rtx_is_in_the_table():
    series = {20: "50 60 70 80", 30: "50 60 70 80 90", 40: "50 60 70 80 90", 50: "50 60 70 80 90"}
    for first, numbers in series.items():
        for number in numbers.split():
            assert any(name.startswith(f"rtx{first}{number}") for name in CARDS), (first, number)
    editions = "2060-12gb 2080-super 3060-8gb 3080-12gb 3080ti-laptop 3080-laptop-16gb 4060ti-16gb 4070ti-super"
    assert all(f"rtx{edition}" in CARDS for edition in editions.split())
    for card in CARDS.values():
        assert card_named(card.name) is card and card.reported_names
        if not card.measured:
            assert card_of_name_reported(card.reported_names[0], card.memory_bytes).memory_bytes == card.memory_bytes


@pytest.mark.parametrize(
    ("card", "reported_gib"), [("a10g", 22.06), ("l40s", 44.39), ("a40", 44.34), ("a6000", 47.40), ("v100", 15.77)]
)
def test_the_memory_of_a_professional_card_is_no_more_than_cuda_reports(card, reported_gib):
    """As errors of PyTorch in public issues say it: "GPU 0 has a total capacity of 22.06 GiB"."""
    assert 0.98 < CARDS[card].memory_bytes / 2**30 / reported_gib <= 1


def test_precisions_that_a_card_lacks_run_on_its_fp32_units():
    pascal, turing = CARDS["gtx1080ti"], CARDS["rtx2080ti"]
    assert pascal.rates["fp16"].peak == pascal.rates["fp32"].peak
    assert CARDS["p100"].rates["fp16"].peak == CARDS["p100"].rates["fp32"].peak
    assert turing.sustained_flops(BF16) == turing.rates["fp32"].sustained * EMULATED_SHARE
    assert turing.sustained_flops(FP16) == 53.8e12 * 0.92
    assert CARDS["a100"].sustained_flops(torch.int64) == CARDS["a100"].sustained_flops(FP32)


WRITTEN = {  # as people and vendors write the name of a card
    "rtx3090": ("rtx3090", "RTX 3090", "rtx-3090", "3090"),
    "rtx2080ti": ("NVIDIA GeForce RTX 2080 Ti",),
    "t4": ("Tesla T4", "T4 16GB"),
    "h200": ("H200", "H200 141GB"),
    "rtx4070ti-super": ("rtx4070ti-super", "RTX 4070 Ti SUPER"),
    "rtx4060ti-16gb": ("RTX 4060 Ti 16 GB", "4060 ti 16gb"),
    "rtx4060-laptop": ("NVIDIA GeForce RTX 4060 Laptop GPU",),
    "rtx2080-maxq": ("GeForce RTX 2080 with Max-Q Design",),
    "rtx3060": ("RTX 3060 12GB",),
    "rtx3060-8gb": ("rtx 3060 8 GB",),
    "rtx4060ti": ("RTX 4060 Ti 8GB",),
    "gtx1080ti": ("1080ti",),
    "rtx4070-laptop": ("NVIDIA GeForce RTX 4070 Laptop GPU", "rtx4070 laptop", "RTX 4070 Mobile"),
    "rtx3080-laptop-16gb": ("RTX 3080 Laptop 16GB",),
    "v100": ("v100", "Tesla V100-SXM2-16GB"),
    "v100-32gb": ("V100 32GB",),
    "a10g": ("a10g", "A10G 24GB"),
    "l40s": ("l40s", "NVIDIA L40S 48GB"),
    "a6000": ("a6000", "RTX A6000"),
    "rtx6000": ("rtx6000", "Quadro RTX 6000"),
    "rtx6000-ada": ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
    "rtxpro6000": ("RTX PRO 6000 Blackwell Workstation Edition",),
    "l4": ("L4 24GB",),
    "a100-80gb": ("A100 80GB",),
    "a100": ("A100-SXM4-40GB", "a100 pcie"),
    "h100": ("H100 80GB HBM3", "H100 SXM5"),
    "h100-pcie": ("H100 PCIe",),
}


@pytest.mark.parametrize(("name", "card"), [(name, card) for card, names in WRITTEN.items() for name in names])
def test_a_card_is_found_by_name_however_it_is_written(name, card):
    assert card_named(name) is CARDS[card]


@pytest.mark.parametrize(
    ("name", "near"),
    [("rtx3090 s", "rtx3090"), ("rtx 6090", "rtx5090"), ("RTX 3060 24GB", "rtx3060"), ("", ""), ("unknown", "")]
    + [("4050", "mean rtx4050-laptop?"), ("3050 ti", "mean rtx3050ti-laptop?")],
)
def test_an_unknown_card_is_refused_with_the_nearest_and_where_all_are_named(name, near, capsys):
    with pytest.raises(InputError) as refusal:
        card_named(name)
    said = str(refusal.value)
    assert near in said and "python -m lowmem.plan --help" in said and "leave --gpu out" in said and len(said) < 4 * 80
    with pytest.raises(SystemExit):
        plan_command.main(["--help"])
    assert set(CARDS) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


# What torch.cuda.get_device_name says; GiB of memory, which tell cards with one name apart; the card.
REPORTED = [
    ("NVIDIA GeForce GTX 1080 Ti", None, "gtx1080ti"), ("GeForce RTX 2080 Ti", None, "rtx2080ti"),
    ("NVIDIA GeForce RTX 3060", None, "rtx3060"), ("NVIDIA GeForce RTX 3090", None, "rtx3090"),
    ("NVIDIA GeForce RTX 4090", None, "rtx4090"), ("Tesla P100-PCIE-16GB", None, "p100"), ("Tesla T4", None, "t4"),
    ("NVIDIA L4", None, "l4"), ("NVIDIA A100-SXM4-40GB", None, "a100"), ("NVIDIA A100-PCIE-40GB", None, "a100"),
    ("NVIDIA H100 80GB HBM3", None, "h100"), ("NVIDIA H200", None, "h200"), ("NVIDIA L40S", None, "l40s"),
    ("NVIDIA A10G", None, "a10g"), ("Tesla V100-SXM2-32GB", None, "v100-32gb"), ("NVIDIA RTX A6000", None, "a6000"),
    ("NVIDIA A100-SXM4-80GB", None, "a100-80gb"), ("NVIDIA H100 PCIe", None, "h100-pcie"),
    ("NVIDIA GeForce GTX 1080", None, "gtx1080"), ("NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx4060ti-16gb"),
    ("NVIDIA GeForce RTX 4060 Ti", 7.6, "rtx4060ti"), ("NVIDIA GeForce RTX 3060", 7.8, "rtx3060-8gb"),
    ("NVIDIA GeForce RTX 3060", 11.76, "rtx3060"), ("NVIDIA GeForce RTX 3080 Laptop GPU", 16, "rtx3080-laptop-16gb"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, "rtx4090-laptop"),
    ("NVIDIA GeForce RTX 2070 Super with Max-Q Design", 7.8, "rtx2070-super-maxq"),
]  # fmt: skip


@pytest.mark.parametrize(("reported", "gib", "card"), REPORTED)
def test_a_card_is_recognised_by_what_cuda_calls_it(reported, gib, card):
    assert card_of_name_reported(reported, gib and int(gib * 2**30)) is CARDS[card]


def test_a_card_that_is_only_nearly_one_of_the_table_is_not_taken_for_it():
    nearly = (
        *("NVIDIA GeForce RTX 3090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "Tesla P100-SXM2-16GB", "NVIDIA L40G", ""),
        *("Tesla P100-PCIE-12GB", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA B200"),
    )
    assert [card_of_name_reported(name) for name in nearly] == [None] * len(nearly)


# --- memory ---


def test_an_operation_reads_its_inputs_and_writes_its_outputs():
    x, y = meta(1000), meta(1000)
    assert nanoseconds(aten.mul.Tensor, x, y) == 12_000
    assert nanoseconds(aten.mul.Tensor, x, x) == 8_000  # one tensor, read once
    assert nanoseconds(aten.mul.Tensor, x, 2.0) == 8_000
    assert nanoseconds(aten._to_copy.default, x, dtype=BF16) == 6_000
    assert nanoseconds(aten.sum.dim_IntList, meta(10, 100), [0]) == 4_400
    assert nanoseconds(aten.zeros.default, [1000], device="meta") == 4_000
    assert nanoseconds(aten.cat.default, [x, y]) == 16_000
    assert nanoseconds(aten.native_dropout.default, x, 0.1, True) == 9_000  # a bool mask beside the output


def test_what_is_changed_in_place_is_read_and_written_and_what_is_overwritten_only_written():
    x, y = meta(1000), meta(1000)
    assert nanoseconds(aten.add_.Tensor, x, y) == 12_000
    assert nanoseconds(aten.mul_.Tensor, x, 2.0) == 8_000
    assert nanoseconds(aten.addcdiv_.default, x, y, meta(1000)) == 16_000
    assert nanoseconds(aten._foreach_mul_.Scalar, [x, y], 2.0) == 16_000
    mask = meta(1000, dtype=torch.bool)
    assert nanoseconds(aten.masked_fill.Scalar, x, mask, 0.0) == 8_000 + 9_000  # a copy, which is then changed
    assert nanoseconds(aten.copy_.default, x, meta(1000, dtype=BF16)) == 6_000
    assert nanoseconds(aten.fill_.Scalar, x, 1.0) == 4_000
    assert nanoseconds(aten.mul.out, x, y, out=meta(1000)) == 12_000


def test_a_grouped_product_multiplies_every_row_by_one_matrix():
    """As a mixture of experts does: 4 matrices here, and the time of one product of all rows with one of them."""
    rows, matrices, ends = meta(512, 256, dtype=BF16), meta(4, 256, 128, dtype=BF16), meta(4, dtype=torch.int32)
    one = work(FAST_MEMORY, aten.mm.default, rows, matrices[0])
    assert work(FAST_MEMORY, aten._grouped_mm.default, rows, matrices, ends) == one
    of_matrices = work(FAST_MEMORY, aten._grouped_mm.default, rows.T, meta(512, 128, dtype=BF16), ends)
    assert of_matrices == work(FAST_MEMORY, aten.mm.default, rows.T, meta(512, 128, dtype=BF16))


def test_an_expanded_tensor_costs_what_exists_of_it():
    assert nanoseconds(aten.clone.default, meta(1, 10).expand(100, 10)) == 40 + 4_000


def test_of_a_table_only_the_rows_that_are_used_are_read():
    table, rows = meta(50257, 100), torch.empty(8, dtype=torch.int64, device="meta")
    assert nanoseconds(aten.embedding.default, table, rows) == 2 * 3_200 + 64
    assert nanoseconds(aten.gather.default, table, 1, rows[:, None]) == 2 * 32 + 64
    assert nanoseconds(aten.scatter_add_.default, table, 1, rows[:, None], meta(8, 1)) == 3 * 32 + 3 * 64
    whole = nanoseconds(aten.embedding_dense_backward.default, meta(8, 100), rows, 50257, -1, False)
    assert whole == 4 * 50257 * 100 + 3_200 + 64


NO_TIME = {  # further arguments, of views and of operators that make empty tensors
    aten.view.default: [[100]], aten.view.dtype: [torch.int32], aten._unsafe_view.default: [[100]],
    aten.transpose.int: [0, 1], aten.t.default: [], aten.permute.default: [[1, 0]], aten.expand.default: [[10, 10]],
    aten.as_strided.default: [[5], [1]], aten.split.Tensor: [5], aten.unbind.int: [], aten.slice.Tensor: [0, 1, 5],
    aten.select.int: [0, 1], aten.detach.default: [], aten.alias.default: [], aten.t_.default: [],
    aten.empty_like.default: [], aten.new_empty.default: [[100]],
    aten.is_same_size.default: [torch.empty(1, device="meta")],
}  # fmt: skip


@pytest.mark.parametrize("func", NO_TIME, ids=str)
def test_views_and_empty_tensors_take_no_time(func):
    x = meta(10, 10)
    assert operation_seconds(PLAIN, func, (x, *NO_TIME[func]), {}, func(x, *NO_TIME[func])) == 0


def test_reading_a_number_takes_no_time_on_the_gpu():
    x = torch.ones(())
    assert operation_seconds(PLAIN, aten._local_scalar_dense.default, (x,), {}, 1.0) == 0


def test_a_tensor_without_entries_launches_nothing():
    assert operation_seconds(PLAIN, aten.mul.Tensor, (meta(0), 2.0), {}, meta(0)) == 0
    assert operation_seconds(PLAIN, aten.mm.default, (meta(0, 8), meta(8, 0)), {}, meta(0, 0)) == 0


# --- products ---


def test_a_product_that_fills_the_card_runs_at_the_sustained_rate_of_its_dtype():
    a, b = meta(512, 1024, dtype=BF16), meta(1024, 512, dtype=BF16)  # 16 tiles: 4 rounds of 4
    flops = 2 * 512 * 512 * 1024
    assert work(FAST_MEMORY, aten.mm.default, a, b) == pytest.approx(flops / 1e12)
    assert work(FAST_MEMORY, aten.mm.default, a.float(), b.float()) == pytest.approx(flops / 1e11)
    assert work(FAST_MEMORY, aten.addmm.default, meta(512, dtype=BF16), a, b) == pytest.approx(flops / 1e12)
    batched = work(FAST_MEMORY, aten.bmm.default, a.expand(3, 512, 1024), b.expand(3, 1024, 512))
    assert batched == pytest.approx(3 * flops / 1e12)
    into = work(FAST_MEMORY, aten.mm.out, a, b, out=meta(512, 512, dtype=BF16))
    assert into == pytest.approx(flops / 1e12)
    onto = work(FAST_MEMORY, aten.addmm_.default, meta(512, 512), a.float(), b.float())
    assert onto == pytest.approx(flops / 1e11)


def test_a_product_is_bound_by_memory_where_it_has_few_operations_for_its_bytes():
    a, b = meta(512, 16, dtype=BF16), meta(16, 512, dtype=BF16)
    assert nanoseconds(aten.mm.default, a, b) == 2 * (512 * 16 * 2 + 512 * 512)


@pytest.mark.parametrize(
    ("rows", "columns", "terms", "share"),
    [
        (256, 256, 64, 1.0),  # 4 tiles, 4 multiprocessors
        (640, 128, 64, 5 / 8),  # 5 tiles: two rounds
        (384, 128, 64, 3 / 4),  # 3 tiles: one is idle
        (192, 256, 64, 3 / 4),  # half of two of the four tiles is over the edge
        (128, 128, 64, 1 / 4),  # one tile, a sum too short to split
        (128, 128, 512, 2 / 4),  # one tile, its sum split in two
        (128, 128, 65536, 1.0),  # and in four
        (64, 64, 65536, 1.0),  # a smaller tile
        (8, 128, 65536, 1 / 2),  # the smallest tile is 16
    ],
)
def test_tiles_that_stand_over_and_idle_multiprocessors_are_lost(rows, columns, terms, share):
    seconds = work(FAST_MEMORY, aten.mm.default, meta(rows, terms, dtype=BF16), meta(terms, columns, dtype=BF16))
    assert seconds == pytest.approx(2 * rows * columns * terms / 1e12 / share)


@pytest.mark.parametrize(("rows", "columns"), [(640, 128), (128, 640)])
def test_fp32_products_fill_a_card_with_half_tiles_where_whole_ones_would_not(rows, columns):
    a, b = meta(rows, 64), meta(64, columns)  # 5 tiles are two rounds of 4; 10 halves are three
    assert work(FAST_MEMORY, aten.mm.default, a, b) == pytest.approx(2 * rows * columns * 64 / 1e11 / (10 / 12))


def test_sixteen_bit_products_with_a_size_that_is_no_multiple_of_8_are_slower():
    def per_flop(columns, dtype, card=FAST_MEMORY):
        a, b = meta(512, 1024, dtype=dtype), meta(1024, columns, dtype=dtype)
        return work(card, aten.mm.default, a, b) / columns

    full = per_flop(12800, BF16)
    assert per_flop(12799, BF16) == pytest.approx(full / UNALIGNED_SHARE, rel=1e-3)
    assert per_flop(12799, FP32) == pytest.approx(10 * full, rel=1e-3)
    hopper = replace(FAST_MEMORY, capability=(9, 0))
    assert per_flop(12799, BF16, hopper) == pytest.approx(full / UNALIGNED_SHARE_ON_HOPPER, rel=1e-3)
    pascal, volta = (replace(FAST_MEMORY, capability=capability) for capability in ((6, 1), (7, 0)))
    assert per_flop(12799, FP16, pascal) == pytest.approx(full, rel=1e-3)
    assert per_flop(12799, FP16, volta) == pytest.approx(full / UNALIGNED_SHARE, rel=1e-3)


@pytest.mark.parametrize(
    ("card", "dtype", "side", "seen"),
    [  # TFLOP/s at `side` as others measured it: the issues that gpus.MEASURED names
        ("rtx3060", BF16, 1024, 19.0),
        ("rtx3060", BF16, 2048, 23.7),
        ("rtx4090", BF16, 1024, 126.8),
        ("gtx1080ti", FP32, 1024, 7.6),
        ("gtx1080ti", FP32, 2048, 8.6),
        ("p100", FP32, 1024, 5.4),
        ("p100", FP32, 2048, 6.8),
        ("a100", FP32, 1024, 9.0),
    ],
)
def test_smaller_products_are_about_as_fast_as_others_measured_them(card, dtype, side, seen):
    seconds = work(CARDS[card], aten.mm.default, meta(side, side, dtype=dtype), meta(side, side, dtype=dtype))
    assert 2 * side**3 / (seconds + KERNEL_SECONDS) / 1e12 == pytest.approx(seen, rel=0.2)


# --- kernels that take few elements per clock ---


CLOCKS = 4 * 1e11 / (4 * 128)  # of PLAIN's four multiprocessors, in a second: 128 FLOP each


def test_a_kernel_without_vector_instructions_takes_its_elements_one_by_one():
    a, b = meta(100, 100), meta(100, 100)
    for other in (b, torch.empty((), device="meta")):  # a number is no second row
        seconds = operation_seconds(FAST_MEMORY, aten.add.Tensor, (a, other), {}, meta(100, 100))
        assert seconds == pytest.approx(KERNEL_SECONDS)
    mixed = work(FAST_MEMORY, aten.add.Tensor, a, b.bfloat16())
    assert mixed == pytest.approx(10_000 / (MIXED_PER_CLOCK * CLOCKS))
    strided = 10_000 / (STRIDED_PER_CLOCK * CLOCKS)
    for arguments in ((a, b.T), (a, b[:1]), (a, b[:, :1])):
        assert work(FAST_MEMORY, aten.mul.Tensor, *arguments) == pytest.approx(strided)
    assert work(FAST_MEMORY, aten.clone.default, b.T, memory_format=torch.contiguous_format) == pytest.approx(strided)


def test_a_norm_that_draws_random_numbers_takes_their_time_too():
    """A kernel's own elements per clock, and dropout's 2.4."""
    x, row, seeds = meta(100, 128), meta(128), meta(2)
    forward = [x, row, None, meta(100, 128), None, 1e-5, 0.0, False, x, meta(100, 128), seeds, 0, 0.1]
    backward = [x, x, row, meta(100), meta(100, 128), meta(4, 128), 0.0, None, None, seeds, 0, 0.1]
    for name, arguments, per_clock in (("normalize", forward, 1.8), ("normalize_backward", backward, 1.2)):
        func = getattr(torch.ops.lowmem, name).default
        drawn = operation_seconds(FAST_MEMORY, func, tuple(arguments), {}, None) - KERNEL_SECONDS
        arguments = [None if each is seeds else each for each in arguments]
        plain = operation_seconds(FAST_MEMORY, func, tuple(arguments), {}, None) - KERNEL_SECONDS
        assert plain == pytest.approx(12_800 / (per_clock * CLOCKS))
        assert drawn == pytest.approx(plain + 12_800 / (2.4 * CLOCKS))


def test_such_kernels_are_no_slower_than_memory_on_a_card_with_slow_memory():
    a, b = meta(100, 100), meta(100, 100, dtype=BF16)
    assert nanoseconds(aten.add.Tensor, a, b) == 4 * 20_000 + 20_000


def test_half_as_many_terms_of_a_16_bit_sum_take_half_as_long():
    one, two = (work(FAST_MEMORY, aten.sum.dim_IntList, meta(rows, 64, dtype=BF16), [0]) for rows in (512, 1024))
    assert two == pytest.approx(2 * one) and one > 0


def test_small_new_results_move_at_the_last_level_caches_speed_and_large_ones_at_memorys():
    x = meta(1000)  # reads and writes 8,000 bytes
    for size, speed in ((10**12, CACHE_SPEED), (8_000 / CACHE_REACH, 1.0), (1, 1.0)):
        card = replace(PLAIN, cache_bytes=size)
        assert 1e9 * work(card, aten.neg.default, x) == pytest.approx(8_000 / speed)
    assert 1e9 * work(replace(PLAIN, cache_bytes=10**12), aten.neg_.default, x) == pytest.approx(8_000), "in place"


# --- other operations ---


def test_other_operations_that_torch_counts_are_counted_its_way():
    x, weight = meta(2, 8, 10, 10, dtype=BF16), meta(4, 8, 3, 3, dtype=BF16)
    args = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    seconds = work(FAST_MEMORY, aten.convolution.default, *args)
    assert seconds == pytest.approx(2 * 2 * 8 * 8 * 4 * 8 * 9 / 1e12)


# --- as the simulator uses it ---


def test_every_operation_of_a_small_step_has_a_time():
    asked = []

    class Ask(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            asked.append((func, args, kwargs, result))
            return result

    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        embedding = torch.nn.Embedding(1000, 64)
        tokens = torch.zeros(2, 32, dtype=torch.int64)
    with Ask():
        logits = layer(embedding(tokens)) @ embedding.weight.T
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert len(asked) > 100
    card = CARDS["rtx3090"]
    times = {func: operation_seconds(card, func, args, kwargs, result) for func, args, kwargs, result in asked}
    assert all(0 <= seconds < 1e-3 for seconds in times.values())
    free = {func._overloadpacket.__name__ for func, seconds in times.items() if seconds == 0}
    views = "_unsafe_view alias as_strided detach expand permute select slice split squeeze t transpose unsqueeze view"
    assert free <= {*views.split(), "empty", "empty_like", "new_empty", "new_empty_strided"}
