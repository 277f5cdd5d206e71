"""Compares counterparts with the operators of a CUDA build of PyTorch: which exist, their results, and their waits."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from stand_in.counterparts import COUNTERPARTS, SYNCHRONOUS, waits
from tests.cuda.operators import deterministic_algorithms

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA build of PyTorch and a card, or the stand-in", allow_module_level=True)

aten = torch.ops.aten
HALF, FULL = torch.bfloat16, torch.float32

# Operators that no CPU has and that no model here has called: convolutions, recurrent cells, batch norm over processes,
# sparse and quantised products, attention of packed sequences, random numbers of old, communication.
NOT_NEEDED = (
    "_conv", "_convert_weight", "_cslt", "_cudnn_ctc", "_cudnn_init", "_cudnn_rnn", "_mixed_dtypes", "_scaled_grouped",
    "_scaled_mm", "_sparse_semi", "_thnn", "_to_sparse", "_use_", "_weight_int4", "batch_norm", "conv_", "cudnn_",
    "miopen_", "_scaled_dot_product_cudnn_attention",  # of which cuDNN refuses every graph on the stand-in
    "_flash_attention", "_efficient_attention", "_cudnn_attention", "_fill_mem_eff", "_triton", "_fused_dropout",
    "_masked_scale", "record_stream", "_scaled_dot_product_flash_attention.quantized",
)  # fmt: skip


def test_every_operator_that_the_cpu_lacks_has_a_counterpart_or_is_named_here():
    composites = "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
    elsewhere = {
        name
        for key in ("CPU", *composites)
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }  # fmt: skip
    on_cuda = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    lacking = {name.removeprefix("aten::") for name in on_cuda if name.startswith("aten::") and name not in elsewhere}
    with_counterpart = {operator.name().removeprefix("aten::") for operator in COUNTERPARTS}
    assert [name for name in sorted(lacking - with_counterpart) if not name.startswith(NOT_NEEDED)] == []
    assert lacking & with_counterpart, "the comparison sees operators that the CPU lacks"


def heads(count: int, dtype: torch.dtype, rows: int = 40) -> Tensor:
    return torch.zeros(2, rows, count, 16, dtype=dtype, device="cuda").transpose(1, 2)


def zeros(*shape: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def sample_calls():
    for dropout, key_heads in ((0.0, 4), (0.1, 4), (0.0, 2)):
        query, key = heads(4, HALF), heads(key_heads, HALF)
        forward = query, key, key, dropout, True
        yield aten._scaled_dot_product_flash_attention.default, forward
        found = aten._scaled_dot_product_flash_attention.default(*forward)
        saved = *found[:6], dropout, True, *found[6:8]
        yield aten._scaled_dot_product_flash_attention_backward.default, (query, query, key, key, *saved)
    for dropout, masked, keeps in ((0.0, True, True), (0.1, False, True), (0.0, False, False)):
        query, mask = heads(4, FULL), zeros(2, 1, 40, 40).expand(2, 4, 40, 40) if masked else None
        forward = query, query, query, mask, keeps, dropout, not masked
        yield aten._scaled_dot_product_efficient_attention.default, forward
        if keeps:
            found = aten._scaled_dot_product_efficient_attention.default(*forward)
            backward = query, query, query, query, mask, *found, dropout, [True, True, True, masked], not masked
            yield aten._scaled_dot_product_efficient_attention_backward.default, backward
    for dtype in (FULL, HALF):
        x, vector = zeros(3, 5, 8, dtype=dtype), zeros(8, dtype=dtype)
        kept = zeros(3, 5, 8, dtype=torch.bool)
        yield aten.native_dropout.default, (x, 0.1, True)
        yield aten.native_dropout_backward.default, (x, kept, 1 / 0.9)
        statistics = zeros(3, 5, 1), zeros(3, 5, 1)
        yield aten.native_layer_norm.default, (x, [8], vector, vector, 1e-5)
        yield aten.native_layer_norm_backward.default, (x, x, [8], *statistics, vector, vector, [True, True, True])
        yield aten.native_layer_norm_backward.default, (x, x, [8], *statistics, None, None, [True, False, False])
        yield aten._fused_rms_norm_backward.default, (x, x, [8], statistics[0], vector, [True, True])
    for forward, backward in (
        (aten._softmax.default, aten._softmax_backward_data.default),
        (aten._log_softmax.default, aten._log_softmax_backward_data.default),
    ):
        yield forward, (zeros(3, 8, dtype=torch.float16), 1, True)
        yield forward, (zeros(3, 8, dtype=HALF), 1, False)
        yield backward, (zeros(3, 8), zeros(3, 8), 1, torch.float16)
        yield backward, (zeros(3, 8, dtype=HALF), zeros(3, 8, dtype=HALF), 1, HALF)
    matrix, batch = zeros(16, 16, dtype=HALF), zeros(2, 16, 16, dtype=HALF)
    yield aten.mm.dtype, (matrix, matrix, FULL)
    yield aten.bmm.dtype, (batch, batch, FULL)
    yield aten.addmm.dtype, (matrix.float(), matrix, matrix, FULL)
    yield aten.baddbmm.dtype, (batch.float(), batch, batch, FULL)


def test_counterparts_return_tensors_of_the_shapes_and_dtypes_of_cudas():
    calls = list(sample_calls())
    for operator, arguments in calls:
        real = tree_leaves(operator(*arguments))
        if "backward" in operator.name() and "attention" in operator.name():
            continue  # their seeds are ours to write, and were not written here
        found = tree_leaves(COUNTERPARTS[operator](*tree_map_only(Tensor, Tensor.cpu, arguments)))
        assert len(real) == len(found), operator
        for place, (one, other) in enumerate(zip(real, found, strict=True)):
            if isinstance(other, Tensor):
                same = (one.shape, one.dtype) == (other.shape, other.dtype)
                assert same, (operator, place, one.shape, one.dtype, other.shape, other.dtype)
            elif other is not None:
                assert one == other, (operator, place)
    covered = {operator for operator, _ in calls}
    assert {"_out", "lowmem"} >= {
        next((part for part in ("_out", "lowmem") if part in operator.name()), operator.name())
        for operator in COUNTERPARTS.keys() - covered
    }, "all but those that write into an argument, or launch the project's kernels"


def waits_for_the_card(operator, arguments) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with _disable_current_modes():  # the operator itself, and not the stand-in's values
            operator(*arguments)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def test_what_is_said_to_wait_for_the_card_does_so_and_nothing_else_of_these():
    x, mask, places = zeros(6, 5), zeros(6, 5, dtype=torch.bool), zeros(3, dtype=torch.int64)
    number = zeros()
    calls = [
        (aten.nonzero.default, (mask,)), (aten.masked_select.default, (x, mask)), (aten.equal.default, (x, x.clone())),
        (aten._unique2.default, (places,)), (aten.unique_consecutive.default, (places,)),
        (aten.bincount.default, (places,)), (aten.repeat_interleave.Tensor, (places,)), (aten.histc.default, (x,)),
        (aten.index.Tensor, (x, [mask])), (aten.index.Tensor, (x, [places])),
        (aten.index_put_.default, (x, [mask], number)), (aten.index_put_.default, (x, [places], number)),
        (aten.index_put_.default, (x, [places], number, True)), (aten.index_fill_.int_Tensor, (x, 0, places, number)),
        (aten.masked_fill_.Tensor, (x, mask, number)), (aten.masked_fill_.Scalar, (x, mask, 1.0)),
        (aten.isin.Tensor_Tensor, (x, x)), (aten.masked_scatter_.default, (x, mask, x.clone())),
        (aten.multinomial.default, (x, 2)), (aten.sort.default, (x,)),
        (aten.topk.default, (x, 2)), (aten.gather.default, (x, 0, zeros(1, 5, dtype=torch.int64))),
        (aten.embedding_dense_backward.default, (zeros(4096, 8), zeros(4096, dtype=torch.int64), 100, -1, False)),
        (aten.median.default, (x,)), (aten.cumsum.default, (x, 0)), (aten.mm.default, (x, zeros(5, 6))),
    ]  # fmt: skip
    with deterministic_algorithms(False):  # a training before this test leaves them on, and histc has none
        for operator, arguments in calls:
            assert waits_for_the_card(operator, arguments) == waits(operator, arguments), operator
    waiting = {operator for operator, _ in calls if operator in SYNCHRONOUS}
    assert len(waiting) >= 13
