"""The update rules against the optimizers they claim to be, on the same gradients: bit for bit, but for SGD's."""

import dataclasses
import math
import sys

import pytest
import torch

from experiments.harness.trainings import make_step
from lowmem.core.kernels import fused
from lowmem.core.optimizers import (
    BLOCK,
    OPTIMIZERS,
    Hyperparameters,
    Optimizer,
    cut_state,
    get_optimizer,
    state_layout,
    update,
)
from lowmem.core.precision import join, split
from lowmem.errors import InputError
from reference import make_batch, tiny_model

N = 3 * 4096  # elements: the smallest sizes that bitsandbytes keeps in 8 bits, and a multiple of BLOCK
HYPER = Hyperparameters(learning_rate=3e-3, weight_decay=0.1, update=1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def fresh_state(name: str, elements: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    layout = state_layout(OPTIMIZERS[name], elements, dtype)
    return {key: torch.zeros(entries, dtype=kind) for key, (entries, kind) in layout.items()}


def start(elements: int = N) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(elements)


def gradients(updates: int, elements: int = N) -> list[torch.Tensor]:
    """Of sizes from 1e-6 to 10, with exact zeros among them."""
    torch.manual_seed(1)
    sizes = torch.logspace(-6, 1, elements)[torch.randperm(elements)] * (torch.arange(elements) % 17 != 0)
    return [torch.randn(elements) * sizes for _ in range(updates)]


def run(name: str, master: torch.Tensor, dtype: torch.dtype, given: list, decay: bool = True, at_once=None, **hyper):
    """Updates with each gradient in turn; returns working weights and state."""
    working, low = split(master.clone(), dtype)
    state = fresh_state(name, master.numel(), dtype)
    if low is not None:
        state["low"].copy_(low)
    for number, gradient in enumerate(given, start=1):
        settings = dataclasses.replace(HYPER, update=number, **hyper)
        update(get_optimizer(name), working, state, gradient.clone(), settings, decay, at_once)
    return working, state


def assert_same(first, second) -> None:
    """Two results of `run`: every bit of weights and states."""
    assert torch.equal(first[0], second[0])
    assert first[1].keys() == second[1].keys()
    for name, tensor in first[1].items():
        assert torch.equal(tensor, second[1][name]), name


# --- AdamW ---


@pytest.mark.parametrize("decay", [True, False])
def test_fp32_adamw_is_torchs_adamw_bit_for_bit(decay):
    """torch's single-tensor form; m and v too. The learning rate changes from step to step, as a schedule's does."""
    given = gradients(10)
    parameter = torch.nn.Parameter(start())
    reference = torch.optim.AdamW([parameter], weight_decay=0.1 if decay else 0.0, foreach=False, fused=False)
    working, state = start(), fresh_state("adamw", N, torch.float32)
    for number, gradient in enumerate(given, start=1):
        rate = 3e-3 / number
        reference.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        reference.step()
        hyper = Hyperparameters(learning_rate=rate, weight_decay=0.1, update=number)
        update(OPTIMIZERS["adamw"], working, state, gradient.clone(), hyper, decay)
    assert torch.equal(working, parameter)
    assert torch.equal(state["m"], reference.state[parameter]["exp_avg"])
    assert torch.equal(state["v"], reference.state[parameter]["exp_avg_sq"])


def test_adamw_is_its_formula_in_fp64():
    """Independent of torch.optim: the docstring's equation, in fp64, with other betas and epsilon than the defaults."""
    given = gradients(5)
    hyper = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "gradient_scale": 0.25}
    working, _ = run("adamw", start(), torch.float32, given, **hyper)
    w, m, v = start().double(), torch.zeros(N).double(), torch.zeros(N).double()
    for t, gradient in enumerate(given, start=1):
        g = gradient.double() * 0.25
        w = w - 3e-3 * 0.1 * w
        m = m + 0.2 * (g - m)
        v = 0.95 * v + 0.05 * g**2
        w = w - 3e-3 / (1 - 0.8**t) * m / (v.sqrt() / math.sqrt(1 - 0.95**t) + 1e-6)
    torch.testing.assert_close(working.double(), w, rtol=0, atol=2e-6)  # five fp32 roundings of numbers up to 4


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "sgd"])
def test_bf16_and_its_low_half_are_updated_as_fp32_bit_for_bit(name):
    given = gradients(10)
    working, state = run(name, start(), torch.bfloat16, given)
    expected, expected_state = run(name, start(), torch.float32, given)
    assert_same((join(working, state.pop("low")), state), (expected, expected_state))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_fp16_and_its_low_half_are_updated_as_fp32_but_for_the_tiniest_weights(name):
    """Exact while a weight's fp16 neighbour is normal; below 2**-14 each update rounds to 2**-39, so off by 2**-40."""
    given = gradients(10)
    working, state = run(name, start(), torch.float16, given)
    expected, _ = run(name, start(), torch.float32, given)
    difference = (join(working, state["low"]) - expected).abs()
    assert difference.max() <= 10 * 2.0**-40
    assert (difference == 0).float().mean() > 0.99


# --- SGD ---


@pytest.mark.parametrize("decay", [True, False])
def test_sgd_is_its_formula(decay):
    given = gradients(3)
    working, state = run("sgd", start(), torch.float32, given, decay)
    expected = start()
    for gradient in given:
        expected = expected * (1 - 3e-3 * (0.1 if decay else 0.0)) - 3e-3 * gradient
    torch.testing.assert_close(working, expected, rtol=1e-6, atol=1e-7)
    assert state == {}


