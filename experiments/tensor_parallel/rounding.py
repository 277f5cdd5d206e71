"""Compares a training with one process's, and judges the differences by those that rounding alone makes in as many
steps."""

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
    """Returns fields of report.json: differences from the ordinary model in one process. `in_roundings` has them as
    multiples of rounding's own."""
    device = group.device_of(0, job.ranks)
    with group.threads_of_a_process():
        references = {dtype: worker.reference(replace(job, dtype=dtype), device) for dtype in DTYPES}
        one, in_reverse = references[job.dtype], worker.reference(job, device, in_reverse=True)
    # A rounding in fp64 is 2**-29 of one in fp32, and so is the distance. If rounding grows with every step, the
    # distance in fp32 ends near the size of the weights, and only that of reverse order goes on growing in fp64.
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
    factor of the distance between two results."""
    epsilon = torch.finfo(dtype).eps
    least = LOSS_EPSILONS * epsilon * abs(one.losses[0])
    steps = zip(*([scale * far for far in _distances(a.losses, b.losses)] for scale, a, b in measures), strict=True)
    # A loss counts beside the largest distance up to its step.
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
    """Returns names of values that differ by more than rounding; none if nothing was compared."""
    found = report.get("in_roundings") or {}
    # In fp32 some ReLU of millions is zero up to rounding, and its gradient may be missing.
    counted = [name for name in found if name != "gradients" or report["dtype"] == "fp64"]
    return [name for name in counted if found[name] is None or not found[name] <= MOST]


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest of all tensors' norms of the difference, relative to the norm."""
    if found.keys() != expected.keys():
        raise ValueError(f"other tensors: {found.keys() ^ expected.keys()}")
    pairs = [(found[name], tensor.cpu()) for name, tensor in expected.items() if tensor.is_floating_point()]
    # Vectors count together: a bias may begin at zero and have a gradient of pure rounding (that of keys, which softmax
    # does not see).
    vectors = [(one, other) for one, other in pairs if one.dim() < 2]
    pairs = [pair for pair in pairs if pair[0].dim() > 1]
    if vectors:
        pairs.append(tuple(torch.cat([tensor.flatten() for tensor in side]) for side in zip(*vectors, strict=True)))
    return worst(0.0 if torch.equal(one, other) else (one - other).norm() / other.norm() for one, other in pairs)


def _distances(losses: Iterable[float], others: Iterable[float]) -> list[float]:
    return [abs(one - other) for one, other in zip(losses, others, strict=True)]
