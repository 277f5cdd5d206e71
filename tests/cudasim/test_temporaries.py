"""The table of temporaries, against numbers worked out by hand; tests/cuda holds it to PyTorch's allocator."""

import torch
from torch.nn import functional as F

from lowmem.cudasim.temporaries import Gpu, hidden_bytes
from tests.cudasim.test_cuda_ops import BF16, FP16, FP32, GTX1080TI, H100, RTX3090, T4, Seen, heads, meta, run_attention

aten = torch.ops.aten
A100 = (8, 0)


def temporaries(gpu, func, *args, **kwargs):
    return hidden_bytes(func, args, kwargs, func(*args, **kwargs), gpu)


def test_gpt2_xl_flash_backward_by_hand():
    tensors = [heads() for _ in range(3)]
    _, seen = run_attention(H100, tensors, is_causal=True)
    name = "_scaled_dot_product_flash_attention_backward"
    row_sums = 25 * 1024 * 4  # 102,400
    dq = 25 * 1024 * 64 * 4  # 6,553,600
    # H100: 132 multiprocessors over 25 heads, 6 splits; RTX 3090: 82 over 25, 4 splits
    assert seen.hidden_bytes(name, Gpu(H100, 132)) == (row_sums, 6 * dq) == (102_400, 39_321_600)
    assert seen.hidden_bytes(name, Gpu(RTX3090, 82)) == (row_sums, 4 * dq) == (102_400, 26_214_400)
    assert seen.hidden_bytes(name, Gpu(H100, 132, deterministic=False)) == (row_sums, dq)


def test_flash_forward_splits_the_keys_of_a_batch_too_small_for_the_card():
    name = "_scaled_dot_product_flash_attention"
    _, seen = run_attention(H100, [heads(H=25) for _ in range(3)])
    assert seen.hidden_bytes(name, Gpu(H100, 132)) == ()  # 400 blocks for 264 places
    _, seen = run_attention(H100, [heads(H=5) for _ in range(3)])
    # 80 blocks for 264 places, 4 blocks of 256 keys: 3 splits would leave as many keys to each as 2; 2 fill 0.61 of
    # the places, 4 fill 1.21, that is two waves at 0.61
    assert seen.hidden_bytes(name, Gpu(H100, 132)) == (2 * 5 * 1024 * 4, 2 * 5 * 1024 * 64 * 4)
    _, seen = run_attention(H100, [heads(H=5), heads(H=5, T=4096), heads(H=5, T=4096)])
    # 16 blocks of keys: 3 splits fill 0.91 of one wave, 16 fill 0.97 of five, which is not worth it
    assert seen.hidden_bytes(name, Gpu(H100, 132)) == (3 * 5 * 1024 * 4, 3 * 5 * 1024 * 64 * 4)
    _, seen = run_attention(H100, [heads(H=5) for _ in range(3)], dropout_p=0.1)
    assert seen.hidden_bytes(name, Gpu(H100, 132)) == ()


def test_gpt2_xl_efficient_backward_by_hand_on_a_t4():
    _, seen = run_attention(T4, [heads(dtype=FP16) for _ in range(3)], is_causal=True)
    name = "_scaled_dot_product_efficient_attention"
    assert seen.hidden_bytes(name, Gpu(T4, 40)) == ()
    tiles = 25 * 16 * (16 + 64 * 64 * 4)  # 16 tiles of 64 queries per head, each with a lock
    assert seen.hidden_bytes(name + "_backward", Gpu(T4, 40)) == (25 * 1024 * 4, tiles) == (102_400, 6_560_000)


def test_efficient_attention_of_wide_heads_and_of_fp32_needs_more():
    name, gpu = "_scaled_dot_product_efficient_attention", Gpu(T4, 40)
    _, seen = run_attention(T4, [heads(H=16, D=256, dtype=FP16) for _ in range(3)])
    assert seen.hidden_bytes(name, gpu) == (16 * 1024 * 256 * 4,)
    sums = 64 * 2 * 256 * 4  # of dk and dv, per head
    tiles = 8 * 4 * (16 + 128 * 64 * 4)  # of 128 queries and 64 columns
    assert seen.hidden_bytes(name + "_backward", gpu) == (16 * 1024 * 4, 16 * (sums + tiles))
    _, seen = run_attention(GTX1080TI, [heads(dtype=FP32) for _ in range(3)])
    products = 25 * 1024 * 64 * 4
    assert seen.hidden_bytes(name, Gpu(GTX1080TI, 28)) == ()
    assert seen.hidden_bytes(name + "_backward", Gpu(GTX1080TI, 28)) == (products, 204_800)


