"""CUDA's autocast on tensors without data, against the lists of PyTorch's header and of its own tests."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowmem
from lowmem.cudasim import autocast
from lowmem.cudasim.autocast import autocast_simulated
from lowmem.errors import InputError

TORCH = Path(torch.__file__).parent
BASE_NAMES = {name.split(".")[0] for name in (*autocast.IN_FP32, *autocast.RESULT_IN_FP32, *autocast.NORMS)}


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="meta", requires_grad=grad)


def pytorchs_lists():
    """Returns the calls of PyTorch's own test of CUDA's autocast. Its file imports, for two names, the rest of the test
    suite, which needs packages that are not here."""
    path = TORCH / "testing/_internal/autocast_test_lists.py"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("from torch.testing._internal")]
    names = {"TEST_WITH_ROCM": False, "TestCase": object}
    exec("\n".join(lines), names)
    return names["AutocastTestLists"]("meta")


LISTS = pytorchs_lists()
NOT_ON_META = {"cudnn_convolution", "cudnn_convolution_transpose", "chain_matmul", "einsum"}
REFUSED = {name.split(".")[0] for name in autocast.REFUSED}


def test_the_rules_are_those_of_pytorchs_header():
    header = (TORCH / "include/ATen/autocast_mode.h").read_text()

    def listed(macro: str) -> set[str]:
        body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)\n", header)[1]
        return {re.sub(r",\s*", ".", entry) for entry in re.findall(r"_\((\w+(?:,\s*\w+)?)\)", body)}

    narrow = listed("AT_FORALL_LOWER_PRECISION_FP")
    assert {*autocast.IN_16_BIT} | {*autocast.REFUSED} >= narrow >= {*autocast.IN_16_BIT}
    assert {*autocast.IN_FP32} == listed("AT_FORALL_FP32")
    assert {*autocast.RESULT_IN_FP32} == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert {*autocast.WIDEST} == listed("AT_FORALL_PROMOTE")
    assert all(f'"{name}"' in header for name in autocast.NORMS)


@pytest.mark.parametrize("entry", LISTS.torch_fp16 + LISTS.nn_fp16, ids=lambda entry: entry[0])
def test_what_cudas_autocast_runs_in_16_bit_runs_in_bf16(entry):
    name, args = entry[0], entry[1]
    if name in NOT_ON_META:
        pytest.skip("the list's arguments do not run")
    with autocast_simulated(), torch.autocast("cuda", torch.bfloat16):
        function = getattr(torch._C._nn if entry in LISTS.nn_fp16 else torch, name)
        if name in REFUSED:
            with pytest.raises(InputError, match=name):
                function(*args)
        else:
            result = function(*args)
            assert (result[0] if isinstance(result, tuple) else result).dtype is torch.bfloat16


@pytest.mark.parametrize("entry", LISTS.torch_fp32 + LISTS.nn_fp32, ids=lambda entry: entry[0])
def test_what_cudas_autocast_runs_in_fp32_does_so_here(entry):
    name, args, kwargs = entry[0], entry[1], entry[2] if len(entry) > 2 else {}
    assert name in BASE_NAMES
    with autocast_simulated(), torch.autocast("cuda", torch.bfloat16):
        assert getattr(torch._C._nn if entry in LISTS.nn_fp32 else torch, name)(*args, **kwargs).dtype is torch.float32


def test_a_weights_bf16_copy_is_made_once_and_an_activations_each_time():
    weight, x = meta(4, 4, grad=True), meta(2, 4)
    with autocast_simulated(), torch.autocast("cuda", torch.bfloat16):
        first = F.linear(x, weight)
        (copy,) = autocast._copies.values()
        second = x @ weight
        assert autocast._copies == {weight: copy}
        assert F.layer_norm(first, (4,)).dtype is torch.float32
        assert (first + x).dtype is torch.float32  # not in any list
        assert F.softmax(first, -1, dtype=torch.bfloat16).dtype is torch.bfloat16  # as asked for
        assert F.linear(torch.ones(2, 4), torch.ones(4, 4)).dtype is torch.float32  # on the CPU
    assert not autocast._copies
    assert first.dtype is second.dtype is torch.bfloat16
    assert F.linear(x, weight).dtype is torch.float32
    (first.sum() + second.sum()).backward()
    assert weight.grad.dtype is torch.float32


def test_arguments_of_different_dtypes_get_the_widest():
    x, narrow = meta(3), meta(3, dtype=torch.bfloat16)
    with autocast_simulated(), torch.autocast("cuda", torch.bfloat16):
        assert torch.addcmul(x, narrow, x).dtype is torch.float32 and torch.dot(narrow, x).dtype is torch.float32
        assert torch.dot(narrow, narrow).dtype is torch.bfloat16


@pytest.mark.parametrize("module", [nn.LSTM(8, 8), nn.GRU(8, 8), nn.RNN(8, 8)])
def test_recurrent_networks_are_refused_by_name_under_autocast(module):
    def run(enabled: bool):
        layer, x = type(module)(8, 8).to("cuda"), torch.ones(4, 2, 8, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            layer(x)

    lowmem.cuda_peak(lambda: run(False))
    with pytest.raises(InputError, match="autocast's rule for torch's .* is not written down here"):
        lowmem.cuda_peak(lambda: run(True))


def test_autocast_switched_on_for_good_ends_with_the_simulation():
    weight = meta(64, 64, grad=True)

    def run():
        torch.set_autocast_enabled("cuda", enabled=True)
        return F.linear(torch.ones(64, 64, device="cuda"), weight)

    lowmem.cuda_peak(run)
    assert not autocast._copies, "the weight's bf16 copy"
    assert not torch.is_autocast_enabled("cuda") and F.linear(meta(2, 2), meta(2, 2)).dtype is torch.float32
