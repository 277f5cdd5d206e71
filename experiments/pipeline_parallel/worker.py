"""Runs one process of a pipeline: its stages, its part of every step, and its report."""

import copy
import gc
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.harness import group
from experiments.harness.group import peer_errors
from experiments.pipeline_parallel.runtime import MicroBatches, ProcessTransfers, Rank
from experiments.pipeline_parallel.schedules import ASYNCHRONOUS, KINDS, Action
from experiments.pipeline_parallel.stage import Layers, Stage
from experiments.pipeline_parallel.tasks import Task, make_task
from lowmem.limits import ram_now_bytes, ram_peak_bytes, reset_ram_peak


@dataclass(frozen=True)
class Job:
    """A training. `sizes`: layers of each stage; `padded_to`: seconds of each kind of action."""

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    steps: int
    batch: int
    task: str
    norm: str
    seed: int
    learning_rate: float
    clip_norm: float | None
    recompute: bool
    sizes: tuple[int, ...]
    padded_to: dict[str, float] | None = None
    keep_weights: bool = False
    data: str | None = None

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @property
    def rows(self) -> list[int]:
        """Returns the rows of each micro-batch; the first may have one more."""
        return [len(part) for part in np.array_split(np.arange(self.batch), self.micro_batches)]

    def make_task(self) -> Task:
        # Stages that are updated one by one have no common gradient for tied embeddings.
        return make_task(self.task, self.seed, self.norm, tied=not self.asynchronous, data=self.data)

    def optimizer_of(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.01)

    def micro_batches_of(self, task: Task, step: int, device: torch.device) -> MicroBatches:
        """Returns the micro-batches of one step; of an asynchronous schedule those of all steps."""
        steps = range(self.steps) if self.asynchronous else range(step, step + 1)
        chosen = torch.cat([task.chosen(number, self.batch, self.seed) for number in steps])
        rows = self.rows * len(steps)
        first = np.cumsum([0, *rows])

        def input_of(m: int) -> Tensor:
            return task.inputs[chosen[first[m] : first[m + 1]]].to(device)

        def loss_of(m: int, output: Tensor) -> Tensor:
            target = task.targets[chosen[first[m] : first[m + 1]]].to(device)
            return task.loss_of(output, target) / ((rows[m] if self.asynchronous else self.batch) * task.predictions)

        return MicroBatches(input_of, loss_of, rows)


class Actions:
    """A rank's list in 16 bytes an action: `array` int32 [n, 4] of kind, stage, micro-batch, version."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @classmethod
    def of(cls, actions: list[Action]) -> "Actions":
        return cls(np.array([[KINDS.index(action.kind), *action[1:]] for action in actions], np.int32))

    def __iter__(self):
        for kind, stage, micro_batch, version in self.array:
            yield Action(KINDS[kind], int(stage), int(micro_batch), int(version))


def work(given: tuple[Job, list[Actions]], rank: int, device: torch.device) -> dict:
    """Trains this rank's stages. `given`: the job, and the actions of each rank. The process group has to exist."""
    job, actions = given[0], given[1][rank]
    task = job.make_task()
    stages = stages_of(job, task, rank, device)
    last_rank = (job.stages - 1) % job.ranks
    tied_group = group.new(sorted({0, last_rank})) if task.tied else None
    transfers = ProcessTransfers(rank, job.ranks, shapes_of(job, task, stages), device)

    def before_updates() -> None:
        if task.tied:
            add_tied(job, task, stages, tied_group)
        if job.clip_norm is not None:
            clip(job, task, stages)

    runtime = Rank(stages, job.stages, transfers, before_updates, job.padded_to)
    with peer_errors():
        dist.barrier()
    gc.collect()
    reset_ram_peak()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else ram_now_bytes()
    losses: list[float] = []
    for step in range(1 if job.asynchronous else job.steps):
        done = runtime.run(actions, job.micro_batches_of(task, step, device), step)
        losses += of_steps(job, done.losses)
    return {
        "losses": losses,
        "times": done.times,
        "bytes_before": before,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else ram_peak_bytes(),
        "weight_versions": max(stage.most_versions for stage in stages.values()),
        "weights": {number: weights_of(stage) for number, stage in stages.items()} if job.keep_weights else {},
    }


