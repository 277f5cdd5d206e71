"""Settings and a model's shape in, a plan out: how the step is laid out, and what it will take.

This first planner makes one fixed choice and says by arithmetic what it needs; it does not search and does not time.

    recompute     on, a block at a time (off on the CPU where all activations fit in a quarter of the free RAM)
    micro-batch   the largest power of two that divides the batch, holds at most 4,096 tokens and fits
    group         1: ordinary accumulation
    residual      fp32, unless asked for in 16 bit: tests/test_step.py measures what that does to the loss
    states        fp32; resident on the GPU for as many units as the cap leaves room for, from the embeddings on, and
                  streamed from RAM for the others. On the CPU everything is in RAM

Bytes on the GPU, for N parameters of which R are resident, B sequences per step in micro-batches of b, T tokens, width
D, L blocks, w bytes per working number (2 in 16 bit) and r per number of the residual stream (2 or 4):

    working weights w N   gradients 4 N   resident states s R   staging ring 3 s PIECE   boundaries r b T D (L + 1)
    gradients of the first block's input r B T D   one block's activations   the loss's chunk   workspaces

On the CPU: the first two, s N, the activations, and the process itself.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace

import torch

from lowmem.adam import OPTIMIZERS, Optimizer, state_layout
from lowmem.blocks import Decoder
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.loss import CHUNK_TOKENS
from lowmem.precision import WORKING_DTYPES
from lowmem.settings import Settings
from lowmem.step import Schedule
from lowmem.store import PIECE
from lowmem.streaming import AHEAD
from lowmem.units import GIB, MIB, format_size, parse_size

MICRO_BATCH_TOKENS = 4096
PROCESS_BYTES = {"cuda": 2 * GIB, "cpu": 640 * MIB}  # interpreter, libraries, CUDA's host side, data; assumed
WORKSPACE_BYTES = 2 * 33 * MIB  # cuBLAS at :4096:8 and cuBLASLt, per handle: the autograd thread has its own
RESERVE_BYTES = 256 * MIB  # what the arithmetic does not see: attention's scratch, rounding, fragments


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs to know of a decoder."""

    name: str
    parameters: int
    unit_parameters: tuple[int, ...]
    width: int
    inner_width: int
    vocabulary: int

    @classmethod
    def of(cls, name: str, decoder: Decoder) -> "Shape":
        """Of a decoder whose parameters may be on the meta device."""
        units = tuple(sum(p.numel() for p in unit.parameters.values()) for unit in decoder.units)
        widest = max((max(p.shape) for p in decoder.blocks[0].parameters() if p.dim() == 2), default=0)
        width = decoder.model.config.get_text_config().hidden_size
        return cls(name, sum(units), units, width, widest, decoder.head_weight.shape[0])


@dataclass(frozen=True)
class Plan:
    """A schedule, how many units keep their state on the device, and the predicted bytes by name."""

    shape: Shape
    settings: Settings
    device: str
    precision: str
    schedule: Schedule
    resident_units: int
    gpu_breakdown: dict[str, int]
    ram_breakdown: dict[str, int]

    @property
    def gpu_bytes(self) -> int | None:
        return sum(self.gpu_breakdown.values()) if self.device == "cuda" else None

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram_breakdown.values())

    @property
    def fits(self) -> bool:
        ram_limit = self.settings.ram_limit_bytes
        return self.gpu_fits and (ram_limit is None or self.ram_bytes <= ram_limit)

    @property
    def gpu_fits(self) -> bool:
        limit = self.settings.gpu_limit_bytes
        return self.gpu_bytes is None or limit is None or self.gpu_bytes <= limit

    def to_dict(self) -> dict:
        """plan.json's content."""
        state_bits = {"adamw": 32, "adamw8bit": 8, "sgd": 0}[self.settings.optimizer]
        return {
            "fits": self.fits,
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "tokens_per_step": self.settings.batch * self.settings.seq,
            "limits": {"gpu_bytes": self.settings.gpu_limit_bytes, "ram_bytes": self.settings.ram_limit_bytes},
            "choice": asdict(self.schedule)
            | {
                "state_bits": state_bits,
                "precision": self.precision,
                "residual": self.settings.residual,
                "device": self.device,
                "optimizer": self.settings.optimizer,
                "resident_units": self.resident_units,
                "streamed_units": len(self.shape.unit_parameters) - self.resident_units,
            },
            "predicted": {
                "gpu_allocated_peak_bytes": self.gpu_bytes,
                "gpu_reserved_peak_bytes": self.gpu_bytes,
                "ram_peak_bytes": self.ram_bytes,
                "step_seconds": None,
            },
            "breakdown": self.gpu_breakdown if self.device == "cuda" else self.ram_breakdown,
            "ram_breakdown": self.ram_breakdown,
        }

    def describe(self) -> str:
        """The plan as a table for people."""
        schedule, settings = self.schedule, self.settings
        lines = [
            f"{self.shape.name}: {self.shape.parameters:,} parameters, all trained; {settings.optimizer}, "
            + self.precision
            + (" with fp32 master weights" if self.precision != "fp32" else ""),
            f"batch {settings.batch} x {settings.seq} tokens as micro-batches of {schedule.micro_batch}, "
            + (f"recomputed {schedule.segment_blocks} block(s) at a time" if schedule.recompute else "no recompute"),
        ]
        for title, breakdown, limit in (
            ("GPU", self.gpu_breakdown if self.device == "cuda" else {}, settings.gpu_limit_bytes),
            ("RAM", self.ram_breakdown, settings.ram_limit_bytes),
        ):
            lines += [
                f"  {title} {name.replace('_', ' '):<32}{format_size(size):>10}" for name, size in breakdown.items()
            ]
            if breakdown:
                cap = "no cap" if limit is None else f"cap {format_size(limit)}"
                lines.append(f"  {title} {'total':<32}{format_size(sum(breakdown.values())):>10}  ({cap})")
        lines.append("fits (by arithmetic)" if self.fits else "does not fit")
        return "\n".join(lines)


