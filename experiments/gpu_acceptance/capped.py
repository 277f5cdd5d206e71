"""The device that a part computes on, as a training under the job's cap would find it.

A file of its own because child.py, which the command imports, does without torch.
"""

import torch

from experiments.harness.child import Setting
from lowmem import device as devices
from lowmem.budget import Budget


def capped_device(setting: Setting) -> torch.device:
    """Sets training's environment and the job's cap of GPU memory. To be called before CUDA starts."""
    devices.set_environment()
    device = torch.device(setting.device)
    Budget(device, setting.gpu_limit_bytes, None).apply()
    return device
