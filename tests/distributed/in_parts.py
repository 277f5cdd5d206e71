"""One process that trains as R ranks do: a sum over the micro-batches of each rank, then the sum of these sums, machine
by machine."""

import math
from functools import reduce

import torch
from cases import DEVICE, LEARNING_RATE

from lowmem.core import parameters
from lowmem.core.optimizers import BLOCK
from lowmem.core.recompute import Dropout


def train_in_parts(step, store, batches, ranks: int, sharing: int) -> tuple[list[float], list[float]]:
    """Returns the losses and the norms of all steps. `sharing`: ranks of a machine, which store a model together."""
    rows = [_one_step(step, store, batch, number, ranks, sharing) for number, batch in enumerate(batches)]
    step.flush()
    losses, norms = zip(*rows, strict=True)
    return list(losses), list(norms)


def _one_step(step, store, batch, number: int, ranks: int, sharing: int) -> tuple[float, float]:
    step.flush()
    step._decoder.model.train()
    tokens, scale = int((batch.labels != -100).sum()), step.loss_scale.scale
    cut = [each.to(DEVICE) for each in batch.micro_batches(step.layout.micro_batch, step.least_positions)]
    loss, parts = 0.0, {part: [] for part in store.parts}
    for rank in range(ranks):
        losses = _of_one_rank(step, cut, range(len(cut))[rank::ranks], number, scale / tokens)
        loss += torch.stack(losses).double().sum().item() if losses else 0.0
        for part in store.parts:
            own = torch.zeros_like(part.working, dtype=torch.float32) if part.gradient is None else part.gradient
            parts[part].append(own)
            part.gradient = None
    sums = {part: _in_order(each, sharing) for part, each in parts.items()}
    norm = _norm(sums, sharing) / scale
    if math.isfinite(norm):
        for part, total in sums.items():
            part.gradient = total
        clip = 1.0 if step._clip_norm is None else min(1.0, step._clip_norm / (norm + 1e-6))
        step._updates.begin(clip / scale, LEARNING_RATE, downwards=False)
    step.loss_scale.update(math.isfinite(norm))
    return loss / tokens, norm


def _in_order(parts: list[torch.Tensor], sharing: int) -> torch.Tensor:
    """The sum of the sums of each `sharing` parts."""
    machines = [reduce(torch.add, parts[first : first + sharing]) for first in range(0, len(parts), sharing)]
    return reduce(torch.add, machines)


def _of_one_rank(step, cut, own: range, number: int, scale: float) -> list[torch.Tensor]:
    """Adds the gradients of these micro-batches to the accumulators. Returns their losses."""
    run, losses, embedded = step.operations, [], []
    for index in own:
        dropout = Dropout(step._seed, number, index)
        hidden, extras = run.embed(cut[index], dropout)
        saved = []
        for segment in step.segments:
            hidden, kept = run.segment_forward(segment, hidden, extras, dropout)
            saved.append(kept)
        loss, gradient = run.head(hidden, cut[index].labels, dropout, scale)
        losses.append(loss)
        for segment in step.segments[::-1]:
            gradient = run.segment_backward(segment, saved.pop(), extras, dropout, gradient)
        embedded.append((cut[index], dropout, gradient))
    for one in embedded:  # a tied embedding gets the gradients of all heads first
        run.embed_backward(*one)
    return losses


def _norm(sums: dict, ranks: int) -> float:
    """The norm whose squares are added in fp64: first those of a rank's pieces, then those of the ranks."""
    squares = []
    for rank in range(ranks):
        norms = []
        for part, total in sums.items():
            share = math.ceil(total.numel() / (ranks * BLOCK)) * BLOCK
            own = total[rank * share : (rank + 1) * share] if part.is_matrices else total
            if part.is_matrices:
                own = torch.nn.functional.pad(own, (0, share - own.numel()))
            if part.is_matrices or rank == 0:
                norms += [torch.linalg.vector_norm(piece.clone()) for piece in own.split(parameters.PIECE)]
        norm = torch.linalg.vector_norm(torch.stack(norms).double()).item()
        squares.append(norm * norm)
    return math.sqrt(sum(squares))
