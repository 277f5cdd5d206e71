"""Measures the tables of tables.md, and keeps rows: `python -m experiments.unified_memory.measure`.

python -m experiments.unified_memory.measure --only fusion
.venv-cuda/bin/python -m stand_in --gpu rtx3090 -- -m experiments.unified_memory.measure --only card --only paged

traffic   bytes that a pass moves under a limit of half of the weights, for every shape and placement
fusion    each fused group, compared with plain code on this machine's CPU: seconds and relative difference
card      the same passes on a card or on the stand-in: bytes moved, peak memory and, with values, bits
paged     bitsandbytes' paged AdamW: a step with its states on the GPU, and one with its states on the host
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from experiments.harness import rows as row_file
from experiments.harness.child import Result, Setting
from experiments.harness.comparison import worst
from experiments.harness.options import check_rows, exit_code_of, parser_of, under_runs
from experiments.unified_memory import fusion, run_gpt2
from experiments.unified_memory.picture import DRAWN
from experiments.unified_memory.schedule import BY_FAULTS, COPIED, PREFETCHED, schedule, traffic
from experiments.unified_memory.shapes import SHAPES, config_of, pieces_of
from experiments.unified_memory.table import RESIDENT, RESIDENT_FUSED, ROWS, sections
from lowmem.errors import InputError
from lowmem.models.build import build_model
from lowmem.units import MIB

PROGRAM = "experiments.unified_memory.measure"
HALF = 2  # the limit is 1 / HALF of the weights (with --backward also of the gradients)
LEAST_FASTER = 1.5  # prefetched, relative to page faults, under that limit
LIMITS = {"gpt3-13b": "20GiB"}  # of a card with 24 GiB; half of these weights are 24
MOST_BESIDE_BYTES = 64 * MIB  # two runs may differ by this in memory other than weights
ROUNDING = 1e-5  # fp32: sums of 3,072 terms in another order
TINY = "24x256x4"  # of dry runs; half of it has room for the largest piece
PLACEMENTS = {
    RESIDENT: "--placement resident",
    BY_FAULTS: "--placement managed",
    PREFETCHED: "--placement managed --enable-prefetch",
    RESIDENT_FUSED: "--placement resident --fusion all",
    "managed, prefetched, fused": "--placement managed --enable-prefetch --fusion all",
    COPIED: "--placement explicit",
}
WIDTH, TOKENS = 768, 1024  # of the groups that are timed: GPT-2's
CASES = {
    "traffic": [f"{name}{way}" for name in SHAPES for way in ("", " --backward")],
    "fusion": ["drop-ln", "attention-ln", "attention-projection", "ffn-ln"],
    "card": [
        f"{name}{way}: {placement}"
        for name in ("gpt2-small", "gpt2-xl")
        for way in ("", " --backward")
        for placement in PLACEMENTS
        if not way or placement != COPIED  # which are measured only in forward
    ]
    + [f"gpt3-13b: {PREFETCHED}"],
    "paged": ["gpt2-small", "gpt2-large"],
}
WITHOUT_A_GPU = ("traffic", "fusion")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--only", choices=CASES, action="append", help=f"default: {' and '.join(WITHOUT_A_GPU)}")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose names begin with it")
    parser.add_argument("--rows", type=Path, default=under_runs(ROWS), metavar="ROWS.jsonl")
    options = parser.parse_args(arguments)
    return exit_code_of(lambda: run(options, arguments))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    chosen = options.only or WITHOUT_A_GPU
    if set(chosen) - set(WITHOUT_A_GPU) and not torch.cuda.is_available():
        raise InputError("card and paged need a GPU, or the stand-in: see --help")
    cases = [(section, case) for section in chosen for case in CASES[section] if case.startswith(options.case)]
    if not cases:
        raise InputError(f"--case {options.case}: no case of {', '.join(chosen)} begins so")
    check_rows(options.rows)
    common = {"sources": row_file.sources(PROGRAM)} | row_file.made_by(PROGRAM, arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    for section, case in cases:
        print(section, case, flush=True)
        found = {"traffic": planned, "fusion": fused, "card": on_card, "paged": paged}[section](case)
        row_file.append(options.rows, common | {"section": section, "case": case, "device": device} | found)
    print(sections(row_file.read(options.rows)))
    return 0


def planned(case: str) -> dict:
    name, _, backward = case.partition(" ")
    pieces = pieces_of(build_model(config_of(name)), torch.float32)
    sizes = pieces.sizes * (2 if backward else 1)
    limit = sum(sizes) // HALF
    accesses = pieces.accesses(bool(backward))
    return {
        "total_bytes": sum(sizes), "limit_bytes": limit, "peak_bytes": schedule(sizes, accesses, limit).peak_bytes,
        "traffic": traffic(sizes, accesses, limit, 1, bool(backward)),
    }  # fmt: skip


def fused(case: str, device: str = "cpu") -> dict:
    """Times forward and backward, plain and compiled alternately, on one CPU thread or a GPU; the median of 15 each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(device):
        function, arguments = _groups()[case]
    compiled = fusion.compiled(function)
    results = [_passed(way, arguments) for way in (function, compiled)]
    apart = worst((one - other).norm() / other.norm() for one, other in zip(results[1], results[0], strict=True))
    seconds: list[list[float]] = [[], []]
    for _ in range(15):
        for place, way in enumerate((function, compiled)):
            began = time.perf_counter()
            _passed(way, arguments)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[place].append(time.perf_counter() - began)
    plain, together = map(statistics.median, seconds)
    return {"plain_seconds": plain, "compiled_seconds": together, "relative_difference": apart}


