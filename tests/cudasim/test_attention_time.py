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


def forward_seconds(card, query, key, value, causal, kind="flash_attention", dropout_p=0.0):
    forward = getattr(aten, f"_scaled_dot_product_{kind}").default
    given = {"flash_attention": (), "flash_attention_for_cpu": ()}.get(kind, (None, False))
    args, output = (query, key, value, *given), meta(*query.shape[:3], value.shape[3])
    seconds = operation_seconds(card, forward, (*args, dropout_p, causal), {}, (output,))
    by_name = {"dropout_p": dropout_p, "is_causal": causal}
    assert operation_seconds(card, forward, args, by_name, (output,)) == seconds
    return seconds - KERNEL_SECONDS


def backward_seconds(card, query, key, value, causal, func=FLASH, deterministic=True):
    names = [argument.name for argument in func._schema.arguments]
    arguments = [None] * len(names)
    arguments[:4] = meta(*query.shape[:3], value.shape[3]), query, key, value
    arguments[names.index("is_causal")] = causal
    results = (query, key, value)
    return operation_seconds(card, func, tuple(arguments), {}, results, deterministic=deterministic) - KERNEL_SECONDS


@pytest.mark.parametrize(
    "kind", ["flash_attention", "efficient_attention", "flash_attention_for_cpu", "cudnn_attention"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_attention_counts_what_torch_counts_and_the_tiles_below_the_diagonal_where_it_is_causal(kind, causal, hopper):
    card = replace(ONE, capability=(9, 0)) if hopper else ONE
    kernel, side = ("efficient", 64) if "efficient" in kind else ("flash", 128)
    reached = [1.0, 1.0]  # keys of a forward row, queries of a backward column
    if kernel == "flash":
        reached = [tokens / (tokens + HALF_SPEED_TOKENS[hopper]) for tokens in (512, 384)]
    forward_share, backward_share = (share * part for share, part in zip(SHARES[kernel, hopper], reached, strict=True))
    query, key, value = meta(2, 3, 384, 16), meta(2, 3, 512, 16), meta(2, 3, 512, 24)
    rows, columns = 384 // side, 512 // side
    counted = rows * (rows + 1) / 2 / rows / columns if causal else 1  # tiles of a row: 1, 2, 3
    flops = sdpa_flop_count(query.shape, key.shape, value.shape) * counted
    seconds = forward_seconds(card, query, key, value, causal, kind)
    assert seconds == pytest.approx(flops / (1e12 * forward_share))

    flops = sdpa_backward_flop_count((2, 3, 384, 24), query.shape, key.shape, value.shape) * counted
    func = getattr(aten, f"_scaled_dot_product_{kind}_backward").default
    seconds = backward_seconds(card, query, key, value, causal, func)
    assert seconds == pytest.approx(flops / (1e12 * backward_share))


def test_hoppers_shares_are_for_16_bit_on_hopper_alone():
    queries = {
        dtype: torch.empty(1, 1, 128, 64, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32)
    }
    for capability, dtype, share in (
        ((9, 0), torch.bfloat16, SHARES["efficient", True][0]),
        ((10, 0), torch.bfloat16, SHARES["efficient", False][0]),
        ((9, 0), torch.float32, 10 * SHARES["efficient", False][0]),  # whose products are a tenth as fast
    ):  # fmt: skip
        x, card = queries[dtype], replace(ONE, capability=capability)
        seconds = forward_seconds(card, x, x, x, False, "efficient_attention")
        work = 4 * 128 * 128 * 64 / 1e12
        assert seconds == pytest.approx(work / share * (100 if dtype is torch.float32 else 1))


@pytest.mark.parametrize(
    ("func", "multiprocessors", "heads", "deterministic", "ends"),
    [
        # Tiles of a head's blocks: 3 + 1, 2. Six blocks on five multiprocessors: the last starts after one of 2 ends.
        (FLASH, 5, 3, True, 4),
        (FLASH, 4, 3, True, 6),  # Two heads fill the card: 4, 2, 4, 2. The last head's blocks start at 2.
        (FLASH, 7, 7, True, 6),  # Each head has one block.
        (FLASH, 7, 8, True, 12),  # The last head runs alone.
        (FLASH, 20, 2, True, 3),  # A head has ten blocks, and work for three.
        (FLASH, 3, 2, False, 4),  # The first head's blocks take 3, 2, 1. The second head's start at 1, 2, 3.
        (EFFICIENT, 5, 3, True, 6),  # Each head has one block.
        (EFFICIENT, 3, 2, False, 4),
    ],
)
def test_backward_ends_with_its_last_block(func, multiprocessors, heads, deterministic, ends):
    tokens = 3 * (128 if func is FLASH else 64)
    x = meta(1, heads, tokens, 64)  # three tiles: 6 below the diagonal of a head
    alone = backward_seconds(ONE, x, x, x, True, func) / heads / 6  # a tile, on the card's only one
    card = replace(ONE, multiprocessors=multiprocessors)
    seconds = backward_seconds(card, x, x, x, True, func, deterministic)
    assert seconds / (alone * multiprocessors) == pytest.approx(ends)


def test_forward_ends_with_its_last_block():
    x = meta(1, 2, 384, 64)
    alone = forward_seconds(ONE, x, x, x, True, dropout_p=0.1) / 12
    ends = {1: 12, 2: 7, 3: 5, 4: 4, 6: 3, 9: 3}  # of blocks of 1, 2, 3, 1, 2, 3 tiles
    for multiprocessors, last in ends.items():
        card = replace(ONE, multiprocessors=multiprocessors)
        seconds = forward_seconds(card, x, x, x, True, dropout_p=0.1)
        assert seconds / (alone * multiprocessors) == pytest.approx(last), multiprocessors


def test_queries_and_keys_of_other_lengths_have_blocks_of_their_own():
    """On four multiprocessors, without a causal mask. Forward's blocks are rows of tiles, backward's columns."""
    card = replace(ONE, multiprocessors=4)
    for queries, keys, forward, backward in ((384, 256, 2, 3), (256, 640, 5, 2 * 2)):
        query, key = meta(1, 1, queries, 64), meta(1, 1, keys, 64)
        tiles = queries * keys / 128**2
        alone = forward_seconds(ONE, query, key, key, False, dropout_p=0.1) / tiles
        seconds = forward_seconds(card, query, key, key, False, dropout_p=0.1)
        assert seconds / (4 * alone) == pytest.approx(forward)
        alone = backward_seconds(ONE, query, key, key, False, deterministic=False) / tiles
        seconds = backward_seconds(card, query, key, key, False, deterministic=False)
        assert seconds / (4 * alone) == pytest.approx(backward)


def test_the_last_of_more_queries_than_keys_see_all_keys():
    query, key = meta(1, 1, 256, 64), meta(1, 1, 128, 64)  # causal, efficient: 1, 2, 2 and 2 of two tiles of 64
    for seconds, how in ((forward_seconds, "efficient_attention"), (backward_seconds, EFFICIENT)):
        causal, whole = (seconds(ONE, query, key, key, masked, how) for masked in (True, False))
        assert causal / whole == pytest.approx(7 / 8)


def test_heads_are_those_of_the_queries():
    query, key = meta(1, 4, 256, 64), meta(1, 2, 256, 64)
    card = replace(ONE, multiprocessors=4)
    for seconds in (forward_seconds, backward_seconds):
        assert seconds(card, query, key, key, True) == pytest.approx(seconds(card, query, query, query, True))


@pytest.mark.parametrize(("multiprocessors", "ends"), [(32, 2), (12, 6)])
def test_forward_without_dropout_splits_the_keys_so_that_few_heads_keep_all_busy(multiprocessors, ends):
    """Eight blocks of eight tiles become 32 of two: on 12 multiprocessors, three rounds."""
    x, card = meta(1, 1, 1024, 64), replace(ONE, multiprocessors=multiprocessors)
    tile = forward_seconds(ONE, x, x, x, False, dropout_p=0.1) / 64
    whole, split = (forward_seconds(card, x, x, x, False, dropout_p=p) for p in (0.1, 0.0))
    assert whole == pytest.approx(8 * multiprocessors * tile) and split == pytest.approx(ends * multiprocessors * tile)


@pytest.mark.parametrize(
    ("card", "E", "blocks"), [("rtx4090", 64, 8), ("rtx4090", 128, 16), ("a100", 128, 8), ("a100", 192, 16)]
)
def test_tiles_of_wide_heads_are_smaller(card, E, blocks):
    """Backward of one head of 1,024 tokens, with a multiprocessor for each tile. Those of forward are not."""
    x, card = meta(1, 1, 1024, E), replace(CARDS[card], memory_bytes_per_second=1e30)
    one = backward_seconds(replace(card, multiprocessors=1), x, x, x, False)
    many = backward_seconds(replace(card, multiprocessors=64), x, x, x, False)
    assert 64 * one / many == pytest.approx(blocks, rel=0.01)
    one, many = (forward_seconds(replace(card, multiprocessors=n), x, x, x, False, dropout_p=0.1) for n in (1, 64))
    assert 64 * one / many == pytest.approx(8)


@pytest.mark.parametrize("heads", [1, 9, 10, 11, 19, 20, 21, 64, 100])
@pytest.mark.parametrize("deterministic", [True, False])
def test_many_heads_take_as_long_as_all_their_blocks_one_after_another(heads, deterministic):
    """The expected time starts every block. The code skips most heads: exactly if each has one block, else nearly."""
    tiles = 5
    blocks = gradients_of_queries(10, heads) if deterministic else tiles
    sizes = [sum(range(tiles - first, 0, -blocks)) for first in range(min(blocks, tiles))]
    free = [0] * 10
    for size in sizes * heads:
        free.sort()
        free[0] += size
    x = meta(1, heads, tiles * 128, 64)
    alone = backward_seconds(ONE, x, x, x, True) / heads / 15
    seconds = backward_seconds(replace(ONE, multiprocessors=10), x, x, x, True, deterministic=deterministic)
    exact = deterministic and len(sizes) == 1
    assert seconds / (alone * 10) == pytest.approx(max(free), rel=1e-9 if exact else 0.05)


@pytest.mark.parametrize("card", ["rtx3060", "rtx4090", "h200"])
@pytest.mark.parametrize("heads", [1, 32, 320])
@pytest.mark.parametrize("causal", [False, True])
def test_a_longer_row_takes_no_less(card, heads, causal):
    """With dropout: without, the keys of longer rows may be split."""
    rows = [meta(1, heads, tokens, 64) for tokens in (127, 128, 129, 255, 256, 257, 1023, 1024, 1025)]
    forward = [forward_seconds(CARDS[card], x, x, x, causal, dropout_p=0.1) for x in rows]
    backward = [backward_seconds(CARDS[card], x, x, x, causal) for x in rows]
    assert forward == sorted(forward) and backward == sorted(backward)


def test_nothing_takes_no_time():
    for shape in ((0, 2, 128, 64), (1, 2, 0, 64)):
        assert forward_seconds(ONE, *[meta(*shape)] * 3, True) <= 0
        assert backward_seconds(ONE, *[meta(*shape)] * 3, True) <= 0


def test_further_gradients_of_the_queries_are_written_and_read():
    card = replace(ONE, multiprocessors=8, memory_bytes_per_second=0.5e9 / MEMORY_SHARE)
    query, key = meta(1, 2, 1000, 80), meta(1, 2, 512, 80)  # two heads on eight multiprocessors: four gradients
    free_memory = replace(card, memory_bytes_per_second=1e30)
    further = 3 * 2 * 1024 * 96 * 4  # of whole tiles, for heads of 96
    more = backward_seconds(card, query, key, key, False) - backward_seconds(free_memory, query, key, key, False)
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
    predicted = {"fwd": forward_seconds(CARDS["h200"], x, x, x, True, dropout_p=config.attn_pdrop)}
    predicted["bwd"] = backward_seconds(CARDS["h200"], x, x, x, True)
    for kind, (seconds, calls) in kernels.items():
        assert calls > 90
        assert predicted[kind] + KERNEL_SECONDS == pytest.approx(seconds / calls, rel=0.05), kind
