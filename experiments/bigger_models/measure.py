"""Trains slices of GPT-J and T5-11B of their true widths; compares planned memory with measured memory.

    python -m experiments.bigger_models.measure [--only NAME ...] [--ram-limit SIZE] [--disk-limit SIZE] [--out DIR]
    .venv-cuda/bin/python -m stand_in --gpu rtx3090 -- -m experiments.bigger_models.measure       the cases of a card

Adam's states are in the folder for temporary files (TMPDIR), which must not be a RAM disk. `largest` is the largest
slice of GPT-J whose plan keeps to both limits. On the stand-in, the 16-bit weights alone exceed the cap. A case with a
row of these sources is passed over (README.md).
"""

import argparse
import json
import shlex
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import lowmem
from experiments.bigger_models.recipe import SLICE_WARMUP
from experiments.bigger_models.shapes import SHAPES
from experiments.bigger_models.train_gptj import SETTINGS
from experiments.harness import rows as row_file
from experiments.harness.comparison import divergence
from experiments.harness.models import Model
from experiments.harness.options import exit_code_of, make_folder, parser_of, under_runs
from experiments.harness.whole_runs import check_room, ram_of, report_of
from lowmem.errors import InputError, PlanError
from lowmem.planning.plan import Plan
from lowmem.settings import Settings
from lowmem.units import format_size, parse_size

PROGRAM = "experiments.bigger_models.measure"
RESULTS = Path(__file__).resolve().parent / "results"
NAME = "rows.jsonl"
GPTJ, T5 = SHAPES["gpt-j-6b"], SHAPES["t5-11b"]
RECIPES = {"gpt-j-6b": "train_gptj", "t5-11b": "train_t5"}
TRAINED, LEARNED, ON_CARD = "trained", "learned", "card"
STEPS = 2
SEQ, BATCH = 128, 2  # on the CPU
FEW_BLOCKS = {"gpt-j-6b": (2, 3), "t5-11b": (1, 2)}
LEARNING_STEPS, LEARNING_SEQ, LEARNING_BLOCKS = 20, 16, 1
WARMUPS = {"warm-up": SLICE_WARMUP, "none": 0}
RAM_WITHIN = 0.03  # of its prediction
RAM_LIMIT, DISK_LIMIT = "14GiB", "56GiB"
PEAKS = ("gpu_allocated_peak_bytes", "gpu_reserved_peak_bytes")
ONCE = ["--save-every", "1000", "--keep-last", "1", "--eval-batches", "1", "--resume", "never"]


@dataclass(frozen=True)
class CardCase:
    """A run of `shape` with so many blocks, under that cap. `computed`: with values."""

    name: str
    shape: Model
    blocks: int
    seq: int
    batch: int
    gpu_limit: str
    options: tuple[str, ...] = ()
    computed: bool = False


