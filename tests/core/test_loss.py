"""The chunked loss against the plain one on full logits: in fp64 for the truth, in the same dtype for the tolerance.

Errors are relative, |x - truth| / |truth| in the 2-norm. The worst seen over 20 seeds, V of 97, 1,000 and 8,200 and
chunks of 1, 3, 37 and 64 tokens (two CPU cores, torch 2.13.0):

                    loss      d hidden   d weight   d bias
    fp32            2.4e-7    1.7e-6     2.0e-7     1.8e-7    (d hidden: chunks of up to 3 tokens at V = 8,200, where
    bf16            3.1e-4    3.7e-3     3.8e-3     2.9e-3     the matrix product sums 8,200 terms one by one)
    bf16 / plain    1.01      1.00       1.07       1.00      (error of the chunked loss over that of the plain loss)
    fp16 / plain    1.07      1.00       1.04       1.00

The fp32 thresholds are about three times these. In 16 bit, the error comes from rounding the logits and dz, and the
plain loss rounds the same numbers, so the threshold is a factor on the plain loss's own error.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.core import loss as loss_module
from lowmem.core.logits import LogitFunction
from lowmem.core.loss import IGNORED, linear_cross_entropy

FP32_TOLERANCE = {"loss": 7e-7, "hidden": 5e-6, "weight": 6e-7, "bias": 5e-7}
SIXTEEN_BIT_FACTOR = {"loss": 1.5, "hidden": 1.05, "weight": 1.2, "bias": 1.05}  # times the plain loss's own error


PLAINLY, SCALED, CAPPED = LogitFunction(), LogitFunction(0.0625), LogitFunction(1.5, 0.5)
functions_of_logits = pytest.mark.parametrize("function", [PLAINLY, SCALED, CAPPED], ids=["plain", "scaled", "capped"])


class Results(NamedTuple):
    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def operands(seed: int, N: int = 37, D: int = 48, V: int = 97, dtype: torch.dtype = torch.float32):
    """hidden [N, D] and weight [V, D] in `dtype`, labels [N] with every fifth ignored, bias [V] in fp32."""
    torch.manual_seed(seed)
    hidden, weight, bias = torch.randn(N, D), torch.randn(V, D) * 0.3, torch.randn(V)
    labels = torch.randint(0, V, (N,))
    labels[::5] = IGNORED
    return hidden.to(dtype), weight.to(dtype), labels, bias


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, scale: float, dtype=None, function=PLAINLY
) -> Results:
    """All logits at once and autograd; `dtype`: compute in it. The bias joins in fp32 at least, as a master does."""
    leaves = [t if t is None else t.to(dtype or t.dtype, copy=True).requires_grad_() for t in (hidden, weight, bias)]
    logits = F.linear(*leaves[:2])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(function(logits if bias is None else logits + leaves[2]), labels, reduction="sum")
    (loss * scale).backward()
    return Results(loss.detach(), *(None if leaf is None else leaf.grad for leaf in leaves))


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, scale: float, **keywords) -> Results:
    weight_gradient = torch.zeros(weight.shape)
    bias_gradient = None if bias is None else torch.zeros(bias.shape)
    gradients = {"weight_gradient": weight_gradient, "bias_gradient": bias_gradient}
    loss, hidden_gradient = linear_cross_entropy(
        hidden, weight, labels, bias=bias, scale=scale, **gradients, **keywords
    )
    return Results(loss, hidden_gradient, weight_gradient, bias_gradient)


def errors(results: Results, truth: Results) -> dict[str, float]:
    return {
        name: ((result.double() - true).norm() / true.norm()).item()
        for name, result, true in zip(Results._fields, results, truth, strict=True)
        if true is not None
    }


def assert_fp32_close(results: Results, truth: Results) -> None:
    for name, error in errors(results, truth).items():
        assert error <= FP32_TOLERANCE[name], (name, error)


@functions_of_logits
@pytest.mark.parametrize("V", [97, 8200])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 37, 64])
def test_fp32_is_the_plain_loss_whatever_the_chunk(chunk_tokens, with_bias, V, function):
    hidden, weight, labels, bias = operands(0, V=V)
    bias = bias if with_bias else None
    truth = plain(hidden, weight, labels, bias, 0.37, torch.float64, function)
    results = chunked(hidden, weight, labels, bias, 0.37, chunk_tokens=chunk_tokens, function=function)
    assert_fp32_close(results, truth)


def test_the_default_chunk_gives_the_plain_loss_over_several_chunks():
    hidden, weight, labels, bias = operands(1, N=2 * loss_module.CHUNK_TOKENS + 5, D=8, V=61)
    assert_fp32_close(
        chunked(hidden, weight, labels, bias, 1.0), plain(hidden, weight, labels, bias, 1.0, torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [loss_module._BAND_WORDS, 2 * loss_module._BAND_WORDS + 37])
def test_a_vocabulary_of_several_bands_gets_every_words_gradient(V, dtype):
    hidden, weight, labels, _ = operands(2, N=6, D=4, V=V, dtype=dtype)
    labels[1:4] = torch.tensor([0, V - 1, min(loss_module._BAND_WORDS, V - 1)])
    truth = plain(hidden, weight, labels, None, 1.0, torch.float64)
    results = chunked(hidden, weight, labels, None, 1.0, chunk_tokens=4)
    difference = (results.weight.double() - truth.weight).abs().amax(dim=1)  # per word, so that no band can hide
    assert difference.max() <= truth.weight.abs().max() * (1e-6 if dtype is torch.float32 else 2**-8)
    assert results.weight[-1].any() and results.weight[0].any()


@functions_of_logits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_16_bit_errors_are_those_of_the_plain_16_bit_loss(chunk_tokens, dtype, function):
    for seed in range(3):
        case = operands(seed, V=1000, dtype=dtype)
        truth = plain(*case, 0.37, torch.float64, function)
        own = errors(chunked(*case, 0.37, chunk_tokens=chunk_tokens, function=function), truth)
        for name, plain_error in errors(plain(*case, 0.37, function=function), truth).items():
            assert own[name] <= SIXTEEN_BIT_FACTOR[name] * plain_error, (name, own[name], plain_error)


def test_the_loss_is_finite_where_exponentials_overflow():
    hidden, weight, labels, bias = operands(4)
    hidden = hidden * 300  # logits of about +-2,000
    results = chunked(hidden, weight, labels, bias, 1.0, chunk_tokens=8)
    truth = plain(hidden, weight, labels, bias, 1.0, torch.float64)
    assert results.loss > 1000
    # fp32 logits of this size are off by 2,000 x 2**-24 = 1.2e-4, and softmax by as much
    assert max(errors(results, truth).values()) < 1.2e-4


# --- ignored tokens ---


def test_an_ignored_token_counts_for_nothing():
    """Bit for bit: its hidden state may be anything (finite), and its gradient is exactly zero."""
    hidden, weight, labels, bias = operands(5)
    changed = torch.where((labels == IGNORED)[:, None], torch.randn_like(hidden) * 10, hidden)
    first, second = (chunked(states, weight, labels, bias, 1.0, chunk_tokens=8) for states in (hidden, changed))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first.hidden[labels == IGNORED].count_nonzero() == 0
    assert (first.hidden[labels != IGNORED].abs().sum(dim=1) > 0).all()


def test_a_chunk_of_ignored_tokens_only_is_no_obstacle():
    hidden, weight, labels, bias = operands(6)
    labels[8:24] = IGNORED
    results = chunked(hidden, weight, labels, bias, 1.0, chunk_tokens=8)
    assert_fp32_close(results, plain(hidden, weight, labels, bias, 1.0, torch.float64))


@pytest.mark.parametrize("N", [0, 5])
def test_without_any_counted_token_loss_and_gradients_are_zero(N):
    hidden, weight, _, bias = operands(7, N=N)
    results = chunked(hidden, weight, torch.full((N,), IGNORED), bias, 1.0, chunk_tokens=2)
    assert all(part.count_nonzero() == 0 for part in results)
    assert results.hidden.shape == hidden.shape


# --- what is added to, what is left alone, what is never made ---


def test_scale_multiplies_gradients_but_not_the_loss():
    case = operands(8)
    once, eightfold = chunked(*case, 1.0), chunked(*case, 8.0)
    assert torch.equal(once.loss, eightfold.loss)
    for name in ("hidden", "weight", "bias"):
        assert torch.equal(8 * getattr(once, name), getattr(eightfold, name))  # exact: a power of two


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_what_the_accumulators_hold(dtype):
    hidden, weight, labels, bias = operands(9, dtype=dtype)
    fresh = chunked(hidden, weight, labels, bias, 1.0)
    held_weight, held_bias = torch.randn(weight.shape), torch.randn(bias.shape)
    weight_gradient, bias_gradient = held_weight.clone(), held_bias.clone()
    linear_cross_entropy(
        hidden, weight, labels, bias=bias, weight_gradient=weight_gradient, bias_gradient=bias_gradient
    )
    torch.testing.assert_close(weight_gradient, held_weight + fresh.weight, rtol=0, atol=2e-5)
    torch.testing.assert_close(bias_gradient, held_bias + fresh.bias, rtol=0, atol=2e-5)


@functions_of_logits
def test_without_an_accumulator_nothing_is_differentiated_and_the_loss_is_the_same(function):
    hidden, weight, labels, bias = operands(10)
    loss, hidden_gradient = linear_cross_entropy(hidden, weight, labels, bias=bias, function=function)
    assert hidden_gradient is None
    assert torch.equal(loss, chunked(hidden, weight, labels, bias, 1.0, function=function).loss)


def test_the_operands_stay_as_they_were():
    case = operands(11)
    before = [operand.clone() for operand in case]
    chunked(*case, 0.5, chunk_tokens=8)
    assert all(torch.equal(a, b) for a, b in zip(case, before, strict=True))


class LargestNewTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor in new memory (no view, no `out=`)."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((arguments, keywords)) if isinstance(t, Tensor)}
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_logits_never_exist(dtype):
    N, D, V, chunk_tokens = 64, 8, 700, 16
    hidden, weight, labels, bias = operands(12, N, D, V, dtype)
    with LargestNewTensor() as seen_by_plain:
        plain(hidden, weight, labels, bias, 1.0)
    assert seen_by_plain.elements == N * V
    with LargestNewTensor() as seen:
        chunked(hidden, weight, labels, bias, 1.0, chunk_tokens=chunk_tokens)
    assert seen.elements == chunk_tokens * V


def test_no_second_weight_gradient_exists_in_16_bit(monkeypatch):
    """The product for the weight's gradient is made a band of words at a time."""
    monkeypatch.setattr(loss_module, "_BAND_WORDS", 50)
    hidden, weight, labels, _ = operands(13, N=8, D=64, V=700, dtype=torch.bfloat16)
    weight_gradient = torch.zeros(weight.shape)
    with LargestNewTensor() as seen:
        linear_cross_entropy(hidden, weight, labels, weight_gradient=weight_gradient, chunk_tokens=4)
    assert seen.elements == max(50 * 64, 4 * 700)
    assert seen.elements < weight.numel()
