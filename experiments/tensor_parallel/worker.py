"""One process of tensor parallelism, and the same training by a single process."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.harness import samples
from experiments.tensor_parallel.collectives import Ranks
from experiments.tensor_parallel.models import Kind, kind_of
from experiments.tensor_parallel.sharding import CPU, Sharder
from lowmem.limits import ram_now_bytes, ram_peak_bytes, reset_ram_peak

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Job:
    """A training. `keep`: gradients of the first step and weights at the end are gathered."""

    model: str
    weights: str | None
    shape: str | None
    ranks: int
    steps: int
    batch: int
    seq: int
    dtype: str
    learning_rate: float
    clip_norm: float | None
    dropout: float
    sequence_parallel: bool
    seed: int
    keep: bool

    @property
    def kind(self) -> Kind:
        return kind_of(self.model, self.seed, self.weights, self.shape)

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns AdamW; for ResNet SGD with the momentum of its paper."""
        if self.model == "resnet":
            return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9, weight_decay=1e-4)
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.01)

    def batches(self, device: torch.device = CPU) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields inputs and targets of each step, the same in every process."""
        inputs, targets = self.kind.samples(self.seq)
        dtype = DTYPES[self.dtype] if inputs.is_floating_point() else torch.int64

        def batch(step: int) -> tuple[Tensor, Tensor]:
            rows = samples.chosen(len(inputs), self.batch, step, self.seed)
            return inputs[rows].to(device, dtype), targets[rows].to(device, torch.int64)

        return map(batch, range(self.steps))

    def sharder(self, ranks: Ranks, device: torch.device = CPU) -> Sharder:
        return Sharder(
            self.kind.build(DTYPES[self.dtype]), ranks, sequence_parallel=self.sequence_parallel, dropout=self.dropout,
            seed=self.seed, dtype=DTYPES[self.dtype], device=device,
        )  # fmt: skip


@dataclass(frozen=True)
class RankResult:
    """The results of a rank.

    `calls` and `sent` are of the first step, by place, pass and kind. `parameters`: numbers of cut and of whole ones.
    `gradients` (of the first step, not clipped) and `weights` are whole, on rank 0. Bytes are of GPU memory, else of
    the process's RAM. `saved_bytes`: saved by the first forward.
    """

    losses: list[float]
    calls: dict[tuple[str, str, str], int]
    sent: dict[tuple[str, str, str], int]
    parameters: tuple[int, int]
    bytes_before: int
    peak_bytes: int
    saved_bytes: int
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class SavedBytes:
    """Counts in `total` the bytes that autograd saves, each piece of memory once."""

    def __init__(self):
        self.total = 0

    @contextmanager
    def counting(self, left_out: Iterable[Tensor]) -> Iterator[None]:
        seen = {tensor.untyped_storage().data_ptr() for tensor in left_out}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.total += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def work(job: Job, rank: int, device: torch.device = CPU) -> RankResult:
    """Trains this rank's part. With several ranks, the process group has to exist."""
    ranks = Ranks(rank, job.ranks)
    batches = job.batches(device)
    gc.collect()
    reset_ram_peak()
    before = ram_now_bytes() if device.type == "cpu" else torch.cuda.memory_allocated(device)
    sharded = job.kind.shard(job.sharder(ranks, device))
    parameters = dict(sharded.model.named_parameters())
    optimizer = job.optimizer_of(parameters.values())
    losses, gradients, calls, sent, saved = [], {}, {}, {}, SavedBytes()
    for step, (inputs, targets) in enumerate(batches):
        for dropout in sharded.dropouts:
            dropout.step = step
        with nullcontext() if step else saved.counting(parameters.values()):
            loss = job.kind.loss(sharded, inputs, targets)
        loss.backward()
        sharded.complete_gradients()
        if not step and job.keep:
            gradients = dict(sharded.gathered({name: p.grad for name, p in parameters.items()}))
        if job.clip_norm is not None:
            sharded.clip_gradients(job.clip_norm)
        if not step:
            calls, sent = dict(ranks.calls), dict(ranks.sent)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak = ram_peak_bytes() if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
    own = sum(parameter.numel() for name, parameter in parameters.items() if name in sharded.cuts)
    return RankResult(
        losses, calls, sent, (own, sum(map(torch.numel, parameters.values())) - own), before, peak, saved.total,
        gradients,
        dict(sharded.gathered(sharded.tensors())) if job.keep else {},
    )  # fmt: skip


def reference(job: Job, device: torch.device = CPU, in_reverse: bool = False) -> RankResult:
    """Trains the ordinary model in one process, with PyTorch's loss. `in_reverse`: each batch's samples come in reverse
    order."""
    kind = job.kind
    sharded = job.sharder(Ranks(0, 1), device).apply({})
    sharded.load(kind.weights())
    model = sharded.model
    parameters = dict(model.named_parameters())
    optimizer = job.optimizer_of(parameters.values())
    losses, gradients = [], {}
    for step, (inputs, targets) in enumerate(job.batches(device)):
        if in_reverse:
            inputs, targets = inputs.flip(0), targets.flip(0)
        output = model(inputs) if kind.config is None else model(inputs, use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(output, targets.flatten())
        loss.backward()
        if not step:
            gradients = {name: parameter.grad.cpu().clone() for name, parameter in parameters.items()}
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters.values(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = sum(map(torch.numel, parameters.values()))
    return RankResult(losses, {}, {}, (0, whole), 0, 0, 0, gradients, dict(sharded.gathered(sharded.tensors())))
