"""Predicts the RAM of a training run, by phase and by name. A cap holds in all phases, so the largest phase counts."""

from dataclasses import dataclass
from fractions import Fraction

import torch

from lowmem.core.optimizers import BLOCK, Optimizer, state_layout
from lowmem.files import CHUNK_BYTES
from lowmem.units import GIB, MIB

# prepare    until the weights are read: imports, data, the GPU's libraries; measured in the process that trains
# load       weights are read or made, a part at a time; optimizer states get their memory
# evaluate   the model and its states, and a forward pass
# train      the model and its states, and on the CPU gradients and activations
# save       the model and its states, and a buffer for copies from a GPU
# export     the model and its states, and the buffers in which weights are converted
PHASES = ("prepare", "load", "evaluate", "train", "save", "export")
CUDA_PROCESS_BYTES = 2 * GIB  # assumed: interpreter, libraries, CUDA's host side and data, if no GPU is here.
# What the process takes after planning: data, buffers, and the kernels that CUDA loads at their first use. On an H200
# with torch 2.11, GPT-2-Large took 340 MiB, the demo 500.
TRAINING_BYTES = 544 * MIB
CPU_TRAINING_BYTES = 112 * MIB  # The same on the CPU, from runs of GPT-2 and GPT-2-Medium.
DATA_BYTES = 64 * MIB  # Assumed: the tokenizer and data of a run, which a plan alone does not load.
PROCESS_VARIES_BYTES = 8 * MIB  # The process may take this much more at its next start; about 1 MiB was seen.
RUNS_BYTES = 24 * MIB  # for reading, converting and writing weights piece by piece; a test checks this number

Ram = dict[str, dict[str, int]]  # by phase, by name


@dataclass(frozen=True)
class Process:
    """Holds the RAM of the process that will train. Planning may run in another process."""

    now_bytes: int  # in use when planning begins
    peak_bytes: int  # the most in use until then; 0 if no training follows


def on_a_gpu(
    process_bytes: int, in_ram: dict[str, int], drawn_bytes: int, optimizer: Optimizer, dtype: torch.dtype
) -> Ram:
    """Predicts the RAM of training on a GPU. Returns {phase of the run: {name: bytes}}. `in_ram`: {name: bytes} of
    tensors that are copied from RAM to the GPU when needed. `process_bytes`: RAM of the process without them.
    `drawn_bytes`: size of the largest tensor that RAM holds whole while initial weights are made. `dtype`: of the
    weights that compute."""
    streamed = {name: size for name, size in in_ram.items() if size or name == "streamed_states"}
    held = streamed | {"process": process_bytes}
    # Gradients, saved inputs and buffers get their memory later.
    loaded = {name: held[name] for name in ("streamed_states", "process", "streamed_weights") if name in held}
    # While weights are loaded, moments are zeros and take no RAM. They take it when they are page-locked after that.
    moments = int(in_ram["streamed_states"] * _share_of_moments(optimizer, dtype))
    return {
        "load": loaded | {"loading": max(drawn_bytes + RUNS_BYTES - moments, 0)},
        "evaluate": held,
        "train": held,
        "save": held | {"saving": CHUNK_BYTES},
        "export": held | {"exporting": RUNS_BYTES},
    }


def most_streamed(
    limit_bytes: int, process_bytes: int, drawn_bytes: int, optimizer: Optimizer, dtype: torch.dtype
) -> int:
    """Returns how many bytes of tensors RAM may store for copies to the GPU, so that no phase of `on_a_gpu` exceeds
    `limit_bytes`. It is negative if training exceeds the limit without any. `process_bytes`: RAM of the process without
    them. `drawn_bytes`: size of the largest tensor that RAM holds whole while initial weights are made."""
    room = limit_bytes - process_bytes - RUNS_BYTES
    # Moments take no RAM while weights are loaded (on_a_gpu).
    low = 1 - _share_of_moments(optimizer, dtype)
    while_loading = room - drawn_bytes
    if while_loading < 0:
        return while_loading
    if not low:
        return room
    return min(room, int(while_loading / low))


def _share_of_moments(optimizer: Optimizer, dtype: torch.dtype) -> Fraction:
    layout = {name: entries * kind.itemsize for name, (entries, kind) in state_layout(optimizer, BLOCK, dtype).items()}
    total = sum(layout.values())
    # All states but the low halves of weights are moments, such as Adam's.
    return Fraction(total - layout.get("low", 0), total or 1)


def on_the_cpu(process_bytes: int, train: dict[str, int], drawn_bytes: int) -> Ram:
    """Predicts the RAM of training on the CPU. Returns {phase of the run: {name: bytes}}. `train`: {name: bytes} at the
    peak of a step. `process_bytes`: RAM of the process without these. `drawn_bytes`: size of the largest tensor that
    RAM holds whole while initial weights are made."""
    names = (
        *("working_weights", "buffers", "resident_states", "streamed_states", "streamed_weights", "weight_slots"),
        *("streamed_boundaries", "streamed_gradients", "freed_and_kept"),
    )
    kept = {name: train[name] for name in names if name in train} | {"process": process_bytes}
    later = dict.fromkeys(("freed_and_kept", "streamed_boundaries", "streamed_gradients"), 0)
    return {
        "load": kept | {"loading": drawn_bytes + RUNS_BYTES} | later,
        "evaluate": kept,
        "train": train | {"process": process_bytes},
        "save": kept,
        "export": kept | {"exporting": RUNS_BYTES},
    }


def largest(ram: Ram) -> dict[str, int]:
    """Returns {name: bytes} of the phase that takes the most RAM. `ram`: {phase of the run: {name: bytes}}."""
    return max(ram.values(), key=lambda held: sum(held.values()))
