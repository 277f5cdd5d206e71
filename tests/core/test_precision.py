"""The split of fp32 into two halves: bit patterns, not samples of weights, decide whether it loses anything.

Of the 2**32 patterns the bf16 tests take every upper half with the lower halves where rounding turns, plus random ones;
the fp16 tests take every fp16 number with the fp32 numbers at the edges of what rounds to it, and one binade whole.
"""

import pytest
import torch
from torch import nn

from lowmem.core.decoder import Decoder
from lowmem.core.layers import cast_explicitly
from lowmem.core.precision import WORKING_DTYPES, LossScale, join, resolve_precision, split
from reference import logits_of_pieces, mixed, tiny_model

# Lower halves: nothing left over, next to nothing, either side of the tie, the tie, everything but one.
LOWER_HALVES = [0x0000, 0x0001, 0x5A5A, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xA5A5, 0xFFFE, 0xFFFF]


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """int64 [n] of unsigned 32-bit patterns -> fp32 [n]."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def bits_of(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int32)


def all_upper_halves() -> torch.Tensor:
    """fp32: every sign, exponent and upper mantissa (zeros, subnormals, infinities, NaNs) x LOWER_HALVES."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    return from_bits((upper[:, None] + torch.tensor(LOWER_HALVES)).flatten())


def fp16_normals() -> torch.Tensor:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return every[every.isfinite() & (every.abs() >= 2.0**-14)]


def assert_exact(master: torch.Tensor, dtype: torch.dtype) -> None:
    working, low = split(master, dtype)
    assert working.dtype is dtype and low.dtype is torch.int16
    assert torch.equal(bits_of(join(working, low)), bits_of(master))


# --- bf16 ---


def test_bf16_halves_rebuild_every_upper_half_of_fp32():
    assert_exact(all_upper_halves(), torch.bfloat16)


def test_bf16_halves_rebuild_random_patterns_and_every_lower_half():
    torch.manual_seed(0)
    assert_exact(torch.randint(-(2**31), 2**31, (2**21,)).to(torch.int32).view(torch.float32), torch.bfloat16)
    for upper in (0x0000, 0x0080, 0x3F80, 0x7F7F, 0x7FFF, 0x8000, 0xBF80, 0xFF7F, 0xFFFF):
        assert_exact(from_bits((upper << 16) + torch.arange(2**16)), torch.bfloat16)


def test_the_bf16_working_weight_is_the_nearest_bf16():
    """Nearest by distance in fp64: as near as what torch rounds to, which differs on exact ties only."""
    master = all_upper_halves()
    master = master[master.isfinite()]
    working, low = split(master, torch.bfloat16)
    rounded = master.to(torch.bfloat16)
    tie = (bits_of(master) & 0xFFFF) == 0x8000
    assert torch.equal(working[~tie].view(torch.int16), rounded[~tie].view(torch.int16))
    assert bool((working[tie].view(torch.int16) != rounded[tie].view(torch.int16)).any())
    finite = working.isfinite() & rounded.isfinite()  # the largest numbers round to infinity, in torch too
    assert torch.equal(finite, working.isfinite())
    error, torch_error = ((w.double() - master.double()).abs()[finite] for w in (working, rounded))
    assert torch.equal(error, torch_error)


def test_a_bf16_tie_rounds_away_from_zero():
    tie = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    working, low = split(tie, torch.bfloat16)
    assert working.tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]
    assert low.tolist() == [-(2**15)] * 3


# --- fp16 ---


def test_fp16_halves_rebuild_everything_that_rounds_to_a_normal_fp16():
    """Every normal fp16 number x fp32 neighbours at the number, at both ties and one step to either side of them.

    Below a power of two fp32 steps halve together with fp16 ones: the interval is 4,096 steps on either side.
    """
    steps = torch.tensor([-4097, -4096, -4095, -2049, -1, 0, 1, 2047, 4095, 4096, 4097], dtype=torch.int32)
    master = (bits_of(fp16_normals().float())[:, None] + steps).flatten().view(torch.float32)
    master = master[(master.abs() >= 2.0**-14) & (master.abs() < 65520)]
    assert master.numel() > 600_000
    assert_exact(master, torch.float16)


