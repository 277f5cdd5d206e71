"""Gated MLPs in one kernel each way: values and gradients against fp64, and which modules are such MLPs."""

import copy

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from lowmem.core.gates import GELU_TANH, SILU, activation_of, gated, gated_mlp
from lowmem.models.build import make_decoder
from tests.core import test_fused
from tests.families import FAMILIES

pytest.importorskip("triton")
interpreted, compiled = test_fused.interpreted_layers, test_fused.compiled_layers
accesses_of = test_fused.accesses_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {FP32: 2**-22, BF16: 2**-8, FP16: 2**-11}


def qwen(activation: str = "silu") -> Qwen3MLP:
    return Qwen3MLP(Qwen3Config(hidden_size=16, intermediate_size=24, hidden_act=activation))


class Halved(Qwen3MLP):
    def forward(self, x):
        return super().forward(x) / 2


class Dropped(Qwen3MLP):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_an_activation_is_found_by_its_values():
    gemma = Gemma3MLP(Gemma3TextConfig(hidden_size=16, intermediate_size=24))
    assert (activation_of(qwen()), activation_of(gemma)) == (SILU, GELU_TANH)
    assert activation_of(qwen("gelu_new")) == GELU_TANH


@pytest.mark.parametrize("activation", ["relu", "gelu", "relu2", "mish", "tanh"])
def test_another_activation_is_none(activation):
    assert activation_of(qwen(activation)) is None and activation in ACT2FN


@pytest.mark.parametrize("kind", [Halved, Dropped])
def test_a_module_that_computes_anything_else_is_none(kind):
    assert activation_of(kind(Qwen3Config(hidden_size=16, intermediate_size=24))) is None


def test_a_module_with_other_layers_or_arguments_is_none():
    other = qwen()
    other.up_proj = nn.Identity()
    assert activation_of(other) is None and activation_of(nn.Linear(4, 4)) is None

    class Needs(Qwen3MLP):
        def forward(self, x, more):
            return super().forward(x) + more

    module = Needs(Qwen3Config(hidden_size=16, intermediate_size=24))
    assert activation_of(module) is None


@pytest.mark.parametrize("size", [1, 1000, 1025])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH], ids=["silu", "gelu"])
def test_values_and_gradients_are_those_of_fp64_within_a_rounding(interpreted, activation, dtype, size):
    generator = torch.Generator().manual_seed(size)
    gate, up, gradient = (torch.randn(size, generator=generator).mul(3).to(dtype) for _ in range(3))
    gate[1:2] = -40  # whose exponential is large
    ours = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    exact = [tensor.double().requires_grad_() for tensor in (gate, up)]
    y = gated(*ours, activation)
    y.backward(gradient)
    truth = activation(exact[0]) * exact[1]
    truth.backward(gradient.double())
    assert y.dtype is dtype
    for found, right in ((y, truth), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))):
        assert ((found - right).abs() <= 1.01 * UNIT[dtype] * right.abs() + 1e-6 * right.abs().max()).all()


def test_an_mlp_computes_what_the_stock_one_does(interpreted):
    module, x = qwen(), torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    stock = copy.deepcopy(module)
    y, truth = gated_mlp(module, SILU, x), stock(x)
    y.sum().backward()
    truth.sum().backward()
    assert torch.allclose(y, truth, atol=1e-6)
    for one, other in zip(module.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_call_with_more_arguments_goes_to_the_modules_own_code():
    class Scaled(nn.Module):
        def forward(self, x, more):
            return x * more

    assert gated_mlp(Scaled(), SILU, torch.ones(2), 3).tolist() == [3, 3]


HAVE = {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo", "olmo2", "olmo3"}


def gated_in(family: str, fused: bool = True, precision: str = "bf16") -> bool:
    model = make_decoder(FAMILIES[family](), precision, "fp32", fused).model
    return any(getattr(vars(module).get("forward"), "func", None) is gated_mlp for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_such_mlps_use_the_kernel(family):
    if family in HAVE:
        assert gated_in(family) and not gated_in(family, fused=False) and not gated_in(family, True, "fp32")
    if family in ("gpt2", "gpt_neox", "opt", "bloom"):
        assert not gated_in(family)


@pytest.mark.parametrize(("capability", "kind"), [(75, "fp16"), (80, "bf16"), (90, "bf16")])
@pytest.mark.parametrize("name", ["_gated", "_gated_backward"])
def test_the_kernels_compile_for_cards_and_move_16_bytes_at_a_time(compiled, name, capability, kind):
    kernel = getattr(compiled, name)
    types = {argument: f"*{kind}" for argument in kernel.arg_names if argument.endswith("_at")} | {"n": "i32"}
    accesses = accesses_of(kernel, types, {"BLOCK": compiled.BLOCK}, "n", capability, 4)
    assert all("local" not in what and "v4" in width for what, width in accesses), accesses
