"""Plain PyTorch training of a decoder on several GPUs, whose memory rank.py predicts.

fp32 parameters, bf16 compute, every block recomputed in backward, fused AdamW, no clipping. Runs on FakeTensors, or on
real tensors in tests.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from lowmem.core.decoder import Decoder


def place(model: nn.Module) -> None:
    """Gives every parameter and buffer memory on the CPU; tied parameters stay tied."""
    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in placed:
                    placed[id(parameter)] = nn.Parameter(torch.empty(parameter.shape), parameter.requires_grad)
                module._parameters[name] = placed[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def owners_of(decoder: Decoder) -> Iterator[tuple[nn.Parameter, int | None]]:
    """Yields every parameter once, with the number of its block, or None outside of the blocks."""
    block_of = {id(p): index for index, block in enumerate(decoder.blocks) for p in block.parameters()}
    for parameter in decoder.model.parameters():
        yield parameter, block_of.get(id(parameter))


def prepare(
    decoder: Decoder, method: str, data_mesh: DeviceMesh, micro_batch: int, seq: int,
    functions: Callable = nullcontext, mark: Callable[[int | None], None] = lambda block: None,
) -> tuple[Callable[[int], None], Optimizer]:  # fmt: skip
    """Returns a function that does one step of so many micro-batches, and the optimizer. `decoder`: this rank's share,
    on the CPU. `functions`: the modes to recompute in. `mark(block)`: called when a block's turn comes; None: between
    blocks."""
    model, blocks = decoder.model, decoder.blocks
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: mark(index))
        # backward() switches off the modes of forward, so `functions` gives them again.
        blocks[index] = checkpoint_wrapper(
            block, preserve_rng_state=False, context_fn=lambda: (nullcontext(), functions())
        )
    sharded = method in ("fsdp2", "dp+tp")
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for index, part in (*enumerate(blocks), (None, model)):  # embeddings, last norm and head, tied or not: one unit
            mark(index)
            fully_shard(part, mesh=data_mesh, mp_policy=policy)
    sums_gradients = lambda last: None  # noqa: E731
    if method == "ddp" and data_mesh.size() > 1:
        sums_gradients = _bucketed(decoder, mark)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    input_ids = torch.zeros((micro_batch, seq), dtype=torch.int64)

    def step(accumulation: int) -> None:
        mark(None)
        optimizer.zero_grad()
        for index in range(accumulation):
            sums_gradients(index == accumulation - 1)
            _backward(_forward(model, input_ids, not sharded, mark), mark)
        optimizer.step()

    return step, optimizer


def _forward(model: nn.Module, input_ids: Tensor, autocast: bool, mark: Callable) -> Tensor:
    mark(None)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        mark(None)
    return loss


def _backward(loss: Tensor, mark: Callable) -> None:
    loss.backward()
    mark(None)


def _bucketed(decoder: Decoder, mark: Callable) -> Callable[[bool], None]:
    """Makes DistributedDataParallel's buckets. Call the returned function before each backward: True for the one that
    sums over ranks."""
    # DistributedDataParallel's C++ reads its tensors' data, so hooks imitate its buckets. Its own are cut every 25 MiB,
    # with as many bytes in all, and made again after the first backward, which is not imitated.
    parts: dict[int | None, list[nn.Parameter]] = defaultdict(list)
    for parameter, block in owners_of(decoder):
        if parameter.requires_grad:
            parts[block].append(parameter)
    views: dict[int, Tensor] = {}
    for block, parameters in parts.items():
        mark(block)
        flat = torch.empty(sum(p.numel() for p in parameters))
        for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            views[id(parameter)] = view.view(parameter.shape)
    mark(None)
    summing = True

    def announce(last: bool) -> None:
        nonlocal summing
        summing = last

    def into_bucket(parameter: Tensor) -> None:
        if summing:
            parameter.grad = views[id(parameter)].copy_(parameter.grad)

    for parameters in parts.values():
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(into_bucket)
    return announce
