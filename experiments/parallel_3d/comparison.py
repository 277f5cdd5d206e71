"""Puts the processes' parts together, and compares the training with one process's.

In fp64 a loss or weight may be LARGEST off, relative to the largest value of its tensor. In fp32 the distance to one
process in fp64 may be FACTOR times that of one process in fp32.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from experiments.harness import group
from experiments.harness.comparison import worst
from experiments.parallel_3d.worker import Job, Told
from experiments.tensor_parallel import worker as tensor_parallel
from experiments.tensor_parallel.sharding import Cut
from experiments.tensor_parallel.worker import DTYPES, RankResult

LARGEST = 1e-12
FACTOR = 4.0
LOSS_EPSILONS = 4  # of the first loss: a sum in another order differs by some, even if one process's happen to agree


def losses_of(told: list[Told]) -> list[float]:
    """Returns the loss of each step: the sum of the replicas' shares."""
    shares = [one.losses for one in told if one.losses and one.place.part == 0]
    return [math.fsum(of_step) for of_step in zip(*shares, strict=True)]


def whole_weights(told: list[Told]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the whole weights by name, and the names of those whose copies are not bit for bit equal."""
    parts: dict[tuple[str, int], Tensor] = {}
    cuts: dict[str, Cut] = {}
    differ: dict[str, None] = {}
    for one in told:
        cuts |= one.cuts
        for name, part in one.weights.items():
            known = parts.setdefault((name, one.place.part if name in one.cuts else 0), part)
            if not torch.equal(known, part) and not (known.isnan() & part.isnan()).any():
                differ[name] = None
    found: dict[str, Tensor] = {}
    for (name, rank), part in parts.items():
        if name not in cuts:
            found[name] = part
            continue
        if name not in found:
            shape = list(part.shape)
            shape[cuts[name].dim] = cuts[name].size
            found[name] = part.new_full(shape, torch.nan)
        cuts[name].put(found[name], part, rank)
    return found, list(differ)


def one_process(job: Job, dtype: str) -> RankResult:
    """Trains in this process: the ordinary model with PyTorch's loss."""
    alone = replace(job, ranks=1, dtype=dtype, keep=True)
    device = group.device_of(0, job.mesh.processes)
    # PyTorch's dropout draws other numbers: then it is tensor_parallel's with one rank and the whole batch at once.
    with group.threads_of_a_process():
        return tensor_parallel.work(alone, 0, device) if job.dropout else tensor_parallel.reference(alone, device)


def compared(job: Job, losses: list[float], weights: dict[str, Tensor]) -> dict:
    """Compares with one process in fp64. Returns fields of report.json."""
    exact = one_process(job, "fp64")
    found = {"loss": loss_distance(losses, exact.losses), "weight": weight_distance(weights, exact.weights)}
    if job.dtype == "fp64":
        allowed = dict.fromkeys(found, LARGEST)
    else:
        rounded = one_process(job, job.dtype)
        least = {"loss": LOSS_EPSILONS * torch.finfo(DTYPES[job.dtype]).eps, "weight": 0.0}
        apart = {
            "loss": loss_distance(rounded.losses, exact.losses),
            "weight": weight_distance(rounded.weights, exact.weights),
        }
        allowed = {name: max(FACTOR * apart[name], least[name]) for name in found}
    return {
        "losses": {"one process": exact.losses},
        "loss_distance": found["loss"],
        "weight_distance": found["weight"],
        "allowed": allowed,
    }


def loss_distance(losses: Iterable[float], others: Iterable[float]) -> float:
    return worst(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def weight_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of its tensor; NaN if a weight is not a number."""
    if found.keys() != expected.keys():
        raise ValueError(f"other tensors: {found.keys() ^ expected.keys()}")
    pairs = [(found[name].double(), tensor.double()) for name, tensor in expected.items()]
    return worst((one - other).abs().max() / other.abs().max() for one, other in pairs)


def too_far(report: dict) -> list[str]:
    """Returns which distances are larger than allowed; none if nothing was compared."""
    allowed = report["allowed"] or {}
    return [name for name, most in allowed.items() if not report[f"{name}_distance"] <= most]
