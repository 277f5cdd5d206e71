"""What stands for CUDA's operators on tensors in host memory: against the bits of the CPU's own operators."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem.core.kernels import fused
from lowmem.core.precision import join, split
from stand_in import attention, interpreted
from stand_in.counterparts import COUNTERPARTS, RANDOM, SYNCHRONOUS, waits

try:
    import triton
except ImportError:
    triton = None
TENSOR_METHODS = set() if triton is None else set(vars(triton.language.tensor))  # before any test has run a kernel

aten = torch.ops.aten
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, H, T, D = 2, 4, 40, 16
DROPPED = 0.1
# The largest distances from the formula, relative to the norm of what is compared. A result is rounded to its dtype at
# least once, by up to 2**-24, 2**-8 and 2**-11 of a number; sums of rounded terms add to that. At least twice what was
# seen: 2.7e-7, 4.6e-3 and 5.1e-4.
MOST_ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}


class Computed(TorchDispatchMode):
    """Runs counterparts in the places of their operators, inside dispatch, as the stand-in does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return COUNTERPARTS.get(func, func)(*args, **kwargs or {})


def run(operator, *args, **kwargs):
    with Computed():
        return operator(*args, **kwargs)


def operands(dtype: torch.dtype, key_heads: int = H, keys: int = T) -> list[Tensor]:
    """Query, key, value and a gradient for the output, laid out as models do: [B, T, H, D], the axes changed."""
    generator = torch.Generator().manual_seed(0)
    shapes = (T, H), (keys, key_heads), (keys, key_heads), (T, H)
    return [torch.randn(B, t, h, D, generator=generator).to(dtype).transpose(1, 2) for t, h in shapes]


def additive_mask(dtype: torch.dtype) -> Tensor:
    """Returns [B, H, T, T] of a mask [B, 1, T, T], as CUDA gets it: the last tokens of one sequence are padding."""
    mask = torch.zeros(B, 1, T, T, dtype=dtype)
    mask[1, :, :, T - 7 :] = -torch.inf
    return mask.expand(B, H, T, T)


