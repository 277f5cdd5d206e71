"""Runs GPT-2 or GPT-3 shapes with their weights in managed memory: `python -m experiments.unified_memory.run_gpt2`.

    python -m experiments.unified_memory.run_gpt2 --model gpt2-xl --enable-prefetch --physical-limit 3GiB
    python -m experiments.unified_memory.run_gpt2 --model gpt2-small --device cpu --fusion all --backward

One sequence at a time, forward alone, with --backward, or --generate N tokens. Under --out: report.json, and
resident.png, bytes on the GPU by access: by the schedule, and as CUDA counts them in one more pass, which is not timed.
On the CPU, where everything is in one memory, it runs the same passes and says what a GPU with this limit would have to
move.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from experiments.harness import rows as row_file
from experiments.harness import samples
from experiments.harness.options import SEEDS, at_least, make_folder
from experiments.unified_memory import fusion, library, schedule
from experiments.unified_memory.picture import draw_resident
from experiments.unified_memory.placement import (
    EXPLICIT,
    MANAGED,
    RESIDENT,
    ExplicitPlacement,
    ManagedPlacement,
    Placement,
)
from experiments.unified_memory.shapes import SHAPES, Pieces, config_of, hooked, pieces_of
from lowmem.data.tokenizer import load_tokenizer
from lowmem.errors import InputError, LowmemError
from lowmem.models.build import build_model, check_length, load_config
from lowmem.models.load import random_weights, read_weights
from lowmem.run.log import write_json
from lowmem.units import format_size, parse_size

PROGRAM = "experiments.unified_memory.run_gpt2"
REPORT, PICTURE = "report.json", "resident.png"
SMALLEST = "gpt2-small"
SEQ = 1024
BY_FAULTS, PREFETCHED, COPIED = "managed, by faults", "managed, prefetched", "explicit copies"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        report = run(options)
    except LowmemError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except torch.OutOfMemoryError as error:
        print(f"error: the GPU's memory ran out: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except Exception as error:
        if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            raise
        print(f"error: --fusion: torch.compile says: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    print(_said(report))
    print(f"see {options.out / REPORT}")
    return 0


def run(options: argparse.Namespace) -> dict:
    """Trains nothing: passes, and what they took. Writes what is under --out, and returns the report."""
    device = device_of(options.device)
    check(options, device)
    given = options.weights is not None
    config = load_config(options.weights, "pretrained") if given else config_of(options.model or SMALLEST)
    if config.model_type != "gpt2":
        raise InputError(f"{options.weights} is of type {config.model_type}; this runs GPT-2's structure alone")
    inputs, tokenizer = inputs_of(options, config.vocab_size)
    if not options.generate:
        check_length(config, inputs.shape[1])
    elif inputs.shape[1] + options.generate > config.n_positions:
        raise InputError(
            f"--generate {options.generate} behind {inputs.shape[1]} tokens is more than the {config.n_positions} "
            "positions of this model"
        )
    model, dtype = build_model(config), DTYPES[options.dtype]
    model.train(options.backward)
    model.set_attn_implementation("sdpa")
    pieces = pieces_of(model, dtype)
    accesses = pieces.accesses(options.backward)
    sizes = pieces.sizes * (2 if options.backward else 1)
    limit = options.physical_limit or sum(sizes)
    ahead = 0 if options.placement == MANAGED and not options.enable_prefetch else options.ahead
    planned = schedule.schedule(sizes, accesses, limit, ahead, in_slots=options.placement == EXPLICIT)
    weights = read_weights(build_model(config), options.weights) if given else random_weights(config, options.seed)
    fusion.fuse(model, options.fusion)
    placement = placed(options, model, pieces, dtype, device, planned)
    # All refusals come before this, so that a refused run leaves another run's files unchanged.
    make_folder(options.out)
    for name in (REPORT, PICTURE):
        remove_old(options.out / name)

    torch.manual_seed(options.seed)  # of dropout, where the model of --weights has some
    torch.backends.cudnn.benchmark = options.enable_cudnn_benchmark
    placement.load(weights)
    placement.begin()
    inputs = inputs.to(device)
    work = generate if options.generate else forward_and_backward if options.backward else forward
    one_pass = partial(work, model, inputs, options)
    seconds, result = timed(one_pass, options.warmups + options.runs, device)
    kept = seconds[options.warmups :]
    generated = result.tolist()[0] if options.generate else None
    report = {
        "model": options.weights or options.model or SMALLEST,
        "device": str(device),
        "placement": options.placement,
        "prefetch": options.enable_prefetch,
        "fusion": options.fusion,
        "backward": options.backward,
        "generated": generated,
        "text": tokenizer.decode(generated) if tokenizer and generated else None,
        "digest": digest([result, *(parameter.grad for parameter in model.parameters() if options.backward)]),
        "latency_seconds": statistics.median(kept),
        "latencies_seconds": kept,
        "weights_bytes": sum(pieces.sizes),
        "physical_limit_bytes": options.physical_limit,
        "planned_resident_bytes": [planned.resident_bytes(number) for number in range(len(accesses))],
        "kept_pieces": sorted(planned.kept),
        "accesses_ahead": planned.ahead,
        "planned_traffic": traffic(sizes, accesses, limit, options.ahead, options.backward),
        "moves": [vars(move) for move in placement.moves],
        "advice": library.attributes(placement.memory) if isinstance(placement, ManagedPlacement) else None,
        "memory": memory_of(device),
        "used_bytes_by_access": used_over_a_pass(model, one_pass, len(accesses)) if device.type == "cuda" else [],
    } | row_file.made_by(PROGRAM, sys.argv[1:])
    draw_resident(report, options.out / PICTURE)
    write_json(options.out / REPORT, report)
    return report


def device_of(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch sees no GPU here; --device cpu runs everything but managed memory")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def check(options: argparse.Namespace, device: torch.device) -> None:
    """Raises InputError for options that contradict each other."""
    if options.model and options.weights is not None:
        raise InputError("--model has random weights, and --weights is a model of its own: give one of them")
    if options.fusion != "none" and device.type == "cuda" and "--values" in row_file.through_stand_in():
        raise InputError(f"--fusion {options.fusion}: the stand-in computes no values of what is compiled")
    if options.num_streams > 1 and not options.enable_prefetch:
        raise InputError(f"--num-streams {options.num_streams} are of prefetches: give --enable-prefetch")
    if options.backward and options.seq == 1:
        raise InputError("--backward trains a token on those before it: give --seq 2 or more")
    if options.prompt is not None and (options.weights is None or not options.generate):
        raise InputError("--prompt is for --generate with the tokenizer of --weights: give both")
    if options.prompt is not None and options.seq:
        raise InputError("--seq is the length of a sequence of bytes: leave it out with --prompt")
    if options.generate and options.generate >= SEQ and options.seq is None and options.prompt is None:
        raise InputError(f"--generate {options.generate} leaves nothing of {SEQ} tokens to begin with: give --seq")
    if options.generate and options.backward:
        raise InputError("--generate has no backward: leave out one of them")
    if options.enable_prefetch and options.placement != MANAGED:
        raise InputError(f"--enable-prefetch is for managed memory; --placement is {options.placement}")
    if options.placement == EXPLICIT and options.backward:
        raise InputError("--placement explicit streams forwards alone; train_gpt2_large.py streams whole steps")
    if options.placement == RESIDENT and options.physical_limit and device.type == "cuda":
        raise InputError("--placement resident has everything on the GPU: leave out --physical-limit")


def placed(
    options: argparse.Namespace, model: nn.Module, pieces: Pieces, dtype: torch.dtype, device: torch.device,
    planned: schedule.Schedule,
) -> Placement:  # fmt: skip
    """Places the model's weights. The CPU has only one memory, so nothing moves there."""
    common = (model, pieces, dtype, device, options.backward)
    if device.type == "cpu" or options.placement == RESIDENT:
        return Placement(*common)
    if options.placement == EXPLICIT:
        return ExplicitPlacement(*common, schedule=planned)
    return ManagedPlacement(*common, schedule=planned, prefetch=options.enable_prefetch, streams=options.num_streams)


