"""The time of fused attention: what torch counts, and multiprocessors that idle until the last block ends."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from experiments.gpu_acceptance.levers import SHAPES
from experiments.harness.rows import read
from lowmem.cudasim.attention import HALF_SPEED_TOKENS, SHARES, gradients_of_queries
from lowmem.cudasim.device_model import gpu_model
from lowmem.cudasim.gpus import CARDS, MEMORY_SHARE, Card, Rate
from lowmem.cudasim.roofline import KERNEL_SECONDS, operation_seconds
from lowmem.models.build import load_config
from tests.published.test_published import ROWS

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
# 1e12 sustained FLOP/s in bf16, and no time for memory
ONE = Card(
    "plain", 2**30, (8, 0), 1, {"bf16": Rate(2e12, 0.5), "fp16": Rate(2e12, 0.5), "fp32": Rate(1e11, 1.0)},
    memory_bytes_per_second=1e30, bus_bytes_per_second=1e8, reported_names=(), source="made up",
)  # fmt: skip


def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def forward_seconds(card, query, key, value, causal, kind="flash_attention"):
    forward = getattr(aten, f"_scaled_dot_product_{kind}").default
    given = (query, key, value) + ((None, False) if kind == "efficient_attention" else ())
    output = meta(*query.shape[:3], value.shape[3])
    seconds = operation_seconds(card, forward, (*given, 0.0, causal), {}, (output,))
    assert operation_seconds(card, forward, given, {"is_causal": causal}, (output,)) == seconds
    return seconds - KERNEL_SECONDS


def backward_seconds(card, query, key, value, causal, func=FLASH, deterministic=True):
    names = [argument.name for argument in func._schema.arguments]
    arguments = [None] * len(names)
    arguments[:4] = meta(*query.shape[:3], value.shape[3]), query, key, value
    arguments[names.index("is_causal")] = causal
    results = (query, key, value)
    return operation_seconds(card, func, tuple(arguments), {}, results, deterministic=deterministic) - KERNEL_SECONDS


@pytest.mark.parametrize("kind", ["flash_attention", "efficient_attention", "flash_attention_for_cpu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_attention_counts_what_torch_counts_and_the_tiles_below_the_diagonal_where_it_is_causal(kind, causal, hopper):
    card = replace(ONE, capability=(9, 0)) if hopper else ONE
    kernel = "efficient" if "efficient" in kind else "flash"
    reached = 512 / (512 + HALF_SPEED_TOKENS[hopper]) if kernel == "flash" else 1.0  # keys of a row
    forward_share, backward_share = (share * reached for share in SHARES[kernel, hopper])
    query, key, value = meta(2, 3, 400, 16), meta(2, 3, 512, 16), meta(2, 3, 512, 24)
    counted = 5 / 8 if causal else 1  # of four tiles of 128 in a row, 1, 2, 3, 4: 10 of 16
    flops = sdpa_flop_count(query.shape, key.shape, value.shape) * counted
    seconds = forward_seconds(card, query, key, value, causal, kind)
    assert seconds == pytest.approx(flops / (1e12 * forward_share))

    flops = sdpa_backward_flop_count((2, 3, 400, 24), query.shape, key.shape, value.shape) * counted
    func = getattr(aten, f"_scaled_dot_product_{kind}_backward").default
    seconds = backward_seconds(card, query, key, value, causal, func)
    assert seconds == pytest.approx(flops / (1e12 * backward_share))


@pytest.mark.parametrize(
    ("func", "multiprocessors", "heads", "deterministic", "ends"),
    [
        # Tiles of a head's blocks: 3 + 1, 2. Six blocks on five multiprocessors: the last starts after one of 2 ends.
        (FLASH, 5, 3, True, 4),
        (FLASH, 4, 3, True, 6),  # 4, 2, 4, 2; the last head's blocks start after 2: at 2 to 6 and 2 to 4
        (FLASH, 7, 7, True, 6),  # one block for each head
        (FLASH, 7, 8, True, 12),  # the last head alone
        (FLASH, 20, 2, True, 3),  # ten blocks for each head would do, and three tiles are there
        (FLASH, 3, 2, False, 4),  # 3, 2, 1; the second head's start at 1, 2, 3
        (EFFICIENT, 5, 3, True, 6),  # one block for each head
        (EFFICIENT, 3, 2, False, 4),
    ],
)
def test_backward_ends_with_its_last_block(func, multiprocessors, heads, deterministic, ends):
    shape = (1, heads, 384, 64)  # three tiles: 6 below the diagonal of a head
    alone = backward_seconds(ONE, *[meta(*shape)] * 3, True, func) / heads / 6  # a tile, on the card's only one
    card = replace(ONE, multiprocessors=multiprocessors)
    seconds = backward_seconds(card, *[meta(*shape)] * 3, True, func, deterministic)
    assert seconds / (alone * multiprocessors) == pytest.approx(ends)


def test_forward_ends_with_its_last_block():
    shape = (1, 2, 384, 64)
    alone = forward_seconds(ONE, *[meta(*shape)] * 3, True) / 12
    ends = {1: 12, 2: 7, 3: 5, 4: 4, 6: 3, 9: 3}  # of blocks of 1, 2, 3, 1, 2, 3 tiles
    for multiprocessors, last in ends.items():
        seconds = forward_seconds(replace(ONE, multiprocessors=multiprocessors), *[meta(*shape)] * 3, True)
        assert seconds / (alone * multiprocessors) == pytest.approx(last), multiprocessors


@pytest.mark.parametrize("heads", [1, 9, 10, 11, 19, 20, 21, 64, 100])
@pytest.mark.parametrize("deterministic", [True, False])
def test_many_heads_take_as_long_as_all_their_blocks_one_after_another(heads, deterministic):
    """All are started here, without skipping whole rounds."""
    tiles = 5
    blocks = gradients_of_queries(10, heads) if deterministic else tiles
    sizes = [sum(range(tiles - first, 0, -blocks)) for first in range(min(blocks, tiles))]
    free = [0] * 10
    for size in sizes * heads:
        free.sort()
        free[0] += size
    shape = (1, heads, tiles * 128, 64)
    alone = backward_seconds(ONE, *[meta(*shape)] * 3, True) / heads / 15
    seconds = backward_seconds(replace(ONE, multiprocessors=10), *[meta(*shape)] * 3, True, deterministic=deterministic)
    exact = deterministic and len(sizes) == 1
    assert seconds / (alone * 10) == pytest.approx(max(free), rel=1e-9 if exact else 0.05)


def test_further_gradients_of_the_queries_are_written_and_read():
    card = replace(ONE, multiprocessors=8, memory_bytes_per_second=0.5e9 / MEMORY_SHARE)
    x = meta(1, 2, 1024, 64)  # two heads on eight multiprocessors: four gradients
    free_memory = replace(card, memory_bytes_per_second=1e30)
    further = 3 * 2 * 1024 * 64 * 4
    more = backward_seconds(card, x, x, x, True) - backward_seconds(free_memory, x, x, x, True)
    assert more == pytest.approx(2 * further / 0.5e9)


def test_a_plain_program_has_the_faster_kernels_unless_determinism_is_on():
    x = meta(1, 50, 1024, 64)
    names = [argument.name for argument in FLASH._schema.arguments]
    arguments = [x] * 4 + [None] * (len(names) - 4)
    arguments[names.index("is_causal")] = True
    times = [gpu_model(CARDS["h200"], plain=plain).seconds(FLASH, tuple(arguments), {}, (x,) * 3) for plain in (0, 1)]
    assert times[0] > 1.25 * times[1]


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_attention_takes_as_long_as_its_kernels_ran_on_an_h200(model):
    """The rows were made by experiments/gpu_acceptance/levers.py. No constant was fitted to the 50 heads of XL."""
    row = [row for row in read(ROWS) if (row["section"], row["name"]) == ("levers", f"step: {model}")][-1]
    kernels = {"fwd": [0.0, 0], "bwd": [0.0, 0]}
    for name, seconds, calls in row["values"]["all: kernels"]:
        if "flash_" in name:
            kind = kernels[name.partition("flash_")[2][:3]]
            kind[:] = kind[0] + seconds, max(kind[1], calls)  # backward has three kernels a call
    config = load_config(model, "random")
    x = meta(SHAPES[model].micro_batch, config.n_head, SHAPES[model].seq, config.n_embd // config.n_head)
    predicted = {"fwd": forward_seconds(CARDS["h200"], x, x, x, True)}
    predicted["bwd"] = backward_seconds(CARDS["h200"], x, x, x, True)
    for kind, (seconds, calls) in kernels.items():
        assert calls > 90
        assert predicted[kind] + KERNEL_SECONDS == pytest.approx(seconds / calls, rel=0.08), kind