def differentiated(function, inputs, gradient: Tensor) -> list[Tensor]:
    """Returns the result of `function(*inputs)`, and its gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def assert_near(found, truth, dtype: torch.dtype) -> None:
    for place, (one, other) in enumerate(zip(found, truth, strict=True)):
        assert one.dtype == dtype or one.dtype == torch.float32
        error = ((one.double() - other).norm() / other.norm()).item()
        assert error <= MOST_ERROR[dtype], (place, error)


def assert_equal(found, truth) -> None:
    for place, (one, other) in enumerate(zip(found, truth, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), place


def by_operators(kind: str, query, key, value, gradient, bias, causal, dropout=0.0, between=lambda: None):
    """Returns the output and the gradients by the operators that CUDA has, `between` them something else."""
    if kind == "flash":
        forward = run(aten._scaled_dot_product_flash_attention.default, query, key, value, dropout, causal)
        between()
        backward = run(
            aten._scaled_dot_product_flash_attention_backward.default, gradient, query, key, value, *forward[:6],
            dropout, causal, *forward[6:8],
        )  # fmt: skip
    else:
        operator = aten._scaled_dot_product_efficient_attention.default
        forward = run(operator, query, key, value, bias, True, dropout, causal)
        between()
        backward = run(
            aten._scaled_dot_product_efficient_attention_backward.default, gradient, query, key, value, bias, *forward,
            dropout, [True, True, True, False], causal,
        )  # fmt: skip
    return [forward[0], *backward[:3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, DROPPED])
@pytest.mark.parametrize(
    ("kind", "key_heads", "causal", "masked"),
    [("flash", H, True, False), ("flash", 2, True, False), ("flash", 1, False, False), ("efficient", H, True, False),
     ("efficient", H, False, False), ("efficient", H, False, True)],
)  # fmt: skip
def test_attention_and_its_gradients_are_the_cpus_bit_for_bit(kind, key_heads, causal, masked, dropout, dtype):
    """Whatever else was drawn between forward and backward; and backward leaves the generator as it was."""
    *inputs, gradient = operands(dtype, key_heads)
    bias = additive_mask(dtype) if masked else None
    torch.manual_seed(3)
    found = by_operators(kind, *inputs, gradient, bias, causal, dropout, between=lambda: torch.rand(7))
    after = torch.rand(1)

    def stock(query, key, value):
        mask = None if bias is None else bias[:, :1]  # as a model hands it over
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, enable_gqa=key_heads != H)

    torch.manual_seed(3)
    truth = differentiated(stock, inputs, gradient)
    torch.rand(7)
    assert_equal(found, truth)
    assert torch.equal(after, torch.rand(1))


def test_the_bias_of_efficient_attention_gets_its_gradient():
    query, key, value, gradient = operands(torch.float32)
    bias = torch.randn(B, H, T, T, generator=torch.Generator().manual_seed(1))
    forward = run(aten._scaled_dot_product_efficient_attention.default, query, key, value, bias, True)
    found = run(
        aten._scaled_dot_product_efficient_attention_backward.default, gradient, query, key, value, bias, *forward,
        0.0, [True, False, True, True],
    )  # fmt: skip
    assert found[1] is None
    exact = [t.double() for t in (query, key, value, bias)]
    truth = differentiated(F.scaled_dot_product_attention, exact, gradient.double())
    assert_near([forward[0], found[0], found[2], found[3]], [truth[0], truth[1], truth[3], truth[4]], torch.float32)


def test_what_attention_saves_is_what_cuda_saves():
    query, key, value, _ = operands(torch.bfloat16)
    scores = query.double() @ key.double().transpose(-1, -2) / math.sqrt(D)
    truth = scores.logsumexp(-1)
    flash = run(aten._scaled_dot_product_flash_attention.default, query, key, value)
    efficient = run(aten._scaled_dot_product_efficient_attention.default, query, key, value, None, True)
    assert flash[1].shape == (B, H, T) and efficient[1].shape == (B, H, 64)
    for found in (flash[1], efficient[1][..., :T]):
        assert found.dtype == torch.float32
        assert (found.double() - truth).abs().max() <= 1e-5 * truth.abs().max()
    without = run(aten._scaled_dot_product_efficient_attention.default, query, key, value, None, False)
    assert without[1] is None


def test_a_forward_pass_that_runs_again_keeps_one_state_and_an_overwritten_seed_is_an_error():
    query, key, value, gradient = operands(torch.float32)
    arguments = query, key, value, None, True, DROPPED, True
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(run(aten._scaled_dot_product_efficient_attention.default, *arguments))
        states = len(attention._states)
    assert len(attention._states) == states
    assert_equal((runs[0][0], runs[0][2]), (runs[1][0], runs[1][2]))
    spoiled = *runs[0][:2], torch.tensor(12345), runs[0][3]
    with pytest.raises(RuntimeError, match="12345.*overwritten"):
        run(
            aten._scaled_dot_product_efficient_attention_backward.default, gradient, query, key, value, None, *spoiled,
            DROPPED, [True, True, True, False], True,
        )  # fmt: skip


def test_as_many_generator_states_are_kept_as_are_said(monkeypatch):
    monkeypatch.setattr(attention, "_MOST_STATES", 3)
    for _ in range(5):
        torch.rand(1)
        attention._keep_generator_state()
    assert len(attention._states) == 3


def test_a_state_that_is_used_again_is_not_the_oldest(monkeypatch):
    monkeypatch.setattr(attention, "_MOST_STATES", 2)
    names = []
    for seed in (1, 2, 1, 3):
        torch.manual_seed(seed)
        names.append(attention._keep_generator_state())
    assert names[0] == names[2]
    again = attention._kept_generator_state(torch.tensor([names[0], 0]))
    assert torch.equal(again, torch.Generator().manual_seed(1).get_state())
    with pytest.raises(RuntimeError, match=str(names[1])):
        attention._kept_generator_state(torch.tensor(names[1]))


def test_what_a_program_asks_of_cudas_kernels_changes_nothing():
    *inputs, gradient = operands(torch.float32)
    plain = by_operators("efficient", *inputs, gradient, None, True)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert_equal(by_operators("efficient", *inputs, gradient, None, True), plain)


@pytest.mark.parametrize("what_is_spoiled", ["output", "logsumexp"])
def test_backward_reads_what_forward_saved(what_is_spoiled):
    """So that memory that is given away too early shows in the gradients."""
    query, key, value, gradient = operands(torch.float32)
    forward = list(run(aten._scaled_dot_product_flash_attention.default, query, key, value))

    def backward() -> list[Tensor]:
        return run(
            aten._scaled_dot_product_flash_attention_backward.default, gradient, query, key, value, *forward[:6], 0.0,
            False, *forward[6:8],
        )  # fmt: skip

    before = backward()
    forward[0 if what_is_spoiled == "output" else 1].zero_()
    assert not torch.equal(before[0], backward()[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9, 0.123456789])
def test_dropout_is_the_cpus_bit_for_bit(p, dtype):
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(37, 41, generator=generator).to(dtype) for _ in "xg")
    torch.manual_seed(6)
    truth = differentiated(lambda x: F.dropout(x, p), [x], gradient)
    after = torch.rand(1)
    torch.manual_seed(6)
    output, kept = run(aten.native_dropout.default, x, p, True)
    assert torch.equal(after, torch.rand(1))
    assert kept.dtype == torch.bool and abs(kept.double().mean().item() - (1 - p)) < 0.05
    found = run(aten.native_dropout_backward.default, gradient, kept, 1 / (1 - p))
    assert_equal((output, found), truth)


def test_dropout_that_keeps_all_or_nothing():
    x = torch.randn(5, 3)
    before = torch.default_generator.get_state()
    for arguments in ((0.0, True), (0.3, False)):
        output, kept = run(aten.native_dropout.default, x, *arguments)
        assert torch.equal(output, x) and kept.all()
    output, kept = run(aten.native_dropout.default, x, 1.0, True)
    assert not output.any() and not kept.any()
    assert not run(aten.native_dropout_backward.default, x, kept, 0.0).any()
    assert torch.equal(before, torch.default_generator.get_state())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("forward", "backward", "stock", "count", "epsilon"), [
    (aten.native_layer_norm, aten.native_layer_norm_backward, F.layer_norm, 2, 1e-5),
    (aten._fused_rms_norm, aten._fused_rms_norm_backward, F.rms_norm, 1, 1e-2),
], ids=["layer norm", "RMS norm"])  # fmt: skip
def test_norms_are_the_cpus_through_statistics_in_fp32(forward, backward, stock, count, epsilon, affine, dtype):
    """`count`: of parameters, and of statistics."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(6, 24, generator=generator).to(dtype) for _ in "xg")
    parameters = [torch.randn(24, generator=generator).to(dtype) for _ in range(count)] if affine else []
    given = parameters or [None] * count
    output, *statistics = run(forward.default, x, [24], *given, epsilon)
    assert [s.dtype for s in statistics] == [torch.float32] * count
    gradients = run(backward.default, gradient, x, [24], *statistics, *given, [True, *[affine] * count])
    truth = differentiated(lambda x, *p: stock(x, [24], *p, eps=epsilon), [x, *parameters], gradient)
    assert_equal([output, *filter(None.__ne__, gradients)], truth)


