"""Norms in one kernel: values and gradients against fp64, which modules are norms, and which of them write 16 bit."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from families import FAMILIES, MORE_FAMILIES, POST_NORM
from lowmem.core import norms
from lowmem.core.kernels import (
    Kernels,
    operators,  # noqa: F401  defines torch.ops.lowmem
)
from lowmem.core.layers import cast_explicitly
from lowmem.core.norms import LEAST_ROWS, PROGRAMS, Norm, Rule, round_for_products, rule_of
from lowmem.models.build import make_decoder
from tests.core import test_fused

pytest.importorskip("triton")
interpreted, compiled = test_fused.interpreted_layers, test_fused.compiled_layers
accesses_of = test_fused.accesses_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = {
    "LayerNorm": lambda width: nn.LayerNorm(width, eps=1e-5),
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False),
    "Llama": lambda width: LlamaRMSNorm(width, eps=1e-6),
    "Gemma": lambda width: GemmaRMSNorm(width),
}
RULES = {
    "LayerNorm": Rule(1e-5, 0.0, True),
    "LayerNorm without bias": Rule(1e-5, 0.0, True),
    "Llama": Rule(1e-6, 0.0, False),
    "Gemma": Rule(1e-6, 1.0, False),
}
named = pytest.mark.parametrize("name", NORMS)


def with_weights(name: str, width: int) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    module = NORMS[name](width)
    for parameter in module.parameters():
        parameter.data = torch.randn(width, generator=generator)
    return module


@named
def test_a_norm_is_found_by_its_values(name):
    assert rule_of(NORMS[name](48).to("meta")) == RULES[name]


class Otherwise(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) * 1.001


class Twice(nn.LayerNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


@pytest.mark.parametrize(
    "module",
    [Otherwise(32), Twice(32), nn.LayerNorm((4, 32)), nn.GroupNorm(2, 32), nn.LayerNorm(32, elementwise_affine=False)],
    ids=["a factor", "a gate", "two dimensions", "groups", "no weight"],
)
def test_a_module_that_computes_anything_else_is_none(module):
    assert rule_of(module) is None


@pytest.mark.quick(32)
@pytest.mark.parametrize("rows", [1, LEAST_ROWS + 1, 37, None])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16)], ids=str)
@named
def test_values_and_gradients_are_those_of_fp64_within_roundings(interpreted, monkeypatch, name, dtypes, rows):
    """One rounding to the output's dtype, and those of fp32 sums, relative to the largest number. `rows` None: so many
    that each program has more than LEAST_ROWS; the interpreter takes seconds for PROGRAMS of them."""
    programs = PROGRAMS if name == "LayerNorm" and dtypes == (FP32, FP32) else 32
    monkeypatch.setattr(norms, "PROGRAMS", programs)
    rows = rows or LEAST_ROWS * programs + 3
    width = 100 if rows < 100 else 24
    generator = torch.Generator().manual_seed(rows)
    module = with_weights(name, width)
    norm = Norm(module, rule_of(module))
    norm.kind = dtypes[1]
    x = (torch.randn(rows, width, generator=generator) * 3 + 1).to(dtypes[0])
    gradient = torch.randn(rows, width, generator=generator).to(dtypes[1])
    ours = x.clone().requires_grad_()
    y = norm(ours.view(1, rows, width))
    y.backward(gradient.view(1, rows, width))

    exact, truth = x.double().requires_grad_(), copy.deepcopy(module).double()
    for parameter in truth.parameters():
        parameter.grad = None
    y_truth = RULES[name](exact, truth.weight, truth._parameters.get("bias"))
    y_truth.backward(gradient.double())
    unit = {FP32: 2**-22, BF16: 2**-8, FP16: 2**-11}
    assert y.dtype is dtypes[1] and ours.grad.dtype is dtypes[0]
    close(y[0], y_truth, 1.01 * unit[dtypes[1]])
    close(ours.grad, exact.grad, 1.01 * unit[dtypes[0]])
    for parameter, other in zip(module.parameters(), truth.parameters(), strict=True):
        close(parameter.grad, other.grad, 2**-22)
    with torch.no_grad():
        assert torch.equal(norm(x), y[0]), "the same bits without a graph"


def close(found: torch.Tensor, truth: torch.Tensor, unit: float) -> None:
    assert ((found - truth).abs() <= unit * truth.abs() + 1e-6 * truth.abs().max()).all()


def test_a_call_with_more_than_the_input_takes_the_modules_own_forward():
    class Gated(nn.LayerNorm):
        def forward(self, x, gate):
            return x * gate

    norm = Norm(Gated(8), rule_of(nn.LayerNorm(8)))
    assert torch.equal(norm(torch.ones(2, 8), 3), torch.full((2, 8), 3.0))


class Block(nn.Module):
    def __init__(self, uses: int, digits: torch.dtype):
        super().__init__()
        self.norm, self.layer, self.uses, self.digits = nn.LayerNorm(8), nn.Linear(8, 8), uses, digits

    def forward(self, x):
        y = self.layer(self.norm(x).to(self.digits))
        return x + (y if self.uses == 1 else self.layer(y))


@pytest.mark.parametrize("digits", [BF16, torch.float64])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("in_one_block", [True, False])
def test_a_norm_writes_16_bit_only_for_products_of_its_block(uses, in_one_block, digits):
    """The norm after a last block and the dense layer of a head are updated at different times."""
    model = Block(uses, digits)
    cast_explicitly(model, FP32, Kernels.ALL)
    before = dict(model.named_parameters())
    blocks = [model] if in_one_block else [model.norm, model.layer]
    decoder = SimpleNamespace(model=model, blocks=blocks, logits=model, head_weight=model.layer.weight)
    decoder.example = lambda _: (torch.empty(2, 8, device="meta"),)
    round_for_products(decoder, BF16)
    assert model.norm.forward.kind is (BF16 if in_one_block and digits is BF16 else None)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


ALL_ADDED = {"opt_projected"}  # whose norms are all read by sums


@pytest.mark.quick(14)
@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_every_family_with_norms_writes_some_of_them_in_16_bit(family):
    """Seen to fail for mixtures of experts, whose products take 16 bit only, and for GPT-Neo, which mixes devices."""
    found = rounded((FAMILIES | MORE_FAMILIES)[family]())
    assert (BF16 in set().union(*found.values())) == (family not in ALL_ADDED) or not found


def rounded(config, residual: str = "fp32") -> dict[str, set]:
    """{last part of a norm's name: dtypes that such norms write}."""
    found: dict[str, set] = {}
    for name, module in make_decoder(config, "bf16", residual, Kernels.ALL).model.named_modules():
        if isinstance(forward := vars(module).get("forward"), Norm):
            found.setdefault(name.split(".")[-1], set()).add(forward.kind)
    return found


def test_norms_write_16_bit_if_only_products_read_them():
    assert rounded(FAMILIES["gpt2"]()) == {"ln_1": {BF16}, "ln_2": {BF16}, "ln_f": {BF16}}
    assert rounded(FAMILIES["qwen3"]()) == {
        "input_layernorm": {BF16}, "post_attention_layernorm": {BF16}, "norm": {BF16}, "q_norm": {None},
        "k_norm": {None},
    }  # fmt: skip
    bloom = FAMILIES["bloom"]()
    assert rounded(bloom)["word_embeddings_layernorm"] == {None}, "it begins the residual stream"
    bloom.apply_residual_connection_post_layernorm = True
    assert rounded(bloom)["input_layernorm"] == {None}, "a product and a sum read it"


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)], ids=str)
def test_a_norm_of_no_rows_or_of_a_vector(interpreted, shape):
    module = with_weights("LayerNorm", 8)
    norm = Norm(module, rule_of(module))
    x = torch.randn(shape, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.shape == shape and torch.allclose(norm(x), module(x), atol=1e-6)


QUERIES = {"q_norm", "k_norm"}  # whose input is 16-bit anyway
ADDED = {
    **dict.fromkeys(
        ("olmo2", "olmo3", "exaone4"), {"post_attention_layernorm", "post_feedforward_layernorm"} | QUERIES
    ),
    "glm4": {"post_self_attn_layernorm", "post_mlp_layernorm"},
    "gemma3_text": {"post_attention_layernorm", "post_feedforward_layernorm"} | QUERIES,
    "gemma2": {"post_attention_layernorm", "post_feedforward_layernorm"},
}


@pytest.mark.parametrize("family", POST_NORM)
def test_norms_whose_output_is_added_to_the_residual_stream_stay_in_its_dtype(family):
    found = rounded(POST_NORM[family]())
    added = {name for name, kinds in found.items() if None in kinds}
    assert added == ADDED[family]


@pytest.mark.quick(14)
@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_a_models_buffers_are_as_without_kernels(family):
    """Seen to fail: GPT-J and CodeGen lost their positions to the meta device, and no GPU could train them."""

    def buffers(kernels: Kernels) -> dict:
        model = make_decoder((FAMILIES | MORE_FAMILIES)[family](), "bf16", "fp32", kernels).model
        others = [value for module in model.modules() for value in vars(module).values()]
        assert not any(isinstance(value, torch.Tensor) and value.is_meta for value in others)
        return dict(model.named_buffers())

    plain, fused = buffers(Kernels.NONE), buffers(Kernels.ALL)
    assert plain.keys() == fused.keys()
    assert all(fused[name].device.type == "cpu" and fused[name].equal(plain[name]) for name in plain)


def test_without_kernels_and_in_fp32_no_norm_is_replaced():
    for precision, kernels in (("fp32", Kernels.ALL), ("bf16", Kernels.NONE)):
        model = make_decoder(FAMILIES["gpt2"](), precision, "fp32", kernels).model
        assert not any(isinstance(vars(module).get("forward"), Norm) for module in model.modules())


@named
def test_on_tensors_without_data_an_output_has_the_shape_and_dtype(name):
    module = NORMS[name](16).to("meta")
    model = nn.Sequential(module)
    cast_explicitly(model, FP32, Kernels.ALL)
    y = model(torch.empty(2, 3, 16, device="meta", requires_grad=True))
    y.sum().backward()
    assert y.shape == (2, 3, 16) and all(parameter.grad.shape == (16,) for parameter in module.parameters())


@pytest.mark.quick(24)
@pytest.mark.parametrize("width", [1280, 4096, 8192])
@pytest.mark.parametrize("with_sum", [False, True], ids=["", "with a sum"])
@pytest.mark.parametrize("name", ["_normalize", "_normalize_backward"])
@test_fused.on_all_cards
def test_the_kernels_compile_for_cards_and_move_16_bytes_at_a_time_without_spilling(
    compiled, name, with_sum, capability, kind, width
):
    kernel = getattr(compiled, name)
    block, rows, warps = compiled._tile(4, width)
    constants = {"CENTERED": True, "HAS_BIAS": True, "KEPT": True, "ROWS": rows, "COLUMNS": block}
    constants |= dict.fromkeys(("ADDS", "DROPS", "BRANCHES"), with_sum)
    constants["DROPS"] &= width < 8192  # no model this wide has dropout; some registers would spill
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = dict.fromkeys(("rows", "columns", "rows_each"), "i32") | dict.fromkeys(
        ("y_at", "gradient_at", "branch_at", "branch_gradient_at"), f"*{kind}"
    )
    types |= {"seeds_at": "*i64", "number": "i32"}
    types = {key: value for key, value in types.items() if key in kernel.arg_names}
    accesses = accesses_of(kernel, types, constants, "columns", capability, warps)
    assert not any("local" in what for what, _ in accesses)
    narrow = [
        access for access in accesses if "global" in access[0] and "v4" not in access[1] and "v2" not in access[1]
    ]
    assert len(narrow) <= 2 * rows + with_sum, accesses  # statistics, and the seed
