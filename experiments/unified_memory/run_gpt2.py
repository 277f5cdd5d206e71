"""Runs GPT-2 or GPT-3 shapes with their weights in managed memory: `python -m experiments.unified_memory.run_gpt2`.

    python -m experiments.unified_memory.run_gpt2 --model gpt2-xl --enable-prefetch --physical-limit 3GiB
    python -m experiments.unified_memory.run_gpt2 --model gpt2-small --device cpu --fusion all --backward

One sequence at a time: forward, with --backward, or --generate N tokens. Under --out: report.json and resident.png,
bytes on the GPU by access. On the CPU the passes are the same, and nothing moves.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from experiments.harness import rows as row_file
from experiments.harness import samples
from experiments.harness.options import exit_code_of, make_folder
from experiments.unified_memory import fusion, library, passes, schedule
from experiments.unified_memory.options import DTYPES, SEQ, SMALLEST, check, parser
from experiments.unified_memory.picture import draw_resident
from experiments.unified_memory.placement import (
    EXPLICIT,
    MANAGED,
    RESIDENT,
    ExplicitPlacement,
    ManagedPlacement,
    Placement,
)
from experiments.unified_memory.schedule import BY_DRIVER, BY_FAULTS, COPIED, PREFETCHED
from experiments.unified_memory.shapes import Pieces, config_of, pieces_of
from lowmem.data.tokenizer import load_tokenizer
from lowmem.errors import InputError, LowmemError, first_line
from lowmem.models.build import build_model, check_length, load_config
from lowmem.models.load import random_weights, read_weights
from lowmem.run.metrics import write_json
from lowmem.units import format_size

PROGRAM = "experiments.unified_memory.run_gpt2"
REPORT, PICTURE = "report.json", "resident.png"


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        report = run(options)
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except torch.OutOfMemoryError as error:
        print(f"error: the GPU's memory ran out: {first_line(error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise
        print(f"error: --fusion: torch.compile says: {first_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    print(_said(report))
    print(f"see {options.out / REPORT}")
    return 0


def run(options: argparse.Namespace) -> dict:
    """Runs passes of a model, writes the files under --out, and returns the report."""
    device = device_of(options.device)
    check(options, device)
    config = config_asked_for(options)
    inputs, tokenizer = inputs_of(options, config)
    model, dtype = build_model(config), DTYPES[options.dtype]
    model.train(options.backward)
    model.set_attn_implementation("sdpa")
    pieces = pieces_of(model, dtype)
    weights = weights_of(options, config)
    fusion.fuse(model, options.fusion)
    placement, planned = placed(options, model, pieces, dtype, device)
    # All refusals come before this, so that a refused run leaves another run's files unchanged.
    make_folder(options.out)
    for name in (REPORT, PICTURE):
        remove_old(options.out / name)

    torch.manual_seed(options.seed)  # of dropout, where the model of --weights has some
    torch.backends.cudnn.benchmark = options.enable_cudnn_benchmark
    placement.load(weights)
    placement.begin()
    work = passes.generate if options.generate else passes.forward_and_backward if options.backward else passes.forward
    one_pass = partial(work, model, inputs.to(device), options)
    seconds, result = passes.timed(one_pass, options.warmups + options.runs, device)
    kept = seconds[options.warmups :]
    computed = [result, *(parameter.grad for parameter in model.parameters() if options.backward)]
    if row_file.computes_values() and not all(tensor.isfinite().all() for tensor in computed):
        raise LowmemError("a result is not finite, so it can be compared with no other: give another --dtype or model")
    generated = result.tolist()[0] if options.generate else None
    found = {
        "device": str(device),
        "generated": generated,
        "text": tokenizer.decode(generated) if tokenizer and generated else None,
        "digest": passes.digest(computed),
        "latency_seconds": statistics.median(kept),
        "latencies_seconds": kept,
        "moves": [vars(move) for move in placement.moves],
        "advice": library.attributes(placement.memory) if isinstance(placement, ManagedPlacement) else None,
        "memory": passes.memory_of(device),
        "used_bytes_by_access": passes.used_over_a_pass(model, one_pass, len(planned.accesses), device),
    }
    report = asked(options) | planned_of(options, planned) | found | row_file.made_by(PROGRAM, sys.argv[1:])
    draw_resident(report, options.out / PICTURE)
    write_json(options.out / REPORT, report)
    return report


def device_of(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no GPU here; --device cpu runs everything but managed memory")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def config_asked_for(options: argparse.Namespace) -> PretrainedConfig:
    """Returns the config. Raises InputError for another structure than GPT-2's."""
    if options.weights is None:
        return config_of(options.model or SMALLEST)
    config = load_config(options.weights, "pretrained")
    if config.model_type != "gpt2":
        raise InputError(f"{options.weights} is of type {config.model_type}; this runs GPT-2's structure alone")
    return config


def weights_of(options: argparse.Namespace, config: PretrainedConfig) -> Iterable[tuple[str, Tensor]]:
    """Yields the weights by name; none if nothing is computed."""
    if options.weights is not None:
        return read_weights(build_model(config), options.weights)
    # 13 billion random ones would take many minutes.
    return random_weights(config, options.seed) if row_file.computes_values() else iter(())


