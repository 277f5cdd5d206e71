"""Predicts the peaks of runs on several GPUs that others measured, and compares (README.md).

python -m experiments.memory_estimation.several_gpus.published [--only RUN ...] [--out DIR]
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import CONFIG_MAPPING, PretrainedConfig

from experiments.harness.models import MODELS
from experiments.harness.options import exit_code_of, make_folder, parser_of, under_runs
from experiments.harness.rows import made_by, plan_sources
from experiments.memory_estimation import rows as row_file
from experiments.memory_estimation.several_gpus.rank import RankPeak, peak_of, record
from lowmem.cudasim.allocator import SimulatedOutOfMemory
from lowmem.cudasim.gpus import CARDS
from lowmem.limits import CONTEXT_BYTES
from lowmem.planning.simulated_step import gpu_target
from lowmem.units import GIB, MIB

PROGRAM = "experiments.memory_estimation.several_gpus.published"
NAME = "several_gpus.jsonl"
RESULTS = row_file.FOLDER / "results"
KIND = "published"
H100_BYTES = round(95.0396 * GIB)  # Meta's, with 96 GB of HBM2e
TITAN = "https://github.com/pytorch/torchtitan"
COMPARED = {  # the predicted peak that is compared with a figure of this kind
    "allocated": "allocated",
    "active": "allocated",
    "reserved": "reserved",
}


@dataclass(frozen=True)
class Run:
    """A published run. `measured`: the peak per GPU in bytes, by kind (allocated, active, reserved); empty if memory
    ran out. `differs`: known differences from the recipe. `unknown`: facts that the source lacks. `held`: bytes that
    only the run's own code keeps through its peak."""

    name: str
    model: str
    config: Callable[[], PretrainedConfig]
    method: str
    ranks: int
    seq: int
    micro_batch: int
    card: str
    measured: dict[str, float]
    source: str
    settings: str
    differs: str
    unknown: str
    held: dict[str, int] = field(default_factory=dict)
    expandable_segments: bool = True
    card_bytes: int = H100_BYTES


def _gpt2_xl() -> PretrainedConfig:
    config = MODELS["gpt2-xl"].config()
    config._attn_implementation = "eager"  # transformers of 2022 has no other
    return config


