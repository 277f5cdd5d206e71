"""What is timed: single operators, a matrix product forward and backward, the update of a part, whole steps.

A case is made for a device, "cuda" to be timed and "meta" to be counted by the simulator's clock, so that both see the
same lines. Sizes do not matter for the host, so operators get small tensors; steps have the shapes of GPT-2, with fewer
blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem.adam import Hyperparameters, UpdateRule, get_optimizer, state_layout
from lowmem.layers import accumulated, cast_explicitly

CALLS = 100  # of an operator, one after the other
SIDE = 64  # of the tensors of single operators
OPTIMIZER = "adamw"
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """`make(device)` gives a function that prepares one timing and returns what is timed, which makes `calls` of what
    the case is named after."""

    name: str
    calls: int
    make: Callable[[torch.device], Callable[[], Run]]


def operator_cases() -> list[Case]:
    return [
        Case("add, no gradient", CALLS, _repeated(lambda x: torch.add(x, x))),
        Case("view, no gradient", CALLS, _repeated(lambda x: x.view(-1))),
        Case("matrix product, no gradient", CALLS, _repeated(lambda x: torch.mm(x, x))),
        Case("add, recorded by autograd", CALLS, _repeated(lambda x: torch.add(x, x), gradient=True)),
        Case("tanh, its backward", CALLS, _backward_of_tanh),
        Case("attention, no gradient", CALLS, _attention),
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
    """A chain of operators with one operation each in backward; the gradient that it begins with is given."""
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


def product_case(fused: bool) -> Case:
    """A linear layer as training has it, forward and backward; `fused` adds the gradient to its accumulator."""

    def make(device: torch.device) -> Callable[[], Run]:
        layers = nn.Sequential(nn.Linear(SIDE, SIDE, device=device, dtype=torch.bfloat16))
        cast_explicitly(layers, torch.bfloat16, fused)
        weight = layers[0].weight
        sum_of_gradients = torch.zeros(SIDE, SIDE, device=device)
        if fused:
            accumulated(weight, lambda: sum_of_gradients)
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

    return Case("linear layer, forward and backward" + (", fused" if fused else ""), CALLS, make)


def update_case(rule: UpdateRule, name: str) -> Case:
    """The exact update of one piece, whose state is on the device."""

    def make(device: torch.device) -> Callable[[], Run]:
        optimizer, entries = get_optimizer(OPTIMIZER), SIDE * SIDE
        layout = state_layout(optimizer, entries, torch.bfloat16)
        state = {name: torch.zeros(size, dtype=dtype, device=device) for name, (size, dtype) in layout.items()}
        working = torch.zeros(entries, dtype=torch.bfloat16, device=device)
        gradient = torch.zeros(entries, device=device)
        hyper = Hyperparameters(learning_rate=1e-4, weight_decay=0.01, update=1)

        def run() -> None:
            with torch.no_grad():
                for _ in range(CALLS):
                    rule(optimizer, working, state, gradient, hyper, True)

        return lambda: run

    return Case(f"update of a piece, {name}", CALLS, make)
