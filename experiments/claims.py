"""The claims of this project, each with a command that tests it on a small scale (`make seeds`). Extend CLAIMS.

A command writes into the folder {out}. `judge` reads that folder, and returns the number to show and whether the claim
holds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowmem.units import GIB, format_size

Verdict = tuple[str, bool]


@dataclass(frozen=True)
class Claim:
    """A claim and its test. `name`: of the folder. `words`: the command after the interpreter. `stand_in`: the
    stand-in's options, if the claim is about CUDA."""

    name: str
    claim: str
    words: str
    judge: Callable[[Path], Verdict]
    stand_in: str | None = None


def _json(folder: Path, name: str = "report.json") -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _plan_fits(folder: Path) -> Verdict:
    plan = _json(folder, "plan.json")
    peaks, limits = plan["predicted"], plan["limits"]
    gpu, ram = peaks["gpu_reserved_peak_bytes"], peaks["ram_peak_bytes"]
    number = f"{format_size(gpu)} of GPU memory, {format_size(ram)} of RAM, {peaks['step_seconds']:.0f} s a step"
    return number, plan["fits"] and gpu <= min(limits["gpu_bytes"], 11 * GIB) and ram <= 16 * GIB


def _run_keeps_to_its_plan(folder: Path) -> Verdict:
    report = _json(folder)
    predicted, measured = (of["ram_peak_bytes"] for of in (report["plan"]["predicted"], report["measured"]))
    first, last = report["loss"]["first"], report["loss"]["last"]
    number = f"{format_size(measured)} of RAM, planned {format_size(predicted)}; loss {first:.2f} -> {last:.2f}"
    return number, measured <= predicted and last < first


def _ranks_train_as_one(folder: Path) -> Verdict:
    ours, one = (_rows(path / "metrics.jsonl") for path in (folder, folder.parent / "one process"))
    far = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, one, strict=True))
    return f"losses of {len(ours)} steps at most {far:.1e} from one process's", far < 1e-6


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _peers(folder: Path) -> Verdict:
    rows = [row["values"] for row in _rows(folder / "rows.jsonl")]
    far = next(row["distance"] for row in rows if row["peer"] == "lowmem")
    return f"weights {far:.1e} of the trained way from plain transformers and AdamW", far < 1e-4


def _bitwise(folder: Path) -> Verdict:
    report = _json(folder)
    equal, bubble = report["weights_bitwise_equal"], report["bubble_planned"]
    return f"weights bit for bit {'equal' if equal else 'NOT equal'}; a bubble of {bubble:.0%} is planned", equal


def _same_numbers(folder: Path) -> Verdict:
    report = _json(folder)
    losses, weights = report["max_rel_loss_difference"], report["max_rel_weight_difference"]
    sent = format_size(report["bytes_per_step"])
    return f"losses {losses:.1e}, weights {weights:.1e} from one process; {sent} sent a step", weights < 1e-10


def _mesh(folder: Path) -> Verdict:
    report = _json(folder)
    far, bytes_off = report["weight_distance"], report["off_theory_bytes"]
    return (
        f"weights {far:.1e} from one process; memory and bytes sent {bytes_off:g} off theory",
        far < 1e-12 > bytes_off,
    )


def _memory(folder: Path) -> Verdict:
    rows = [row for row in _rows(folder / "rows.jsonl") if row.get("fits") and row.get("batch")]
    most = {
        method: max((r["batch"] for r in rows if r["method"] == method), default=0) for method in ("bf16", "lowmem")
    }
    return f"batch {most['bf16']} plain, {most['lowmem']} with lowmem", most["lowmem"] > most["bf16"]


def _plan_is_exact(folder: Path) -> Verdict:
    rows = _rows(folder / "rows.jsonl")
    peaks = [[row[of]["gpu_allocated_peak_bytes"] for of in ("predicted", "measured")] for row in rows]
    off = [abs(measured - predicted) for predicted, measured in peaks]
    return f"allocated peaks of {len(off)} runs at most {max(off)} bytes from their plans", not any(off)


def _nested(folder: Path) -> Verdict:
    rows = _rows(folder / "eval.jsonl")
    far = max(max(row["output"], row["gradient"]) for row in rows)
    return f"logits and gradients of {len(rows)} cases at most {far:.1e} off", far < 1e-5


def _fusion(folder: Path) -> Verdict:
    rows = _rows(folder / "rows.jsonl")
    far = max(row["relative_difference"] for row in rows)
    times = [row["plain_seconds"] / row["compiled_seconds"] for row in rows]
    number = f"outputs and gradients of {len(rows)} groups of layers at most {far:.1e} off"
    return f"{number}; {min(times):.2f} to {max(times):.2f} times as fast on this CPU", len(rows) == 4 and far < 1e-5