def _llama_8b() -> PretrainedConfig:
    return CONFIG_MAPPING["llama"](
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip


def _qwen3_32b() -> PretrainedConfig:
    return CONFIG_MAPPING["qwen3"](
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        intermediate_size=25600, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False,
    )  # fmt: skip


def _per_parameter_fsdp(name: str, method: str, micro_batch: int, active: float, reserved: float, **more: str) -> Run:
    return Run(
        name, "llama-7b", MODELS["llama-7b"].config, method, 8, 2048, micro_batch, "h100",
        {"active": active / 100 * H100_BYTES, "reserved": reserved / 100 * H100_BYTES},
        f"{TITAN}/pull/165 (March 2024)",
        held={"fp32 logits, which the training loop keeps": 4 * 8 * 2048 * 32000},  # 2D: 16 sequences, half the words
        expandable_segments=False, **more,
    )  # fmt: skip


def _qwen3(name: str, ranks: int, micro_batch: int, reserved_gib: float | None) -> Run:
    return Run(
        name, "qwen3-32b", _qwen3_32b, "fsdp2", ranks, 4096, micro_batch, "h100",
        {"reserved": reserved_gib * GIB} if reserved_gib else {}, f"{TITAN}/pull/1690 (September 2025)",
        "fully_shard, bf16 with fp32 reduction, fused AdamW, recompute per block, no compile",
        "clips; embeddings are a unit of their own, which is freed after forward; head and norm are another",
        "whether these rows had recompute (the committed config has); expandable segments are assumed from the script",
    )  # fmt: skip


RUNS = {
    run.name: run
    for run in (
        Run(
            "ddp", "gpt2-xl", _gpt2_xl, "ddp", 4, 1024, 6, "a100", {"allocated": 37905.422 * MIB},
            "https://github.com/hpcaitech/ColossalAI-Pytorch-lightning/blob/main/benchmark/gpt/README.md (August 2022)",
            "DistributedDataParallel(static_graph=True), fp16 autocast, torch.optim.Adam, recompute per block",
            "gradient_as_bucket_view is off, and zero_grad keeps gradients (PyTorch before 2.0); Adam is not fused; "
            "the loss copies the shifted logits; attention is eager, here too",
            "the versions, but for the date",
            held={"gradients beside the buckets": 4 * 1_557_611_200}, expandable_segments=False,
            card_bytes=CARDS["a100"].memory_bytes,
        ),
        _per_parameter_fsdp(
            "fsdp2", "fsdp2", 8, 23.92, 32.64,
            settings="fully_shard, bf16 with fp32 reduction, AdamW (foreach), recompute per block, no compile",
            differs="clips; the last block is not resharded after forward; rotations in complex numbers",
            unknown='"AC" is taken for the mode "full"; the nightly build of PyTorch',
        ),
        _per_parameter_fsdp(
            "fsdp2 + sp", "dp+tp", 16, 50.12, 60.97,
            settings="fully_shard over 4, tensor and sequence parallelism over 2, otherwise as above",
            differs="sequence parallelism divides activations between products, here they are whole; the loss is over "
            f"a divided vocabulary; FSDP2 then took 16 GB more than FSDP1 in a similar run ({TITAN}/issues/191)",
            unknown="how much of the figure that fault makes",
        ),
        _qwen3("qwen3 8x1", 8, 1, 81.47),
        _qwen3("qwen3 8x2", 8, 2, 89.33),
        _qwen3("qwen3 16x4", 16, 4, 78.48),
        _qwen3("qwen3 16x8", 16, 8, None),
        _qwen3("qwen3 32x16", 32, 16, None),
        Run(
            "long", "llama-3.1-8b", _llama_8b, "fsdp2", 8, 32768, 1, "h100", {"reserved": 83.9 * GIB},
            f"{TITAN}/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, table 2 (December 2024)",
            "fully_shard, float8 products, fp32 reduction, fused AdamW, recompute per block, blocks compiled",
            "blocks are compiled, their products in float8, here eager in bf16; clips; the last block is not resharded",
            "the options of the optimizer; expandable segments are assumed from the script",
        ),
    )
}  # fmt: skip


def sources() -> str:
    return plan_sources("experiments/memory_estimation/several_gpus/*.py", "experiments/harness/models.py")


def compared(run: Run) -> dict:
    """Returns a run's row: its figures, predictions, and signed errors with and without `held`. `fits`: whether the
    simulated run completes on its card."""
    case = run.method, run.ranks, run.micro_batch
    recording = record(run.config(), *case, run.seq, gpu_target(CARDS[run.card]))
    peak = peak_of(recording, *case, expandable_segments=run.expandable_segments)
    try:
        limit_bytes = run.card_bytes - CONTEXT_BYTES
        fits = bool(peak_of(recording, *case, limit_bytes, run.expandable_segments))
    except SimulatedOutOfMemory:
        fits = False
    held = sum(run.held.values())
    return {
        "kind": KIND, "name": run.name, "model": run.model, "method": run.method, "seq": run.seq,
        "batch": run.micro_batch, "card": run.card, "ranks": run.ranks, "tensor_ranks": peak.tensor_ranks,
        "card_bytes": run.card_bytes, "expandable_segments": run.expandable_segments,
        "settings": run.settings, "differs": run.differs, "unknown": run.unknown, "source": run.source,
        "measured": {kind: round(size) for kind, size in run.measured.items()}, "held": run.held,
        "allocated_peak_bytes": peak.allocated_peak_bytes, "reserved_peak_bytes": peak.reserved_peak_bytes,
        "at_peak": peak.at_peak, "fits": fits,
        "errors": {kind: _predicted(peak, kind) / size - 1 for kind, size in run.measured.items()},
        "errors_with_held": {kind: (_predicted(peak, kind) + held) / size - 1 for kind, size in run.measured.items()},
    }  # fmt: skip


def _predicted(peak: RankPeak, kind: str) -> int:
    return getattr(peak, f"{COMPARED[kind]}_peak_bytes")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), metavar="RUN", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), help="folder to write to (%(default)s)")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: compare(options, {"sources": sources()} | made_by(PROGRAM, arguments)))


def compare(options: argparse.Namespace, shared: dict) -> int:
    make_folder(options.out)
    for name in options.only or RUNS:
        row = compared(RUNS[name]) | shared
        row_file.replace(options.out / NAME, [row])
        errors = ", ".join(f"{kind} {error:+.1%}" for kind, error in row["errors"].items())
        print(f"{name:<12} {errors or ('fits' if row['fits'] else 'does not fit')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
