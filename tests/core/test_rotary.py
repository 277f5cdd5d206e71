"""Rotary embeddings in one kernel each way: values and gradients against fp64, and which models use it."""

import copy
import pickle
from unittest.mock import MagicMock

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as partial_rotation
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb

from lowmem.core import rotary
from lowmem.core.dry_run import is_ours
from lowmem.core.kernels import Kernels
from lowmem.core.rotary import rotary_forward, rotate, rotate_plainly
from lowmem.models.build import make_decoder
from stand_in import plain_layers
from tests.core import test_fused
from tests.families import FAMILIES, MORE_FAMILIES

pytest.importorskip("triton")
interpreted, compiled = test_fused.interpreted_layers, test_fused.compiled_layers
accesses_of = test_fused.accesses_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {FP32: 2**-22, BF16: 2**-8, FP16: 2**-11}
B, T = 2, 3


def tables(width: int, batch: int = B, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    """Numbers, not angles: the halves of a table differ, so that a kernel which takes one half twice is found."""
    generator = torch.Generator().manual_seed(width)
    return [torch.randn(batch, T, width, generator=generator).to(dtype) for _ in range(2)]


def heads(numbers: int, width: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """As products leave them: [B, T, heads * width] in memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, numbers, width, generator=generator).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("q_heads", "k_heads", "width", "turned", "batch"), [
    (4, 2, 8, 8, B), (3, 3, 12, 4, 1), (5, 1, 24, 24, 1), (1, 1, 6, 2, B),
])  # fmt: skip
def test_values_and_gradients_are_those_of_fp64_within_a_rounding(
    interpreted, q_heads, k_heads, width, turned, batch, dtype
):
    cos, sin = tables(turned, batch, dtype)
    given = [heads(q_heads, width, 1, dtype), heads(k_heads, width, 2, dtype)]
    gradients = [heads(q_heads, width, 3, dtype), heads(k_heads, width, 4, dtype)]
    ours = [tensor.detach().clone().requires_grad_() for tensor in given]
    exact = [tensor.double().requires_grad_() for tensor in given]
    found = rotate(*ours, cos, sin)
    torch.autograd.backward(found, gradients)
    truth = [rotate_plainly(x, cos.double(), sin.double()) for x in exact]
    torch.autograd.backward(truth, [gradient.double() for gradient in gradients])
    assert all(one.dtype is dtype and one.transpose(1, 2).is_contiguous() for one in found)
    pairs = *zip(found, truth, strict=True), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))
    for one, right in pairs:
        assert ((one - right).abs() <= 1.01 * UNIT[dtype] * right.abs() + 1e-6 * right.abs().max()).all()
    with torch.no_grad():
        assert all(map(torch.equal, rotate(*given, cos, sin), found))


def test_queries_and_keys_may_be_parts_of_one_product_and_heads_gradients_of_any_layout(interpreted):
    packed = torch.randn(B, T, 3, 24, generator=torch.Generator().manual_seed(5))
    q, k, _ = packed.transpose(1, 2).chunk(3, -1)
    cos, sin = tables(8)
    found = rotate(q, k, cos, sin)
    assert all(map(torch.equal, found, rotate(q.contiguous(), k.contiguous(), cos, sin)))
    transposed = q.transpose(2, 3).contiguous().transpose(2, 3)  # whose last dimension is not contiguous
    assert torch.equal(rotate(transposed, k, cos, sin)[0], found[0])
    gradients = []
    for of_q in (torch.ones(()).expand(q.shape), torch.ones(q.shape)):  # of sums, and stored as [B, H, T, E]
        leaf = q.detach().clone().requires_grad_()
        rotate(leaf, k, cos, sin)[0].backward(of_q)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_results_may_be_changed_in_place_and_nothing_is_rotated_of_no_tokens(interpreted):
    q, k, (cos, sin) = heads(4, 8, 1).requires_grad_(), heads(2, 8, 2), tables(8)
    rotate(q, k, cos, sin)[0].mul_(2).sum().backward()
    assert q.grad.abs().sum() > 0
    assert [one.shape for one in rotate(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])] == [
        (B, 4, 0, 8),
        (B, 2, 0, 8),
    ]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_the_stand_ins_lines_have_the_kernels_values(interpreted, dtype, backward):
    given = heads(4, 12, 1, dtype), heads(2, 12, 2, dtype), *tables(8, dtype=dtype)
    results = []
    for kernel in (interpreted.rotate, plain_layers.rotate):
        new = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in given[:2]]
        kernel(*given, *(each.transpose(1, 2) for each in new), backward)
        results.append(new)
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=2 * UNIT[dtype], atol=1e-6)


@pytest.mark.parametrize(("function", "turned"), [(apply_rotary_pos_emb, 8), (partial_rotation, 4)])
def test_the_plain_lines_are_the_models(function, turned):
    q, k, (cos, sin) = heads(4, 8, 1), heads(2, 8, 2), tables(turned)
    assert all(map(torch.equal, function(q, k, cos, sin), (rotate_plainly(x, cos, sin) for x in (q, k))))


def test_other_arguments_or_dtypes_go_to_the_models_own_function(monkeypatch):
    called = []

    def own(q, k, cos, sin, unsqueeze_dim=1):
        called.append((cos.dtype, unsqueeze_dim))
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setitem(Qwen3Attention.forward.__globals__, "apply_rotary_pos_emb", own)
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    forward = rotary_forward(Qwen3Attention(config, 0))
    called.clear()
    inside = forward.func.__globals__["apply_rotary_pos_emb"]
    q, k, (cos, sin) = heads(4, 8, 1), heads(2, 8, 2), tables(8)
    inside(q, k, cos.double(), sin.double())
    inside(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert called == [(torch.float64, 1), (FP32, 2)]
    called.clear()
    inside(q, k, cos[:, :1], sin[:, :1])  # one row for all tokens
    inside(q[:1], k[:1], cos, sin)  # two rows of tables for one of queries
    inside(q, k[..., :4].repeat(1, 1, 1, 2), cos=cos, sin=sin)
    learned = cos.clone().requires_grad_()
    inside(q, k, learned, sin)[0].sum().backward()
    assert called == [(FP32, 1)] * 4 and learned.grad is not None


@pytest.mark.parametrize("shapes", [
    ((2, 4, 3, 8), (2, 2, 3, 6), (2, 3, 6), (2, 3, 6)),  # keys of another width
    ((2, 4, 3, 8), (2, 2, 3, 8), (2, 1, 3, 8), (2, 1, 3, 8)),  # tables with a dimension for heads
    ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 12), (2, 3, 12)),  # tables wider than heads
    ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 7), (2, 3, 7)),  # an odd number of places
    ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8)),
    ((4, 3, 8), (2, 3, 8), (1, 3, 8), (1, 3, 8)),
])  # fmt: skip
def test_shapes_that_the_kernel_does_not_take_do_not_fit(shapes):
    assert not rotary._fit(*map(torch.ones, shapes))
    assert rotary._fit(*map(torch.ones, [(2, 4, 3, 8), (2, 2, 3, 8), (1, 3, 4), (1, 3, 4)]))
    assert not rotary._fit(torch.ones(2, 4, 3, 8), None, torch.ones(2, 3, 8), torch.ones(2, 3, 8))


def test_a_decorated_forward_is_left_alone():
    class Silent(Qwen3Attention):
        forward = torch.no_grad()(Qwen3Attention.forward)

    config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    assert rotary_forward(Silent(config, 0)) is None


def test_a_model_with_the_kernel_can_be_copied_and_pickled():
    model = make_decoder(FAMILIES["qwen3"](), "bf16", "fp32", Kernels.ALL).model
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = again.model.layers[0].self_attn
        forward = vars(attention)["forward"]
        assert forward.args == (attention,) and is_ours(forward)


@pytest.mark.parametrize("wrong", [
    lambda q, k, cos, sin: (q, k),
    lambda q, k, cos, sin: apply_rotary_pos_emb(q, k, sin, cos),
    lambda q, k, cos, sin: (apply_rotary_pos_emb(q, k, cos, sin)[0], k),
    lambda q, k, cos, sin, more: apply_rotary_pos_emb(q, k, cos, sin),
    lambda q, k, cos, sin: tuple(x[..., : cos.shape[-1]] for x in partial_rotation(q, k, cos, sin)),
    lambda q, k, cos, sin: None,
    lambda q, k, cos, sin: (1.0, 2.0),
])  # fmt: skip
def test_a_function_that_computes_anything_else_is_left_alone(monkeypatch, wrong):
    monkeypatch.setitem(Qwen3Attention.forward.__globals__, "apply_rotary_pos_emb", wrong)
    assert rotary_forward(Qwen3Attention(Qwen3Config(hidden_size=32, num_attention_heads=4), 0)) is None


HAVE = set("llama gpt_neox qwen2 qwen3 mistral gemma gemma2 gemma3_text smollm3 olmo olmo2 olmo3 phi phi3".split())
WITHOUT, OTHER_PAIRS = ("gpt2", "opt", "bloom"), ("gptj", "cohere", "glm", "helium", "nanochat", "deepseek_v2")


@pytest.mark.quick(8)
@pytest.mark.parametrize("family", sorted({*HAVE, *WITHOUT, *OTHER_PAIRS}))
def test_families_that_rotate_halves_use_the_kernel(family):
    def rotaries(*kind) -> int:
        model = make_decoder((FAMILIES | MORE_FAMILIES)[family](), *kind).model
        return sum(isinstance(vars(module).get("forward"), rotary.RotaryAttention) for module in model.modules())

    blocks = rotaries("bf16", "fp32", Kernels.ALL)
    assert bool(blocks) == (family in HAVE)
    assert not rotaries("bf16", "fp32", Kernels.NONE) and not rotaries("fp32", "fp32", Kernels.ALL)


@pytest.mark.quick(8)
@pytest.mark.parametrize("shape", [(32, 8, 128), (40, 8, 128), (56, 8, 128), (14, 2, 64)], ids=str)
@test_fused.on_all_cards
def test_the_kernel_compiles_for_cards_and_moves_8_or_16_bytes_of_queries_at_a_time_without_spilling(
    compiled, monkeypatch, capability, kind, shape
):
    """Seen to fail: 40 heads asked for 5 warps, which is no power of two."""
    q_heads, k_heads, width = shape
    launched = {}
    grid = MagicMock()
    grid.__getitem__.return_value = lambda *_, **options: launched.update(options)
    monkeypatch.setattr(compiled, "_rotate", grid)
    q, k = (torch.empty(1, n, 2, width) for n in (q_heads, k_heads))
    compiled.rotate(q, k, torch.empty(1, 2, width), torch.empty(1, 2, width), q, k, True)
    monkeypatch.undo()
    kernel, warps = compiled._rotate, launched.pop("num_warps")
    integers = [name for name in kernel.arg_names if not name.endswith("_at") and name.islower()]
    types = {name: f"*{kind}" for name in kernel.arg_names if name.endswith("_at")} | dict.fromkeys(integers, "i32")
    accesses = accesses_of(kernel, types, launched, integers, capability, warps)
    assert all("global" in what for what, _ in accesses)
    wide = [what for what, width in accesses if "v4" in width or "v2" in width]
    assert wide.count("ld.global") >= 2 and wide.count("st.global") >= 2, "both halves of the queries"
