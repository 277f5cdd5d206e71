"""Tests the fused GPU operators of operators.py against plain PyTorch code, and updates weights with them.

The plain code runs in the place of kernels that fail. A run's plan counts the memory and time of the code that runs.
"""

import importlib.util
from collections.abc import Iterable
from functools import cache, reduce
from itertools import product

import torch
from torch import Tensor

from lowmem.core import optimizers
from lowmem.core.activations import ACTIVATIONS, Activation, sum_of_rows
from lowmem.core.kernels import Kernels
from lowmem.core.logits import LogitFunction
from lowmem.core.loss import IGNORED, linear_cross_entropy
from lowmem.core.norms import Drops, Rule, normalize_sum
from lowmem.core.optimizers import Hyperparameters, Optimizer, State
from lowmem.core.precision import join, split
from lowmem.core.residual_sums import add_dropped
from lowmem.core.rotary import rotate, rotate_plainly

OLDEST_CAPABILITY = (7, 5)  # oldest cards that today's Triton compiles for
KINDS_OF_LOGITS = (  # (with a bias, function of the logits): Triton compiles a kernel for each
    (False, LogitFunction()),
    (True, LogitFunction()),
    (False, LogitFunction(5.0, 0.25)),
)
KINDS_OF_NORMS = (Rule(1e-5, 0.0, True), Rule(1e-5, 0.0, False))
SIZES = (4096, 4097)  # Triton compiles another kernel for multiples of 16
MOST_LOSS_ERROR = 0.02  # logits, and the gradients for them, are rounded to 16 bit: 0.006 in bf16 on the CPU
MOST_NORM_ERROR = 5e-3  # an output rounded to bf16: 0.0017 on the CPU
MOST_ACTIVATION_ERROR = MOST_ROTARY_ERROR = 5e-3  # as for norms
MOST_ULPS = 8  # of a kernel against the plain code: some fused products and sums, and a square root
Dtypes = tuple[torch.dtype, ...]


def update(
    optimizer: Optimizer, working: Tensor, state: State, gradient: Tensor, hyper: Hyperparameters, decay: bool
) -> None:
    """Updates weights `working` [n] and the optimizer's `state` in place, by a fused kernel if `optimizer` has one. May
    overwrite `gradient` [n] fp32. With 8-bit moments and 16-bit weights, temporaries take 4 bytes per parameter."""
    weight_decay = hyper.weight_decay if decay else 0.0
    low = state.get("low")
    if optimizer.name == "adamw":
        numbers = optimizers.adamw_numbers(hyper, weight_decay)
        torch.ops.lowmem.adamw(working, low, state["m"], state["v"], gradient, hyper.gradient_scale, *numbers)
    elif optimizer.name == "sgd":
        decay_factor = 1 - hyper.learning_rate * weight_decay
        torch.ops.lowmem.sgd(working, low, gradient, hyper.gradient_scale, decay_factor, hyper.learning_rate)
    elif optimizer.name != "adamw8bit" or low is None:
        optimizers.update(optimizer, working, state, gradient, hyper, decay)
    else:
        # bitsandbytes updates fp32 weights: one kernel joins the two halves before, another splits them again.
        master = torch.empty_like(working, dtype=torch.float32)
        torch.ops.lowmem.join(working, low, master)
        optimizer.rule(master, state, gradient, hyper, weight_decay, None)
        torch.ops.lowmem.split(working, low, master)


def expected(capability: tuple[int, int]) -> Kernels:
    """Returns the fused kernels that a plan assumes for a GPU of this compute `capability`: all or none. Returns none
    if this machine has a GPU but no Triton."""
    here = not torch.cuda.is_available() or importlib.util.find_spec("triton") is not None
    return Kernels.ALL if here and capability >= OLDEST_CAPABILITY else Kernels.NONE


