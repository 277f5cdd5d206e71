"""What CUDA runs in the place of generic operators, worked out by hand; tests/cuda holds it to PyTorch's CUDA build."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem.cudasim.cuda_ops import CUBLAS_OPERATORS, CudaFunctions, allocated, attention_kernel, workspace_bytes
from lowmem.cudasim.meta_kernels import fused_on_meta
from lowmem.cudasim.temporaries import hidden_bytes
from lowmem.units import MIB

aten = torch.ops.aten
H100, RTX3090, T4, V100, GTX1080TI = (9, 0), (8, 6), (7, 5), (7, 0), (6, 1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Seen(TorchDispatchMode):
    """Notes every operation with its arguments and result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @property
    def names(self):
        return [func.overloadpacket.__name__ for func, *_ in self.calls]

    def hidden_bytes(self, name, gpu):
        (call,) = [call for call in self.calls if call[0].overloadpacket.__name__ == name]
        return hidden_bytes(*call, gpu)


def meta(*shape, dtype=BF16, grad=True):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def heads(B=1, H=25, T=1024, D=64, dtype=BF16, grad=True):
    """Returns [B, H, T, D], with the layout [B, T, H, D] that models make."""
    return meta(B, T, H, D, dtype=dtype, grad=grad).transpose(1, 2)


def run_attention(capability, tensors, **keywords):
    with CudaFunctions(capability), Seen() as seen:
        out = F.scaled_dot_product_attention(*tensors, **keywords)
        out.backward(torch.empty_like(out))
    return out, seen


