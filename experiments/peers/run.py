"""Runs the same training with every peer and with lowmem, under the same caps, and writes a row for each.

On the CPU (`--device cpu`), everything is fp32 and no GPU cap applies: this shows whether a peer runs, and its effect
on the weights.

Exit codes: 0 if every peer ran, 1 if one failed or is not installed, 2 bad usage.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.harness import rows
from experiments.harness.child import Setting, Unavailable, machine_here
from experiments.harness.options import exit_code_of, make_folder, parser_of, under_runs
from experiments.peers.catalogue import PEERS, peers_named
from experiments.peers.table import training_table
from experiments.peers.train import DATA, measure, training_settings
from lowmem.errors import InputError, LowmemError
from lowmem.models.build import check_length, load_config
from lowmem.units import parse_size

RESULTS = Path(__file__).resolve().parent / "results"
NAME = "rows.jsonl"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    return exit_code_of(lambda: run(options, arguments))


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    gpu_limit_bytes = _limit("gpu_limit", options.gpu_limit) if options.device == "cuda" else None
    ram_limit_bytes = _limit("ram_limit", options.ram_limit)
    training = {name: getattr(options, name) for name in ("model", "init", "seq", "batch", "steps")}
    training["data"] = DATA
    check_length(load_config(options.model, options.init), options.seq)
    machine = machine_here()
    if options.device not in machine["names"]:
        raise InputError("PyTorch finds no GPU here; --device cpu runs what runs on a CPU, in fp32")
    common = {
        "section": "peers",
        "caps": {"gpu_bytes": gpu_limit_bytes, "ram_bytes": ram_limit_bytes},
        "command": shlex.join(["python", "-m", "experiments.peers.run", *arguments]),
        "commit": rows.commit(),
        "sources": rows.sources("experiments.peers.train:measure"),
        "device": machine["names"][options.device],
        "versions": machine["versions"],
        "dry_run": False,
        "stand_in": rows.on_stand_in(),
    }
    path, good = options.out / NAME, True

    def add(name: str, started: float, **content) -> bool:
        row = rows.make_row(common, name, time.perf_counter() - started, **content)
        rows.append(path, row)
        print(rows.summary(row), flush=True)
        return row["ok"]

    with tempfile.TemporaryDirectory(prefix="lowmem_peers_") as scratch:
        setting = Setting(options.device, False, gpu_limit_bytes, ram_limit_bytes, Path(scratch), lambda *_: True)
        training_settings(setting, **training)  # what cannot run is refused before a row is written
        make_folder(options.out)
        for peer in peers_named(options.peer):
            name, started = f"{options.model} {peer.name}", time.perf_counter()
            folder = Path(scratch) / peer.name
            folder.mkdir()
            its_own = replace(setting, scratch=folder, record=partial(_detail, add, name, started))
            try:
                result = measure(its_own, peer.name, **training, cache=options.cache)
            except (LowmemError, Unavailable) as error:
                good &= add(name, started, error=str(error))
            else:
                good &= add(name, started, values=result.values, checks=result.checks)
    print(f"\n{training_table(rows.read(path))}\n\n{path} is written")
    return 0 if good else 1


def _detail(add: Callable, name: str, started: float, detail: str, values: dict, checks: dict[str, bool]) -> bool:
    return add(f"{name}: {detail}", started, values=values, checks=checks)


def _limit(name: str, text: str) -> int | None:
    if text == "none":
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise InputError(f"--{name.replace('_', '-')}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("experiments.peers.run", __doc__)
    parser.add_argument("--model", default="gpt2-large", help="hub name or folder (%(default)s)")
    parser.add_argument(
        "--init", choices=("random", "pretrained"), default="random", help="of the weights; random needs no download"
    )
    parser.add_argument(
        "--peer", nargs="+", choices=list(PEERS), default=[], metavar="NAME", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--seq", type=int, default=1024, help="tokens per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences per optimizer step (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (%(default)s)")
    parser.add_argument("--gpu-limit", default="11GiB", metavar="SIZE", help="cap, or none (%(default)s)")
    parser.add_argument("--ram-limit", default="16GiB", metavar="SIZE", help="cap, or none (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=under_runs(RESULTS), help="folder of rows.jsonl (%(default)s)")
    parser.add_argument(
        "--cache", type=Path, help="folder that keeps the reference's weights, 8 bytes per parameter, for other calls"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