@cache
def failures(device: torch.device) -> dict[Kernels, str]:
    """Compiles and tests the fused kernels on `device`, a GPU. Returns {kernels that must not be used: the reason, part
    of a sentence}; empty if all work. Takes about ten seconds if Triton's cache is empty."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return {Kernels.ALL: "Triton compiles for cards from Turing on"}
    in_16_bit = (torch.float16, torch.bfloat16) if capability >= (8, 0) else (torch.float16,)  # dtypes of runs
    found: dict[Kernels, str] = {}
    for kernels, trial in TRIALS.items():
        if any(kernels in failed for failed in found):
            continue
        try:
            reason = trial(device, in_16_bit)
        except Exception as error:  # such as: no compiler, a driver too old, no room for files
            last = (str(error).strip() or "no reason given").splitlines()[-1]
            reason = f"they do not run here ({type(error).__name__}: {last})"
        if reason is not None:
            found[kernels] = reason
    return found


def running(device: torch.device) -> Kernels:
    """Returns the fused kernels that work on `device`."""
    return reduce(lambda kernels, failed: kernels & ~failed, failures(device), Kernels.ALL)


def _try_products(device: torch.device, in_16_bit: Dtypes) -> str | None:
    worst = _largest(
        ulps
        for name, dtype, size in product(("adamw", "sgd"), (torch.float32, *in_16_bit), SIZES)
        for ulps in largest_ulps(device, name, dtype, size=size).values()
    )
    if not worst <= MOST_ULPS:
        return f"an update is {worst:.3g} units of the last place off"
    if not all(halves_agree(device, dtype, size) for dtype in in_16_bit for size in SIZES):
        return "a kernel splits or joins weights otherwise"
    loss = _largest(
        loss_error(device, dtype, size, with_bias, differentiate, function)
        for dtype, size, differentiate, (with_bias, function) in product(
            in_16_bit, SIZES, (False, True), KINDS_OF_LOGITS
        )
    )
    return _reason("the loss or a gradient of it", loss, MOST_LOSS_ERROR)


def _try_norms(device: torch.device, in_16_bit: Dtypes) -> str | None:
    errors = (norm_error(device, dtype, rule) for dtype, rule in product(in_16_bit, KINDS_OF_NORMS))
    return _reason("a norm or a gradient of it", _largest(errors), MOST_NORM_ERROR)


def _try_sums(device: torch.device, in_16_bit: Dtypes) -> str | None:
    errors = (norm_error(device, *kind) for kind in product(in_16_bit, KINDS_OF_NORMS, (0.0, 0.3)))
    return _reason("a sum, its norm or a gradient of them", _largest(errors), MOST_NORM_ERROR)


def _try_activations(device: torch.device, in_16_bit: Dtypes) -> str | None:
    errors = (activation_error(device, *kind) for kind in product(in_16_bit, ACTIVATIONS, (False, True)))
    return _reason("an MLP's activation or a gradient of it", _largest(errors), MOST_ACTIVATION_ERROR)


def _try_rotary(device: torch.device, in_16_bit: Dtypes) -> str | None:
    error = _largest(rotary_error(device, dtype) for dtype in in_16_bit)
    return _reason("a rotary embedding or a gradient of it", error, MOST_ROTARY_ERROR)


def _reason(subject: str, error: float, most: float) -> str | None:
    return None if error <= most else f"{subject} is {error:.3g} off"


TRIALS = {  # {kernels that must not be used if the trial fails: the trial}
    Kernels.ALL: _try_products,
    Kernels.NORMS | Kernels.SUMS: _try_norms,
    Kernels.SUMS: _try_sums,
    Kernels.ACTIVATIONS: _try_activations,
    Kernels.ROTARY: _try_rotary,
}


def loss_error(
    device: torch.device, dtype: torch.dtype, words: int, with_bias: bool = True, differentiate: bool = True,
    function: LogitFunction = LogitFunction(),  # noqa: B008  it is frozen
) -> float:  # fmt: skip
    """Compares the fused cross-entropy on `device` with the plain one in fp32 on the CPU. Returns the largest relative
    error (norm of the difference / norm of the plain result) of the loss and the gradients. `words`: size of the
    vocabulary. `differentiate`: False to compare the loss only."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (40, words))
    labels, bias = torch.arange(40) * 7 % words, torch.randn(words, generator=generator)
    labels[::5] = IGNORED

    def results(device: torch.device, dtype: torch.dtype, fused: bool) -> list[Tensor]:
        of_weight = torch.ones(weight.shape, device=device) if differentiate else None
        of_bias = torch.ones(words, device=device) if differentiate and with_bias else None
        found = linear_cross_entropy(
            hidden.to(device, dtype), weight.to(device, dtype), labels.to(device), scale=0.5, chunk_tokens=32,
            bias=bias.to(device) if with_bias else None, weight_gradient=of_weight, bias_gradient=of_bias, fused=fused,
            function=function,
        )  # fmt: skip
        return [tensor.double() for tensor in (*found, of_weight, of_bias) if tensor is not None]

    pairs = zip(results(device, dtype, True), results(torch.device("cpu"), torch.float32, False), strict=True)
    return _relative_error(pairs)


