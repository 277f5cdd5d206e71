"""Settings and a model's config in, a plan out: how the step is laid out, what it will take, and how long.

The plan is a prediction about the code that trains, not a formula beside it: search.py tries layouts of the step in a
simulation of it (simulate.py) and takes the fastest whose run completes under both caps. No weights are loaded and no
GPU is needed. fp32 moments are preferred; 8-bit ones are only taken where they were asked for, or where nothing exact
fits into RAM, and the plan says so. It depends on the kind of card and on the versions of torch and transformers, which
it names.

    GPU   the simulated run, and MARGIN_BYTES left free
    RAM   streamed states, and the process: what it holds now, and what training adds to that

On the CPU there is no choice to make for speed: the largest micro-batch of at most 4,096 tokens that fits, and
recompute unless all activations fit into a quarter of the free RAM. The simulated peak is then RAM's, with the blocks'
activations counted twice: malloc keeps what was freed and does not find it all again. (GPT-2-Medium and Large, nothing
recomputed, held 1.2 and 2 times their activations beyond what lived; a model of a million parameters nothing.)

The micro-batch changes the bits of the result. So it never depends on what happens to be free or on a stopwatch: the
same command on the same machine takes the same one.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec

import torch
from transformers import logging

from lowmem.adam import OPTIMIZERS
from lowmem.blocks import Decoder
from lowmem.budget import CONTEXT_BYTES, ram_now_bytes
from lowmem.cards import CARDS, Card, card_named, card_of_name_reported
from lowmem.device import set_environment
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.models import check_tokens, load_config, make_decoder
from lowmem.precision import WORKING_DTYPES
from lowmem.search import SEGMENTS, Choices, Found, Room, Simulations, fastest, smallest_room
from lowmem.settings import Settings
from lowmem.simulate import Recording, StepCase, cpu_target, gpu_target, named_at_peak, record_step
from lowmem.step import Schedule
from lowmem.units import GIB, MIB, format_size, parse_size

MARGIN_BYTES = 64 * MIB  # of the GPU's cap: small temporaries that are not simulated; not yet measured on a GPU
CUDA_PROCESS_BYTES = 2 * GIB  # interpreter, libraries, CUDA's host side, data, where there is no GPU here; assumed
TRAINING_BYTES = 192 * MIB  # what the process takes on top of what it holds when the plan is made: data, buffers
CPU_MICRO_BATCH_TOKENS = 4096
# What PyTorch and the models of transformers raise where an architecture does not run in pieces, or not without data.
_NOT_SIMULATED = (RuntimeError, TypeError, AttributeError, ValueError, AssertionError, IndexError, KeyError)
STATE_BITS = {"adamw": 32, "adamw8bit": 8, "sgd": 0}


@dataclass(frozen=True)
class Plan:
    """A layout of the step and what the simulation says of it. `card`: None on the CPU; GPU figures are None there."""

    model: str
    parameters: int
    units: int
    settings: Settings
    device: str
    precision: str
    card: Card | None
    optimizer: str
    schedule: Schedule
    resident_units: int
    gpu_limit_bytes: int | None
    gpu_allocated_peak_bytes: int | None
    gpu_reserved_peak_bytes: int | None
    gpu_breakdown: dict[str, int]
    ram_breakdown: dict[str, int]
    step_seconds: float | None
    waiting_seconds: float | None
    timeline: list[tuple[float, int, int]] = field(repr=False)

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram_breakdown.values())

    def to_dict(self) -> dict:
        """plan.json's content."""
        return {
            "fits": True,
            "model": self.model,
            "parameters": self.parameters,
            "tokens_per_step": self.settings.batch * self.settings.seq,
            "limits": {"gpu_bytes": self.gpu_limit_bytes, "ram_bytes": self.settings.ram_limit_bytes},
            "choice": asdict(self.schedule)
            | {
                "state_bits": STATE_BITS[self.optimizer],
                "precision": self.precision,
                "residual": self.settings.residual,
                "device": self.device,
                "optimizer": self.optimizer,
                "resident_units": self.resident_units,
                "streamed_units": self.units - self.resident_units,
            },
            "predicted": {
                "gpu_allocated_peak_bytes": self.gpu_allocated_peak_bytes,
                "gpu_reserved_peak_bytes": self.gpu_reserved_peak_bytes,
                "ram_peak_bytes": self.ram_bytes,
                "step_seconds": self.step_seconds,
            },
            "seconds_waiting_for_copies": self.waiting_seconds,
            "breakdown": self.gpu_breakdown or self.ram_breakdown,
            "ram_breakdown": self.ram_breakdown,
            "depends_on": {
                "card": None if self.card is None else self.card.name,
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
        }

    def describe(self) -> str:
        """The plan as a table for people."""
        schedule, settings = self.schedule, self.settings
        masters = " with fp32 master weights" if self.precision != "fp32" else ""
        layout = f"batch {settings.batch} x {settings.seq} tokens as micro-batches of {schedule.micro_batch}"
        if schedule.group > 1:
            layout += f" in groups of {schedule.group}"
        blocks = "block" if schedule.segment_blocks == 1 else f"{schedule.segment_blocks} blocks"
        layout += f", recomputed {blocks} at a time" if schedule.recompute else ", nothing recomputed"
        lines = [
            f"{self.model}: {self.parameters:,} parameters, all trained; {self.optimizer}, {self.precision}{masters}",
            layout,
        ]
        if self.optimizer != settings.optimizer:
            lines.append(
                f"NOT EXACT: no plan with fp32 moments fits, so Adam's moments are kept in 8 bits ({self.optimizer})"
            )
        if self.device == "cuda":
            lines[-1] += f"; states of {self.resident_units} of {self.units} units on the GPU"
            lines += _table("GPU", self.gpu_breakdown, "allocated", self.gpu_limit_bytes)
            lines.append(f"  GPU {'reserved':<32}{format_size(self.gpu_reserved_peak_bytes):>10}")
        lines += _table("RAM", self.ram_breakdown, "total", settings.ram_limit_bytes)
        if self.step_seconds is not None:
            rate = settings.batch * settings.seq / self.step_seconds
            lines.append(
                f"a step takes about {self.step_seconds:.3g} s on {self.card.name} ({rate:,.0f} tokens/s), "
                f"{self.waiting_seconds:.2g} s of it waiting for copies"
            )
        lines.append("fits")
        return "\n".join(lines)


def _table(title: str, breakdown: dict[str, int], total: str, limit_bytes: int | None) -> list[str]:
    cap = "no cap" if limit_bytes is None else f"cap {format_size(limit_bytes)}"
    names = {name.replace("_", " "): size for name, size in breakdown.items() if size >= MIB / 2}
    lines = [f"  {title} {name:<32}{format_size(size):>10}" for name, size in names.items()]
    return [*lines, f"  {title} {total:<32}{format_size(sum(breakdown.values())):>10}  ({cap})"]


def make_plan(
    settings: Settings, decoder: Callable[[], Decoder], device: str, precision: str, card: Card | None,
    ram_free_bytes: int | None = None, measured: Card | None = None,
) -> Plan:  # fmt: skip
    """The plan for `device` ("cuda", with a `card`, or "cpu"); PlanError, naming the smallest caps that would do, where
    nothing fits. `decoder`: makes one in that precision, without weights. `ram_free_bytes`: what this machine has, if
    the plan is for this machine. `measured`: the card as it was timed here, which says how long the chosen layout
    takes; what is chosen is the table's to say, so that it is the same every time."""
    try:
        if device == "cpu":
            plan = _cpu_plan(settings, decoder, precision, ram_free_bytes)
        else:
            plan = _gpu_plan(settings, decoder, precision, card, measured)
    except _NOT_SIMULATED as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{settings.model} cannot be simulated in {precision}, so it is not trained: {reason}"
        ) from error
    if ram_free_bytes is not None and plan.ram_bytes - ram_now_bytes() > ram_free_bytes:
        raise PlanError(
            f"{plan.model} at {settings.batch} x {settings.seq} tokens needs {format_size(plan.ram_bytes)} of RAM in "
            f"this plan, and {format_size(ram_free_bytes)} are free here; free some, or lower --micro-batch or --seq."
        )
    return plan


