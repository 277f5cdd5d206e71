"""The updates that update.py times on the CPU: the same gradients, but each with its own weights and states."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.peers.shared import single_process
from lowmem.core.optimizers import CPU_SLICE, Hyperparameters, get_optimizer, state_layout, update
from lowmem.core.parameters import PIECE

# Every number read once and written once. fp32: weight, gradient and both moments read, weight and moments written;
# halves of a bf16 weight add up to the same. 8-bit: weight 4, gradient 4, moments 2 read, weight and moments written;
# their scales (8 bytes per 256 parameters) are left out.
BYTES_FP32, BYTES_8BIT = 28, 16
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
Gradients = list[Tensor]  # each fp32 [at most PIECE]
Update = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """A timed update. `make(gradients)` returns a function that updates its own weights once."""

    name: str
    bytes_per_parameter: int
    make: Callable[[Gradients], Update]
    packages: tuple[str, ...] = ()


def random_gradients(parameters: int) -> Gradients:
    """Returns `parameters` random numbers, in pieces as lowmem updates them."""
    generator = torch.Generator().manual_seed(0)
    sizes = [min(PIECE, parameters - start) for start in range(0, parameters, PIECE)]
    return [torch.randn(size, generator=generator).mul_(1e-3) for size in sizes]


def _weights(gradients: Gradients) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.full_like(gradient, 0.02)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    return weights


def _lowmem(gradients: Gradients, optimizer_name: str, dtype: torch.dtype) -> Update:
    optimizer = get_optimizer(optimizer_name)
    hyper = Hyperparameters(LEARNING_RATE, WEIGHT_DECAY, update=1)
    parts = []
    for gradient in gradients:
        layout = state_layout(optimizer, gradient.numel(), dtype)
        state = {name: torch.zeros(entries, dtype=kind) for name, (entries, kind) in layout.items()}
        parts.append((torch.full_like(gradient, 0.02, dtype=dtype), state, gradient))

    def run() -> None:
        for working, state, gradient in parts:
            update(optimizer, working, state, gradient, hyper, decay=True, at_once=CPU_SLICE)

    return torch.no_grad()(run)


def _torch(gradients: Gradients, **how: bool) -> Update:
    return torch.optim.AdamW(_weights(gradients), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **how).step


def _bitsandbytes(gradients: Gradients) -> Update:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(_weights(gradients), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY).step


def _deepspeed(gradients: Gradients) -> Update:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(_weights(gradients), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY).step


def _torchao(gradients: Gradients) -> Update:
    from torchao.optim import AdamW8bit

    return AdamW8bit(_weights(gradients), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY).step


def _fsdp2(gradients: Gradients) -> Update:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    single_process(torch.device("cpu"), Path(tempfile.mkdtemp(prefix="lowmem_peers_")))
    module = nn.ParameterList(_weights(gradients))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    for weight, gradient in zip(module.parameters(), gradients, strict=True):
        # As FSDP2 leaves it after it has offloaded everything.
        weight.grad = DTensor.from_local(gradient, weight.device_mesh, weight.placements)
    parameters = list(module.parameters())
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True).step


CANDIDATES = (
    Candidate("torch.optim.AdamW(fused=True)", BYTES_FP32, partial(_torch, fused=True)),
    Candidate("torch.optim.AdamW(foreach=True)", BYTES_FP32, partial(_torch, foreach=True)),
    Candidate("torch.optim.AdamW, for-loop", BYTES_FP32, partial(_torch, foreach=False, fused=False)),
    Candidate("FSDP2 on gloo, AdamW(fused=True)", BYTES_FP32, _fsdp2),
    Candidate("DeepSpeedCPUAdam", BYTES_FP32, _deepspeed, ("deepspeed",)),
    Candidate("lowmem, fp32", BYTES_FP32, partial(_lowmem, optimizer_name="adamw", dtype=torch.float32)),
    Candidate("lowmem, bf16 in halves", BYTES_FP32, partial(_lowmem, optimizer_name="adamw", dtype=torch.bfloat16)),
    Candidate(
        "lowmem, bf16 in halves, 8-bit moments",
        BYTES_8BIT,
        partial(_lowmem, optimizer_name="adamw8bit", dtype=torch.bfloat16),
        ("bitsandbytes",),
    ),
    Candidate("bitsandbytes AdamW8bit", BYTES_8BIT, _bitsandbytes, ("bitsandbytes",)),
    Candidate("torchao AdamW8bit", BYTES_8BIT, _torchao, ("torchao",)),
)