# --- 8 bit ---


@pytest.mark.parametrize("decay", [True, False])
def test_adamw8bit_is_bitsandbytes_adamw8bit_bit_for_bit(decay):
    optimizers = pytest.importorskip("bitsandbytes.optim")
    given = gradients(5)
    parameter = torch.nn.Parameter(start())
    reference = optimizers.AdamW8bit([parameter], lr=3e-3, weight_decay=0.1 if decay else 0.0)
    for gradient in given:
        parameter.grad = gradient.clone()
        reference.step()
    working, state = run("adamw8bit", start(), torch.float32, given, decay)
    assert torch.equal(working, parameter)
    kept = reference.state[parameter]
    for own, theirs in {"m": "state1", "v": "state2", "m_scale": "absmax1", "v_scale": "absmax2"}.items():
        assert torch.equal(state[own], kept[theirs]), own
    assert kept["state1"].dtype is torch.uint8  # it did keep this parameter in 8 bits


def test_without_bitsandbytes_adamw8bit_is_refused_and_the_others_are_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InputError, match="adamw8bit needs the package bitsandbytes; pip install"):
        get_optimizer("adamw8bit")
    assert get_optimizer("adamw").name == "adamw"
    assert get_optimizer("sgd").name == "sgd"


# --- all ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_of_an_update_change_nothing(name, dtype):
    elements = 11 * BLOCK + 97  # the last slice and the last 8-bit block are not full
    given = gradients(3, elements)
    whole = run(name, start(elements), dtype, given)
    for size in (BLOCK, 3 * BLOCK):
        assert_same(run(name, start(elements), dtype, given, at_once=size), whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_updated_on_their_own_are_the_whole(name):
    given = gradients(2)
    whole = run(name, start(), torch.bfloat16, given)
    optimizer = get_optimizer(name)
    working, low = split(start(), torch.bfloat16)
    state = fresh_state(name, N, torch.bfloat16)
    state["low"].copy_(low)
    for number, gradient in enumerate(given, start=1):
        cuts = (numbers.split(5 * BLOCK) for numbers in (working, gradient.clone()))
        pieces = [*zip(cut_state(optimizer, state, N, 5 * BLOCK), *cuts, strict=True)]
        for part, piece, of_piece in reversed(pieces):  # in any order
            update(optimizer, piece, part, of_piece, dataclasses.replace(HYPER, update=number), True)
    assert_same((working, state), whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gradient_scale_is_a_factor_on_the_gradient(name):
    given = gradients(3)
    scaled = run(name, start(), torch.float32, given, gradient_scale=0.3)
    assert_same(scaled, run(name, start(), torch.float32, [gradient * 0.3 for gradient in given]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_decay_a_weight_that_gets_no_gradient_stays(name):
    """Also what keeps the padding between parameters at zero."""
    zeros = [torch.zeros(N)] * 3
    assert torch.equal(run(name, start(), torch.float32, zeros, decay=False)[0], start())
    decayed, _ = run(name, start(), torch.float32, zeros, decay=True)
    torch.testing.assert_close(decayed, start() * (1 - 3e-4) ** 3, rtol=1e-6, atol=0)
    assert run(name, torch.zeros(N), torch.float32, zeros)[0].count_nonzero() == 0


@pytest.mark.parametrize(
    ("name", "bytes_16_bit", "bytes_fp32"),
    [("adamw", 10, 8), ("adamw8bit", 4 + 8 / BLOCK, 2 + 8 / BLOCK), ("sgd", 2, 0)],
)
def test_bytes_of_state_per_parameter(name, bytes_16_bit, bytes_fp32):
    for dtype, expected in zip(DTYPES, (bytes_16_bit, bytes_16_bit, bytes_fp32), strict=True):
        layout = state_layout(OPTIMIZERS[name], N, dtype)
        assert sum(entries * kind.itemsize for entries, kind in layout.values()) == expected * N


def test_another_optimizer_is_one_entry_that_steps_stream_and_kernels_leave_alone(monkeypatch):
    """SGD with momentum, which has no kernel: a step takes it from the table, wherever its state lies."""

    def rule(master, state, gradient, hyper, weight_decay, scratch):
        state["momentum"].mul_(0.9).add_(gradient, alpha=hyper.gradient_scale)
        master.sub_(state["momentum"], alpha=hyper.learning_rate)

    momentum = Optimizer("momentum", {"momentum": (1, torch.float32)}, rule)
    monkeypatch.setitem(OPTIMIZERS, "momentum", momentum)
    assert momentum.state_bits == 32 and not momentum.any_stream

    def trained(**layout) -> dict[str, torch.Tensor]:
        step, store = make_step(tiny_model("gpt2", 0.1, 0), precision="bf16", optimizer="momentum", **layout)
        for number in range(3):
            step(make_batch(number, 4, 16), number, 1e-2)
        step.flush()
        return dict(store.masters())

    resident, streamed = trained(), trained(states_on_gpu=0, group=2, segment_blocks=2)
    assert all(torch.equal(weight, streamed[name]) for name, weight in resident.items())

    given = gradients(1)[0]
    expected, found = [(start().bfloat16(), fresh_state("momentum", N, torch.bfloat16)) for _ in range(2)]
    update(momentum, *expected, given.clone(), HYPER, True)
    fused.update(momentum, *found, given.clone(), HYPER, True)
    assert_same(expected, found)
    assert torch.equal(expected[1]["momentum"], given)
