"""Lists the peers. Imports nothing slow."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.harness.child import Unavailable


@dataclass(frozen=True)
class Peer:
    """A peer. `packages`: needed beside torch and transformers, as pip and import know them. `gives_up`: the cost of
    `settings` to the result. `source`: its documentation."""

    name: str
    packages: tuple[str, ...]
    settings: str
    gives_up: str
    source: str
    needs_gpu: bool = False

    def check(self, device: str) -> None:
        """Raises Unavailable if the peer cannot run on `device` ("cuda" or "cpu")."""
        missing = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if missing:
            raise Unavailable(f"not installed: pip install {' '.join(missing)}")
        if self.needs_gpu and device != "cuda":
            raise Unavailable("needs a GPU")


_RECOMPUTE = "every block recomputed (transformers' gradient checkpointing)"
_TRAINER = f"Trainer, bf16=True (fp32 weights under autocast), {_RECOMPUTE}, gradient accumulation"
_TRAINER_SOURCE = "https://huggingface.co/docs/transformers/perf_train_gpu_one"
_DEEPSPEED = f"bf16, optimizer offloaded to the CPU (DeepSpeedCPUAdam), page-locked, overlap_comm, {_RECOMPUTE}"
_BF16_SUMS = "gradients summed over micro-batches in bf16 (the default of data_types.grad_accum_dtype); "

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "plain",
            (),
            "transformers and torch.optim.AdamW(fused=True), fp32 weights under bf16 autocast, no cap: the reference",
            "nothing: 16 bytes of GPU memory per parameter, and the activations",
            "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
        ),
        Peer(
            "lowmem",
            (),
            "as train_gpt2_large.py sets it up: bf16 with fp32 master weights, the planner's layout, deterministic",
            "nothing in the weights; kernels that add in a fixed order",
            "README.md",
        ),
        Peer(
            "hf_trainer_adamw_bnb_8bit",
            ("accelerate", "bitsandbytes"),
            f"{_TRAINER}, optim=adamw_bnb_8bit",
            "8-bit moments (32-bit ones for embeddings)",
            _TRAINER_SOURCE,
        ),
        Peer(
            "hf_trainer_paged_adamw_8bit",
            ("accelerate", "bitsandbytes"),
            f"{_TRAINER}, optim=paged_adamw_8bit",
            "8-bit moments (32-bit ones for embeddings), in managed memory that no cap of PyTorch's counts",
            "https://huggingface.co/docs/bitsandbytes/explanations/optimizers",
        ),
        Peer(
            "deepspeed_zero2_offload",
            ("deepspeed",),
            f"ZeRO stage 2, {_DEEPSPEED}",
            _BF16_SUMS + "the fp32 masters begin as weights rounded to bf16; the update starts after backward",
            "https://www.deepspeed.ai/tutorials/zero-offload/",
        ),
        Peer(
            "deepspeed_zero3_offload",
            ("deepspeed", "accelerate"),
            f"ZeRO stage 3, parameters offloaded too, {_DEEPSPEED}",
            _BF16_SUMS
            + "the fp32 masters begin as weights rounded to bf16; weights cross the bus for every micro-batch",
            "https://huggingface.co/docs/transformers/deepspeed",
        ),
        Peer(
            "torchao_cpu_offload",
            ("torchao",),
            "CPUOffloadOptimizer(torch.optim.AdamW, fused=True), gradients not offloaded (they are accumulated), "
            f"weights in bf16 throughout, as its notes recommend, {_RECOMPUTE}",
            "clipping (not supported: it would come after the gradients have left); master weights; moments and "
            "sums of gradients in bf16",
            "https://github.com/pytorch/ao/blob/main/torchao/optim/README.md",
            needs_gpu=True,
        ),
        Peer(
            "flashoptim",
            ("flashoptim",),
            f"cast_model to bf16, FlashAdamW with its default of 24-bit master weights, {_RECOMPUTE}; no gradient "
            "release, which forbids clipping and accumulation",
            "8-bit moments; 24 bits of 32 in the master weights, which begin as weights rounded to bf16; gradients "
            "summed over micro-batches in bf16",
            "https://github.com/databricks/flashoptim#readme",
            needs_gpu=True,
        ),
        Peer(
            "fsdp2_cpu_offload",
            (),
            "fully_shard on one GPU, a group per block and one for the tied head, CPUOffloadPolicy(pin_memory=True), "
            "bf16 parameters and fp32 reductions, no communication before the last micro-batch, AdamW(fused=True) on "
            f"the CPU, {_RECOMPUTE}",
            "16 bytes of RAM per parameter; fp32 sums of gradients on the GPU; the update starts after backward",
            "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        ),
    )
}


def peers_named(names: Sequence[str]) -> list[Peer]:
    """Returns the peers in the order of PEERS; all if `names` is empty."""
    return [peer for name, peer in PEERS.items() if name in names or not names]
