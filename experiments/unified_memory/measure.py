"""Runs what the README's tables say, and keeps rows: `python -m experiments.unified_memory.measure`.

python -m experiments.unified_memory.measure --only fusion
.venv-cuda/bin/python -m stand_in --gpu rtx3090 -- -m experiments.unified_memory.measure --only card --only paged

traffic   what a pass moves at half of the weights, by how they are held, for every shape; arithmetic
fusion    each fused group beside the plain lines on this machine's CPU: seconds, and how far they are apart
card      the same passes on a card, or on the stand-in: what it was asked to move, and the most that lay on it
paged     bitsandbytes' paged AdamW: what it moves in a step, its states being twice the room that is left
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from experiments.harness import rows as row_file
from experiments.unified_memory import fusion, run_gpt2
from experiments.unified_memory.schedule import schedule
from experiments.unified_memory.shapes import SHAPES, config_of, pieces_of
from experiments.unified_memory.table import ROWS, sections
from lowmem.models.build import build_model
from lowmem.units import MIB

PROGRAM = "experiments.unified_memory.measure"
HALF = 2  # of the weights, and of the gradients with --backward, is the limit
PLACEMENTS = {
    "all on the GPU": "--placement resident",
    "managed, sent back behind": "--placement managed",
    "managed, prefetched": "--placement managed --enable-prefetch",
    "managed, prefetched, fused": "--placement managed --enable-prefetch --fusion all",
    "explicit copies": "--placement explicit",
}
WIDTH, TOKENS = 768, 1024  # of the groups that are timed: GPT-2's
CASES = {
    "traffic": [f"{name}{way}" for name in SHAPES for way in ("", " --backward")],
    "fusion": ["drop-ln", "attention-ln", "attention-projection", "ffn-ln"],
    "card": [f"{name}: {placement}" for name in ("gpt2-small", "gpt2-xl") for placement in PLACEMENTS],
    "paged": ["gpt2-small"],
}
WITHOUT_A_GPU = ("traffic", "fusion")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", allow_abbrev=False)
    parser.add_argument("--only", choices=CASES, action="append", help=f"default: {' and '.join(WITHOUT_A_GPU)}")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    chosen = options.only or WITHOUT_A_GPU
    if set(chosen) - set(WITHOUT_A_GPU) and not torch.cuda.is_available():
        print("error: card and paged need a GPU, or the stand-in: see --help", file=sys.stderr)
        return 2
    common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    for section in chosen:
        for case in CASES[section]:
            print(section, case, flush=True)
            found = {"traffic": planned, "fusion": fused, "card": on_card, "paged": paged}[section](case)
            row_file.append(options.rows, common | {"section": section, "case": case, "device": device} | found)
    print(sections(row_file.read(options.rows)))
    return 0


def planned(case: str) -> dict:
    """Of a shape in fp32, by the schedule and by the model of faults."""
    name, _, backward = case.partition(" ")
    pieces = pieces_of(build_model(config_of(name)), torch.float32)
    sizes = pieces.sizes * (2 if backward else 1)
    limit = sum(sizes) // HALF
    found = schedule(sizes, pieces.accesses(bool(backward)), limit)
    return {
        "total_bytes": sum(sizes), "limit_bytes": limit, "peak_bytes": found.peak_bytes,
        "traffic": run_gpt2.traffic(found, limit, bool(backward)),
    }  # fmt: skip


def fused(case: str) -> dict:
    """Forward and backward, plain and compiled by turns, on one thread; the median of 15 each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    function, arguments = _groups()[case]
    compiled = fusion.compiled(function)
    results = [_passed(way, arguments) for way in (function, compiled)]
    apart = max(float((one - other).norm() / other.norm()) for one, other in zip(results[1], results[0], strict=True))
    seconds: list[list[float]] = [[], []]
    for _ in range(15):
        for place, way in enumerate((function, compiled)):
            began = time.perf_counter()
            _passed(way, arguments)
            seconds[place].append(time.perf_counter() - began)
    plain, together = map(statistics.median, seconds)
    return {"plain_seconds": plain, "compiled_seconds": together, "relative_difference": apart}