@pytest.mark.parametrize("power", [-14, 0, 15])
def test_fp16_halves_rebuild_every_fp32_number_of_a_binade(power):
    start = bits_of(torch.tensor(2.0**power)).item()
    master = torch.arange(start, start + 2**23, dtype=torch.int32).view(torch.float32)
    assert_exact(master[master < 65520], torch.float16)


def test_the_fp16_working_weight_is_torchs_own_rounding():
    torch.manual_seed(0)
    master = torch.randn(2**16) * torch.logspace(-8, 4, 2**16)
    assert torch.equal(split(master, torch.float16)[0], master.half())


def test_below_fp16s_normal_numbers_the_error_is_at_most_2_to_the_minus_40():
    torch.manual_seed(0)
    subnormal = torch.arange(2**10, dtype=torch.int16).view(torch.float16).float()
    steps = torch.tensor([-(2.0**-25), -(2.0**-40), 0.0, 2.0**-40, 2.0**-39, 1.7 * 2.0**-39, 2.0**-25])
    everywhere = torch.rand(2**18) * 2.0**-14
    tiny = torch.logspace(-45, -5, 2**12)
    master = torch.cat([(subnormal[:, None] + steps).flatten(), everywhere, tiny[tiny < 2.0**-14]])
    master = torch.cat([master, -master])
    rebuilt = join(*split(master, torch.float16))
    error = (rebuilt.double() - master.double()).abs().max().item()
    assert 2.0**-42 < error <= 2.0**-40  # the bound is reached, so it cannot be stated tighter


def test_from_65520_on_the_fp16_working_weight_is_infinite():
    assert split(torch.tensor([65519.996]), torch.float16)[0].tolist() == [65504]
    assert split(torch.tensor([65520.0, -1e30]), torch.float16)[0].tolist() == [float("inf"), -float("inf")]


# --- fp32, shapes, the choice ---


def test_fp32_is_its_own_master():
    master = torch.randn(3, 5)
    working, low = split(master, torch.float32)
    assert working is master and low is None
    assert join(working, None) is master


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_shape_goes_and_the_operand_stays(dtype):
    master = torch.randn(3, 1, 7).transpose(0, 2)
    before = master.clone()
    working, low = split(master, dtype)
    assert working.shape == low.shape == master.shape
    halves = working.clone(), low.clone()
    assert torch.equal(join(working, low), master)
    assert torch.equal(master, before) and torch.equal(working, halves[0]) and torch.equal(low, halves[1])
    empty = join(*split(torch.empty(0), dtype))
    assert empty.shape == (0,) and empty.dtype is torch.float32


