"""Defines the plan of a training run: how a step is computed, and the bytes and seconds that its simulation predicts.

A plan is written as `plan.json`, and printed as a few lines (answer.py) or, with --verbose, as a table.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

import torch

from lowmem.core.kernels import Kernels
from lowmem.core.layout import Fate, Layout
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.cudasim.gpus import Card
from lowmem.models.export import BESIDE_WEIGHTS_BYTES
from lowmem.planning.answer import answer
from lowmem.planning.ram import Ram, largest
from lowmem.settings import Settings
from lowmem.terminal import filled, for_terminal
from lowmem.units import GIB, MIB, format_size, interval_seconds


@dataclass(frozen=True)
class Plan:
    """Holds the layout of a training step (how it is computed) and the predicted figures, of one rank if there are
    several. On the CPU, the card, peaks of GPU memory and seconds are None. `timeline`: list of (second of a step,
    allocated bytes, reserved bytes)."""

    settings: Settings
    parameters: int  # of the model
    units: int  # the embeddings, each block, and the final norm
    blocks: int
    precision: str
    layout: Layout
    ram: Ram  # bytes by phase of the training run and by name
    card: Card | None = None
    gpu_limit_bytes: int | None = None
    gpu_allocated_peak_bytes: int | None = None
    gpu_reserved_peak_bytes: int | None = None
    gpu_breakdown: dict[str, int] = field(default_factory=dict)
    step_seconds: float | None = None
    waiting_seconds: float | None = None  # of a step, in which the GPU waits for copies or other ranks
    timeline: list[tuple[float, int, int]] = field(default_factory=list, repr=False)
    fused_kernels: Kernels = Kernels.NONE  # those that are expected to run
    # compatibility.py compares a small copy of the model with its embeddings, blocks and head, run in turn.
    not_compared: str | None = None  # why the model could not be compared with its parts; None: it was
    faster_with_ram: tuple[int, float] | None = None  # with more RAM: (bytes of RAM, seconds of a step)
    allocator_bytes: int | None = None  # the allocator's cap, if it must be smaller than the limit
    keeps_freed_memory: bool = False  # whether RAM of freed tensors stays for new ones (device.keep_freed_memory)
    checkpoint_bytes: int = 0
    disk_state_bytes: int = 0  # of the states in --states-folder
    typical_tokens: int | None = None  # of the timed step, if its rows are as long as the data's; None: rows are full
    steps: int | None = None  # of the whole training run; None if that depends on the data
    ranks: int = 1  # processes that train together
    sharing: int = 1  # how many ranks store one copy of the model together; the others store further copies
    sent_bytes: int = 0  # to other ranks, in a step
    # Smaller layouts allocate 5 to 50% less, and change no bit.
    smaller_layouts: tuple[Layout, ...] = ()  # if memory runs out, training changes to these, the largest first

    @property
    def model(self) -> str:
        return self.settings.model

    @property
    def device(self) -> str:
        return "cpu" if self.card is None else "cuda"

    @property
    def ram_breakdown(self) -> dict[str, int]:
        """Returns {name: bytes} of RAM in the phase of the run that takes the most."""
        return largest(self.ram)

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram_breakdown.values())

    @property
    def ram_phases(self) -> dict[str, int]:
        return {phase: sum(held.values()) for phase, held in self.ram.items()}

    @property
    def most_saves(self) -> int | None:
        """Returns the largest number of checkpoints that training can write, or None if that is unknown."""
        settings, steps = self.settings, self.steps
        every, seconds = settings.save_every, interval_seconds(settings.save_every)
        if steps is None or (seconds is not None and self.step_seconds is None):
            return None
        if seconds is not None:
            every = max(int(seconds / self.step_seconds), 1)
        return math.ceil(steps / every) + (steps // settings.eval_every if settings.keep_best else 0)

    @property
    def disk(self) -> dict[str, int]:
        """Returns {name: bytes} of everything that training stores on disks, when it takes the most: checkpoints, the
        exported model, and optimizer states."""
        kept = (self.settings.keep_last + self.settings.keep_best) * self.checkpoint_bytes
        exported = WORKING_DTYPES[self.settings.export_dtype].itemsize
        states = {"states": self.disk_state_bytes} if self.disk_state_bytes else {}
        saved = {"checkpoints": kept, "one_being_written": self.checkpoint_bytes, "export": exported * self.parameters}
        return saved | {"beside_exported_weights": BESIDE_WEIGHTS_BYTES} | states

    def to_dict(self) -> dict:
        """Returns the content of plan.json."""
        return {
            "fits": True,
            "model": self.model,
            "parameters": self.parameters,
            "tokens_per_step": self.settings.batch * self.settings.seq,
            "typical_tokens_per_step": self.typical_tokens,
            "steps": self.steps,
            "ranks": self.ranks,
            "ranks_that_share_a_model": self.sharing,
            "limits": {"gpu_bytes": self.gpu_limit_bytes, "ram_bytes": self.settings.ram_limit_bytes},
            "choice": asdict(self.layout)
            | {
                "recompute": self.layout.recomputes(self.blocks),
                "state_bits": OPTIMIZERS[self.settings.optimizer].state_bits,
                "precision": self.precision,
                "residual": self.settings.residual,
                "device": self.device,
                "optimizer": self.settings.optimizer,
                "fused_kernels": self.fused_kernels.names,
                "streamed_units": self.units - self.layout.states_on_gpu,
            },
            "predicted": {
                "gpu_allocated_peak_bytes": self.gpu_allocated_peak_bytes,
                "gpu_reserved_peak_bytes": self.gpu_reserved_peak_bytes,
                "ram_peak_bytes": self.ram_bytes,
                "step_seconds": self.step_seconds,
            },
            "keeps_freed_memory": self.keeps_freed_memory,
            "seconds_waiting_for_copies": self.waiting_seconds,
            "sent_bytes": self.sent_bytes,
            "faster_with_ram": self.faster_with_ram
            and dict(zip(("ram_bytes", "step_seconds"), self.faster_with_ram, strict=True)),
            "breakdown": self.gpu_breakdown or self.ram_breakdown,
            "ram_breakdown": self.ram_breakdown,
            "ram_phases": self.ram_phases,
            "disk": self.disk,
            "not_compared_with_the_whole_model": self.not_compared,
            "depends_on": {
                "card": None if self.card is None else self.card.name,
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
        }

    def __str__(self) -> str:
        return for_terminal("\n".join(answer(self)), sys.stdout)

    def describe(self) -> str:
        """Returns the plan as a table with all figures, in 80 columns; docs/plan.md explains the rows."""
        settings = self.settings
        masters = " with fp32 master weights" if self.precision != "fp32" else ""
        trained = f"{self.model}: {self.parameters:,} parameters, all trained"
        lines = [f"{trained}; {settings.optimizer}, {self.precision}{masters}", self._layout_in_words()]
        if self.layout.fate is Fate.DROPPED:
            lines.append(
                "all gradients at once would not fit, so forward and backward run twice, first for the norm alone"
            )
        if self.device == "cuda":
            lines += _table("GPU", self.gpu_breakdown, "allocated", self.gpu_limit_bytes)
            lines.append(f"  GPU {'reserved':<32}{format_size(self.gpu_reserved_peak_bytes):>10}")
        lines += _table("RAM", self.ram_breakdown, "total", settings.ram_limit_bytes)
        phases = ", ".join(f"{phase} {size / GIB:.2f}" for phase, size in self.ram_phases.items())
        lines.append(f"  RAM in GiB: {phases}")
        saved = sum(self.disk.values()) - self.disk_state_bytes
        kept = settings.keep_last + settings.keep_best
        model = saved - (kept + 1) * self.checkpoint_bytes
        total, each, model = (format_size(size) for size in (saved, self.checkpoint_bytes, model))
        every = settings.save_every if isinstance(settings.save_every, str) else f"{settings.save_every} steps"
        lines.append(f"  disk {total}: {kept} + 1 checkpoints of {each}, and {model} for the model; one every {every}")
        if self.disk_state_bytes:
            size = format_size(self.disk_state_bytes)
            lines.append(f"  disk {size} in {settings.states_folder}: states, read and written in each step")
        lines += self._seconds_in_words()
        return filled("\n".join(lines), 80, "    ")

    def _layout_in_words(self) -> str:
        layout, settings, units, blocks = self.layout, self.settings, self.units, self.blocks
        streamed = blocks + 1 - max(layout.weights_on_gpu or 0, 1)
        on_disk = len(layout.units_on_disk(units))
        groups = f" in groups of {layout.group}" if layout.group > 1 else ""
        said = {
            f"batch {settings.batch} x {settings.seq} tokens as micro-batches of {layout.micro_batch}{groups}": True,
            kept_in_words(layout, blocks): True,
            f"states of {layout.states_on_gpu} of {units} units on the GPU": self.device == "cuda",
            f"working weights of {streamed} of {blocks} blocks brought over for each pass": (
                layout.weights_on_gpu is not None
            ),
            f"states of {on_disk} of {units} units on the disk of {settings.states_folder}": layout.states_on_disk,
            "inputs of blocks wait in RAM for their backward": layout.boundaries_in_ram,
            "gradients wait in RAM for their updates": layout.fate is Fate.SENT,
            "blocks are updated during backward": layout.fate is Fate.APPLIED,
            "weights of blocks stay gathered until backward": layout.gathered,
            "memory of freed tensors is kept for new ones": self.keeps_freed_memory,
        }
        return "; ".join(text for text, holds in said.items() if holds)

    def _seconds_in_words(self) -> Iterator[str]:
        if self.step_seconds is not None:
            tokens = self.typical_tokens or self.settings.batch * self.settings.seq
            of_data = "" if self.typical_tokens is None else f" with the data's {tokens:,} tokens"
            waiting = "copies" if self.ranks == 1 else "copies and for other cards"
            yield (
                f"a step takes about {self.step_seconds:.3g} s{of_data} on {self.card.name} "
                f"({tokens / self.step_seconds:,.0f} tokens/s), "
                f"{round(self.waiting_seconds, 4):.2g} s of it waiting for {waiting}"
            )
        if self.not_compared is not None:
            yield f"not compared with the whole model ({self.not_compared}); training does that before its first step"


def kept_in_words(layout: Layout, blocks: int) -> str:
    """Returns a clause for users: how many of the model's `blocks` are recomputed, in whole or in part."""
    if not layout.recomputes(blocks):
        return "nothing recomputed"
    whole, again = max(layout.kept - blocks, 0), max(blocks - layout.kept, 0)
    together = min(layout.segment_blocks, again)
    at_a_time = f", {together} at a time" if together > 1 else ""
    if not layout.kept:
        return f"all {blocks} blocks recomputed{at_a_time}"
    said = {
        f"{again} recomputed{at_a_time}": again,
        f"{blocks - again - whole} recomputed but for their matrix products": blocks - again - whole,
        f"{whole} kept whole": whole,
    }
    return f"of {blocks} blocks " + ", ".join(text for text, number in said.items() if number)


def _table(title: str, breakdown: dict[str, int], total: str, limit_bytes: int | None) -> list[str]:
    cap = "no cap" if limit_bytes is None else f"cap {format_size(limit_bytes)}"
    names = {name.replace("_", " "): size for name, size in breakdown.items() if size >= MIB / 2}
    lines = [f"  {title} {name:<32}{format_size(size):>10}" for name, size in names.items()]
    return [*lines, f"  {title} {total:<32}{format_size(sum(breakdown.values())):>10}  ({cap})"]
