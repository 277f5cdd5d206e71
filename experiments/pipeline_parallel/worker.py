"""What one process of a pipeline does: its stages, its part of every step, and what it tells at the end.

python -m experiments.pipeline_parallel.worker FOLDER RANK        started by run.py, never by hand
"""

import json
import math
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.harness.child import end_with_parent
from experiments.pipeline_parallel.runtime import MicroBatches, ProcessTransfers, Rank, TransferError
from experiments.pipeline_parallel.schedules import ASYNCHRONOUS, KINDS, Action
from experiments.pipeline_parallel.stage import Layers, Stage
from experiments.pipeline_parallel.tasks import Task, make_task
from lowmem.limits import ram_peak_bytes

TIMEOUT = timedelta(minutes=10)
RESULT = "result.pt"
FAILED = "failed-{}.json"


@dataclass(frozen=True)
class Job:
    """What is trained, and how. `sizes`: layers of each stage; `padded_to`: seconds of each kind of action."""

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

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @property
    def rows(self) -> list[int]:
        """Of each micro-batch; a batch that does not divide evenly has larger ones first."""
        return [len(part) for part in np.array_split(np.arange(self.batch), self.micro_batches)]

    def make_task(self) -> Task:
        """The task; where stages are updated one by one, tied embeddings have no common gradient, and are not tied."""
        return make_task(self.task, self.seed, self.norm, tied=not self.asynchronous)

    def optimizer_of(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.01)

    def micro_batches_of(self, task: Task, step: int, device: torch.device) -> MicroBatches:
        """Of one step; of an asynchronous schedule of all steps, each of whose micro-batches is a batch of its own."""
        rows = self.rows
        batches = [task.batch(number, self.batch, self.seed) for number in self._steps(step)]
        inputs = [part.to(device) for batch in batches for part in batch[0].split(rows)]
        targets = [part.to(device) for batch in batches for part in batch[1].split(rows)]
        whole = rows * len(batches) if self.asynchronous else [self.batch] * len(rows)
        loss_of = [
            lambda output, target=target, count=count * task.predictions: task.loss_of(output, target) / count
            for target, count in zip(targets, whole, strict=True)
        ]
        return MicroBatches(inputs, loss_of, rows * len(batches))

    def _steps(self, step: int) -> range:
        return range(self.steps) if self.asynchronous else range(step, step + 1)


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


def work(job: Job, rank: int, actions: Actions, device: torch.device) -> list[dict] | None:
    """Trains this rank's stages; what all ranks tell, on rank 0. The process group is there already."""
    task = job.make_task()
    stages = stages_of(job, task, rank, device)
    last_rank = (job.stages - 1) % job.ranks
    tied_group = dist.new_group(sorted({0, last_rank})) if task.tied else None
    transfers = ProcessTransfers(rank, job.ranks, shapes_of(job, task, stages), device)

    def before_updates() -> None:
        if task.tied:
            add_tied(job, task, stages, tied_group)
        if job.clip_norm is not None:
            clip(job, task, stages)

    runtime = Rank(stages, job.stages, transfers, before_updates, job.padded_to)
    dist.barrier()
    losses: list[float] = []
    for step in range(1 if job.asynchronous else job.steps):
        done = runtime.run(actions, job.micro_batches_of(task, step, device), step)
        losses += of_steps(job, done.losses)
    told = {
        "losses": losses,
        "spans": [(begin, end, *action) for begin, end, action in done.spans],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else ram_peak_bytes(),
        "weight_versions": max(stage.most_versions for stage in stages.values()),
        "weights": {number: weights_of(stage) for number, stage in stages.items()} if job.keep_weights else {},
    }
    gathered = [None] * job.ranks if rank == 0 else None
    dist.gather_object(told, gathered)
    return gathered


def of_steps(job: Job, losses: dict[int, float]) -> list[float]:
    """A step's loss; of an asynchronous schedule each micro-batch's. None of a rank without the last stage."""
    found = [losses[m] for m in sorted(losses)]
    return found if job.asynchronous or not found else [math.fsum(found)]


def stages_of(job: Job, task: Task, rank: int, device: torch.device) -> dict[int, Stage]:
    """Those that lie on a rank, by number."""
    found, first = {}, 0
    for number, size in enumerate(job.sizes):
        if number % job.ranks == rank:
            layers = Layers(task.layers[first : first + size], first, job.seed).to(device)
            found[number] = Stage(layers, job.optimizer_of, job.recompute, stashing=job.asynchronous)
        first += size
    return found


