"""Divides the same Llama by PyTorch's `parallelize_module`, for comparison, with the plan of PyTorch's tutorial.
Nothing is clipped: PyTorch refuses a norm over ordinary and distributed tensors together."""

import gc

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from experiments.tensor_parallel.collectives import Ranks
from experiments.tensor_parallel.worker import Job, RankResult
from lowmem.limits import ram_now_bytes, ram_peak_bytes, reset_ram_peak

PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"model.layers.*.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


class Counted(CommDebugMode):
    """Counts collectives as PyTorch does, and the bytes that a rank sends for them in a ring."""

    def __init__(self, ranks: int):
        super().__init__()
        times = {"all_reduce": 2, "all_gather_into_tensor": ranks, "reduce_scatter_tensor": 1}
        self.share = {f"_c10d_functional::{name}": count * (ranks - 1) / ranks for name, count in times.items()}
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if share := self.share.get(func._schema.name):
            self.sent += int(share * args[0].nbytes)
        return super().__torch_dispatch__(func, types, args, kwargs)


def work(job: Job, rank: int, device: torch.device) -> RankResult:
    """Trains like worker.work. `calls` of the result are by kind only."""
    mesh = init_device_mesh("cpu", (job.ranks,))
    batches = job.batches()
    gc.collect()
    reset_ram_peak()
    before = ram_now_bytes()
    sharded = job.sharder(Ranks(0, 1)).apply({})
    sharded.load(job.kind.weights())
    model = parallelize_module(sharded.model, mesh, PLAN)
    if model.config.tie_word_embeddings:  # parallelize_module has made two parameters of one
        model.lm_head.weight = model.model.embed_tokens.weight
    parameters = dict(model.named_parameters())
    optimizer = job.optimizer_of(parameters.values())
    losses, calls, sent = [], {}, {}
    for step, (inputs, targets) in enumerate(batches):
        with Counted(job.ranks) as counted, loss_parallel():
            logits = model(inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        if not step:
            calls = {("", "both", str(kind)): count for kind, count in counted.get_comm_counts().items()}
            sent = {("", "both", "all"): counted.sent}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    own = sum(p.to_local().numel() for p in parameters.values() if isinstance(p, DTensor))
    whole = sum(p.numel() for p in parameters.values() if not isinstance(p, DTensor))
    return RankResult(losses, calls, sent, (own, whole), before, ram_peak_bytes(), 0, {}, {})
