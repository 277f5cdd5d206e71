"""Predicts the GPU memory of training for the table's models, and with --measure runs them on the GPU that is here.

Writes rows.jsonl (rows of the same cases are replaced), report.json and pictures into --out.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

from experiments.harness.models import MODELS
from experiments.harness.options import exit_code_of, make_folder, parser_of, positive, size, under_runs
from experiments.harness.rows import made_by, plan_sources
from experiments.memory_estimation import rows as row_file
from experiments.memory_estimation.estimate import LARGEST_BATCH, LOWMEM, SMALLEST, lowmem_row, plain_rows, smallest_row
from experiments.memory_estimation.measure import measured
from experiments.memory_estimation.pictures import draw_batches, draw_sizes
from experiments.memory_estimation.published import LLMEM, SEQ, V100, accelerate_answer, llmem_row
from experiments.memory_estimation.table import summary
from lowmem.cudasim.gpus import Card, card_named
from lowmem.device import set_environment
from lowmem.errors import InputError
from lowmem.models.build import most_positions
from lowmem.run.metrics import write_json
from lowmem.units import format_size

PROGRAM = "experiments.memory_estimation.run"
TRAININGS = ("fp32", "bf16", LOWMEM)
METHODS = (*TRAININGS, SMALLEST)
LOWMEM_BATCHES = (1, LARGEST_BATCH)
RESULTS = row_file.FOLDER / "results"


def sources() -> str:
    return plan_sources("experiments/memory_estimation/*.py", "experiments/harness/models.py")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: run(options, arguments))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    limit_bytes = options.limit
    card = _card_here() if options.measure else card_named(options.gpu)
    shared = {"sources": sources()} | made_by(PROGRAM, arguments)
    make_folder(options.out)
    path = options.out / row_file.NAME
    everything = row_file.read(path)
    tasks = [(name, options.methods, options.seq, card, limit_bytes) for name in options.only or MODELS]
    # Spawned: a process that has begun with CUDA (to see which card is here) must not be forked.
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), initializer=_prepare) as pool:
        for new in pool.map(_predicted, tasks):
            new = [row | shared for row in new]
            for row in new:
                print(_line(row), flush=True)
            everything = row_file.replace(path, new)
            for row in _to_measure(new) if options.measure else ():
                case = {name: row[name] for name in row_file.KEY} | {"choice": row.get("choice")}
                result = case | {"kind": "measured"} | measured(case) | shared
                print(_line(result), flush=True)
                everything = row_file.replace(path, [result])
    write_json(options.out / "report.json", summary(everything) | {"rows": row_file.NAME})
    draw_batches(everything, options.out / "memory.png")
    draw_sizes(everything, options.out / "sizes.png")
    print(f"{path}, report.json and the pictures are written")
    return 0


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process, not its task alone
    torch.set_num_threads(1)
    set_environment()
    transformers.logging.set_verbosity_error()  # it warns of losses and token ids that no allocation depends on


def _predicted(task: tuple) -> list[dict]:
    name, methods, lengths, card, limit_bytes = task
    model, rows = MODELS[name], []
    for seq in lengths:
        longest = most_positions(model.config())
        if longest is not None and seq > longest:
            continue
        for method in methods:
            case = {"method": method, "seq": seq, "limit_bytes": limit_bytes, "card": card.name}
            if method == LOWMEM:
                rows += [case | row for row in _lowmem(name, seq, card, limit_bytes)]
            elif method == SMALLEST and seq == max(lengths):  # takes long, and says little more of shorter ones
                rows += [case | {"limit_bytes": None} | row for row in _smallest(name, seq, card)]
            elif method != SMALLEST:
                rows += [case | row for row in plain_rows(model.config(), seq, method, card, limit_bytes)]
    rows.append({"method": "accelerate", "answer": accelerate_answer(model.config())})
    if name in LLMEM:
        rows.append({"method": "llmem", "seq": SEQ, "card": V100.name} | llmem_row(name))
    return [{"kind": "predicted", "model": name} | row for row in rows]


def _lowmem(name: str, seq: int, card: Card, limit_bytes: int) -> Iterable[dict]:
    found = []
    for batch in LOWMEM_BATCHES:
        try:
            found.append(lowmem_row(MODELS[name].config(), seq, batch, limit_bytes, card))
        except InputError as error:
            return [{"batch": None, "refused": str(error)}]
        if not found[-1]["fits"]:
            break
    return found


def _smallest(name: str, seq: int, card: Card) -> list[dict]:
    try:
        return [smallest_row(MODELS[name].config(), seq, batch, card) for batch in LOWMEM_BATCHES]
    except InputError as error:
        return [{"batch": None, "refused": str(error)}]


def _to_measure(rows: list[dict]) -> Iterable[dict]:
    # Cases that should not fit as well, for a refusal can be wrong too.
    return [row for row in rows if row["method"] in TRAININGS and "refused" not in row]


def _card_here() -> Card:
    if not torch.cuda.is_available():
        raise InputError("--measure needs a GPU, and PyTorch finds none here; without it everything is predicted")
    properties = torch.cuda.get_device_properties(0)
    return replace(
        card_named("a100"),  # its speeds, which change no prediction of memory
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
    )


def _line(row: dict) -> str:
    case = f"{row['kind']:<9} {row['model']:<22} {row['method']:<10}"
    if row["method"] == "accelerate":
        answer = row["answer"]
        return f"{case} " + (
            format_size(answer["float32"]["training_with_adam"]) if answer else "accelerate is not installed"
        )
    if "refused" in row or row.get("error") and row["kind"] == "measured":
        return f"{case} {row.get('refused') or row['error']}"
    if "smallest_cap_bytes" in row:
        needs = format_size(row["smallest_cap_bytes"])
        verdict = "needs a cap of at least" if row["method"] == SMALLEST else "does not fit; the smallest cap is"
        return f"{case} {row['seq']:>5} x {row['batch']:<3} {verdict} {needs}"
    if "allocated_peak_bytes" not in row:
        return f"{case} {row['seq']:>5} x {row['batch']:<3} out of memory"
    verdict = "" if row.get("fits", True) else "  does not fit"
    sizes = " / ".join(format_size(row[f"{kind}_peak_bytes"]) for kind in ("allocated", "reserved"))
    return f"{case} {row['seq']:>5} x {row['batch']:<3} {sizes}{verdict}"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(all)")
    parser.add_argument("--seq", nargs="+", type=positive, default=[512, 1024], help="tokens per sequence (512 1024)")
    parser.add_argument("--limit", type=size, default="16GiB", help="cap of the GPU's allocator (%(default)s)")
    parser.add_argument("--gpu", default="a100", help="the card that is simulated under that cap (%(default)s)")
    parser.add_argument("--measure", action="store_true", help="run the cases on the GPU here; never run on one yet")
    parser.add_argument("--jobs", type=positive, default=min(2, os.cpu_count() or 1), help="processes (%(default)s)")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), help="folder to write to (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