def make_plan(shape: Shape, settings: Settings, device: str, precision: str, ram_free_bytes: int | None = None) -> Plan:
    """The fixed choice for `device` ("cuda" or "cpu"); PlanError, naming the smallest caps that would do, if it does
    not fit. `ram_free_bytes`: what this machine has, if the plan is for this machine."""
    schedules = [
        Schedule(micro_batch, settings.group or 1, settings.segment_blocks or 1, settings.recompute != "off")
        for micro_batch in _micro_batches(settings)
    ]
    plans = [_most_resident(shape, settings, device, precision, schedule) for schedule in schedules]
    chosen = next((plan for plan in plans if plan.fits), None)
    if chosen is None:
        raise PlanError(_refusal(min(plans, key=lambda plan: (0 if plan.gpu_fits else plan.gpu_bytes, plan.ram_bytes))))
    # What happens to be free decides what is kept and whether to run at all, but not the micro-batch: that would change
    # the result from one day to the next.
    if device == "cpu" and settings.recompute == "auto" and ram_free_bytes is not None:
        kept = _most_resident(shape, settings, device, precision, replace(chosen.schedule, recompute=False))
        if kept.fits and kept.ram_breakdown["live_blocks"] <= ram_free_bytes // 4 and kept.ram_bytes <= ram_free_bytes:
            chosen = kept
    if ram_free_bytes is not None and chosen.ram_bytes > ram_free_bytes:
        raise PlanError(
            f"{shape.name} at {settings.batch} x {settings.seq} tokens needs {format_size(chosen.ram_bytes)} of RAM in "
            f"this plan, and {format_size(ram_free_bytes)} are free here; free some, or lower --micro-batch or --seq."
        )
    return chosen


def _refusal(plan: Plan) -> str:
    wants = [f"--ram-limit {math.ceil(plan.ram_bytes / MIB)}MiB"]
    if plan.gpu_bytes is not None:
        wants.insert(0, f"--gpu-limit {math.ceil(plan.gpu_bytes / MIB)}MiB")
    limits = plan.settings
    caps = [
        f"{format_size(limit)} of {what}"
        for what, limit in (
            ("GPU memory", limits.gpu_limit_bytes if plan.device == "cuda" else None),
            ("RAM", limits.ram_limit_bytes),
        )
        if limit is not None
    ]
    return (
        f"{plan.shape.name} at {limits.batch} x {limits.seq} tokens does not fit in {' and '.join(caps)}; "
        f"the smallest that this planner knows is {' with '.join(wants)}."
    )