def _managed(folder: Path) -> Verdict:
    report = _json(folder)
    most, total = max(report["planned_resident_bytes"]), report["weights_bytes"]
    return f"{format_size(total)} of weights, at most {format_size(most)} on the card", most <= 20 * GIB < total


def _learned(folder: Path) -> Verdict:
    losses = _rows(folder / "rows.jsonl")[-1]["losses"]
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps", losses[-1] < losses[0] / 2


def _code(folder: Path) -> Verdict:
    before, after = (_json(folder)[of]["bits_per_byte"] for of in ("before", "after"))
    return f"held-out bits per byte {before:.2f} -> {after:.2f}", after < before


_SMALL_RUN = (
    "train_gpt2_large.py --demo --device cpu --precision fp32 --steps 8 --batch 4 --micro-batch 1 --seq 64 "
    "--eval-fraction 0"
)
CLAIMS = [
    Claim(
        "XL in 11 GiB", "A plan puts GPT-2-XL, full Adam, fp32 masters and 64 x 1,024 tokens, under 11 + 16 GiB.",
        "train_gpt2_xl.py --plan-only --gpu rtx3060 --out {out}", _plan_fits,
    ),
    Claim(
        "a run", "A run keeps to the RAM of its plan, and learns.",
        "train_gpt2_large.py --demo --device cpu --steps 60 --out {out}", _run_keeps_to_its_plan,
    ),
    Claim(
        "one process", "The next claim's run, in one process.",
        f"{_SMALL_RUN} --out {{out}}", _run_keeps_to_its_plan,
    ),
    Claim(
        "two processes", "torchrun's processes train one model, each with a part of it.",
        f"-m torch.distributed.run --nproc-per-node 2 {_SMALL_RUN} --out {{out}}", _ranks_train_as_one,
    ),
    Claim(
        "plain transformers", "Placement changes no result: lowmem's weights are those of plain training.",
        "-m experiments.peers.run --device cpu --init random --model gpt2 --seq 64 --batch 4 --steps 3 "
        "--ram-limit none --gpu-limit none --peer plain lowmem --out {out}", _peers,
    ),
    Claim(
        "pipeline", "A pipeline of four processes trains the weights of one, bit for bit.",
        "-m experiments.pipeline_parallel.run --stages 4 --schedule 1f1b --micro-batches 8 --steps 30 --compare "
        "--out {out}", _bitwise,
    ),
    Claim(
        "zero bubble", "Backward in two parts fills a part of the bubble, with the same bits.",
        "-m experiments.pipeline_parallel.run --stages 4 --schedule zb-h1 --micro-batches 8 --steps 10 --compare "
        "--out {out}", _bitwise,
    ),
    Claim(
        "parts of layers", "Two processes with half of each layer train the model of one.",
        "-m experiments.tensor_parallel.run --ranks 2 --model gpt2 --steps 20 --dtype fp64 --compare --out {out}",
        _same_numbers,
    ),
    Claim(
        "three kinds", "Stages, replicas and parts of layers are right together, to the byte.",
        "-m experiments.parallel_3d.run --pp 2 --tp 2 --dp 2 --model gpt2 --compare --out {out}", _mesh,
    ),
    Claim(
        "which batch fits", "A plan without a GPU says which batch fits into 16 GiB; lowmem's is larger.",
        "-m experiments.memory_estimation.run --only gpt2-large --methods bf16 lowmem --seq 512 --out {out}", _memory,
    ),
    Claim(
        "bytes of plans", "PyTorch's own CUDA allocator allocates the bytes of the plan.",
        "-m experiments.plan_accuracy.run --only gpt2- --every 9 --out {out}/rows.jsonl", _plan_is_exact, stand_in="",
    ),
    Claim(
        "no padding", "Batches without padding compute what single samples do, gradients too.",
        "-m experiments.nested_tensors.run --model gpt2 --lengths equal --num_samples 16 --batch_size 8 "
        "--out {out}", _nested,
    ),
    Claim(
        "fused layers", "Layers of GPT-2 that are fused keep their function, forward and backward.",
        "-m experiments.unified_memory.measure --only fusion --rows {out}/rows.jsonl", _fusion,
    ),
    Claim(
        "managed memory", "GPT-3's 13 billion weights run on a 24 GiB card in managed memory, under 20 GiB.",
        "-m experiments.unified_memory.run_gpt2 --model gpt3-13b --enable-prefetch --physical-limit 20GiB --out {out}",
        _managed, stand_in="--gpu rtx3090",
    ),
    Claim(
        "a wide block", "A block as wide as GPT-J's learns one batch.",
        "-m experiments.bigger_models.measure --only 'learns: warm-up' --out {out}", _learned,
    ),
    Claim(
        "code", "A model that has trained on code writes more of it.",
        "-m experiments.code_generation.compare --steps 150 --prefixes 20 --shape 4x128x4 --out {out}", _code,
    ),
]  # fmt: skip
