"""Activations with the product that reads them: values, gradients and sums against fp64, which modules have such ones,
and what is computed again."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from experiments.harness import trainings
from experiments.harness.trainings import make_step
from families import FAMILIES, MORE_FAMILIES, V, with_dropout
from lowmem.core.activations import ACTIVATIONS, GELU, GELU_TANH, SILU, ActivationForward, activation_of, sum_of_rows
from lowmem.core.decoder import Decoder
from lowmem.core.kernels import Kernels
from lowmem.core.layers import cast_explicitly
from lowmem.core.operation_recorder import OperationRecorder, holders_if_alone
from lowmem.core.products import ProductRecorder, ProductReplayer
from lowmem.models.build import make_decoder, model_from_config
from reference import tiny_model
from tests.core import test_fused
from tests.core.test_products import Counting
from tests.core.test_residual_sums import outcome, values_for
from tests.core.test_step import PLAIN, make_batches
from tests.stream_order.arrangements import with_plain_kernels

pytest.importorskip("triton")
interpreted, compiled = test_fused.interpreted_layers, test_fused.compiled_layers
accesses_of = test_fused.accesses_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {FP32: 2**-21, BF16: 2**-8, FP16: 2**-11}


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
    assert all(activation_of(ACT2FN[name]) == GELU_TANH for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"))
    assert activation_of(nn.GELU(approximate="tanh")) == GELU_TANH and activation_of(nn.SiLU()) == SILU
    assert activation_of(nn.GELU()) == activation_of(ACT2FN["gelu"]) == activation_of(qwen("gelu")) == GELU


@pytest.mark.parametrize("activation", ["relu", "relu2", "mish", "tanh", "quick_gelu", "gelu_10"])
def test_another_activation_is_none(activation):
    assert activation_of(qwen(activation)) is activation_of(ACT2FN[activation]) is None


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


SHAPES = [(1, 1), (7, 300), (2, 9, 16), (38, 1025)]  # the last: two programs of 19 rows, in tiles of 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["alone", "gated"])
def test_values_and_gradients_are_those_of_fp64_within_a_rounding(interpreted, is_gated, activation, dtype, shape):
    generator = torch.Generator().manual_seed(shape[0])
    gate, up, gradient = (torch.randn(shape, generator=generator).mul(3).to(dtype) for _ in range(3))
    gate[..., 1:2] = -40  # whose exponential is large
    up = up if is_gated else None
    exact = [tensor.double().requires_grad_() for tensor in (gate, up) if tensor is not None]
    truth = activation(exact[0]) * (exact[1] if is_gated else 1)
    truth.backward(gradient.double())
    values, of_gate = activation.values(gate, up), gradient.clone()
    again, of_up = activation.differentiate(of_gate, gate, up)
    pairs = [
        (values, truth),
        (again.view(shape), truth),
        (of_gate, exact[0].grad),
        *[(of_up, exact[-1].grad)] * is_gated,
    ]
    for found, right in pairs:
        assert found.dtype is dtype
        assert ((found - right).abs() <= 1.01 * UNIT[dtype] * right.abs() + 1e-6 * right.abs().max()).all()
    if not is_gated:
        right, scale = exact[0].grad.flatten(0, -2).sum(0), exact[0].grad.abs().flatten(0, -2).sum(0)
        found = sum_of_rows(of_gate, of_gate.flatten(0, -2))
        assert found.dtype is FP32 and ((found - right).abs() <= 1e-5 * scale + 1e-6).all(), "before it is rounded"


def test_a_sum_is_made_anew_if_the_gradient_was_written_since(interpreted):
    gradient, gate = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    GELU_TANH.differentiate(gradient, gate, None)
    noted = sum_of_rows(gradient, rows := gradient.view(6, 8))
    assert torch.allclose(noted, rows.sum(0), atol=1e-5)
    gradient += 1
    assert torch.equal(sum_of_rows(gradient, rows), rows.sum(0)) and torch.allclose(noted + 6, rows.sum(0), atol=1e-5)


class TwoReaders(nn.Module):
    """An MLP whose middle two layers read."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8)

    def forward(self, x, added):
        middle = self.up(x)
        return self.down(self.act(middle)) + (middle[..., :8] * added)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_bias_before_an_activation_and_another_reader_gets_the_gradients_of_both(interpreted, recorded):
    module, x, added = TwoReaders(), torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8)
    module.load_state_dict({name: tensor.to(BF16).float() for name, tensor in module.state_dict().items()})
    stock = copy.deepcopy(module).double()
    for layer in (module.up, module.down):
        layer.weight.data = layer.weight.data.to(BF16)
    cast_explicitly(module, FP32, Kernels.ALL)
    module.act.forward = ActivationForward(module.act, GELU_TANH)
    with OperationRecorder([x], [module], holders_if_alone()) if recorded else nullcontext():
        module(x, added.to(BF16)).sum().backward()
    stock(x.double(), added.to(BF16).double()).sum().backward()
    for one, other in zip(module.parameters(), stock.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 2e-2 * other.grad.norm(), "bf16 rounds to 2^-9"


HAVE = {
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo", "olmo2", "olmo3",
    "gpt2", "gpt_neo", "gptj", "bloom", "codegen", "gpt_bigcode", "phi", "gpt_neox", "falcon",
}  # fmt: skip
HAVE_NONE = {"opt", "biogpt"}  # one has ReLU, one drops numbers of the activation's output


def fused_in(family: str, kernels: Kernels = Kernels.ALL, precision: str = "bf16", dropout: float = 0.0) -> int:
    config = with_dropout((FAMILIES | MORE_FAMILIES)[family](), dropout)
    decoder = make_decoder(config, precision, "fp32", kernels)
    forwards = [vars(module).get("forward") for module in decoder.model.modules()]
    found = [forward for forward in forwards if isinstance(forward, ActivationForward)]
    assert all(forward.place is not None for forward in found)
    return len(found) / len(decoder.blocks)


@pytest.mark.parametrize("family", sorted(HAVE | HAVE_NONE))
def test_families_with_such_activations_use_the_kernel(family):
    assert fused_in(family) == fused_in(family, dropout=0.1) == (family in HAVE)
    assert not fused_in(family, Kernels.NONE) and not fused_in(family, precision="fp32")


@pytest.mark.parametrize("reader", [nn.Dropout(0.1), nn.LayerNorm(4 * 16), nn.Identity()], ids=["dropout", "norm", ""])
def test_an_activation_that_another_layer_reads_keeps_its_own_forward(monkeypatch, reader):
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    def forward(self, x):
        return self.dropout(self.c_proj(self.reader(self.act(self.c_fc(x)))))

    def made(self, size, config, init=GPT2MLP.__init__):
        init(self, size, config)
        self.reader = copy.deepcopy(reader) if not isinstance(reader, nn.LayerNorm) else nn.LayerNorm(size)

    monkeypatch.setattr(GPT2MLP, "__init__", made)
    monkeypatch.setattr(GPT2MLP, "forward", forward)
    assert fused_in("gpt2") == isinstance(reader, nn.Identity)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "family",
    "gpt2 qwen3 gpt_neox gpt_neo gptj opt bloom llama qwen2 gemma3_text mistral phi".split(),
)
@pytest.mark.parametrize(("precision", "kind"), [("fp16", FP16), ("bf16", BF16)])
def test_a_block_has_the_output_and_gradients_of_the_stock_one_in_fp64(interpreted, precision, kind, family):
    """The stock block is transformers' own, in fp64; rotary tables and RMSNorms round some numbers to fp32. Tolerance:
    a rounding to 16 bit errs by up to UNIT, in the root mean square by half of that. A gradient passes some 30 of them,
    whose errors add as random numbers do, to 3 UNIT. The largest error that was seen is 3.5 UNIT."""
    config = with_dropout((FAMILIES | MORE_FAMILIES)[family](), 0.0)
    decoder, stock = (
        make_decoder(config, precision, "fp32", Kernels.ALL),
        Decoder(model_from_config(config).double().train()),
    )
    values_for(decoder, kind)
    stock.model.load_state_dict(decoder.model.state_dict())
    with torch.no_grad():
        hidden, extras = decoder.embed(*decoder.example(V))
        _, true_extras = stock.embed(*stock.example(V))
    found, truth = outcome(decoder, 0, hidden, extras), outcome(stock, 0, hidden.double(), true_extras)
    largest = max(right.norm() for right in truth)
    for one, right in zip(found, truth, strict=True):
        assert right.dtype is torch.float64
        scale = right.norm() if right.norm() > 1e-9 * largest else largest  # the bias of OPT's keys has no gradient
        assert (one - right).norm() <= 5 * UNIT[kind] * scale


