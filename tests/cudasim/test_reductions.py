"""Staging buffers of reductions, worked out by hand and as PyTorch 2.14.1's allocator saw them on stand-ins."""

import torch

from lowmem.cudasim.gpus import CARDS, MULTIPROCESSORS, multiprocessor
from lowmem.cudasim.reductions import staging_bytes

BF16, FP32 = torch.bfloat16, torch.float32
RTX3060, A100, H100 = (28, (8, 6)), (108, (8, 0)), (132, (9, 0))


def staging(card, tensor, dims, vector=8):
    multiprocessors, capability = card
    vector = vector if tensor.itemsize == 2 else 4
    return staging_bytes(
        multiprocessors, multiprocessor(capability), tensor, dims, max(4, tensor.itemsize), tensor.itemsize, vector
    )


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_the_sum_of_a_biass_gradient_by_hand():
    """16,384 x 1,280 on 28 multiprocessors: a thread has 4 columns; blocks of 32 x 4 threads; 10 blocks for all columns
    and, of 16,384 / 4 rows a thread, enough for 12 blocks on each multiprocessor: 336 / 10, rounded up to 34."""
    assert staging(RTX3060, meta(16384, 1280), [0]) == (4 * 1280 * 34 * (32 * 4), 4 * 10) == (22_282_240, 40)


def test_a_whole_norm_leaves_one_number_per_block():
    """4,194,304 numbers: 512 threads, 2,048 of them at once on 108 multiprocessors make 432 blocks."""
    assert staging(A100, meta(4_194_304, dtype=FP32), [0]) == (432 * 4, 4)


def test_more_than_two_gib_are_cut_and_handed_on():
    """131,072 x 10,240 in 16 bit: two kernels, the first of which leaves fp32 sums to the second."""
    tensor = meta(131072, 10240)
    assert staging(H100, tensor, [0]) == (*staging(H100, tensor[:65536], [0]), 10240 * 4)


def test_every_card_has_the_multiprocessor_of_its_capability_and_newer_ones_the_last_before():
    assert {card.capability for card in CARDS.values()} <= MULTIPROCESSORS.keys()
    assert multiprocessor((12, 1)).threads == 1536 and multiprocessor((3, 7)) == multiprocessor((5, 0))