def norm_error(device: torch.device, dtype: torch.dtype, rule: Rule, p: float | None = None, rows: int = 40) -> float:
    """Compares a fused norm and its gradients on `device` with fp64 on the CPU. Returns the largest relative error
    (norm of the difference / norm of the fp64 result). Unless `p` is None, also tests residual additions before and
    after the norm, with dropout probability `p`. A share of dropped numbers far from `p` is an error, too."""
    generator = torch.Generator().manual_seed(4)
    x, branch, weight, bias = (torch.randn(*n, 1280, generator=generator) for n in ((rows,), (rows,), (), ()))
    inputs = [x, branch.to(dtype) if p is not None else None, weight, bias if rule.centered else None]
    gradients = [torch.randn(rows, 1280, generator=generator).to(kind) for kind in (torch.float32, dtype)]
    there = [None if each is None else each.detach().to(device, copy=True).requires_grad_() for each in inputs]
    leaves = [None if each is None else each.double().requires_grad_() for each in inputs]
    drops = [Drops(p, Drops.draw(2, device), number) if p else None for number in range(2)]
    total, y = normalize_sum(*there[:2], drops[0], *there[2:], rule, dtype)
    if p is None:
        truth = rule(leaves[0], *leaves[2:])
        found, true, masks = [y], [truth], []
    else:
        last = add_dropped(total, y, drops[1])
        # The reference drops the numbers that the kernels have dropped.
        masks = [((a != b).double() / (1 - p)).cpu() for a, b in ((total, there[0]), (last, total))]
        true_total = leaves[0] + masks[0] * leaves[1]
        truth = rule(true_total, *leaves[2:])
        found, true = [total, last, y], [true_total, true_total + masks[1] * truth, truth]
    outputs = gradients[-len(found[-2:]) :]
    torch.autograd.backward(found[-2:], [gradient.to(device) for gradient in outputs])
    torch.autograd.backward(true[-2:], [gradient.double() for gradient in outputs])
    of_inputs = ((one.grad, leaf.grad) for one, leaf in zip(there, leaves, strict=True) if one is not None)
    # The masks are random. Their share of zeros may be 0.02 off, which is ten standard deviations.
    off = max((abs((mask == 0).double().mean().item() - p) for mask in masks), default=0.0)
    return _largest((_relative_error((*zip(found, true, strict=True), *of_inputs)), 0.0 if off < 0.02 else off))


def activation_error(device: torch.device, dtype: torch.dtype, activation: Activation, is_gated: bool) -> float:
    """Compares an MLP's fused activation and its gradients on `device` with fp64 on the CPU. Returns the largest
    relative error (norm of the difference / norm of the fp64 result). `is_gated`: True for activation(gate) * up."""
    generator = torch.Generator().manual_seed(5)
    gradient, *inputs = (torch.randn(40, 300, generator=generator).to(dtype) for _ in range(2 + is_gated))
    there = [*(tensor.to(device) for tensor in inputs), *[None] * (not is_gated)]
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    values, of_gate = activation.values(*there), gradient.to(device, copy=True)
    again, of_up = activation.differentiate(of_gate, *there)
    truth = activation(leaves[0]) * (leaves[1] if is_gated else 1.0)
    truth.backward(gradient.double())
    sums = [(sum_of_rows(of_gate, of_gate), leaves[0].grad.sum(0))] * (not is_gated)
    of_inputs = zip((of_gate, of_up), (leaf.grad for leaf in leaves), strict=is_gated)
    return _relative_error([(values, truth.detach()), (again, truth.detach()), *of_inputs, *sums])