def trained(**kind):
    with with_plain_kernels():
        step, store = make_step(
            tiny_model("gpt2", dropout=0.1), precision="bf16", fused_kernels=Kernels.ALL, **PLAIN | kind
        )
        with Counting() as counting:
            outcome = trainings.train(step, store, make_batches(1), [1e-3])
    return outcome, counting.operations, step._decoder


@pytest.mark.parametrize("kept", [0, 1, 3], ids=["inputs", "products of one", "products of three"])
def test_a_block_that_runs_again_leaves_out_its_activation(kept):
    """Two micro-batches. Each activation is computed forward and, with its gradient, backward."""
    _, operations, decoder = trained(kept=kept)
    blocks = len(decoder.blocks)
    assert operations[torch.ops.lowmem.gated.default] == 2 * blocks
    assert operations[torch.ops.lowmem.gated_backward.default] == 2 * blocks


def test_a_product_that_is_made_again_makes_its_activation_again(interpreted):
    """The recorder forgets a product whose output is written later."""
    module = TwoReaders()
    for layer in (module.up, module.down):
        layer.weight.data = layer.weight.data.to(BF16)
    cast_explicitly(module, FP32, Kernels.ALL)
    module.act.forward = ActivationForward(module.act, GELU_TANH)
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), ProductRecorder() as recorder:
        y = module.down(module.act(module.up(x))).add_(1)
    with torch.no_grad(), ProductReplayer(recorder.products):
        again = module.down(module.act(module.up(x))).add_(1)
    assert [product is None for product in recorder.products] == [False, True] and torch.equal(y, again)


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(2 * x)