def saved_bytes(function):
    """Returns the bytes that autograd keeps for the backward of `function()`, each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    return sum(storages.values()), out


BOOL_MASK = {"attn_mask": torch.ones(1, 1, 128, 128, dtype=torch.bool, device="meta")}


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "key_heads", "keywords", "kernel"),
    [
        (H100, BF16, 64, 4, {"is_causal": True}, "flash"),
        (H100, FP16, 64, 4, {"dropout_p": 0.1}, "flash"),
        ((12, 1), BF16, 64, 4, {}, "flash"),
        ((13, 0), BF16, 64, 4, {}, "math"),
        (H100, BF16, 60, 4, {}, "flash"),  # padded to 64
        (H100, BF16, 60, 4, BOOL_MASK, "math"),
        (H100, BF16, 64, 4, BOOL_MASK, "efficient"),
        (H100, FP32, 64, 4, {}, "efficient"),
        (H100, FP32, 62, 4, {}, "math"),
        (T4, FP32, 62, 4, {}, "efficient"),  # no tensor cores for fp32: no alignment
        (T4, FP16, 64, 4, {}, "efficient"),
        (T4, FP16, 60, 4, {}, "math"),
        (T4, BF16, 64, 4, {}, "math"),
        (GTX1080TI, FP16, 60, 4, {}, "efficient"),
        ((3, 7), FP32, 64, 4, {}, "math"),
        (H100, torch.float64, 64, 4, {}, "math"),
        (H100, BF16, 256, 4, {"dropout_p": 0.1}, "flash"),
        (RTX3090, BF16, 256, 4, {"dropout_p": 0.1}, "efficient"),
        (RTX3090, BF16, 256, 4, {}, "flash"),
        (RTX3090, BF16, 224, 4, {}, "efficient"),
        (RTX3090, BF16, 192, 4, {"dropout_p": 0.1}, "flash"),
        (H100, BF16, 264, 4, {}, "efficient"),
        (H100, BF16, 64, 2, {"enable_gqa": True}, "flash"),
        (H100, BF16, 64, 3, {"enable_gqa": True}, "math"),
        (H100, FP32, 64, 2, {"enable_gqa": True}, "math"),
        (T4, FP16, 64, 2, {"enable_gqa": True}, "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_chooses_on_that_card(capability, dtype, width, key_heads, keywords, kernel):
    query = heads(1, 4, 128, width, dtype)
    key, value = heads(1, key_heads, 128, width, dtype), heads(1, key_heads, 128, width, dtype)
    assert attention_kernel(capability, query, key, value, **keywords) == kernel


@pytest.mark.parametrize(("capability", "dtype", "key_heads", "keywords", "older", "newer"), [
    (T4, FP16, 2, {"enable_gqa": True}, "math", "efficient"),
    (H100, FP32, 2, {"enable_gqa": True}, "math", "efficient"), (H100, BF16, 2, {"enable_gqa": True}, "flash", "flash"),
    (H100, BF16, 2, {"enable_gqa": True} | BOOL_MASK, "math", "efficient"), (H100, BF16, 1, {}, "math", "flash"),
    (T4, FP16, 1, {}, "math", "efficient"), (T4, FP16, 2, {}, "math", "math"),
    (T4, FP16, 3, {"enable_gqa": True}, "math", "math"),
])  # fmt: skip
def test_from_2_14_on_the_efficient_kernel_takes_groups_and_both_take_one_head_of_keys(
    capability, dtype, key_heads, keywords, older, newer
):
    query, key, value = heads(H=4, T=128, dtype=dtype), *(heads(H=key_heads, T=128, dtype=dtype) for _ in range(2))
    for version, kernel in (((2, 13), older), ((2, 14), newer), ((3, 0), newer)):
        assert attention_kernel(capability, query, key, value, **keywords, torch_version=version) == kernel


def test_a_wide_head_is_refused_only_where_there_is_a_backward():
    tensors = [heads(1, 4, 128, 224) for _ in range(3)]
    with torch.no_grad():
        assert attention_kernel(RTX3090, *tensors) == "flash"


def test_causal_with_fewer_queries_than_keys_is_not_for_flash():
    query, key, value = heads(1, 4, 64), heads(1, 4, 128), heads(1, 4, 128)
    assert attention_kernel(H100, query, key, value, is_causal=True) == "efficient"
    assert attention_kernel(H100, query, key, value) == "flash"


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, BOOL_MASK, {"enable_gqa": True, "scale": 0.5}])
@pytest.mark.parametrize("dtype", [BF16, torch.float64])
def test_the_composite_runs_torchs_own_operations_but_adds_the_mask_in_place(dtype, keywords):
    def run(mode):
        tensors = [heads(1, count, 128, dtype=dtype) for count in (4, 2 if "enable_gqa" in keywords else 4, 4)]
        with mode, Seen() as seen:
            out = F.scaled_dot_product_attention(*tensors, **keywords)
            out.backward(torch.empty_like(out))
        views = {"transpose", "view", "_unsafe_view", "expand", "detach", "unsqueeze", "squeeze"}
        return [name for name in seen.names if name not in views]

    generic = run(contextlib.nullcontext())
    ours = run(CudaFunctions(T4))
    assert "bmm" in ours and ours == ["add_" if name == "add" else name for name in generic]


def test_fake_tensors_that_say_cpu_run_what_cuda_would():
    with FakeTensorMode(), CudaFunctions(H100), Seen() as seen:
        x = torch.empty(4, 1024, dtype=FP16, requires_grad=True)
        saved, out = saved_bytes(lambda: F.dropout(x, 0.1))
        out.backward(torch.empty_like(out))
        query, key, value = torch.empty(3, 1, 4, 128, 64, dtype=BF16, requires_grad=True).unbind()
        F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True).sum().backward()
        F.softmax(x, dim=-1, dtype=FP32)
    assert saved == 4 * 1024  # a bool per entry
    names = seen.names
    assert "_scaled_dot_product_flash_attention" in names and "_scaled_dot_product_flash_attention_backward" in names
    assert "bernoulli_" not in names and "_scaled_dot_product_flash_attention_for_cpu" not in names
    assert "_softmax" in names and "_to_copy" not in names
    assert x.device.type == "cpu"


def test_dropout_modules_too_and_only_where_cuda_does():
    x = meta(4, 8)

    def names(function, *arguments, **keywords):
        with CudaFunctions(H100), Seen() as seen:
            function(*arguments, **keywords)
        return seen.names

    assert names(nn.Dropout(0.1), x) == ["native_dropout"]
    assert names(F.dropout, x, p=0.1, training=True) == ["native_dropout"]
    for arguments in ({"p": 0.0}, {"p": 0.1, "training": False}, {"p": 0.1, "inplace": True}, {"p": 1.0}):
        assert "native_dropout" not in names(F.dropout, x.detach(), **arguments)
    real = torch.ones(1000)
    with CudaFunctions(H100):
        torch.manual_seed(0)
        ours = F.dropout(real, 0.5)
        attended = F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)
    torch.manual_seed(0)
    assert torch.equal(ours, F.dropout(real, 0.5)) and torch.equal(attended, torch.ones(1, 1, 2, 4))


def test_recurrent_cells_are_fused_where_meta_tensors_have_the_kernel():
    with CudaFunctions(H100), Seen() as seen:
        assert nn.GRUCell(8, 8, device="meta")(meta(2, 8, dtype=FP32)).shape == (2, 8)  # as in a plan
        nn.LSTMCell(8, 8, device="meta")(meta(2, 8, dtype=FP32))
        with fused_on_meta():
            assert nn.GRUCell(8, 8, device="meta")(meta(2, 8, dtype=FP32)).shape == (2, 8)
    assert seen.names.count("_thnn_fused_gru_cell") == seen.names.count("_thnn_fused_lstm_cell") == 1


@pytest.mark.parametrize("call", [
    lambda x: F.softmax(x, dim=-1, dtype=FP32), lambda x: torch.softmax(x, -1, FP32),
    lambda x: x.softmax(dim=-1, dtype=FP32), lambda x: nn.functional.softmax(x, -1, dtype=FP32),
])  # fmt: skip
def test_fp16_softmax_in_fp32_copies_nothing_and_bf16_does(call):
    for dtype, copies in ((FP16, 0), (BF16, 2)):
        x = meta(4, 8, dtype=dtype)
        with CudaFunctions(H100), Seen() as seen:
            out = call(x)
            out.backward(torch.empty_like(out))
            assert F.softmax(x, -1).dtype is dtype
        assert seen.names.count("_to_copy") == copies
        assert out.dtype is FP32 and x.grad.dtype is dtype


def test_the_bias_of_a_linear_is_added_in_place_where_the_input_is_no_matrix():
    x, weight, bias = meta(4, 8, 16), meta(32, 16), meta(32)

    def names(x, bias):
        with CudaFunctions(H100), Seen() as seen:
            F.linear(x, weight, bias)
        return set(seen.names)

    assert "add_" in names(x.transpose(0, 1), bias)
    assert {"add", "add_"} & (
        names(x, bias) | names(x.transpose(0, 1), None) | names(x[0].T.contiguous().T, bias)
    ) == set()


@pytest.mark.parametrize(
    ("capability", "config", "version", "expected"),
    [
        (RTX3090, None, (2, 13), (8_519_680,)),
        (RTX3090, ":4096:2:16:8", (2, 13), (8_519_680,)),
        (RTX3090, ":4096:8", (2, 13), (32 * MIB,)),
        (RTX3090, "nonsense", (2, 13), (8_519_680,)),
        (H100, ":16:8", (2, 13), (128 * 1024,)),
        *((capability, None, (2, 13), (32 * MIB,)) for capability in (H100, (10, 0), (12, 0))),
        ((12, 0), None, (2, 11), (8_519_680, MIB)),  # the second for cuBLASLt
        (H100, None, (2, 11), (32 * MIB, MIB)),
    ],
)
def test_workspaces(capability, config, version, expected):
    assert workspace_bytes(capability, config, version) == expected


def test_every_product_of_a_block_and_of_the_loss_counts_as_one():
    a, b, out = meta(8, 8, grad=False), meta(8, 8, grad=False), meta(8, 8, grad=False)
    with Seen() as seen:
        torch.mm(a, b, out=out)
        a @ b
        F.linear(a[None], b, b[0])
        torch.matmul(a[None, None], b[None, None])
        torch.baddbmm(a[None], b[None], b[None])
        a.addmm_(b, b)
    products = [func for func, *_ in seen.calls if "mm" in func.overloadpacket.__name__]
    assert len(products) == 6 and all(func in CUBLAS_OPERATORS for func in products)
    assert aten.add.Tensor not in CUBLAS_OPERATORS


@pytest.mark.parametrize(("dropout_p", "on_the_device"), [(0.0, 4), (0.1, 2)])
def test_the_random_numbers_of_efficient_attention_with_dropout_lie_in_ram(dropout_p, on_the_device):
    """As the allocator of 2.14.1 was seen to be asked, on a T4, where a step keeps one of each for every block."""
    efficient = aten._scaled_dot_product_efficient_attention.default
    results = [object() for _ in range(4)]
    assert allocated(efficient, (None, None, None, None, True, dropout_p), {}, results) == results[:on_the_device]
    assert allocated(efficient, (None,) * 5, {"dropout_p": dropout_p}, results) == results[:on_the_device]


def test_results_are_allocated_in_their_order_but_for_dropouts():
    results = [object(), object()]
    assert allocated(aten.native_dropout.default, (None, 0.1, True), {}, results) == results[::-1]
    assert allocated(aten.native_layer_norm.default, (), {}, results) == results