def test_auto_is_fp32_on_the_cpu_and_bf16_on_a_gpu_that_has_it(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for precision in WORKING_DTYPES:
        assert resolve_precision(precision, cpu) == resolve_precision(precision, gpu) == precision
    assert resolve_precision("auto", cpu) == "fp32"
    for capability, expected in {(6, 0): "fp16", (7, 5): "fp16", (8, 0): "bf16", (12, 0): "bf16"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert resolve_precision("auto", gpu) == expected


# --- explicit casts ---


def dtypes_at_work(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """Output dtypes of the modules of one forward and backward, by the name of their class."""
    seen: dict[str, set[torch.dtype]] = {}

    def note(module, _, output):
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor):
            seen.setdefault(type(module).__name__, set()).add(output.dtype)

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        logits_of_pieces(Decoder(model), torch.arange(20).view(2, 10)).float().square().mean().backward()
    finally:
        hook.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32 residual", "16-bit residual"])
@pytest.mark.parametrize(
    ("family", "products", "norm", "block"),
    [("gpt2", "Conv1D", "LayerNorm", "GPT2Block"), ("llama", "Linear", "LlamaRMSNorm", "LlamaDecoderLayer")],
)
def test_products_are_in_16_bit_norms_in_fp32_and_the_residual_as_asked(family, products, norm, block, wide, dtype):
    residual = torch.float32 if wide else dtype
    model = mixed(tiny_model(family), dtype)
    cast_explicitly(model, residual)
    seen = dtypes_at_work(model)
    assert seen[products] == {dtype}
    assert seen["Embedding"] == seen[block] == seen[norm] == {residual}
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_computes_in_fp32_and_returns_what_it_was_given(dtype):
    model = mixed(tiny_model("gpt2"), torch.bfloat16)
    cast_explicitly(model, dtype)
    norm = model.transformer.ln_f
    x = torch.randn(2, 5, 48).to(dtype)
    exact = nn.functional.layer_norm(x.float(), (48,), norm.weight, norm.bias, norm.eps)
    assert norm(x).dtype is dtype and torch.equal(norm(x), exact.to(dtype))


def test_what_a_block_is_handed_is_cast_but_for_whole_numbers_masks_and_the_hidden_state():
    """Beside an fp32 hidden state a rotary table would be fp32 too, and with it queries and keys, but not values."""
    model = mixed(tiny_model("llama"), torch.bfloat16)
    cast_explicitly(model, torch.float32)
    seen = []
    block = model.model.layers[0]
    block.self_attn.register_forward_pre_hook(lambda _, __, keywords: seen.append(keywords), with_kwargs=True)
    input_ids = torch.arange(10).view(1, 10)
    model(input_ids=input_ids, position_ids=input_ids % 5, use_cache=False)
    assert {table.dtype for table in seen[0]["position_embeddings"]} == {torch.bfloat16}
    assert seen[0]["position_ids"].dtype is torch.int64 and seen[0]["attention_mask"].dtype is torch.bool
    assert seen[0]["hidden_states"].dtype is torch.float32


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_explicit_casts_are_about_as_near_to_fp32_as_autocast_is(family):
    """Worst factors over both families and ten seeds: 1.2 with an fp32 residual stream, 1.5 with a bf16 one."""
    input_ids = torch.arange(40).view(2, 20)
    for seed in range(3):
        plain = tiny_model(family, seed=seed).eval()
        with torch.no_grad():
            truth = plain(input_ids=input_ids, use_cache=False).logits
            with torch.autocast("cpu", torch.bfloat16):
                autocast = plain(input_ids=input_ids, use_cache=False).logits
            for residual, factor in ((torch.float32, 1.4), (torch.bfloat16, 1.8)):
                model = mixed(tiny_model(family, seed=seed).eval(), torch.bfloat16)
                cast_explicitly(model, residual)
                error = (logits_of_pieces(Decoder(model), input_ids) - truth).norm()
                assert 0 < error <= factor * (autocast - truth).norm()


# --- loss scale ---


def test_loss_scale_halves_on_overflow_and_doubles_after_an_interval_of_good_steps():
    scale = LossScale(enabled=True, scale=1024.0, growth_interval=3)
    history = []
    for finite in (True, True, False, True, True, True, True, True, True, False):
        scale.update(finite)
        history.append(scale.scale)
    assert history == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 1024]


def test_loss_scale_stays_between_1_and_2_to_the_24_and_is_1_if_it_is_off():
    scale, off = LossScale(enabled=True, scale=2.0, growth_interval=1), LossScale(enabled=False)
    for finite, limit in ((False, 1.0), (True, 2.0**24)):
        for _ in range(40):
            scale.update(finite)
            off.update(finite)
        assert (scale.scale, off.scale) == (limit, 1.0)


def test_loss_scale_goes_on_from_its_saved_state():
    first = LossScale(enabled=True, growth_interval=4)
    for finite in (True, False, True, True):
        first.update(finite)
    second = LossScale(enabled=True, growth_interval=4)
    second.load(first.state())
    for finite in (True, True, True, False):
        first.update(finite)
        second.update(finite)
        assert first.state() == second.state()