def of_steps(job: Job, losses: dict[int, float]) -> list[float]:
    """Returns a step's loss; of an asynchronous schedule each micro-batch's; [] on a rank without the last stage."""
    found = [losses[m] for m in sorted(losses)]
    return found if job.asynchronous or not found else [math.fsum(found)]


def stages_of(job: Job, task: Task, rank: int, device: torch.device) -> dict[int, Stage]:
    found, first = {}, 0
    for number, size in enumerate(job.sizes):
        if number % job.ranks == rank:
            layers = Layers(task.layers[first : first + size], first, job.seed).to(device)
            found[number] = Stage(layers, job.optimizer_of, job.recompute, stashing=job.asynchronous)
        first += size
    return found


def shapes_of(job: Job, task: Task, stages: dict[int, Stage]) -> list[tuple[torch.Size, torch.dtype]]:
    """Returns the shape and dtype of a row of each stage's output."""
    x = task.inputs[:1]
    shapes: list = []
    for number in range(job.stages - 1):
        # Each rank finds its own on tensors without data, and tells the others.
        told = [None]
        if number in stages:
            layers = copy.deepcopy(stages[number].layers).to("meta")
            given = torch.empty((2, *shapes[-1][0]), dtype=shapes[-1][1], device="meta") if shapes else x.to("meta")
            output = layers(given, 0, 0)
            told = [(output.shape[1:], output.dtype)]
        if job.ranks > 1:
            with peer_errors():
                dist.broadcast_object_list(told, src=number % job.ranks)
        shapes.append(told[0])
    return shapes


def add_tied(job: Job, task: Task, stages: dict[int, Stage], both: dist.ProcessGroup) -> None:
    """Sums the gradients of the tied embedding's two ends. `both`: the ranks that have them."""
    first, last = task.tied
    ends = [(0, f"layers.0.{first}"), (job.stages - 1, f"layers.{job.sizes[-1] - 1}.{last}")]
    here = [(stages[number], stages[number].names.index(name)) for number, name in ends if number in stages]
    if len(here) == 2:
        (one, place), (other, other_place) = here
        total = one.gradients[place] + other.gradients[other_place]
        one.gradients[place], other.gradients[other_place] = total, total.clone()
    elif here:
        ((stage, place),) = here
        with peer_errors():
            dist.all_reduce(stage.gradients[place], group=both)


def clip(job: Job, task: Task, stages: dict[int, Stage]) -> None:
    """Clips all gradients by their norm over all stages."""
    squares = {number: squares_of(stage.gradients, stage.names) for number, stage in stages.items()}
    gathered: list = [None] * job.ranks
    with peer_errors():
        dist.all_gather_object(gathered, squares)
    named = {(number, name): square for one in gathered for number, of in one.items() for name, square in of.items()}
    if task.tied:
        del named[job.stages - 1, f"layers.{job.sizes[-1] - 1}.{task.tied[1]}"]
    # The squares are added up exactly (math.fsum), so the places where they were computed make no difference.
    scale = clip_scale(named.values(), job.clip_norm)
    for stage in stages.values():
        for gradient in stage.gradients:
            if gradient is not None:
                gradient.mul_(scale)


def squares_of(gradients: list[Tensor | None], names: list[str]) -> dict[str, float]:
    pairs = zip(names, gradients, strict=True)
    return {name: float(gradient.double().square().sum()) for name, gradient in pairs if gradient is not None}


def clip_scale(squares, clip_norm: float) -> float:
    return min(1.0, clip_norm / (math.sqrt(math.fsum(squares)) + 1e-6))


def weights_of(stage: Stage) -> dict[str, Tensor]:
    """Returns parameters and running statistics by their names in the stage."""
    state = dict(zip(stage.names, stage.parameters, strict=True)) | dict(stage.layers.named_buffers())
    return {name: tensor.detach().cpu() for name, tensor in state.items()}