def _gpu_plan(
    settings: Settings, decoder: Callable[[], Decoder], precision: str, card: Card, measured: Card | None
) -> Plan:
    gpu_limit = settings.gpu_limit_bytes
    if settings.gpu is not None or (gpu_limit is None and torch.cuda.is_available()):
        # what CUDA's context takes of a card is not for us
        gpu_limit = min(gpu_limit or card.memory_bytes, card.memory_bytes - CONTEXT_BYTES)
    process = ram_now_bytes() + TRAINING_BYTES if torch.cuda.is_initialized() else CUDA_PROCESS_BYTES
    room = Room(
        None if gpu_limit is None else gpu_limit - MARGIN_BYTES,
        None if settings.ram_limit_bytes is None else settings.ram_limit_bytes - process,
    )
    case = _case(settings, precision)
    simulations = Simulations(decoder, case, gpu_target(card))
    choices = _choices(settings, simulations.units)
    found = fastest(simulations, choices, room)
    if found is None:
        smallest = smallest_room(simulations, choices, room)
        only_ram_is_short = room.ram is not None and smallest.gpu == room.gpu
        if only_ram_is_short and settings.optimizer == "adamw" and find_spec("bitsandbytes"):
            smaller = Simulations(decoder, replace(case, optimizer=OPTIMIZERS["adamw8bit"]), gpu_target(card))
            found = fastest(smaller, choices, room)
        if found is None:
            raise PlanError(_refusal(settings, gpu_limit, process, smallest))
    plan = _plan(settings, simulations, "cuda", precision, card, gpu_limit, found, process)
    if measured is not None:
        timed = record_step(decoder(), found.case, gpu_target(measured), {}, alike=True)
        plan = replace(plan, card=measured, step_seconds=timed.seconds, waiting_seconds=timed.waiting_seconds)
    return plan


