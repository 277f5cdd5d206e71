"""Describes a run for the log and report.json: device, package versions, and things that a user might not expect."""

import platform
from importlib import metadata

import torch
from transformers import PretrainedConfig

from lowmem.config_switches import remarks
from lowmem.core.batch import LEAST_POSITIONS, micro_batch_shapes
from lowmem.data.batches import PACKED, Batches
from lowmem.data.tokenizer import BYTE_LEVEL, is_byte_level
from lowmem.planning.plan import Plan
from lowmem.units import counted


def opening_remarks(init: str, config: PretrainedConfig, tokenizer, device: torch.device) -> list[str]:
    """Returns sentences for the log on the device, random weights, a byte-level tokenizer, and fields of the config
    that training overrides or removes. `init`: the value of --init."""
    said = [f"training on {device_name(device)}"]
    if init == "random":
        said.append("weights are random (--init random), not pretrained")
    if is_byte_level(tokenizer):
        said.append(BYTE_LEVEL)
    return said + remarks(config)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU ({platform.processor() or platform.machine()}, {counted(torch.get_num_threads(), 'threads')})"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "transformers", "safetensors", "bitsandbytes"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with its build: +cpu, +cu130


def computed_share(train: Batches, plan: Plan) -> list[str]:
    """Returns a list with one sentence on a typical batch: the share of its positions that are not computed, and the
    share of padding in the rest. Returns [] if all rows are computed at full length."""
    lengths = train.typical_lengths()
    if lengths is None:
        return []
    seq, rows = train.parts[0].seq, train.batch_rows
    shapes = micro_batch_shapes(lengths, seq, plan.layout.micro_batch, LEAST_POSITIONS[plan.device])
    positions = sum(count * width for count, width in shapes)
    how = "packing examples into rows" if train.pack == PACKED else "sorting by length"
    return [
        f"{how} skips {1 - positions / (rows * seq):.0%} of {rows} x {seq} positions a step; "
        f"{1 - sum(lengths) / positions:.0%} padding remains"
    ]
