"""The device that a part computes on, as a training under the job's cap would find it, and the precisions it has.

A file of its own because child.py, which the command imports, does without torch.
"""

import torch

from experiments.harness.child import Setting
from lowmem import device as devices
from lowmem.core.precision import WORKING_DTYPES, resolve_precision
from lowmem.limits import Budget


def capped_device(setting: Setting) -> torch.device:
    """Sets training's environment and the job's cap of GPU memory. To be called before CUDA starts."""
    devices.set_environment()
    device = torch.device(setting.device)
    Budget(device, setting.gpu_limit_bytes, None).apply()
    return device


def sixteen_bit(device: torch.device) -> str:
    """Returns the 16-bit precision of this device: "bf16", or "fp16" on cards below sm_80, which have no bf16."""
    return resolve_precision("auto", device) if device.type == "cuda" else "bf16"


def precisions(device: torch.device) -> dict[str, torch.dtype]:
    """Returns all working precisions that the device has, by name."""
    return {name: dtype for name, dtype in WORKING_DTYPES.items() if name != "bf16" or sixteen_bit(device) == "bf16"}
