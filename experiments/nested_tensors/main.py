"""Runs forward, and backward if asked, on ragged text in one mode: `python -m experiments.nested_tensors.main`.

    python -m experiments.nested_tensors.main --mode packed --num_samples 256 --batch_size 16 --backward --use_warmup

Prints and keeps real tokens per second, the share of real positions, and the peak of memory above weights (and
gradients with --backward). On the CPU the peak is that of the process's resident set, exact to a few MiB if
MALLOC_MMAP_THRESHOLD_=65536 is set. Under --out:

    data/<model>-<mode>.json        the figures, and seconds, tokens and positions of every batch
    log/<model>-<mode>/             with --use_torch_profiler a trace of two batches, which TensorBoard opens
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from experiments.harness.options import at_least, exit_code_of, make_folder, parser_of, positive
from experiments.nested_tensors.ragged import (
    DTYPES,
    KINDS,
    MODES,
    SHAPES,
    Inputs,
    batches_of,
    collate,
    forward,
    make_model,
    read_samples,
)
from experiments.nested_tensors.timeline import MemoryTimeline, thinned
from lowmem.errors import InputError
from lowmem.limits import ram_now_bytes, ram_peak_bytes, reset_ram_peak
from lowmem.units import MIB

PROGRAM = "experiments.nested_tensors.main"
OUT = Path("runs/nested_tensors")
PROFILED_BATCHES = 2


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(PROGRAM, __doc__)
    parser.add_argument("--model", choices=SHAPES, default="llama", help="shape, with random weights (%(default)s)")
    parser.add_argument("--mode", choices=MODES, help="default: padded")
    parser.add_argument("--use_nested", action="store_true", help="the same as --mode nested")
    add_sample_options(parser)
    parser.add_argument(
        "--num_workers", type=at_least(int, 0), default=0, metavar="N", help="processes that make batches"
    )
    parser.add_argument("--use_warmup", action="store_true", help="one batch before those that count")
    parser.add_argument("--use_torch_profiler", action="store_true", help="a trace of two batches in log/")
    parser.add_argument("--memory_over_time", action="store_true", help="memory every few milliseconds, too")
    parser.add_argument("--backward", action="store_true", help="gradients of all parameters, too")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.use_nested and options.mode not in (None, "nested"):
        parser.error(f"--use_nested and --mode {options.mode} name two modes")
    mode = "nested" if options.use_nested else options.mode or "padded"
    device, samples = chosen_device(parser, options), chosen_samples(parser, options)
    name = f"{options.model}-{mode}"
    path = options.out / "data" / f"{name}.json"
    make_out(parser, path.parent)
    batches = DataLoader(
        samples,
        batch_sampler=batches_of(mode, [len(sample) for sample in samples], options.batch_size),
        collate_fn=_Collate(mode),
        num_workers=options.num_workers,
    )
    model = make_model(options.model, mode, device, options.dtype)
    found = measured(model, batches, device, options.backward, options.use_warmup, options.memory_over_time)
    if options.use_torch_profiler:
        write_trace(model, batches, device, options.backward, options.out / "log" / name)
    found = {"model": options.model, "mode": mode, "data": options.data, "backward": options.backward} | found
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(
        f"{options.model} {mode}: {found['tokens_per_second']:,.1f} real tokens/s, "
        f"{found['tokens'] / found['positions']:.0%} of positions real, "
        f"peak {found['peak_bytes'] / MIB:,.0f} MiB beside {found['held_bytes'] / MIB:,.0f} MiB; see {path}"
    )
    return 0


def add_sample_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", default="lines", metavar="SPEC",
        help=f"{', '.join(KINDS)} of Python's library, or what --data of the training scripts takes (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--num_samples", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch_size", type=positive, default=16, metavar="N", help="default: %(default)s")
    add_device_options(parser)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: %(default)s")


def chosen_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Returns the device of the options; ends the process if there is none."""
    try:
        device = torch.device(options.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device {options.device}: neither cpu nor cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {options.device}: there is no such GPU here")
    return device


def chosen_samples(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[list[int]]:
    """Returns the samples' token ids; ends the process if they are not available."""
    try:
        return read_samples(options.data, options.num_samples)
    except (InputError, ValueError) as error:
        parser.error(str(error))


def make_out(parser: argparse.ArgumentParser, folder: Path) -> None:
    try:
        make_folder(folder)
    except InputError as error:
        parser.error(str(error))


def on_device(device: torch.device, dtype: str) -> dict:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "dtype": dtype}


class _Collate:
    """Calls `collate` for one mode; workers get this object by pickle."""

    def __init__(self, mode: str):
        self.mode = mode

    def __call__(self, samples: list[list[int]]) -> Inputs:
        return collate(self.mode, samples)


def measured(
    model: nn.Module, batches: DataLoader, device: torch.device, backward: bool, warmup: bool, over_time: bool = False
) -> dict:
    """Measures times and the peak of memory over all `batches`, and the summed loss. `over_time`: also memory by
    seconds."""
    if backward:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    if warmup:
        compute(model, next(iter(batches)), device, backward)
    model.zero_grad(set_to_none=False)
    held = begin_peak(device)
    rows, loss = [], 0.0
    with MemoryTimeline(device) if over_time else nullcontext() as timeline:
        for inputs in batches:
            wait(device)
            began = time.perf_counter()
            loss += compute(model, inputs, device, backward)
            wait(device)
            seconds = time.perf_counter() - began
            rows.append({"seconds": seconds, "tokens": inputs.tokens, "positions": inputs.positions})
    sums = {key: sum(row[key] for row in rows) for key in rows[0]}
    return {
        **sums,
        "tokens_per_second": sums["tokens"] / sums["seconds"],
        "loss": loss,
        "held_bytes": held,
        "peak_bytes": max(peak_bytes(device) - held, 0),
        "memory": thinned(timeline.samples, held) if timeline else None,
        "batches": rows,
    }


def compute(model: nn.Module, inputs: Inputs, device: torch.device, backward: bool) -> float:
    """Returns the loss of one batch, and accumulates gradients."""
    with torch.set_grad_enabled(backward):
        loss, _ = forward(model, inputs.to(device))
    if backward:
        loss.backward()
    return loss.item()


def begin_peak(device: torch.device) -> int:
    """Returns the memory in use now, and restarts the count of the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    reset_ram_peak()
    return ram_now_bytes()


def peak_bytes(device: torch.device) -> int:
    """Returns the peak since `begin_peak`, with the memory held before."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else ram_peak_bytes()


def write_trace(model: nn.Module, batches: DataLoader, device: torch.device, backward: bool, folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(
        activities=activities, profile_memory=True, record_shapes=True,
        on_trace_ready=tensorboard_trace_handler(str(folder)),
    ):  # fmt: skip
        for _, inputs in zip(range(PROFILED_BATCHES), batches, strict=False):
            compute(model, inputs, device, backward)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
