"""Registers fused GPU operators as `torch.ops.lowmem`.

    adamw, sgd                        optimizer updates                                 triton_kernels.py
    join, split                       fp32 weights from and into two halves of 16 bits  triton_kernels.py
    cross_entropy                     a row's loss; its gradient overwrites the logits  triton_kernels.py
    normalize, drop, gated, rotate    for norms.py, residual_sums.py, activations.py    layer_kernels.py
                                      and rotary.py
    add_product, add_rows             gradients added to their fp32 accumulators        cuBLAS, PyTorch

The planner simulates a training step. There, a call of any of these operators counts as one PyTorch operation, and only
add_product may allocate temporary memory.
"""

import torch
from torch import Tensor

_numbers = "float gradient_scale, float decay_factor"
_adamw_numbers = f"{_numbers}, float one_minus_beta1, float beta2, float one_minus_beta2, float root, float epsilon"
_SCHEMAS = {
    "adamw": f"(Tensor(a!) working, Tensor(b!)? low, Tensor(c!) m, Tensor(d!) v, Tensor gradient, {_adamw_numbers}, "
    "float step_size) -> ()",
    "sgd": f"(Tensor(a!) working, Tensor(b!)? low, Tensor gradient, {_numbers}, float learning_rate) -> ()",
    "join": "(Tensor working, Tensor low, Tensor(a!) master) -> ()",
    "split": "(Tensor(a!) working, Tensor(b!) low, Tensor master) -> ()",
    "cross_entropy": "(Tensor(a!) logits, Tensor? bias, Tensor labels, Tensor(b!) losses, float? scale, "
    "float outer=1.0, float? inner=None) -> ()",
    "normalize": "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) y, Tensor(b!)? statistics, float epsilon, "
    "float offset, bool centered, Tensor? branch=None, Tensor(c!)? total=None, Tensor? seeds=None, int number=0, "
    "float p=0.0) -> ()",
    "normalize_backward": "(Tensor gradient, Tensor x, Tensor weight, Tensor statistics, Tensor(a!) x_gradient, "
    "Tensor(b!) partial_sums, float offset, Tensor? other_gradient=None, Tensor(c!)? branch_gradient=None, "
    "Tensor? seeds=None, int number=0, float p=0.0) -> ()",
    "drop": "(Tensor x, Tensor? added, Tensor(a!) y, Tensor seeds, int number, float p) -> ()",
    "gated": "(Tensor gate, Tensor? up, float linear, float cubic, bool erf) -> Tensor",
    "gated_backward": "(Tensor(a!) gradient, Tensor gate, Tensor? up, Tensor(b!) y, Tensor(c!)? of_up, "
    "Tensor(d!)? partial_sums, float linear, float cubic, bool erf) -> ()",
    "rotate": "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor(a!) new_q, Tensor(b!) new_k, bool backward) -> ()",
    "add_product": "(Tensor(a!) accumulator, Tensor left, Tensor right) -> ()",
    "add_rows": "(Tensor(a!) accumulator, Tensor ids, Tensor rows) -> ()",
}


def add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the matmul `left` [M, K] @ `right` [K, N] to `accumulator` [M, N] fp32. Both factors have one 16-bit dtype;
    their product is not rounded to 16 bit."""
    if accumulator.is_cuda:
        torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.addmm_(left.float(), right.float())


def add_rows(accumulator: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds rows[i] to accumulator[ids[i]] for each i, all in fp32. `rows` is [N, D] or [N], `accumulator` [V, D] or
    [V]. If `ids` [N] has an id several times, at most one of the rows for this id may have numbers other than 0."""
    # With one such row per id, no order of additions changes a bit. So PyTorch need not sort the ids.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        accumulator.index_add_(0, ids, rows)
    finally:
        torch.set_deterministic_debug_mode(before)


def _kernel(name: str):
    def launch(*arguments) -> Tensor | None:
        from lowmem.core.kernels import layer_kernels, triton_kernels  # need Triton

        return getattr(layer_kernels if hasattr(layer_kernels, name) else triton_kernels, name)(*arguments)

    return launch


_library = torch.library.Library("lowmem", "DEF")
for name, schema in _SCHEMAS.items():
    _library.define(name + schema)
    _library.impl(name, (lambda x, *_: torch.empty_like(x)) if schema.endswith("Tensor") else (lambda *_: None), "Meta")
    run = {"add_product": add_product, "add_rows": add_rows}.get(name) or _kernel(name)
    _library.impl(name, run, "CUDA")
    # Triton's interpreter runs the kernels there, for tests. Training on the CPU uses `add_rows`, too.
    _library.impl(name, run, "CPU")
