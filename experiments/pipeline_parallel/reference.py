"""Trains as a pipeline has to, by one process and plain autograd: without stages, schedule and messages."""

import math

import torch
from torch import Tensor
from torch.func import functional_call

from experiments.pipeline_parallel.stage import Layers
from experiments.pipeline_parallel.worker import Job, clip_scale, squares_of

CPU = torch.device("cpu")
Outcome = tuple[list[float], dict[str, Tensor]]  # losses, weights by their names in the whole model


def trained(job: Job, device: torch.device = CPU) -> Outcome:
    return (asynchronous if job.asynchronous else synchronous)(job, device)


def synchronous(job: Job, device: torch.device = CPU) -> Outcome:
    task = job.make_task()
    layers = Layers(task.layers, 0, job.seed).to(device)
    parameters = list(layers.parameters())
    optimizer = job.optimizer_of(parameters)
    losses = []
    for step in range(job.steps):
        batch = job.micro_batches_of(task, step, device)
        found = []
        for m in range(len(batch.rows)):
            loss = batch.loss_of(m, layers(batch.input_of(m), step, m))
            loss.backward()
            found.append(loss.item())
        gradients = {name: parameter.grad for name, parameter in layers.named_parameters()}
        if task.tied:
            first, last = f"layers.0.{task.tied[0]}", f"layers.{len(task.layers) - 1}.{task.tied[1]}"
            # Joined once, as two stages join their own sums.
            total = gradients[first] + gradients[last]
            gradients[first].copy_(total)
            gradients[last].copy_(total)
            del gradients[last]
        if job.clip_norm is not None:
            scale = clip_scale(squares_of(list(gradients.values()), list(gradients)).values(), job.clip_norm)
            for parameter in parameters:
                parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(math.fsum(found))
    return losses, _weights(layers)


def asynchronous(job: Job, device: torch.device = CPU) -> Outcome:
    """Trains a job of one of PipeDream's schedules, as a recurrence."""
    task = job.make_task()
    layers = Layers(task.layers, 0, job.seed).to(device)
    names = [name for name, _ in layers.named_parameters()]
    parameters = list(layers.parameters())
    stage_of = {}
    first = 0
    for stage, size in enumerate(job.sizes):
        stage_of |= {f"layers.{place}": stage for place in range(first, first + size)}
        first += size
    # Micro-batch i meets in stage s of p the weights of max(0, i - (p - 1 - s)) updates, with vertical sync those of
    # max(0, i - (p - 1)) in all stages, forward and backward. Its gradient updates the newest.
    behind = [job.stages - 1 if job.schedule == "pipedream-vs" else job.stages - 1 - s for s in range(job.stages)]
    optimizer = job.optimizer_of(parameters)
    history = [_copies(parameters)]  # after each update
    batch = job.micro_batches_of(task, 0, device)
    losses = []
    for i in range(len(batch.rows)):
        used = [
            history[max(0, i - behind[stage_of[".".join(name.split(".")[:2])]]) - (i + 1)][place]
            for place, name in enumerate(names)
        ]
        output = functional_call(layers, dict(zip(names, used, strict=True)), (batch.input_of(i), 0, i))
        loss = batch.loss_of(i, output)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, used, allow_unused=True), strict=True):
            parameter.grad = gradient
        optimizer.step()
        history = [*history[-job.stages :], _copies(parameters)]
        losses.append(loss.item())
    return losses, _weights(layers)


def _copies(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone().requires_grad_() for parameter in parameters]


def _weights(layers: Layers) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in layers.state_dict().items()}
