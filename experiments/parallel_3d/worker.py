"""Runs one process of a mesh, which has a part of each layer of one stage, and the samples of one replica."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from experiments.parallel_3d.mesh import Axes, Mesh, Place
from experiments.parallel_3d.pieces import Piece, piece_of
from experiments.pipeline_parallel.checker import Checked, check
from experiments.pipeline_parallel.runtime import MicroBatches, ProcessTransfers, Rank
from experiments.pipeline_parallel.schedules import schedule
from experiments.pipeline_parallel.stage import Stage
from experiments.pipeline_parallel.tasks import cut
from experiments.pipeline_parallel.worker import clip_scale, squares_of
from experiments.tensor_parallel import worker as tensor_parallel
from experiments.tensor_parallel.collectives import BACKWARD
from experiments.tensor_parallel.layers import vocabulary_cross_entropy
from experiments.tensor_parallel.sharding import Cut, padded
from experiments.tensor_parallel.worker import DTYPES

# Adam divides by |gradient| + epsilon. Where a gradient cancels out, epsilon decides how far rounding moves a weight.
# With the usual 1e-8 and a learning rate of 1e-3, one process with micro-batches is 1e-12 from itself without.
EPSILON = 1e-6
AXES = ("tensor", "pipeline", "data", "clipping")


@dataclass(frozen=True)
class Job(tensor_parallel.Job):
    """A training on a mesh; `ranks` are those of tensor parallelism. `micro_batches`: of each replica."""

    pp: int
    dp: int
    schedule: str
    micro_batches: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.pp, self.dp, self.ranks)

    @property
    def layers(self) -> int:
        """Returns the number of layers to divide: blocks, the embedding and the head."""
        return self.kind.config.num_hidden_layers + 2

    @property
    def sizes(self) -> list[int]:
        return cut([1.0] * self.layers, self.pp)

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, eps=EPSILON, weight_decay=0.01)

    def checked(self) -> Checked:
        return check(schedule(self.schedule, self.pp, self.micro_batches), self.pp, self.micro_batches)

    def samples_of(self, replica: int) -> list[range]:
        """Returns the places in the batch of each micro-batch's samples; the first may have one more."""
        own = np.array_split(np.arange(self.batch), self.dp)[replica]
        return [range(part[0], part[-1] + 1) for part in np.array_split(own, self.micro_batches)]


@dataclass(frozen=True)
class Told:
    """A process's results. `losses`: its shares, if it has the last stage. `sent`: bytes in the first step, by axis.
    `gradients_bytes`: before the update. `weights`: its parts at the end, by name in the whole model; `cuts`: of cut
    ones."""

    place: Place
    losses: list[float]
    sent: dict[str, int]
    parameters_bytes: int
    gradients_bytes: int
    moments_bytes: int
    weights: dict[str, Tensor]
    cuts: dict[str, Cut]


class Process:
    def __init__(self, job: Job, process: int, device: torch.device):
        self.job, self.device = job, device
        self.place = job.mesh.place(process)
        self.axes = Axes(job.mesh, process)
        self.samples = job.samples_of(self.place.replica)
        sharded = job.kind.shard(job.sharder(self.axes.tensor, device))
        first_samples = [samples[0] for samples in self.samples]
        self.piece: Piece = piece_of(sharded, job.sizes, self.place.stage, job.seed, first_samples)
        self.stage = Stage(self.piece.layers, job.optimizer_of)
        self.gradients_bytes = 0
        shape = (torch.Size((job.seq, job.kind.config.hidden_size)), DTYPES[job.dtype])
        self.transfers = ProcessTransfers(self.place.stage, job.pp, [shape] * job.pp, device, job.mesh.pipelines())
        self.runtime = Rank({self.place.stage: self.stage}, job.pp, self.transfers, self.before_updates)

    def micro_batches(self, inputs: Tensor, targets: Tensor) -> MicroBatches:
        """Returns this replica's part of a batch; each loss is a share of the whole batch's mean."""
        job, ranks = self.job, self.axes.tensor
        vocabulary = job.kind.classes
        first = int(padded(vocabulary, ranks.count).indices[ranks.rank][0])

        def loss_of(m: int, logits: Tensor) -> Tensor:
            own = targets[self.samples[m]].flatten()
            mean = vocabulary_cross_entropy(logits.flatten(0, 1), own, first, vocabulary, ranks)
            return mean * (len(self.samples[m]) / job.batch)

        return MicroBatches(lambda m: inputs[self.samples[m]], loss_of, [len(samples) for samples in self.samples])

    def before_updates(self) -> None:
        self.gradients_bytes = sum(gradient.nbytes for gradient in self.stage.gradients)
        self.add_replicas()
        self.add_tied()
        if self.job.clip_norm is not None:
            self.clip()

    def add_replicas(self) -> None:
        if self.axes.data.count == 1:
            return
        gradients = self.stage.gradients
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.axes.data.all_reduce(flat, ("gradients", BACKWARD))
        parts = flat.split([gradient.numel() for gradient in gradients])
        self.stage.gradients = [part.view_as(one) for part, one in zip(parts, gradients, strict=True)]

    def add_tied(self) -> None:
        if self.piece.tied is not None:
            place = self.stage.names.index(self.piece.tied)
            total = self.stage.gradients[place].contiguous()
            self.stage.gradients[place] = self.axes.ends.all_reduce(total, ("tied", BACKWARD))

    def clip(self) -> None:
        square = torch.tensor(self.counted_square(), dtype=torch.float64, device=self.device)
        self.axes.replica.all_reduce(square, ("clipping", BACKWARD))
        scale = clip_scale([float(square)], self.job.clip_norm)
        for gradient in self.stage.gradients:
            gradient.mul_(scale)

    def counted_square(self) -> float:
        """Returns this process's summand of the squared norm of the model's gradients."""
        # Every weight counts once: a whole one in part 0, a tied embedding in stage 0.
        squares = squares_of(self.stage.gradients, self.stage.names)
        if self.piece.tied is not None and self.place.stage > 0:
            del squares[self.piece.tied]
        is_first = self.place.part == 0
        return math.fsum(
            square for name, square in squares.items() if is_first or self.piece.names[name] in self.piece.cuts
        )

    def sent(self) -> dict[str, int]:
        axes = self.axes
        of_ends = 0 if axes.ends is None else axes.ends.sent.total()
        counts = (axes.tensor.sent.total(), self.transfers.sent_bytes + of_ends)
        return dict(zip(AXES, (*counts, axes.data.sent.total(), axes.replica.sent.total()), strict=True))

    def train(self) -> Told:
        actions = self.job.checked().actions[self.place.stage]
        losses, sent = [], {}
        for step, (inputs, targets) in enumerate(self.job.batches(self.device)):
            done = self.runtime.run(actions, self.micro_batches(inputs, targets), step)
            losses += [math.fsum(done.losses.values())] if done.losses else []
            sent = sent or self.sent()
        parameters = self.stage.parameters
        moments = [tensor for state in self.stage.optimizer.state.values() for tensor in state.values() if tensor.dim()]
        names = self.piece.names
        weights = {names[name]: p.detach().cpu() for name, p in zip(self.stage.names, parameters, strict=True)}
        return Told(
            self.place, losses, sent, sum(p.nbytes for p in parameters), self.gradients_bytes,
            sum(moment.nbytes for moment in moments), weights,
            {name: self.piece.cuts[name] for name in weights if name in self.piece.cuts},
        )  # fmt: skip


def work(job: Job, process: int, device: torch.device) -> Told:
    """Trains this process's part. With several processes, the process group has to exist."""
    return Process(job, process, device).train()