def _case(settings: Settings, precision: str) -> StepCase:
    return StepCase(
        settings.seq, settings.batch, Schedule(1, 1, 1, recompute=True), WORKING_DTYPES[precision],
        OPTIMIZERS[settings.optimizer], 0, settings.clip_norm, settings.document_mask,
    )  # fmt: skip


def _choices(settings: Settings, units: int) -> Choices:
    """All that the settings leave open."""
    micro_batches = [2**k for k in range(settings.batch.bit_length()) if settings.batch % 2**k == 0]
    if settings.micro_batch is not None:
        micro_batches = [settings.micro_batch]
    if settings.group is not None:
        micro_batches = [size for size in micro_batches if (settings.batch // size) % settings.group == 0]
    return Choices(
        micro_batches=micro_batches,
        groups=None if settings.group is None else [settings.group],
        segments=SEGMENTS if settings.segment_blocks is None else [settings.segment_blocks],
        recompute={"auto": (True, False), "on": (True,), "off": (False,)}[settings.recompute],
        resident_units={"auto": range(units + 1), "resident": [units], "streamed": [0]}[settings.states],
    )


def _plan(
    settings: Settings, simulations: Simulations, device: str, precision: str, card: Card | None,
    gpu_limit: int | None, found: Found, process: int,
) -> Plan:  # fmt: skip
    recording = found.recording
    ram = {"streamed_states": recording.streamed_bytes, "process": process}
    return Plan(
        settings.model, simulations.parameters, simulations.units, settings, device, precision, card,
        found.case.optimizer.name, found.case.schedule, found.case.resident_units, gpu_limit,
        found.memory.allocated_peak_bytes, found.memory.reserved_peak_bytes, found.memory.at_peak, ram,
        recording.seconds, recording.waiting_seconds, _one_step(recording, found.memory.timeline),
    )  # fmt: skip


def _one_step(recording: Recording, timeline: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """The part of a timeline that belongs to the second step, from 0 seconds on."""
    return [
        (seconds - recording.began, allocated, reserved)
        for seconds, allocated, reserved in timeline
        if 0 <= seconds - recording.began <= recording.seconds
    ]


def _cpu_plan(settings: Settings, decoder: Callable[[], Decoder], precision: str, ram_free_bytes: int | None) -> Plan:
    process = ram_now_bytes() + TRAINING_BYTES
    simulations = Simulations(decoder, _case(settings, precision), cpu_target())
    choices = _choices(settings, simulations.units)
    resident = choices.resident_units[-1]

    def plan_of(schedule: Schedule) -> Plan:
        case, recording = simulations.record(schedule, resident)
        ram = named_at_peak(recording.tape) | {"streamed_states": recording.streamed_bytes, "process": process}
        ram["freed_and_kept"] = ram.get("live_blocks", 0)
        return Plan(
            settings.model, simulations.parameters, simulations.units, settings, "cpu", precision, None,
            settings.optimizer, case.schedule, resident, settings.gpu_limit_bytes, None, None, {}, ram, None, None, [],
        )  # fmt: skip

    def fits(plan: Plan) -> bool:
        return settings.ram_limit_bytes is None or plan.ram_bytes <= settings.ram_limit_bytes

    most = max(CPU_MICRO_BATCH_TOKENS // settings.seq, 1)
    sizes = [size for size in choices.micro_batches if size <= most] or choices.micro_batches[:1]
    schedules = [
        Schedule(size, choices.groups_of(settings.batch, size)[0], choices.segments[0], settings.recompute != "off")
        for size in reversed(sizes)
    ]
    plan = next((plan for plan in map(plan_of, schedules) if fits(plan)), None)
    if plan is None:
        least = plan_of(schedules[-1]).ram_bytes
        raise PlanError(_refusal(settings, None, 0, Room(None, least)))
    if settings.recompute == "auto" and ram_free_bytes is not None:
        kept = plan_of(replace(plan.schedule, recompute=False))
        activations = kept.ram_bytes - plan.ram_bytes
        if fits(kept) and activations <= ram_free_bytes // 4 and kept.ram_bytes - ram_now_bytes() <= ram_free_bytes:
            plan = kept
    return plan


def _refusal(settings: Settings, gpu_limit: int | None, process: int, room: Room) -> str:
    caps = [
        f"{format_size(limit)} of {what}"
        for what, limit in (("GPU memory", gpu_limit), ("RAM", settings.ram_limit_bytes))
        if limit is not None
    ]
    wants = [f"--ram-limit {math.ceil((process + room.ram) / MIB)}MiB"]
    if room.gpu is not None:
        wants.insert(0, f"--gpu-limit {math.ceil((room.gpu + MARGIN_BYTES) / MIB)}MiB")
    return (
        f"{settings.model} at {settings.batch} x {settings.seq} tokens does not fit in {' and '.join(caps)}; "
        f"the smallest that would do is {' with '.join(wants)}."
    )


def card_for(settings: Settings) -> Card:
    """The card that is planned for: the one asked for, the one that is here, or the smallest in the table that has
    bf16 and as much memory as the cap."""
    if settings.gpu is not None:
        return card_named(settings.gpu)
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return card_of_name_reported(name) or _nearest(capability, torch.cuda.get_device_properties(0))
    wanted = (settings.gpu_limit_bytes or 0) + CONTEXT_BYTES
    enough = [card for card in CARDS.values() if "bf16" in card.rates and card.memory_bytes >= wanted]
    return min(enough or CARDS.values(), key=lambda card: card.memory_bytes * (1 if enough else -1))


def _nearest(capability: tuple[int, int], properties) -> Card:
    """A card that is not in the table, taken for the one that is most like it. It is not timed: see the docstring."""
    alike = min(
        CARDS.values(),
        key=lambda card: (
            abs(10 * (card.capability[0] - capability[0]) + card.capability[1] - capability[1]),
            abs(card.multiprocessors - properties.multi_processor_count),
        ),
    )
    return replace(
        alike, name=f"{properties.name} (taken for {alike.name})", capability=capability,
        multiprocessors=properties.multi_processor_count, memory_bytes=properties.total_memory,
    )  # fmt: skip


def planned(settings: Settings) -> tuple[str, str, Card | None]:
    """Device, precision and card that `--plan-only` plans for: a GPU, whether or not there is one here, unless the CPU
    was asked for."""
    if settings.device == "cpu":
        return "cpu", "fp32" if settings.precision == "auto" else settings.precision, None
    card = card_for(settings)
    automatic = "bf16" if "bf16" in card.rates else "fp16"
    return "cuda", automatic if settings.precision == "auto" else settings.precision, card


def _advice(options: argparse.Namespace, settings: Settings, config, card: Card) -> int:
    """What --gpus prints: peaks per rank and advice for PyTorch's own ways to use several cards."""
    from lowmem.advice import advise, describe, to_dict  # torch.distributed costs a second

    limit = settings.gpu_limit_bytes
    memory = card.memory_bytes if limit is None else min(limit + CONTEXT_BYTES, card.memory_bytes)
    rows, sentence = advise(config, options.gpus, memory, settings.seq, settings.batch, gpu_target(card))
    if options.json:
        print(json.dumps(to_dict(rows, sentence), indent=2))
    else:
        print(describe(rows, sentence))
    return 0 if any(row.peak is not None for row in rows) else PlanError.exit_code


def main(arguments: list[str] | None = None) -> int:
    """`python -m lowmem.plan`: the plan of any Hugging Face decoder, without a GPU and without weights."""
    parser = argparse.ArgumentParser(prog="python -m lowmem.plan", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="hub name, folder or config.json")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences per optimizer step (%(default)s)")
    parser.add_argument("--gpu-limit", help="cap of GPU memory, or none (11GiB; with --gpu: what the card has)")
    parser.add_argument("--ram-limit", default="none", help="cap of RAM (%(default)s)")
    parser.add_argument("--gpu", metavar="CARD", help=f"plan for this card: {', '.join(CARDS)}")
    parser.add_argument("--gpus", type=int, metavar="N", help="advice for N of these cards: which method, which batch")
    parser.add_argument("--json", action="store_true", help="print plan.json's content alone")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    try:
        set_environment()
        gpu_limit = _size(options.gpu_limit or ("none" if options.gpu else "11GiB"))
        ram_limit = _size(options.ram_limit)
        settings = Settings(
            model=options.model, init="random", seq=options.seq, batch=options.batch, gpu=options.gpu, plan_only=True,
            gpu_limit_bytes=gpu_limit, ram_limit_bytes=ram_limit,
        )  # fmt: skip
        config = load_config(options.model, "random")
        check_tokens(config, settings.seq, largest_token_id=0)
        device, precision, card = planned(settings)
        if options.gpus is not None:
            return _advice(options, settings, config, card)
        plan = make_plan(settings, lambda: make_decoder(config, precision, settings.residual), device, precision, card)
    except LowmemError as error:
        print(f"lowmem.plan: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan.describe())
    return 0


def _size(text: str) -> int | None:
    try:
        return None if text.lower() == "none" else parse_size(text)
    except ValueError as error:
        raise InputError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