@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax_of_fp16_in_fp32_is_the_cpus(logarithm):
    generator = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(6, 50, generator=generator).half(), torch.randn(6, 50, generator=generator)
    stock = F.log_softmax if logarithm else F.softmax
    forward = aten._log_softmax.default if logarithm else aten._softmax.default
    backward = aten._log_softmax_backward_data.default if logarithm else aten._softmax_backward_data.default
    output = run(forward, x, 1, True)
    assert output.dtype == torch.float32
    found = output, run(backward, gradient, output, 1, torch.float16)
    assert_equal(found, differentiated(lambda x: stock(x, 1, dtype=torch.float32), [x], gradient))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("name", "batch"), [("mm", ()), ("bmm", (3,)), ("addmm", ()), ("baddbmm", (3,))])
def test_products_in_another_dtype_are_not_rounded_to_the_factors(name, batch, dtype):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(*batch, 9, 70, generator=generator).to(dtype)
    right = torch.randn(*batch, 70, 11, generator=generator).to(dtype)
    addend = torch.randn(*batch, 9, 11, generator=generator)
    packet, truth = getattr(aten, name), left.double() @ right.double()
    arguments, keywords = [left, right, torch.float32], {}
    if name in ("addmm", "baddbmm"):
        arguments, keywords = [addend, *arguments], {"beta": 0.5, "alpha": -2.0}
        truth = 0.5 * addend.double() - 2 * truth
    found = run(packet.dtype, *arguments, **keywords)
    assert found.dtype == torch.float32
    assert_near([found], [truth], torch.float32)
    assert ((found.to(dtype).double() - truth).norm() / truth.norm()) > MOST_ERROR[torch.float32]
    out = torch.full_like(found, torch.nan)
    run(packet.dtype_out, *arguments, **keywords, out=out)
    assert torch.equal(out, found)