def shapes_of(job: Job, task: Task, stages: dict[int, Stage]) -> list[tuple[torch.Size, torch.dtype]]:
    """Of a row of each stage's output. Each rank finds its own on tensors without data, and tells the others, once."""
    import copy

    x = task.inputs[:1]
    shapes: list = []
    for number in range(job.stages - 1):
        told = [None]
        if number in stages:
            layers = copy.deepcopy(stages[number].layers).to("meta")
            given = torch.empty((2, *shapes[-1][0]), dtype=shapes[-1][1], device="meta") if shapes else x.to("meta")
            output = layers(given, 0, 0)
            told = [(output.shape[1:], output.dtype)]
        if job.ranks > 1:
            dist.broadcast_object_list(told, src=number % job.ranks)
        shapes.append(told[0])
    return shapes


def add_tied(job: Job, task: Task, stages: dict[int, Stage], group) -> None:
    """Gives both ends of the tied embedding the sum of their gradients."""
    first, last = task.tied
    ends = [(0, f"layers.0.{first}"), (job.stages - 1, f"layers.{job.sizes[-1] - 1}.{last}")]
    here = [(stages[number], stages[number].names.index(name)) for number, name in ends if number in stages]
    if len(here) == 2:
        (one, place), (other, other_place) = here
        total = one.gradients[place] + other.gradients[other_place]
        one.gradients[place], other.gradients[other_place] = total, total.clone()
    elif here:
        ((stage, place),) = here
        dist.all_reduce(stage.gradients[place], group=group)


def clip(job: Job, task: Task, stages: dict[int, Stage]) -> None:
    """Scales all gradients by that of the norm over all stages. The squares of its parts are added up exactly
    (math.fsum), so that where they were computed makes no difference."""
    squares = {number: squares_of(stage.gradients, stage.names) for number, stage in stages.items()}
    gathered: list = [None] * job.ranks
    dist.all_gather_object(gathered, squares)
    named = {(number, name): square for one in gathered for number, of in one.items() for name, square in of.items()}
    if task.tied:
        del named[job.stages - 1, f"layers.{job.sizes[-1] - 1}.{task.tied[1]}"]
    scale = clip_scale(named.values(), job.clip_norm)
    for stage in stages.values():
        for gradient in stage.gradients:
            if gradient is not None:
                gradient.mul_(scale)


def squares_of(gradients: list[Tensor | None], names: list[str]) -> dict[str, float]:
    """The square of each gradient's norm, in double precision."""
    pairs = zip(names, gradients, strict=True)
    return {name: float(gradient.double().square().sum()) for name, gradient in pairs if gradient is not None}


def clip_scale(squares, clip_norm: float) -> float:
    """By what gradients of these squared norms are multiplied."""
    return min(1.0, clip_norm / (math.sqrt(math.fsum(squares)) + 1e-6))


def weights_of(stage: Stage) -> dict[str, Tensor]:
    """Parameters and running statistics, by the names that they have in the stage."""
    state = dict(zip(stage.names, stage.parameters, strict=True)) | dict(stage.layers.named_buffers())
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def main() -> int:
    """Of a process that run.py started; it ends when its standard input does. What goes wrong is left in the folder."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=end_with_parent, daemon=True).start()
    job = Job(**json.loads((folder / "job.json").read_text()))
    try:
        torch.set_num_threads(1)
        device = device_of(rank, job.ranks)
        actions = Actions(np.load(folder / f"actions-{rank}.npy"))
        begin(f"file://{folder / 'rendezvous'}", rank, job.ranks, device)
        told = work(job, rank, actions, device)
        if rank == 0:
            torch.save(told, folder / RESULT)
        dist.destroy_process_group()
    except Exception as error:
        failure = {"time": time.time(), "of_another": isinstance(error, TransferError), "error": describe(error)}
        (folder / FAILED.format(rank)).write_text(json.dumps(failure))
        return 1
    return 0


def describe(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def begin(address: str | None, rank: int, ranks: int, device: torch.device) -> None:
    """The process group; `address` None: what torchrun says."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = {} if address is None else {"init_method": address, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, timeout=TIMEOUT, **where)


def device_of(rank: int, ranks: int) -> torch.device:
    """A GPU of its own for every process, where a machine has as many, or else the CPU."""
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if not torch.cuda.is_available() or torch.cuda.device_count() < here:
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def saved(job: Job) -> str:
    """As main() reads it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    sys.exit(main())