def inputs_of(options: argparse.Namespace, vocabulary_size: int) -> tuple[Tensor, PreTrainedTokenizerBase | None]:
    """Returns token numbers [1, T], and the tokenizer if --prompt needs one; else they are bytes of this repository."""
    if options.prompt is None:
        if vocabulary_size < 256:
            raise InputError(
                f"{options.weights} knows {vocabulary_size} tokens, fewer than there are bytes: give --prompt"
            )
        seq = options.seq or SEQ - (options.generate or 0)
        return samples.source_bytes(seq)[:1].long(), None
    tokenizer = load_tokenizer(options.weights, "pretrained", vocabulary_size)
    inputs = torch.tensor([tokenizer.encode(options.prompt)], dtype=torch.int64)
    if not inputs.numel():
        raise InputError("--prompt has no token: give some text")
    return inputs, tokenizer


@torch.no_grad()
def forward(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> Tensor:
    """Logits of the last token [1, V]."""
    return model(inputs, use_cache=False, logits_to_keep=1).logits[:, -1]


def forward_and_backward(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> Tensor:
    """Returns the mean loss [1]. Its gradients accumulate."""
    logits = model(inputs, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1].float(), inputs[0, 1:])
    loss.backward()
    return loss.detach()[None]


@torch.no_grad()
def generate(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> Tensor:
    """Returns the likeliest next tokens, int64 [1, N]."""
    cache, found, next_inputs = None, [], inputs
    for _ in range(options.generate):
        output = model(next_inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, next_inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        found.append(next_inputs)
    return torch.cat(found, 1)


def timed(work, times: int, device: torch.device) -> tuple[list[float], Tensor]:
    """Returns the seconds of each call, and the last result."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, result


def traffic(
    sizes: Sequence[int], accesses: Sequence[schedule.Access], limit_bytes: int, ahead: int, backward: bool
) -> dict[str, dict[str, int]]:
    """Returns bytes and faults of a pass for each placement; explicit copies only if their slots fit into the limit."""
    plan = partial(schedule.schedule, sizes, accesses, limit_bytes)
    found = {
        "managed, left to the driver": schedule.by_faults(sizes, accesses, limit_bytes),
        BY_FAULTS: schedule.evicted_only(plan(ahead=0)),
        PREFETCHED: schedule.prefetched(plan(ahead=ahead)),
    }
    with suppress(InputError):
        if not backward:
            found[COPIED] = schedule.streamed(plan(ahead=ahead, in_slots=True))
    return {name: vars(of) for name, of in found.items()}


def remove_old(path: Path) -> None:
    """Removes another run's files. InputError if it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} is in the way: {error.strerror}") from error


def used_over_a_pass(model: nn.Module, one_pass: Callable[[], Tensor], accesses: int) -> list[int]:
    """Returns the bytes in use on the card at each access of a pass, by CUDA's count of everything."""
    found: list[int] = []

    def look(*_) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found.append(total - free)

    hooks = []
    for forwards, backwards in hooked(model):  # behind the hooks that move
        hooks.append(forwards.register_forward_pre_hook(look))
        if accesses > len(hooked(model)):
            hooks.append(backwards.register_full_backward_pre_hook(look))
    one_pass()
    for hook in hooks:
        hook.remove()
    return found[:accesses]


def memory_of(device: torch.device) -> dict[str, int]:
    """Returns PyTorch's figures and the card's own."""
    if device.type == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "physical_used_bytes": total - free,
    } | {key: count for key, count in row_file.card_counts().items() if "managed" in key or "prefetched" in key}


def digest(tensors: list[Tensor]) -> str:
    """Hashes tensors, to compare results and gradients of two runs bit for bit."""
    found = xxhash.xxh64()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def _said(report: dict) -> str:
    sizes, here = report["planned_resident_bytes"], report["device"] != "cpu"
    prefetched, what = report["prefetch"], "weights and gradients" if report["backward"] else "weights"
    total = report["weights_bytes"] * (2 if report["backward"] else 1)
    did = f"{len(report['generated'])} tokens" if report["generated"] else "a pass"
    this = {MANAGED: PREFETCHED if prefetched else BY_FAULTS, EXPLICIT: COPIED}.get(report["placement"])
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


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except (InputError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _model(text: str) -> str:
    words = text.split("x")
    if text not in SHAPES and not (len(words) == 3 and all(word.isdecimal() and int(word) for word in words)):
        raise argparse.ArgumentTypeError(f"{text}: give {', '.join(SHAPES)}, or a shape as 2x64x4")
    if text not in SHAPES and int(words[1]) % int(words[2]):
        raise argparse.ArgumentTypeError(f"{text}: {words[2]} heads do not divide a width of {words[1]}")
    return text


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", allow_abbrev=False, description=__doc__.split("\n")[0])
    whole, count = at_least(int, 1), at_least(int, 0)
    found.add_argument("--model", type=_model, metavar="NAME",
                       help=f"{', '.join(SHAPES)}, or BLOCKSxWIDTHxHEADS ({SMALLEST})")  # fmt: skip
    found.add_argument("--weights", metavar="DIR", help="a GPT-2's folder or hub name, instead of random weights")
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    found.add_argument("--placement", choices=(RESIDENT, MANAGED, EXPLICIT), default=MANAGED,
                       help="weights on the GPU, in managed memory, or copied from the host (%(default)s)")  # fmt: skip
    found.add_argument("--enable-prefetch", action="store_true", help="bring layers before they are used")
    found.add_argument("--physical-limit", type=_size, metavar="SIZE", help="most of the weights on the GPU at once")
    found.add_argument("--ahead", type=count, default=1, metavar="N", help="layers prefetched ahead (%(default)s)")
    found.add_argument("--num-streams", type=whole, default=1, metavar="N", help="of prefetches (%(default)s)")
    found.add_argument("--fusion", choices=fusion.FUSIONS, default="none", help="default: %(default)s")
    found.add_argument("--enable-cudnn-benchmark", action="store_true", help="as the seeds have it; GPT-2 has no use")
    found.add_argument("--backward", action="store_true", help="forward and backward; gradients are managed too")
    found.add_argument("--generate", type=whole, metavar="N", help="tokens behind the sequence")
    found.add_argument("--prompt", metavar="TEXT", help="to begin with, for the tokenizer of --weights")
    found.add_argument("--seq", type=whole, metavar="N", help=f"tokens of the sequence ({SEQ}, with --generate in all)")
    found.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights (%(default)s)")
    found.add_argument("--warmups", type=count, default=1, metavar="N", help="passes that do not count (%(default)s)")
    found.add_argument("--runs", type=whole, default=5, metavar="N", help="passes that do (%(default)s)")
    found.add_argument("--seed", type=at_least(int, 0, SEEDS), default=0, metavar="N", help="default: %(default)s")
    found.add_argument("--out", type=Path, default=Path("runs/unified_memory"), metavar="DIR", help="%(default)s")
    return found


if __name__ == "__main__":
    sys.exit(main())