def _micro_batches(settings: Settings) -> list[int]:
    if settings.micro_batch is not None:
        return [settings.micro_batch]
    most = max(MICRO_BATCH_TOKENS // settings.seq, 1)
    powers = [2**k for k in range(20) if 2**k <= most and settings.batch % 2**k == 0]
    if settings.group is not None:  # chosen by the user: it has to divide the number of micro-batches
        powers = [size for size in powers if (settings.batch // size) % settings.group == 0]
    return powers[::-1]


def _most_resident(shape: Shape, settings: Settings, device: str, precision: str, schedule: Schedule) -> Plan:
    """The plan with as many resident units as the GPU's cap allows (none need stay resident by themselves)."""
    units = len(shape.unit_parameters)
    if settings.states == "resident" or (settings.states == "auto" and device == "cpu"):
        counts = [units]
    elif settings.states == "streamed":
        counts = [0]
    else:
        counts = list(range(units, -1, -1))
    plans = [_predict(shape, settings, device, precision, schedule, resident) for resident in counts]
    return next((plan for plan in plans if plan.gpu_fits), plans[-1])  # the first one takes the least RAM


def _predict(
    shape: Shape, settings: Settings, device: str, precision: str, schedule: Schedule, resident_units: int
) -> Plan:
    dtype = WORKING_DTYPES[precision]
    optimizer = OPTIMIZERS[settings.optimizer]
    tokens = schedule.micro_batch * settings.seq
    blocks = len(shape.unit_parameters) - 2
    residual = residual_dtype(settings, precision).itemsize
    boundary = residual * tokens * shape.width
    live_blocks = schedule.segment_blocks if schedule.recompute else blocks * schedule.group
    resident = sum(shape.unit_parameters[:resident_units])
    streamed = shape.parameters - resident
    ring = min((AHEAD + 1) * PIECE, streamed)
    compute = {
        "working_weights": dtype.itemsize * shape.parameters,
        "gradients": 4 * shape.parameters,
        "boundaries": boundary * (schedule.group * (blocks // schedule.segment_blocks + 1)),
        "gradients_of_the_first_input": residual * settings.batch * settings.seq * shape.width,
        "live_blocks": live_blocks * _block_activation_bytes(shape, tokens, precision),
        "loss": _loss_bytes(shape, tokens, dtype),
    }
    states = {
        "resident_states": _state_bytes(optimizer, resident, dtype),
        "staging_ring": _state_bytes(optimizer, ring, dtype),
    }
    host_states = {"streamed_states": _state_bytes(optimizer, streamed, dtype)}
    process = {"process": PROCESS_BYTES[device]}
    if device == "cuda":
        gpu = compute | states | {"workspaces": WORKSPACE_BYTES, "reserve": RESERVE_BYTES}
        ram = host_states | process
    else:
        gpu, ram = {}, compute | states | host_states | process
    return Plan(shape, settings, device, precision, schedule, resident_units, gpu, ram)


def residual_dtype(settings: Settings, precision: str) -> torch.dtype:
    """fp32, or the working dtype where the user asked for a 16-bit residual stream."""
    return WORKING_DTYPES[precision] if settings.residual == "16bit" else torch.float32


def _state_bytes(optimizer: Optimizer, parameters: int, dtype: torch.dtype) -> int:
    return sum(entries * kind.itemsize for entries, kind in state_layout(optimizer, parameters, dtype).values())


def _block_activation_bytes(shape: Shape, tokens: int, precision: str) -> int:
    """What one block keeps for its backward and the largest temporaries of that backward: in the working dtype 9 D for
    attention (norm, q, k, v, out, projection, gradients) and 4 times the MLP's inner width; in fp32 4 D (norms,
    residuals)."""
    return tokens * (
        WORKING_DTYPES[precision].itemsize * (9 * shape.width + 4 * shape.inner_width) + 4 * 4 * shape.width
    )


def _loss_bytes(shape: Shape, tokens: int, dtype: torch.dtype) -> int:
    per_logit = 4 if dtype is torch.float32 else 6
    return min(tokens, CHUNK_TOKENS) * shape.vocabulary * per_logit


def main(arguments: list[str] | None = None) -> int:
    """`python -m lowmem.plan`: the plan of any Hugging Face decoder, without a GPU and without weights."""
    from lowmem.models import build_model, check_tokens, load_config

    parser = argparse.ArgumentParser(prog="python -m lowmem.plan", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="hub name, folder or config.json")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences per optimizer step (%(default)s)")
    parser.add_argument("--gpu-limit", default="11GiB", help="cap of GPU memory (%(default)s)")
    parser.add_argument("--ram-limit", default="none", help="cap of RAM (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print plan.json's content alone")
    options = parser.parse_args(arguments)
    try:
        limits = [None if text.lower() == "none" else _size(text) for text in (options.gpu_limit, options.ram_limit)]
        settings = Settings(
            model=options.model,
            init="random",
            seq=options.seq,
            batch=options.batch,
            gpu_limit_bytes=limits[0],
            ram_limit_bytes=limits[1],
        )
        config = load_config(options.model, "random")
        check_tokens(config, settings.seq, largest_token_id=0)
        shape = Shape.of(options.model, Decoder(build_model(config)))
        plan = make_plan(shape, settings, "cuda", "bf16")
    except LowmemError as error:
        print(f"lowmem.plan: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan.describe())
    return 0


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise InputError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