def rotary_error(device: torch.device, dtype: torch.dtype) -> float:
    """Compares fused rotary embeddings and their gradients on `device` with fp64 on the CPU. Returns the largest
    relative error (norm of the difference / norm of the fp64 result)."""
    generator = torch.Generator().manual_seed(6)
    shapes = (2, 4, 5, 64), (2, 2, 5, 64), (2, 5, 48), (2, 5, 48), (2, 4, 5, 64), (2, 2, 5, 64)
    q, k, cos, sin, *gradients = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    there = [tensor.to(device, copy=True).requires_grad_() for tensor in (q, k)]
    leaves = [tensor.double().requires_grad_() for tensor in (q, k)]
    found = rotate(*there, cos.to(device), sin.to(device))
    truth = [rotate_plainly(leaf, cos.double(), sin.double()) for leaf in leaves]
    torch.autograd.backward(found, [gradient.to(device) for gradient in gradients])
    torch.autograd.backward(truth, [gradient.double() for gradient in gradients])
    pairs = *zip(found, truth, strict=True), *((a.grad, b.grad) for a, b in zip(there, leaves, strict=True))
    return _relative_error(pairs)


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    return _largest(((found.cpu().double() - truth).norm() / truth.norm()).item() for found, truth in pairs)


def _largest(numbers: Iterable[float]) -> float:
    # NaN if any number is NaN. Python's max() may ignore NaN.
    return torch.tensor(list(numbers), dtype=torch.float64).max().item()


def halves_agree(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Returns True if the kernels on `device` split fp32 weights into halves, and join them, with the same bits as
    precision.py on the CPU. `dtype`: that of the upper halves. `size`: number of weights."""
    exponents = torch.linspace(-30, 10, size).exp2()
    master = torch.randn(size, generator=torch.Generator().manual_seed(2)) * exponents
    working, low = split(master, dtype)
    there, low_there = torch.empty_like(working, device=device), torch.empty_like(low, device=device)
    joined = torch.empty(size, device=device)
    torch.ops.lowmem.split(there, low_there, master.to(device))
    torch.ops.lowmem.join(there, low_there, joined)
    same = torch.equal(there.cpu().view(torch.int16), working.view(torch.int16)) and torch.equal(low_there.cpu(), low)
    return same and torch.equal(joined.cpu(), join(working, low))


def largest_ulps(
    device: torch.device,
    optimizer_name: str,
    dtype: torch.dtype,
    rule: optimizers.UpdateFunction = update,
    size: int = 4097,
) -> dict[str, float]:
    """Makes one optimizer update by `rule` on `device`, and by optimizers.py on the CPU. Returns {"weight" or a
    moment's name: largest difference}, in fp32 units in the last place (ulps) of the larger of the old and new value.
    `dtype`: that of the weights that compute. `size`: number of weights."""
    generator = torch.Generator().manual_seed(1)
    optimizer = optimizers.get_optimizer(optimizer_name)
    hyper = Hyperparameters(learning_rate=1e-3, weight_decay=0.01, update=3, gradient_scale=0.7)
    working, low = split(torch.randn(size, generator=generator).mul_(0.02), dtype)
    gradient = torch.randn(size, generator=generator).mul_(1e-3)
    state = {
        name: torch.zeros(n, dtype=kind) for name, (n, kind) in optimizers.state_layout(optimizer, size, dtype).items()
    }
    if "low" in state:
        state["low"].copy_(low)
    if "m" in state:
        state["m"].copy_(torch.randn(size, generator=generator).mul_(1e-3))
        state["v"].copy_(torch.rand(size, generator=generator).mul_(1e-6))

    def numbers(working: Tensor, state: State) -> dict[str, Tensor]:
        working, state = working.cpu(), {name: tensor.cpu() for name, tensor in state.items()}
        return {"weight": join(working, state.pop("low", None)).clone()} | {
            name: tensor.clone() for name, tensor in state.items()
        }

    before = numbers(working, state)
    working_there, state_there = working.to(device, copy=True), {n: t.to(device, copy=True) for n, t in state.items()}
    rule(optimizer, working_there, state_there, gradient.to(device, copy=True), hyper, True)
    optimizers.update(optimizer, working, state, gradient, hyper, True)
    found, truth = numbers(working_there, state_there), numbers(working, state)
    # If gradient and old moment cancel, a step is less exact. So a weight's unit is at least that at the learning rate.
    smallest = {"weight": hyper.learning_rate}
    return {name: _ulps(found[name], truth[name], before[name], smallest.get(name, 0.0)) for name in truth}


def _ulps(found: Tensor, truth: Tensor, before: Tensor, smallest: float) -> float:
    largest = torch.maximum(truth.abs(), before.abs()).clamp(min=smallest)
    spacing = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
    return ((found.double() - truth.double()).abs() / spacing).max().item()
