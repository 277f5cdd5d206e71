"""Computes the bytes that a process of a mesh holds and sends, from a config and the mesh alone.

tensor_parallel/theory.py has the sources. An all-reduce of n bytes among N sends 2 (N - 1) / N of n from each.
"""

from dataclasses import dataclass

from experiments.parallel_3d.mesh import Place
from experiments.parallel_3d.worker import AXES, Job
from experiments.tensor_parallel.theory import cut_of_a_block, tables, whole_at_ends, whole_of_a_block
from experiments.tensor_parallel.worker import DTYPES

LOSS_NUMBERS = 3  # of a token: the largest logit, the sum of exponentials, the target's logit


@dataclass(frozen=True)
class Expected:
    """Bytes that a process holds and, by axis, sends in a step."""

    parameters: float
    gradients: float
    moments: float
    sent: dict[str, float]


def expected(job: Job, place: Place) -> Expected:
    """Returns a process's bytes, if parts divide all that is cut, and replicas the batch."""
    config, number = job.kind.config, DTYPES[job.dtype].itemsize
    is_first, is_last = place.stage == 0, place.stage == job.pp - 1
    blocks = job.sizes[place.stage] - is_first - is_last
    table = -(-config.vocab_size // job.ranks) * config.hidden_size
    is_tied = tables(config) == 1
    before, after = whole_at_ends(config)
    # A tied embedding is in the first and in the last stage, and once if they are the same.
    held = number * (
        blocks * (cut_of_a_block(config) / job.ranks + whole_of_a_block(config))
        + is_first * (before + table)
        + is_last * (after + table * (not (is_tied and job.pp == 1)))
    )
    tokens = job.batch / job.dp * job.seq
    hidden = tokens * config.hidden_size * number
    # zb-h1 passes the head's input twice, once for each part of a backward.
    passes = 2 if job.schedule == "zb-h1" else 1
    # Four all-reduces of hidden states for each block, one for the embedding, one for the head's input.
    tensor = (4 * blocks + is_first + is_last * passes) * hidden + is_last * LOSS_NUMBERS * tokens * number
    pipeline = hidden * ((not is_last) + (not is_first))
    if is_tied and job.pp > 1 and (is_first or is_last):
        pipeline += _ring(2, number * table)
    clipping = 0.0 if job.clip_norm is None else _ring(job.pp * job.ranks, 8)
    sent = (_ring(job.ranks, tensor), pipeline, _ring(job.dp, held), clipping)
    return Expected(held, held, 2 * held, dict(zip(AXES, sent, strict=True)))


def _ring(count: int, size: float) -> float:
    """Returns the bytes that an all-reduce of `size` bytes sends from each of `count`."""
    return 2 * (count - 1) / count * size