def placed(
    options: argparse.Namespace, model: nn.Module, pieces: Pieces, dtype: torch.dtype, device: torch.device
) -> tuple[Placement, schedule.Schedule]:
    """Places the model's weights by a schedule; on the CPU none moves. Raises InputError if there is no room."""
    sizes = pieces.sizes * (2 if options.backward else 1)
    limit = options.physical_limit or sum(sizes)
    ahead = 0 if options.placement == MANAGED and not options.enable_prefetch else options.ahead
    in_slots = options.placement == EXPLICIT
    planned = schedule.schedule(sizes, pieces.accesses(options.backward), limit, ahead, in_slots=in_slots)
    common = (model, pieces, dtype, device, options.backward)
    if device.type == "cpu" or options.placement == RESIDENT:
        return Placement(*common), planned
    if in_slots:
        return ExplicitPlacement(*common, schedule=planned), planned
    library.check_room(sum(sizes), options.physical_limit, options.oversubscribe)
    return ManagedPlacement(
        *common, schedule=planned, prefetch=options.enable_prefetch, streams=options.num_streams,
        driven=options.oversubscribe,
    ), planned  # fmt: skip


def asked(options: argparse.Namespace) -> dict:
    return {
        "model": options.weights or options.model or SMALLEST,
        "placement": options.placement,
        "prefetch": options.enable_prefetch,
        "oversubscribe": options.oversubscribe,
        "fusion": options.fusion,
        "compiled": options.fusion != "none" and fusion.compiles(),
        "backward": options.backward,
        "physical_limit_bytes": options.physical_limit,
    }


def planned_of(options: argparse.Namespace, planned: schedule.Schedule) -> dict:
    total = sum(planned.sizes)
    limit = options.physical_limit or total
    resident = [planned.resident_bytes(number) for number in range(len(planned.accesses))]
    if options.oversubscribe and torch.cuda.is_available():
        # The driver fills all of the GPU's memory.
        limit = min(total, torch.cuda.mem_get_info()[1])
        resident = [min(size, limit) for size in resident]
    return {
        "weights_bytes": total // (2 if options.backward else 1),
        "planned_resident_bytes": resident,
        "kept_pieces": sorted(planned.kept),
        "accesses_ahead": planned.ahead,
        "planned_traffic": schedule.traffic(planned.sizes, planned.accesses, limit, options.ahead, options.backward),
    }


def inputs_of(options: argparse.Namespace, config: PretrainedConfig) -> tuple[Tensor, PreTrainedTokenizerBase | None]:
    """Returns token numbers [1, T] of --prompt and its tokenizer, else bytes of this repository and None. Raises
    InputError if there are more than the model's positions."""
    tokenizer = None
    if options.prompt is None:
        if config.vocab_size < 256:
            raise InputError(
                f"{options.weights} knows {config.vocab_size} tokens, fewer than there are bytes: give --prompt"
            )
        inputs = samples.source_bytes(options.seq or SEQ - (options.generate or 0))[:1].long()
    else:
        tokenizer = load_tokenizer(options.weights, "pretrained", config.vocab_size)
        inputs = torch.tensor([tokenizer.encode(options.prompt)], dtype=torch.int64)
    if not inputs.numel():
        raise InputError("--prompt has no token: give some text")
    if not options.generate:
        check_length(config, inputs.shape[1])
    elif inputs.shape[1] + options.generate > config.n_positions:
        raise InputError(
            f"--generate {options.generate} behind {inputs.shape[1]} tokens is more than the {config.n_positions} "
            "positions of this model"
        )
    return inputs, tokenizer


def remove_old(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} is in the way: {error.strerror}") from error


def _said(report: dict) -> str:
    sizes, here = report["planned_resident_bytes"], report["device"] != "cpu"
    prefetched, what = report["prefetch"], "weights and gradients" if report["backward"] else "weights"
    total = report["weights_bytes"] * (2 if report["backward"] else 1)
    did = f"{len(report['generated'])} tokens" if report["generated"] else "a pass"
    managed = BY_DRIVER if report["oversubscribe"] else PREFETCHED if prefetched else BY_FAULTS
    this = {MANAGED: managed, EXPLICIT: COPIED}.get(report["placement"])
    lines = [
        f"{report['model']} on {report['device']}, {report['placement']}"
        + (", prefetched" if prefetched else "") + f", fusion {report['fusion']}: "
        f"{report['latency_seconds'] * 1e3:,.1f} ms for {did} (the median of {len(report['latencies_seconds'])})",
        f"{what} {format_size(total)}; at most {format_size(max(sizes))} "
        + ("are" if here else "would be") + f" on the GPU, {len(report['kept_pieces'])} pieces always",
        f"a forward{' and backward' if report['backward'] else ''} {'moves' if here else 'would move'}, to the GPU "
        "and back:",
    ]  # fmt: skip
    for name, moved in report["planned_traffic"].items():
        faults = f", {moved['faults']:,} faults" if moved["faults"] else ""
        mark = " (this run)" if name == this and here else ""
        lines.append(f"  {name}: {format_size(moved['to_device'])}, {format_size(moved['to_host'])}{faults}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
