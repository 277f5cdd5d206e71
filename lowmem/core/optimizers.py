"""Defines AdamW (arXiv:1711.05101), AdamW with 8-bit moments, and SGD. Each updates weights in place."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from lowmem.core.precision import join, split_into
from lowmem.errors import InputError

State = dict[str, Tensor]
UpdateFunction = Callable[["Optimizer", Tensor, State, Tensor, "Hyperparameters", bool], None]  # arguments of `update`
BLOCK = 256  # parameters that share a scale in 8-bit states; every updated slice starts at a multiple of it
CPU_SLICE = 2**18  # parameters at a time on the CPU: temporaries stay in the cache, ten times faster than 2**22


@dataclass(frozen=True)
class Hyperparameters:
    learning_rate: float = 0.0
    weight_decay: float = 0.0  # decoupled; only matrices decay
    update: int = 0  # number of the update, from 1
    gradient_scale: float = 1.0  # multiplies every gradient first
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


def checked_rate(rate) -> float:
    """Returns `rate` as a float. Raises InputError unless `rate` is finite and at least 0."""
    try:
        value = math.nan if isinstance(rate, str | bool) else float(rate)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"learning_rate is {rate!r}: it must be a number from 0 on")
    return value


@dataclass(frozen=True)
class Optimizer:
    """Describes an optimizer: its state's tensors and its update rule.

    `rule(master, state, gradient, hyperparameters, weight_decay, scratch)` updates fp32 weights `master` and `state` in
    place. It first multiplies `gradient` by `hyperparameters.gradient_scale`. `scratch` is a tensor like `master` that
    the rule may overwrite. If memory runs out, nothing is changed.
    """

    name: str
    entries: dict[str, tuple[int, torch.dtype]]  # state without `low`: {name: (parameters per entry, dtype)}
    rule: Callable[[Tensor, State, Tensor, Hyperparameters, float, Tensor | None], None]
    any_stream: bool = False  # its kernel (fused.py) allocates nothing, and runs on the current CUDA stream

    @property
    def state_bits(self) -> int:
        """Returns the bits per parameter of each of Adam's moments; 0 for an optimizer without moments."""
        return max((8 * kind.itemsize for per, kind in self.entries.values() if per == 1), default=0)


def state_layout(optimizer: Optimizer, elements: int, dtype: torch.dtype) -> dict[str, tuple[int, torch.dtype]]:
    """Returns {name: (number of entries, dtype)} of the state tensors for `elements` parameters. `dtype`: that of the
    weights that compute. If it has 16 bits, the low halves of the fp32 weights (precision.py) are a state, too."""
    layout = {name: (math.ceil(elements / per), kind) for name, (per, kind) in optimizer.entries.items()}
    return layout if dtype is torch.float32 else {"low": (elements, torch.int16)} | layout


def cut_state(optimizer: Optimizer, state: State, elements: int, at_once: int) -> list[State]:
    """Cuts the tensors of `state` into views: returns one dict {name: view} for each range of `at_once` parameters.
    `elements`: number of parameters in all. `at_once`: a multiple of BLOCK, or at least `elements`."""
    per = {name: per for name, (per, _) in optimizer.entries.items()}
    cut = {name: tensor.split(math.ceil(at_once / per.get(name, 1))) for name, tensor in state.items()}
    ranges = range(math.ceil(elements / at_once))
    return [{name: tensors[index] for name, tensors in cut.items()} for index in ranges]


def update(
    optimizer: Optimizer,
    working: Tensor,
    state: State,
    gradient: Tensor,
    hyper: Hyperparameters,
    decay: bool,
    at_once: int | None = None,
) -> None:
    """Updates weights `working` [n] and `state` in place. Overwrites `gradient` [n] fp32. `decay`: True to apply weight
    decay. `at_once`: parameters per slice, a multiple of BLOCK, or None for all. If memory runs out, the current slice
    and later ones are unchanged."""
    size, weight_decay = at_once or working.numel(), hyper.weight_decay if decay else 0.0
    cut = cut_state(optimizer, state, working.numel(), size)
    for part, of_state, of_part in zip(working.split(size), cut, gradient.split(size), strict=True):
        master = join(part, of_state.get("low"))
        scratch = torch.empty_like(master)
        optimizer.rule(master, of_state, of_part, hyper, weight_decay, scratch)
        if "low" in of_state:
            split_into(master, part, of_state["low"], scratch)