def _passed(function: Callable, arguments: list) -> list[Tensor]:
    """What it returns, and the gradients of its tensors."""
    leaves = [each for each in _flat(arguments) if isinstance(each, Tensor)]
    output = _flat([function(*arguments)])
    gradients = torch.autograd.grad(sum(each.square().sum() for each in output), leaves)
    return [each.detach() for each in (*output, *gradients)]


def _groups() -> dict[str, tuple[Callable, list]]:
    """Each group and what it works on: one block of GPT-2."""

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).requires_grad_()

    def product(into: int, out: int) -> tuple[Tensor, Tensor]:
        return tensor(into, out, scale=0.02), tensor(out, scale=0.02)

    hidden, norm = (lambda: tensor(1, TOKENS, WIDTH)), (tensor(WIDTH), tensor(WIDTH), 1e-5)
    mlp = (*product(WIDTH, 4 * WIDTH), *product(4 * WIDTH, WIDTH))
    return {
        "drop-ln": (fusion.drop_ln, [hidden(), hidden(), *norm, 0.0]),
        "attention-ln": (fusion.attention_ln, [hidden(), *norm, *product(WIDTH, 3 * WIDTH)]),
        "attention-projection": (
            fusion.attention_projection,
            [tensor(1, TOKENS, 3 * WIDTH), *product(WIDTH, WIDTH), 12, 0.125, 0.0],
        ),
        "ffn-ln": (fusion.ffn_ln, [hidden(), *norm, mlp, 0.0]),
    }


def _flat(values) -> list:
    return [leaf for value in values for leaf in (_flat(value) if isinstance(value, tuple | list) else [value])]


def on_card(case: str) -> dict:
    """A run of the command; on the stand-in with what its card counted, and without times."""
    name, _, placement = case.partition(": ")
    weights = sum(pieces_of(build_model(config_of(name)), torch.float32).sizes)
    words = ["--model", name, *PLACEMENTS[placement].split(), "--runs", "5"]
    if "--placement resident" not in PLACEMENTS[placement]:
        words += ["--physical-limit", f"{weights // HALF // MIB}MiB"]
    on_stand_in = row_file.on_stand_in()
    if on_stand_in and "fused" in placement:
        return {"not_run": "compiled kernels compute nothing on the stand-in"}
    with tempfile.TemporaryDirectory() as out:  # a process of its own, whose peaks are no other run's
        command = [sys.executable, "-m", run_gpt2.PROGRAM, *words, "--out", out]
        result = subprocess.run(command, cwd=row_file.ROOT, capture_output=True, text=True)
        if result.returncode:
            return {"not_run": result.stderr.strip().splitlines()[-1].removeprefix("error: ")}
        report = json.loads((Path(out) / "report.json").read_text())
    return {
        "weights_bytes": weights,
        "limit_bytes": report["physical_limit_bytes"],
        "planned_peak_bytes": max(report["planned_resident_bytes"]),
        "memory": report["memory"],
        "digest": None if on_stand_in else report["digest"],
        "latency_seconds": None if on_stand_in else report["latency_seconds"],
        "fetched_bytes": sum(move["size_bytes"] for move in report["moves"] if move["kind"] == "fetch"),
        "evicted_bytes": sum(move["size_bytes"] for move in report["moves"] if move["kind"] == "evict"),
    }


def paged(case: str) -> dict:
    """Three steps on the parameters of a shape, the last one counted. What is free beside weights and gradients is made
    half of what the states need."""
    import bitsandbytes

    shapes = [parameter.shape for parameter in build_model(config_of(case)).parameters()]
    parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    states = 8 * sum(map(torch.numel, parameters))
    free = torch.cuda.mem_get_info()[0]
    if states > free:
        return {"not_run": "the states are more than is free"}
    optimizer = bitsandbytes.optim.PagedAdamW32bit(parameters)
    optimizer.step()
    room = torch.empty(max(0, torch.cuda.mem_get_info()[0] - states // HALF + states), dtype=torch.uint8, device="cuda")
    found = {"states_bytes": states, "room_bytes": states // HALF}
    for _ in range(2):
        before = row_file.card_counts()
        began = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        found["step_seconds"] = None if row_file.on_stand_in() else time.perf_counter() - began
        after = row_file.card_counts()
        found["card"] = {key: after[key] - before[key] for key in after if key.startswith("prefetched")}
    del room
    return found


if __name__ == "__main__":
    sys.exit(main())