def test_embedding_backward_sorts_from_3073_lookups_on():
    gpu = Gpu(H100, 132)
    for lookups in (3072, 4096):
        weight = meta(50257, 1600)
        with Seen() as seen:
            out = F.embedding(torch.zeros(1, lookups, dtype=torch.int64, device="meta"), weight)
            out.backward(torch.empty_like(out))
        sizes = seen.hidden_bytes("embedding_dense_backward", gpu)
        if lookups == 3072:
            assert sizes == ()
    rows = 4096 // 10 + 4096  # 4,505
    assert sizes == (*[4096 * 8] * 5, rows * 8, rows * 1600 * 4) and sizes[-1] == 28_832_000


def test_groups_of_queries_have_gradients_of_their_own_first():
    query, key, value = (heads(H=count, dtype=FP16, grad=False) for count in (16, 4, 4))
    func = aten._scaled_dot_product_efficient_attention_backward.default
    args = query, query, key, value, None, query, None, None, None, 0.0, [True] * 4  # on meta from 2.14 on
    assert hidden_bytes(func, args, {}, None, Gpu(T4, 40))[:2] == (16 * 1024 * 64 * 2,) * 2


def test_layer_norm_backward_sums_blocks_of_rows_only_where_multiprocessors_would_idle():
    def found(rows, width, multiprocessors):
        x, vector, statistics = meta(rows, width, grad=False), meta(width, grad=False), meta(rows, 1, grad=False)
        args = x, x, [width], statistics, statistics, vector, vector, [True] * 3
        return temporaries(Gpu(A100, multiprocessors), aten.native_layer_norm_backward.default, *args)

    assert found(65536, 256, 108) == ()  # not above 65,536 rows
    assert found(131072, 2048, 108) == ()  # 64 blocks side by side for 108 multiprocessors: half of those
    blocks = 131072 // 32
    # as the allocator saw it (2.14.1): two tables of sums, then each is summed by 256 outputs of 128 threads
    assert found(131072, 256, 108) == (blocks * 256 * 2, blocks * 256 * 2, 512, 8_388_608, 8)


def test_a_sum_of_another_dtype_is_one_of_a_copy_but_for_16_bit_in_fp32():
    gpu, flags = Gpu(A100, 108), torch.empty(8, 1024, dtype=torch.bool, device="meta")
    assert temporaries(gpu, aten.sum.default, flags) == (8 * 1024 * 8,)
    assert temporaries(gpu, aten.sum.default, torch.empty(8, 1024, dtype=torch.bool)) == ()  # on the CPU
    for dtype in (BF16, FP16):
        assert temporaries(gpu, aten.sum.dim_IntList, meta(64, 64, dtype=dtype, grad=False), [0], dtype=FP32) == ()


def test_the_sum_of_a_biass_gradient_by_hand():
    """16,384 x 1,280 on 28 multiprocessors: a thread has 4 columns; blocks of 32 x 4 threads; 10 blocks for all columns
    and, of 16,384 / 4 rows a thread, enough for 12 blocks on each multiprocessor: 336 / 10, rounded up to 34."""
    found = temporaries(Gpu(RTX3090, 28), aten.sum.dim_IntList, meta(16384, 1280, grad=False), [0])
    assert found == (4 * 1280 * 34 * (32 * 4), 4 * 10) == (22_282_240, 40)


def test_a_whole_norm_leaves_one_number_per_block():
    """4,194,304 numbers: 512 threads, 2,048 of them at once on 108 multiprocessors make 432 blocks."""
    x = meta(4_194_304, dtype=FP32, grad=False)
    assert temporaries(Gpu(A100, 108), aten.linalg_vector_norm.default, x) == (432 * 4, 4)


def test_a_sum_over_more_than_two_gib_is_cut_and_handed_on():
    """131,072 x 10,240 in 16 bit: two kernels, the first of which leaves fp32 sums to the second."""
    gpu, x = Gpu(H100, 132), meta(131072, 10240, grad=False)
    half = temporaries(gpu, aten.sum.dim_IntList, x[:65536], [0])
    assert temporaries(gpu, aten.sum.dim_IntList, x, [0]) == (*half, 10240 * 4)
