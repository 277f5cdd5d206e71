"""The options of run_gpt2, and which of them contradict each other."""

import argparse
from pathlib import Path

import torch

from experiments.harness.options import SEEDS, at_least, positive, size
from experiments.unified_memory import fusion
from experiments.unified_memory.placement import EXPLICIT, MANAGED, RESIDENT
from experiments.unified_memory.shapes import SHAPES
from lowmem.errors import InputError

SMALLEST = "gpt2-small"
SEQ = 1024
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check(options: argparse.Namespace, device: torch.device) -> None:
    if options.model and options.weights is not None:
        raise InputError("--model has random weights, and --weights is a model of its own: give one of them")
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
    if options.oversubscribe and (options.placement != MANAGED or options.enable_prefetch or options.physical_limit):
        raise InputError(
            "--oversubscribe leaves managed memory to the driver alone: leave out --enable-prefetch, --physical-limit "
            f"and any --placement but {MANAGED}"
        )


def _model(text: str) -> str:
    words = text.split("x")
    if text not in SHAPES and not (len(words) == 3 and all(word.isdecimal() and int(word) for word in words)):
        raise argparse.ArgumentTypeError(f"{text}: give {', '.join(SHAPES)}, or a shape as 2x64x4")
    if text not in SHAPES and int(words[1]) % int(words[2]):
        raise argparse.ArgumentTypeError(f"{text}: {words[2]} heads do not divide a width of {words[1]}")
    return text


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m experiments.unified_memory.run_gpt2",
        allow_abbrev=False,
        description="Runs GPT-2 or GPT-3 shapes with their weights in managed memory",
    )
    count = at_least(int, 0)
    found.add_argument("--model", type=_model, metavar="NAME",
                       help=f"{', '.join(SHAPES)}, or BLOCKSxWIDTHxHEADS ({SMALLEST})")  # fmt: skip
    found.add_argument("--weights", metavar="DIR", help="a GPT-2's folder or hub name, instead of random weights")
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    found.add_argument("--placement", choices=(RESIDENT, MANAGED, EXPLICIT), default=MANAGED,
                       help="weights on the GPU, in managed memory, or copied from the host (%(default)s)")  # fmt: skip
    found.add_argument("--enable-prefetch", action="store_true", help="bring layers before they are used")
    found.add_argument("--physical-limit", type=size, metavar="SIZE", help="most of the weights on the GPU at once")
    found.add_argument("--oversubscribe", action="store_true",
                       help="leave more than the GPU has to the driver; never on a shared GPU")  # fmt: skip
    found.add_argument("--ahead", type=count, default=1, metavar="N", help="layers prefetched ahead (%(default)s)")
    found.add_argument("--num-streams", type=positive, default=1, metavar="N", help="of prefetches (%(default)s)")
    found.add_argument("--fusion", choices=fusion.FUSIONS, default="none", help="default: %(default)s")
    found.add_argument("--enable-cudnn-benchmark", action="store_true", help="as the seeds have it; GPT-2 has no use")
    found.add_argument("--backward", action="store_true", help="forward and backward; gradients are managed too")
    found.add_argument("--generate", type=positive, metavar="N", help="tokens behind the sequence")
    found.add_argument("--prompt", metavar="TEXT", help="to begin with, for the tokenizer of --weights")
    found.add_argument(
        "--seq", type=positive, metavar="N", help=f"tokens of a sequence ({SEQ}, with --generate in all)"
    )
    found.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights (%(default)s)")
    found.add_argument("--warmups", type=count, default=1, metavar="N", help="passes that do not count (%(default)s)")
    found.add_argument("--runs", type=positive, default=5, metavar="N", help="passes that do (%(default)s)")
    found.add_argument("--seed", type=at_least(int, 0, SEEDS), default=0, metavar="N", help="default: %(default)s")
    found.add_argument("--out", type=Path, default=Path("runs/unified_memory"), metavar="DIR", help="%(default)s")
    return found
