"""Defines the input of planning (`Question`), and chooses the precision and the GPU that a plan is for."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from lowmem.core.kernels import Kernels
from lowmem.core.precision import resolve_precision
from lowmem.cudasim.gpus import CARDS, Card, card_named, card_of_name_reported
from lowmem.device import expandable_segments, select_device
from lowmem.errors import InputError
from lowmem.limits import CONTEXT_BYTES
from lowmem.models.build import make_decoder
from lowmem.planning.ram import Process
from lowmem.planning.simulated_ranks import ALONE, Mesh
from lowmem.settings import Settings


@dataclass(frozen=True)
class Question:
    """Holds the input of planning: the model of `config`, the settings of its training, and the device."""

    settings: Settings
    config: PretrainedConfig
    precision: str  # such as "bf16"
    card: Card | None  # None: the CPU
    ram_free_bytes: int | None = None  # RAM that is free for the process; None: not a limit, only the cap counts
    fused_kernels: Kernels | None = None  # those that run; None: those expected to run on the card
    process: Process | None = None  # the RAM of the process that will train; None: the process is not here
    mesh: Mesh = ALONE  # the processes that train together; `settings` has the batch and caps of one process
    ranks_here: int = 1  # how many processes of `mesh` share this machine's RAM, and --ram-limit

    @property
    def make_decoder(self) -> partial:
        return partial(make_decoder, self.config, self.precision, self.settings.residual)

    @property
    def ram_limit_bytes(self) -> int | None:
        """Returns the RAM cap of all processes of this run on this machine together, in bytes; None for no cap."""
        limit = self.settings.ram_limit_bytes
        return None if limit is None else limit * self.ranks_here

    @property
    def ram_here_bytes(self) -> int | None:
        """Returns the most bytes of RAM that the training process can take on this machine: its present use and the
        free RAM. Returns None if `ram_free_bytes` or `process` is None."""
        if self.ram_free_bytes is None or self.process is None:
            return None
        return self.process.now_bytes + self.ram_free_bytes


def precision_and_card(settings: Settings) -> tuple[str, Card | None]:
    """Returns the precision (such as "bf16") and the GPU that a plan is for; None for the CPU. Raises InputError for an
    unknown GPU, for training on a GPU that PyTorch cannot use here, and for bf16 on a GPU that lacks it. Also raises it
    for settings of PyTorch's CUDA allocator that the planner cannot simulate."""
    if settings.plan_only:
        # for a GPU, even if this machine has none
        on_gpu = settings.device != "cpu"
    else:
        on_gpu = select_device(settings.device).type == "cuda"
        if settings.gpu is not None and not on_gpu:
            raise InputError(
                f"--gpu {settings.gpu}: there is no GPU here to train on; add --plan-only to plan for that card, or "
                "leave --gpu out to train on the CPU"
            )
    if not on_gpu:
        return resolve_precision(settings.precision, torch.device("cpu")), None
    card, precision = card_for(settings), settings.precision
    if not settings.plan_only:
        precision = resolve_precision(precision, torch.device("cuda"))
    elif precision == "auto":
        precision = "bf16" if "bf16" in card.rates else "fp16"
    if precision == "bf16" and "bf16" not in card.rates:
        raise InputError(f"--precision bf16: {card.name} has no bf16; --precision auto takes fp16 there")
    expandable_segments()  # refuses settings of the allocator that no plan can be made for
    return precision, card


def card_for(settings: Settings) -> Card:
    """Returns the GPU that the settings name, or else the one in this machine. If there is neither, returns the
    smallest card with measured speed, bf16, and memory for the GPU cap. If there is no such card, returns the largest
    with measured speed."""
    here = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    if settings.gpu is not None:
        named = card_named(settings.gpu)
        elsewhere = settings.plan_only or here is None
        return named if elsewhere else replace(named, memory_bytes=min(named.memory_bytes, here.total_memory))
    if here is not None:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        found = card_of_name_reported(name, here.total_memory)
        if found is None:
            return _nearest(capability, here)
        return found if found.measured else replace(found, memory_bytes=here.total_memory)
    wanted = (settings.gpu_limit_bytes or 0) + CONTEXT_BYTES
    measured = [card for card in CARDS.values() if card.measured]
    enough = [card for card in measured if "bf16" in card.rates and card.memory_bytes >= wanted]
    # The smallest that is enough, else the largest.
    return min(enough or measured, key=lambda card: card.memory_bytes * (1 if enough else -1))


def _nearest(capability: tuple[int, int], properties) -> Card:
    # Does not time the GPU, because no choice may depend on measured time (cpu_plan.py).
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