LEARNING = replace(  # all widths but the vocabulary's: its texts are bytes
    GPTJ, fields=GPTJ.fields | {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0}
)
NARROW_FIELDS = {"n_embd": 768, "n_head": 12, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
NARROW = replace(GPTJ, name="narrow", fields=GPTJ.fields | NARROW_FIELDS)
CARD_CASES = (
    CardCase("28 blocks", GPTJ, 28, 1024, 4, "8GiB"),
    CardCase("8 blocks, disk", GPTJ, 8, 128, 4, "3500MiB", ("--ram-limit", "20GiB")),
    CardCase("narrow", NARROW, 28, 32, 4, "368MiB", ("--micro-batch", "1"), computed=True),
)


def slice_settings(folder: Path, ram_limit: str) -> Settings:
    """Returns the settings of a slice on the CPU, whose config.json is in `folder`."""
    return Settings(
        model=str(folder), init="random", seq=SEQ, batch=BATCH, device="cpu", steps=STEPS, states="disk",
        states_folder=str(folder / "states"), ram_limit_bytes=parse_size(ram_limit), keep_last=1, export_dtype="bf16",
    )  # fmt: skip


def disk_bytes(plan: Plan) -> int:
    """Returns the bytes on the disk at the end of a run that saves once."""
    return sum(plan.disk[name] for name in ("checkpoints", "states", "export"))


def too_large(blocks: int, ram_limit: str, disk_limit_bytes: int) -> str | None:
    """Returns the limit that a slice of so many blocks exceeds: "RAM", "disk" or None."""
    with tempfile.TemporaryDirectory(prefix="lowmem-") as folder:
        try:
            plan = lowmem.plan(slice_settings(GPTJ.write(Path(folder), blocks), ram_limit))
        except PlanError:
            return "RAM"
    return "disk" if disk_bytes(plan) > disk_limit_bytes else None


def largest_slice(ram_limit: str, disk_limit_bytes: int) -> tuple[int, str | None]:
    """Returns the largest slice's number of blocks under both limits, and the limit that one more block exceeds, or
    None if the model has no more. Raises InputError if one block is too large."""
    known: dict[int, str | None] = {}

    def reason(blocks: int) -> str | None:
        if blocks not in known:
            known[blocks] = too_large(blocks, ram_limit, disk_limit_bytes)
        return known[blocks]

    most = GPTJ.fields["n_layer"]
    blocks = bisect_left(range(1, most + 1), True, key=lambda count: reason(count) is not None)
    if not blocks:
        raise InputError(f"a slice of one block is too large for this {reason(1)}: give more")
    return blocks, reason(blocks + 1) if blocks < most else None


def trained(shape: Model, blocks: int, ram_limit: str) -> dict:
    """Returns the values of a slice's row. Raises LowmemError if the disk is too small or the run fails."""
    name = f"{blocks} blocks of {shape.name}"
    with tempfile.TemporaryDirectory(prefix="lowmem-") as folder:
        config = shape.write(Path(folder) / "config", blocks)
        planned = lowmem.plan(slice_settings(config, ram_limit))
        check_room(folder, disk_bytes(planned), name)
        words = [
            *("--blocks", str(blocks), "--seq", str(SEQ), "--batch", str(BATCH), "--steps", str(STEPS)),
            *("--device", "cpu", *ONCE),
            *("--ram-limit", ram_limit, "--export-dtype", "bf16", "--states", "disk"),
        ]
        words += ["--target-tokens", str(SEQ // 2)] if shape is T5 else []
        program = ["-m", f"experiments.bigger_models.{RECIPES[shape.name]}", *words]
        states = ["--states-folder", str(Path(folder) / "states")]
        report = report_of([sys.executable, *program, *states], Path(folder) / "run", name)
    found = ram_of(report)
    error = found["predicted_ram_peak_bytes"] / found["ram_peak_bytes"] - 1
    return found | {
        "shape": shape.name,
        "blocks": blocks,
        "seq": SEQ,
        "batch": BATCH,
        "ram_limit_bytes": parse_size(ram_limit),
        "disk": report["plan"]["disk"],
        "ram_phases": report["ram_phases"],
        "loss": [report["loss"][which] for which in ("first", "last")],
        "checks": {
            "RAM under its cap": found["ram_peak_bytes"] <= parse_size(ram_limit),
            "RAM within 3% of its prediction": abs(error) <= RAM_WITHIN,
            "the training does not diverge": divergence([report["loss"]["first"], report["loss"]["last"]]) is None,
        },
        "run": shlex.join(["python", *program, "--states-folder", "DIR"]),
    }


def learned(warmup_steps: float) -> dict:
    """Returns the values of a row of LEARNING, trained on one batch. Raises LowmemError if the run fails."""
    with tempfile.TemporaryDirectory(prefix="lowmem-") as folder:
        place = Path(folder)
        words = [
            *("-m", "lowmem", "train", "--model", str(LEARNING.write(place / "config", LEARNING_BLOCKS))),
            *("--init", "random", "--seq", str(LEARNING_SEQ), "--batch", str(BATCH), "--device", "cpu", *ONCE),
            *("--steps", str(LEARNING_STEPS), "--fixed-batch", "--lr", str(SETTINGS.lr)),
            *("--warmup-steps", str(warmup_steps), "--export-dtype", "bf16"),
        ]
        report = report_of([sys.executable, *words], place / "run", "a slice that learns")
        losses = [loss for loss, _ in rows_of(place / "run")]
    return {
        "shape": GPTJ.name,
        "blocks": LEARNING_BLOCKS,
        "parameters": report["plan"]["parameters"],
        "seq": LEARNING_SEQ,
        "batch": BATCH,
        "lr": SETTINGS.lr,
        "warmup_steps": warmup_steps,
        "losses": losses,
        "step_seconds": report["measured"]["step_seconds"],
        "checks": {"the loss falls": losses[-1] < losses[0]} if warmup_steps else {},
    }


def on_card(case: CardCase) -> dict:
    """Returns the values of a case's row, run on the stand-in. Raises LowmemError if a run fails."""
    card = "rtx3090"
    with tempfile.TemporaryDirectory(prefix="lowmem-") as folder:
        place = Path(folder)
        config = case.shape.write(place / "config", case.blocks)
        common = ["--seq", str(case.seq), "--batch", str(case.batch), "--steps", str(STEPS), *ONCE, *case.options]
        common += ["--states-folder", str(place / "states")] if "--ram-limit" in case.options else []
        if case.computed:
            program = ["-m", "lowmem", "train", "--model", str(config), "--init", "random", *common]
        else:
            program = ["-m", "experiments.bigger_models.on_card", "--blocks", str(case.blocks), *common]
        values = ["--values"] if case.computed else []
        command = [sys.executable, "-m", "stand_in", "--gpu", card, *values, "--", *program]
        report = report_of([*command, "--gpu-limit", case.gpu_limit], place / "run", case.name)
        losses = rows_of(place / "run")
        if case.computed:
            report_of([*command, "--gpu-limit", "none"], place / "free", case.name)
            free = rows_of(place / "free")
    plan, measured = report["plan"], report["measured"]
    weights_bytes = 2 * plan["parameters"]
    cap_bytes = parse_size(case.gpu_limit)
    checks = {
        "16-bit weights are more than the cap": weights_bytes > cap_bytes,
        "reserved under the cap": measured["gpu_reserved_peak_bytes"] <= cap_bytes,
        "nothing had to be laid out anew": not report["out_of_memory"],
    }
    if case.computed:
        checks["losses and norms are those without a cap"] = losses == free
        checks["the training does not diverge"] = divergence([loss for loss, _ in losses]) is None
    return {
        "card": card,
        "computed": case.computed,
        "parameters": plan["parameters"],
        "blocks": case.blocks,
        "seq": case.seq,
        "batch": case.batch,
        "weights_bytes": weights_bytes,
        "gpu_limit_bytes": cap_bytes,
        "choice": plan["choice"],
        "disk": plan["disk"],
        "predicted": {name: plan["predicted"][name] for name in PEAKS},
        "measured": {name: measured[name] for name in PEAKS},
        "losses": losses if case.computed else None,
        "checks": checks,
    }


def rows_of(run: Path) -> list[list[float]]:
    """Returns each step's loss and norm of the gradient."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [[row["loss"], row["grad_norm"]] for row in rows if "loss" in row]


def sources() -> str:
    own = (
        f"experiments/bigger_models/{name}.py" for name in ("shapes", "recipe", *RECIPES.values(), "on_card", "measure")
    )
    return row_file.digest("lowmem/**/*.py", "experiments/harness/whole_runs.py", "experiments/harness/models.py", *own)


def line(row: dict) -> str:
    failed = [name for name, holds in row["checks"].items() if not holds]
    verdict = f"FAILED ({', '.join(failed)})" if failed else "ok"
    if row["kind"] == LEARNED:
        return f"{row['name']}: loss {row['losses'][0]:.2f} to {row['losses'][-1]:.2f}  {verdict}"
    if row["kind"] == TRAINED:
        sizes = [row["predicted_ram_peak_bytes"], row["ram_peak_bytes"]]
    else:
        sizes = [row[which]["gpu_reserved_peak_bytes"] for which in ("predicted", "measured")]
    said, was = map(format_size, sizes)
    return f"{row['name']}: {said} predicted, {was} measured  {verdict}"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: run(options, arguments))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    work = _work(options)
    chosen = [name for name, *_ in work if any(text in name for text in options.only)]
    if not chosen:
        names = "; ".join(name for name, *_ in work)
        raise InputError(f"--only {' '.join(options.only)}: no case here has that in its name; there are {names}")
    make_folder(options.out)
    path, failed = options.out / NAME, 0
    common = row_file.made_by(PROGRAM, arguments) | {"sources": sources()}
    done = {row["name"] for row in row_file.read(path) if row.get("sources") == common["sources"]}
    for name, kind, values in work:
        if name in done or name not in chosen:
            continue
        row = {"kind": kind, "name": name} | values() | common
        row_file.append(path, row)
        print(line(row), flush=True)
        failed += not all(row["checks"].values())
    return 1 if failed else 0


def _work(options: argparse.Namespace) -> list[tuple[str, str, Callable[[], dict]]]:
    if row_file.on_stand_in():
        return [(f"card: {case.name}", ON_CARD, lambda case=case: on_card(case)) for case in CARD_CASES]

    def largest() -> dict:
        blocks, reason = largest_slice(options.ram_limit, parse_size(options.disk_limit))
        limits = {"disk_limit_bytes": parse_size(options.disk_limit), "one_block_more_is_too_large_for": reason}
        return trained(GPTJ, blocks, options.ram_limit) | limits

    slices = [
        (
            f"slice: {blocks} blocks of {shape.name}", TRAINED,
            lambda shape=shape, blocks=blocks: trained(shape, blocks, options.ram_limit),
        )
        for shape in (GPTJ, T5) for blocks in FEW_BLOCKS[shape.name]
    ]  # fmt: skip
    learning = [
        (f"learns: {name}", LEARNED, lambda warmup=warmup: learned(warmup))
        for name, warmup in WARMUPS.items()
    ]  # fmt: skip
    return [*slices, *learning, ("slice: largest", TRAINED, largest)]


def _size(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("--only", nargs="+", default=[""], metavar="NAME", help="parts of the names of cases (all)")
    add("--ram-limit", type=_size, default=RAM_LIMIT, metavar="SIZE", help="of runs on the CPU (%(default)s)")
    add("--disk-limit", type=_size, default=DISK_LIMIT, metavar="SIZE", help="of the largest slice (%(default)s)")
    add("--out", type=Path, default=under_runs(RESULTS), metavar="DIR", help="folder of rows (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