def _passed(function: Callable, arguments: list) -> list[Tensor]:
    leaves = [each for each in _flat(arguments) if isinstance(each, Tensor)]
    output = _flat([function(*arguments)])
    gradients = torch.autograd.grad(sum(each.square().sum() for each in output), leaves)
    return [each.detach() for each in (*output, *gradients)]


def _groups() -> dict[str, tuple[Callable, list]]:
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
            [*(tensor(1, 12, TOKENS, WIDTH // 12) for _ in range(3)), *product(WIDTH, WIDTH), 0.125, 0.0],
        ),
        "ffn-ln": (fusion.ffn_ln, [hidden(), *norm, mlp, 0.0]),
    }


def _flat(values) -> list:
    return [leaf for value in values for leaf in (_flat(value) if isinstance(value, tuple | list) else [value])]


def on_card(case: str, device: str = "cuda") -> dict:
    """Runs run_gpt2 in another process, and returns a row's values; on the stand-in without times."""
    shape, placement = case.split(": ")
    name, *backward = shape.split()
    stand_in = row_file.on_stand_in()
    total = sum(pieces_of(build_model(config_of(name)), torch.float32).sizes) * (2 if backward else 1)
    words = ["--model", name, *backward, *PLACEMENTS[placement].split(), "--device", device]
    words += ["--runs", "1" if stand_in else "5"]
    if placement not in (RESIDENT, RESIDENT_FUSED):
        words += ["--physical-limit", LIMITS.get(name, f"{total // HALF // MIB}MiB")]
    with tempfile.TemporaryDirectory() as out:  # a process of its own, whose peaks are no other run's
        command = [sys.executable, "-m", run_gpt2.PROGRAM, *words, "--out", out]
        result = subprocess.run(command, cwd=row_file.ROOT, capture_output=True, text=True)
        if result.returncode:
            return {"not_run": result.stderr.strip().splitlines()[-1].removeprefix("error: ")}
        report = json.loads((Path(out) / "report.json").read_text())
    return {
        "total_bytes": total,
        "limit_bytes": report["physical_limit_bytes"],
        "planned_peak_bytes": max(report["planned_resident_bytes"]),
        "traffic": report["planned_traffic"].get(placement.removesuffix(", fused")),
        "memory": report["memory"],
        "peak_used_bytes": max(report["used_bytes_by_access"], default=None),
        "digest": report["digest"] if row_file.computes_values() else None,
        "compiled": report["compiled"],
        "resident": {key: report[key] for key in DRAWN},
        "latency_seconds": None if stand_in else report["latency_seconds"],
    }


def paged(case: str) -> dict:
    """Times two steps on the parameters of a shape, in fp32: with states on the GPU, and on the host."""
    import bitsandbytes

    shapes = [parameter.shape for parameter in build_model(config_of(case)).parameters()]
    parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    states_bytes = 8 * sum(map(torch.numel, parameters))
    if states_bytes > torch.cuda.mem_get_info()[0]:
        return {"not_run": "the states are more than is free"}
    optimizer = bitsandbytes.optim.PagedAdamW32bit(parameters)
    optimizer.step()  # makes the states
    found = {"states_bytes": states_bytes}
    for where in ("resident", "sent_back"):
        if where == "sent_back":
            for state in optimizer.page_mng.paged_tensors:
                bitsandbytes.functional.prefetch_tensor(state, to_cpu=True)
        torch.cuda.synchronize()
        before, began = row_file.card_counts(), time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        seconds, after = time.perf_counter() - began, row_file.card_counts()
        found[where] = {
            "step_seconds": None if row_file.on_stand_in() else seconds,
            "to_device_bytes": after["prefetched_to_device_bytes"] - before["prefetched_to_device_bytes"]
            if after else None,
        }  # fmt: skip
    return found


def check(setting: Setting) -> Result:
    """Measures each placement on a GPU, for the acceptance command."""
    model = TINY if setting.dry_run else "gpt2-xl"
    found = {}
    for placement in PLACEMENTS:
        if not (setting.dry_run and "fused" in placement):
            case = f"{model}: {placement}"
            work = partial(_as_result, on_card, case, setting.device)
            found[placement] = setting.attempt(f"card: {case}", work).values
    if setting.device == "cuda":
        case = TINY if setting.dry_run else CASES["paged"][0]
        setting.attempt(f"paged: {case}", partial(_as_result, paged, case))
    if setting.device == "cuda" and not setting.stand_in:
        for case in CASES["fusion"][: 1 if setting.dry_run else None]:
            setting.attempt(f"fusion: {case}", partial(_fused_result, case))
    if any(not one or "not_run" in one for one in found.values()):
        return Result({}, {"ran": False})
    resident, by_faults, prefetched = (found[placement] for placement in (RESIDENT, BY_FAULTS, PREFETCHED))
    same = {one["digest"] for name, one in found.items() if "fused" not in name}
    fused_ones = {one["digest"] for name, one in found.items() if "fused" in name}
    checks = {
        "outputs equal those of all on the GPU, bit for bit": len(same) == 1 and None not in same,
        "outputs of fused groups equal those of all on the GPU, fused": len(fused_ones) <= 1 and None not in fused_ones,
    }
    if setting.device == "cuda":
        kept_away = resident["total_bytes"] - prefetched["limit_bytes"]
        checks["no more than the limit is resident"] = (
            prefetched["peak_used_bytes"] <= resident["peak_used_bytes"] - kept_away + MOST_BESIDE_BYTES
        )
    values = {}
    if not (setting.stand_in or setting.dry_run):
        values["times_faster_than_faults"] = by_faults["latency_seconds"] / prefetched["latency_seconds"]
        checks[f"prefetch is {LEAST_FASTER}x faster than faults alone"] = (
            values["times_faster_than_faults"] >= LEAST_FASTER
        )
    return Result(values, checks)


def _fused_result(case: str) -> Result:
    values = fused(case, "cuda")
    return Result(values, {"a fused group is the plain one but for rounding": values["relative_difference"] < ROUNDING})


def _as_result(work: Callable[..., dict], *arguments: str) -> Result:
    return Result(work(*arguments), {})


if __name__ == "__main__":
    sys.exit(main())
