"""Makes the timed cases: single operators, a linear layer, the update of a piece, whole steps of few blocks.

Each runs on "cuda" to be timed, and on "meta" to be counted by the simulator's clock. Sizes do not matter for the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as numbers

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config

from experiments.harness.measured import random_step
from lowmem.core.batch import Batch
from lowmem.core.kernels import Kernels
from lowmem.core.layers import cast_explicitly, register_add_product
from lowmem.core.layout import Layout
from lowmem.core.optimizers import Hyperparameters, UpdateFunction, get_optimizer, state_layout
from lowmem.cudasim.recorder import Recorder
from lowmem.models.build import GPT2_SHAPES, make_decoder
from lowmem.planning.simulated_step import StepCase, Target, record_step

CALLS = 100  # of an operator, one after the other
SIDE = 64  # of the tensors of single operators
OPTIMIZER, LEARNING_RATE = "adamw", 1e-4
SEQ, SEQUENCES = 1024, 2  # of a step
META = torch.device("meta")
Run = Callable[[], object]


Make = Callable[[torch.device], Callable[[], Run]]


@dataclass(frozen=True)
class Case:
    """A case of `calls` calls. `make(device)` returns a function that prepares one timing and returns the function to
    time. `count(target)`: host seconds of all calls by the simulator's clock."""

    name: str
    calls: int
    make: Make
    count: Callable[[Target], float]


def _case(name: str, make: Make) -> Case:
    """Returns a case whose code also runs on meta tensors."""

    def count(target: Target) -> float:
        with target.device_model.functions(), Recorder(target.device_model) as recorder:
            run = make(META)()
            began = recorder.clock.host
            run()
            return recorder.clock.host - began

    return Case(name, CALLS, make, count)


def operator_cases() -> list[Case]:
    return [
        _case("add, no gradient", _repeated(lambda x: torch.add(x, x))),
        _case("view, no gradient", _repeated(lambda x: x.view(-1))),
        _case("matrix product, no gradient", _repeated(lambda x: torch.mm(x, x))),
        _case("add, recorded by autograd", _repeated(lambda x: torch.add(x, x), gradient=True)),
        _case("tanh, its backward", _backward_of_tanh),
        _case("attention, no gradient", _attention),
    ]


def _repeated(operator: Callable[[Tensor], Tensor], gradient: bool = False) -> Callable:
    def make(device: torch.device) -> Callable[[], Run]:
        x = torch.empty(SIDE, SIDE, device=device, dtype=torch.bfloat16, requires_grad=gradient)

        def run() -> None:
            with torch.set_grad_enabled(gradient):
                for _ in range(CALLS):
                    operator(x)

        return lambda: run

    return make


def _backward_of_tanh(device: torch.device) -> Callable[[], Run]:
    """Returns a case's `make`: operators with one operation each in backward."""
    x = torch.empty(SIDE, SIDE, device=device, requires_grad=True)
    gradient = torch.empty(SIDE, SIDE, device=device)

    def prepare() -> Run:
        y = x
        for _ in range(CALLS):
            y = torch.tanh(y)
        return lambda: torch.autograd.grad(y, x, gradient)

    return prepare


def _attention(device: torch.device) -> Callable[[], Run]:
    q = torch.empty(1, 2, SIDE, SIDE, device=device, dtype=torch.bfloat16)

    def run() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                F.scaled_dot_product_attention(q, q, q, is_causal=True)

    return lambda: run


def product_case(kernels: Kernels) -> Case:
    """Returns the case of a linear layer, forward and backward. With `kernels`, it adds the gradient to its
    accumulator."""

    def make(device: torch.device) -> Callable[[], Run]:
        layers = nn.Sequential(nn.Linear(SIDE, SIDE, device=device, dtype=torch.bfloat16))
        cast_explicitly(layers, torch.bfloat16, kernels)
        weight = layers[0].weight
        sum_of_gradients = torch.zeros(SIDE, SIDE, device=device)
        if kernels:
            register_add_product(weight, lambda *factors: torch.ops.lowmem.add_product(sum_of_gradients, *factors))
        x = torch.empty(SIDE, SIDE, device=device, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty(SIDE, SIDE, device=device, dtype=torch.bfloat16)

        def run() -> None:
            for _ in range(CALLS):
                layers(x).backward(gradient)

        def prepare() -> Run:
            x.grad = None
            layers.zero_grad()
            return run

        return prepare

    return _case("linear layer, forward and backward" + (", fused" if kernels else ""), make)


def update_case(rule: UpdateFunction, name: str) -> Case:
    def make(device: torch.device) -> Callable[[], Run]:
        optimizer, entries = get_optimizer(OPTIMIZER), SIDE * SIDE
        layout = state_layout(optimizer, entries, torch.bfloat16)
        state = {name: torch.zeros(size, dtype=dtype, device=device) for name, (size, dtype) in layout.items()}
        working = torch.zeros(entries, dtype=torch.bfloat16, device=device)
        gradient = torch.zeros(entries, device=device)
        hyper = Hyperparameters(LEARNING_RATE, weight_decay=0.01, update=1)

        def run() -> None:
            with torch.no_grad():
                for _ in range(CALLS):
                    rule(optimizer, working, state, gradient, hyper, True)

        return lambda: run

    return _case(f"update of a piece, {name}", make)


def step_case(model: str, blocks: int, kernels: Kernels, recorded: bool = False) -> Case:
    """Returns the case of a step, with the update of the step before it. `recorded`: blocks are repeated from
    recordings, which the simulator's clock does not know."""
    _, width, heads = GPT2_SHAPES[model]
    config = GPT2Config(n_layer=blocks, n_embd=width, n_head=heads)
    layout = Layout(micro_batch=1, group=SEQUENCES, states_on_gpu=blocks + 2)
    case = StepCase(SEQ, SEQUENCES, layout, torch.bfloat16, get_optimizer(OPTIMIZER))

    def make(device: torch.device) -> Callable[[], Run]:
        decoder = make_decoder(config, "bf16", "16bit", kernels)
        step = random_step(decoder, case, device)
        if not recorded:
            step.operations.recordings = None
        ids = torch.zeros(SEQUENCES, SEQ, dtype=torch.int64)
        batch, number = Batch(ids, ids), numbers()
        step(batch, next(number), LEARNING_RATE)  # the first step has no update to apply
        return lambda: lambda: step(batch, next(number), LEARNING_RATE)

    def count(target: Target) -> float:
        return record_step(make_decoder(config, "bf16", "16bit", kernels), case, target).seconds

    name = f"step, {model}, {blocks} blocks" + (", fused" if kernels else "") + (", recorded" if recorded else "")
    return Case(name, 1, make, count)