def wrap(owner: nn.Module, name: str) -> None:
    setattr(owner, name, Wrapped(getattr(owner, name)))


def hook(owner: nn.Module, name: str) -> None:
    getattr(owner, name).register_forward_pre_hook(lambda module, given: (2 * given[0],))


def hook_all(owner: nn.Module, name: str) -> None:
    layer = getattr(owner, name)
    nn.modules.module.register_module_forward_pre_hook(
        lambda module, given: (2 * given[0],) if module is layer else None
    )


@pytest.mark.parametrize("change", [wrap, hook, hook_all])
@pytest.mark.parametrize(("family", "product"), [("gpt2", "c_proj"), ("llama", "down_proj")])
def test_a_user_who_changes_the_product_gets_the_activations_output(interpreted, monkeypatch, family, product, change):
    """Also before the next step: in an evaluation, or a forward pass of the model."""
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        monkeypatch.setattr(nn.modules.module, name, type(getattr(nn.modules.module, name))())
    decoder = make_decoder(with_dropout(FAMILIES[family](), 0.0), "bf16", "fp32", Kernels.ALL)
    values_for(decoder)
    mlp = decoder.blocks[0].mlp
    with torch.no_grad():
        hidden, extras = decoder.embed(*decoder.example(decoder.head_weight.shape[0]))
        getattr(mlp, product).weight.mul_(2)
        doubled = decoder.block(0, hidden, extras[0])
        getattr(mlp, product).weight.div_(2)
        change(mlp, product)
        assert torch.allclose(decoder.block(0, hidden, extras[0]), doubled, rtol=0.02, atol=0.02)
    others = [vars(module).get("forward") for module in decoder.blocks[1].modules()]
    read = [forward._is_read() for forward in others if isinstance(forward, ActivationForward)]
    assert read == [change is not hook_all], "other blocks are as they were"


def hook_output(owner: nn.Module, name: str) -> None:
    getattr(owner, name).register_forward_hook(lambda module, given, result: 2 * result)


@pytest.mark.parametrize("change", [wrap, hook, hook_output])
@pytest.mark.parametrize(("family", "name"), [("llama", "gate_proj"), ("llama", "act_fn"), ("gpt2", "act")])
def test_a_user_may_change_the_other_layers_of_an_mlp(interpreted, family, name, change):
    results = []
    for kernels in (Kernels.ALL, Kernels.ALL & ~Kernels.ACTIVATIONS):
        decoder = make_decoder(with_dropout(FAMILIES[family](), 0.0), "bf16", "fp32", kernels)
        values_for(decoder)
        mlp = decoder.blocks[0].mlp
        x = torch.randn(2, 3, decoder.head_weight.shape[1], generator=torch.Generator().manual_seed(1))
        before = mlp(x)
        change(mlp, name)
        results.append(mlp(x))
        assert (results[-1] != before).any()
    assert torch.allclose(*results, rtol=0.05, atol=0.05)
    assert torch.equal(*results) == (name != "gate_proj"), "a changed activation runs as it is; else the kernel does"


@pytest.mark.quick(12)
@pytest.mark.parametrize(("is_gated", "erf"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["_gated", "_gated_backward"])
@test_fused.on_all_cards
def test_the_kernels_compile_for_cards_and_move_16_bytes_at_a_time(compiled, name, is_gated, erf, capability, kind):
    kernel = getattr(compiled, name)
    integers = dict.fromkeys(("n", "rows", "columns", "rows_each"), "i32")
    pointers = {argument: f"*{kind}" for argument in kernel.arg_names if argument.endswith("_at")}
    types = {name: each for name, each in (pointers | integers).items() if name in {*kernel.arg_names} - {"sums_at"}}
    constants, warps = {"ERF": erf, "HAS_UP": is_gated, "BLOCK": compiled.BLOCK}, 4
    if name == "_gated_backward":
        block, rows, warps = compiled._tile(4, compiled.BLOCK)
        constants = {"ERF": erf, "HAS_UP": is_gated, "SUMS": not is_gated, "ROWS": rows, "COLUMNS": block}
    accesses = accesses_of(kernel, types, constants, "columns" if "columns" in types else "n", capability, warps)
    assert all("local" not in what and "v4" in width for what, width in accesses if what != "bar.sync"), accesses
