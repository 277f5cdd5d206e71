"""Compares a training with one process's, and judges the differences by what rounding alone does.

The measure is one process's own, after as many steps: a fixed tolerance would not know their number, nor a loss that
goes to zero. It is the larger of two distances of the ordinary model:

- in fp32 from the same in fp64. A rounding in fp64 is 2**-29 of one in fp32, and so is this distance there;
- from the same with each batch's samples in reverse order, which only rounds other sums. If rounding grows with every
  step, the distance in fp32 ends near the size of the weights, and one in fp64 goes on growing.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from experiments.harness import group
from experiments.harness.comparison import worst
from experiments.tensor_parallel import worker
from experiments.tensor_parallel.worker import DTYPES, Job, RankResult

MOST = 10.0  # times what rounding does to one process; up to 7.2 times was seen
LOSS_EPSILONS = 4  # of the first loss: a sum in another order differs by some, even if one process's happen to agree


def compared(job: Job, ours: RankResult) -> dict:
    """Compares with one process and the ordinary model, with as many threads as each rank has. Returns fields of
    report.json; `in_roundings` has the differences as multiples of what rounding does to one process."""
    device = group.device_of(0, job.ranks)
    with group.threads_of_a_process():
        references = {dtype: worker.reference(replace(job, dtype=dtype), device) for dtype in DTYPES}
        one, in_reverse = references[job.dtype], worker.reference(job, device, in_reverse=True)
    scale = torch.finfo(DTYPES[job.dtype]).eps / torch.finfo(torch.float32).eps
    measures = [(scale, references["fp32"], references["fp64"]), (1.0, in_reverse, one)]
    pairs = list(zip(ours.losses, one.losses, strict=True))
    return {
        "losses": {"one process": one.losses},
        "max_abs_loss_difference": worst(abs(a - b) for a, b in pairs),
        "max_rel_loss_difference": worst(abs(a - b) / abs(b) for a, b in pairs),
        "max_rel_weight_difference": largest_difference(ours.weights, one.weights),
        "max_rel_gradient_difference": largest_difference(ours.gradients, one.gradients),
        "in_roundings": in_roundings(ours, one, measures, DTYPES[job.dtype]),
        "parameters_alone": one.parameters[1],
    }


def in_roundings(
    ours: RankResult, one: RankResult, measures: list[tuple[float, RankResult, RankResult]], dtype: torch.dtype
) -> dict[str, float]:
    """Returns the largest differences between `ours` and `one`, both in `dtype`, as multiples of the largest measure: a
    factor of the distance between two results. A loss counts beside the largest distance up to its step."""
    epsilon = torch.finfo(dtype).eps
    least = LOSS_EPSILONS * epsilon * abs(one.losses[0])
    steps = zip(*([scale * far for far in _distances(a.losses, b.losses)] for scale, a, b in measures), strict=True)
    grown = accumulate(map(max, steps), max)
    losses = zip(_distances(ours.losses, one.losses), grown, strict=True)

    def ratio(name: str) -> float:
        measure = worst(scale * largest_difference(getattr(a, name), getattr(b, name)) for scale, a, b in measures)
        return largest_difference(getattr(ours, name), getattr(one, name)) / max(measure, epsilon)

    return {
        "losses": worst(distance / max(drift, least) for distance, drift in losses),
        "gradients": ratio("gradients"),
        "weights": ratio("weights"),
    }


def too_large(report: dict) -> list[str]:
    """Returns what differs by more than rounding; nothing if nothing was compared. Gradients count only in fp64: in
    fp32 some ReLU of millions is zero up to rounding, and its gradient may be missing."""
    found = report.get("in_roundings") or {}
    counted = [name for name in found if name != "gradients" or report["dtype"] == "fp64"]
    return [name for name in counted if found[name] is None or not found[name] <= MOST]


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest of all tensors, as the norm of the difference relative to the norm. Vectors count together: a
    bias may begin at zero and have a gradient of pure rounding (that of keys, which softmax does not see). Then no
    value of it is right or wrong."""
    if found.keys() != expected.keys():
        raise ValueError(f"other tensors: {found.keys() ^ expected.keys()}")
    pairs = [(found[name], tensor.cpu()) for name, tensor in expected.items() if tensor.is_floating_point()]
    vectors = [(one, other) for one, other in pairs if one.dim() < 2]
    pairs = [pair for pair in pairs if pair[0].dim() > 1]
    if vectors:
        pairs.append(tuple(torch.cat([tensor.flatten() for tensor in side]) for side in zip(*vectors, strict=True)))
    return worst(0.0 if torch.equal(one, other) else (one - other).norm() / other.norm() for one, other in pairs)


def _distances(losses: Iterable[float], others: Iterable[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(losses, others, strict=True)]