def test_the_sets_have_the_operators_that_draw_and_those_that_wait():
    drawing = {
        aten.native_dropout.default, aten.bernoulli_.float, aten.normal_.default, aten.uniform_.default,
        aten.random_.default, aten.rand.default, aten.randn.default, aten.randint.low, aten.randperm.default,
        aten.multinomial.default, aten.exponential_.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }  # fmt: skip
    assert drawing <= RANDOM
    assert aten._scaled_dot_product_efficient_attention_backward.default not in RANDOM
    waiting = {
        aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
        aten.equal.default, aten.repeat_interleave.Tensor, aten.bincount.default, aten.index.Tensor,
        aten.index_put_.default, aten.masked_fill_.Tensor,
    }  # fmt: skip
    assert waiting <= SYNCHRONOUS
    assert SYNCHRONOUS.isdisjoint({aten.mm.default, aten.add.Tensor, aten._local_scalar_dense.default})
    x, mask, places = torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    assert waits(aten.nonzero.default, (x,)) and not waits(aten.mm.default, (x, x))
    assert waits(aten.index.Tensor, (x, [mask])) and not waits(aten.index.Tensor, (x, [None, places]))
    assert waits(aten.index_put_.default, (x, [mask], x)) and not waits(aten.index_put_.default, (x, [places], x))


@pytest.mark.skipif(triton is None, reason="needs Triton")
class TestKernels:
    """The project's kernels by the copy of their module that is interpreted, inside dispatch."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", ["adamw", "sgd"])
    def test_updates_are_within_a_few_units_of_the_last_place_of_the_eager_lines(self, name, dtype):
        """As in test_fused.py: the eager lines fuse products and sums where the CPU's kernels do."""
        with Computed():
            ulps = fused.largest_ulps(CPU, name, dtype, size=5000)
        assert ulps.pop("weight") <= fused.MOST_ULPS and all(value <= 1 for value in ulps.values())

    @pytest.mark.parametrize("dtype", DTYPES[1:])
    def test_halves_are_those_of_precision_py(self, dtype):
        with Computed():
            assert fused.halves_agree(CPU, dtype, 5000)

    @pytest.mark.parametrize(("with_bias", "differentiate"), itertools.product([False, True], repeat=2))
    def test_the_loss_is_within_what_fused_py_allows(self, with_bias, differentiate):
        with Computed():
            error = fused.loss_error(CPU, torch.bfloat16, 5000, with_bias, differentiate)
        assert 0 < error <= fused.MOST_LOSS_ERROR

    def test_gradients_are_rounded_to_bf16_and_not_cut_off(self):
        """Every one is within half a unit in the last place, 2**-8 at most of a number in bf16, of the formula."""
        logits = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        labels = torch.arange(5)
        truth = logits.double().softmax(1) - F.one_hot(labels, 96)
        run(torch.ops.lowmem.cross_entropy.default, logits, None, labels, torch.empty(5), 1.0)
        assert ((logits.double() - truth) / truth).abs().max() <= 2**-8 * 1.001

    def test_they_write_where_the_tensors_lie(self):
        """Views of one storage with a stride and an offset, the numbers around them unchanged."""
        master = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
        working, low = split(master[1].clone(), torch.bfloat16)
        room = torch.full((3, 100), 7.0)
        run(torch.ops.lowmem.join.default, working, low, room[1])
        assert torch.equal(room[1], join(working, low)) and (room[[0, 2]] == 7).all()

    def test_compiler_and_interpreter_share_a_process(self):
        """Each before and after the other: code for a GPU of the first copy, numbers of the second."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from lowmem.core.kernels import triton_kernels

        def compiled() -> str:
            kernel = triton_kernels._join_all  # calls _read, which is a kernels' function itself
            signature = dict.fromkeys(kernel.arg_names, "constexpr")
            signature |= {"working_at": "*i16", "low_at": "*i16", "master_at": "*fp32", "n": "i32"}
            source = ASTSource(kernel, signature, {"KIND": 1, "BLOCK": triton_kernels.BLOCK})
            return triton.compile(source, target=GPUTarget("cuda", 86, 32), options={"num_warps": 4}).asm["ptx"]

        def joined() -> Tensor:
            working, low = split(torch.linspace(-3, 3, 1000), torch.bfloat16)
            master = torch.empty(1000)
            run(torch.ops.lowmem.join.default, working, low, master)
            return master

        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            first = compiled()
            numbers = joined()
            assert set(vars(triton.language.tensor)) == TENSOR_METHODS, "the language is as it was"
            assert compiled() == first and torch.equal(joined(), numbers)
        assert torch.equal(numbers, torch.linspace(-3, 3, 1000))
        assert triton_kernels is not interpreted.interpreted_kernels()
        assert isinstance(triton_kernels._join_all, triton.JITFunction), "the program's own copy compiles"