update_in_slices = partial(update, at_once=CPU_SLICE)


def adamw_numbers(hyper: Hyperparameters, weight_decay: float) -> tuple[float, ...]:
    """Returns AdamW's constants for one update: 1 - lr wd, 1 - b1, b2, 1 - b2, sqrt(1 - b2^t), eps, lr / (1 - b1^t)."""
    correction1 = 1 - hyper.beta1**hyper.update
    correction2 = 1 - hyper.beta2**hyper.update
    decay_factor, step_size = 1 - hyper.learning_rate * weight_decay, hyper.learning_rate / correction1
    return decay_factor, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2, math.sqrt(correction2), hyper.epsilon, step_size


def _adamw(
    master: Tensor, state: State, gradient: Tensor, hyper: Hyperparameters, weight_decay: float, scratch: Tensor
) -> None:  # fmt: skip
    # The order of operations is torch.optim.AdamW's. Like every rule, this allocates before it changes anything.
    decay_factor, one_minus_beta1, beta2, one_minus_beta2, root, epsilon, step_size = adamw_numbers(hyper, weight_decay)
    m, v = state["m"], state["v"]
    gradient.mul_(hyper.gradient_scale)
    master.mul_(decay_factor)
    m.lerp_(gradient, one_minus_beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=one_minus_beta2)
    denominator = torch.sqrt(v, out=scratch).div_(root).add_(epsilon)
    master.addcdiv_(m, denominator, value=-step_size)


def _adamw8bit(
    master: Tensor, state: State, gradient: Tensor, hyper: Hyperparameters, weight_decay: float, scratch: Tensor | None
) -> None:  # fmt: skip
    from bitsandbytes import functional

    signed, unsigned = _quantisation_maps(master.device)  # the first update allocates them, before any change
    gradient.mul_(hyper.gradient_scale)
    moments, scales = (state["m"], state["v"]), (state["m_scale"], state["v_scale"])
    numbers = hyper.beta1, hyper.beta2, 0.0, 0.0, hyper.epsilon, hyper.update, hyper.learning_rate
    functional.optimizer_update_8bit_blockwise(
        "adam", gradient, master, *moments, *numbers, signed, unsigned, *scales, weight_decay
    )


def _sgd(
    master: Tensor, state: State, gradient: Tensor, hyper: Hyperparameters, weight_decay: float, scratch: Tensor
) -> None:  # fmt: skip
    gradient.mul_(hyper.gradient_scale)
    master.mul_(1 - hyper.learning_rate * weight_decay).sub_(gradient, alpha=hyper.learning_rate)


@cache
def _quantisation_maps(device: torch.device) -> tuple[Tensor, Tensor]:
    from bitsandbytes import functional

    return functional.create_dynamic_map(True).to(device), functional.create_dynamic_map(False).to(device)


_BYTE, _FLOAT = torch.uint8, torch.float32
# Bytes of state per parameter. adamw: low 2 (none for fp32 weights), m 4, v 4. adamw8bit: low 2, m 1, v 1, and 8 per
# 256 parameters (bitsandbytes' blockwise quantisation, arXiv:2110.02861). sgd: low 2.
OPTIMIZERS = {
    "adamw": Optimizer("adamw", {"m": (1, _FLOAT), "v": (1, _FLOAT)}, _adamw, any_stream=True),
    "adamw8bit": Optimizer(
        "adamw8bit",
        {"m": (1, _BYTE), "v": (1, _BYTE), "m_scale": (BLOCK, _FLOAT), "v_scale": (BLOCK, _FLOAT)},
        _adamw8bit,
        any_stream=False,  # bitsandbytes launches its kernel on the default stream, which does not wait for others
    ),
    "sgd": Optimizer("sgd", {}, _sgd, any_stream=True),
}


def get_optimizer(name: str) -> Optimizer:
    """Returns the optimizer `name`. Raises InputError if the package that it needs is not installed."""
    if name == "adamw8bit":
        try:
            import bitsandbytes  # noqa: F401
        except ImportError:
            raise InputError("--optimizer adamw8bit needs the package bitsandbytes; pip install bitsandbytes") from None
    return OPTIMIZERS[name]
