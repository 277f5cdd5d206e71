"""Runs the same cases on the GPU, each in its own process, under the cap of the prediction.

Weights are random: no memory depends on them.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields

import torch
from transformers import PretrainedConfig

from experiments.harness.measured import kernels_of, train
from experiments.harness.models import MODELS
from lowmem import device as devices
from lowmem.core.batch import Batch
from lowmem.core.layout import Layout
from lowmem.core.optimizers import get_optimizer
from lowmem.models.build import make_decoder, model_from_config
from lowmem.planning.simulated_step import StepCase

STEPS = 3
TIME_LIMIT_SECONDS = 300


def measured(case: dict) -> dict:
    """Runs a case: model, method, seq, batch, limit_bytes and lowmem's choice. Returns its figures, {"fits": False} if
    memory ran out under the cap, or {"fits": None, "error": ...}."""
    command = [sys.executable, "-m", "experiments.memory_estimation.measure", json.dumps(case)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"fits": None, "error": f"not done after {TIME_LIMIT_SECONDS} s"}
    if result.returncode:
        return {"fits": None, "error": (result.stderr.strip() or "nothing was said").splitlines()[-1]}
    return json.loads(result.stdout.splitlines()[-1])


def run_case(case: dict, device: torch.device) -> dict:
    """Returns the peaks of allocated and reserved bytes over STEPS steps, after the weights are there."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as the simulation takes it
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case["limit_bytes"] / total), device)
    config = MODELS[case["model"]].config()
    try:
        if case["choice"] is not None:
            run_lowmem(config, case["seq"], case["batch"], case["choice"], device)
        else:
            run_plain(config, case["seq"], case["batch"], case["method"], device)
    except torch.OutOfMemoryError:
        return {"fits": False}
    if device.type != "cuda":
        return {"fits": True}
    return {
        "fits": True,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
    }


def run_plain(config: PretrainedConfig, seq: int, batch: int, recipe: str, device: torch.device) -> None:
    """Runs a recipe of plain.py, with the optimizer that PyTorch would choose."""
    with device:
        model = model_from_config(config).train()
    tokens = torch.zeros((batch, seq), dtype=torch.int64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    _begin(device)
    for _ in range(STEPS):
        with torch.autocast(device.type, torch.bfloat16) if recipe == "bf16" else nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run_lowmem(config: PretrainedConfig, seq: int, batch: int, choice: dict, device: torch.device) -> None:
    devices.make_deterministic(device)
    decoder = make_decoder(config, "bf16", "fp32", kernels_of(device))
    layout = Layout(**{field.name: choice[field.name] for field in fields(Layout) if field.name in choice})
    case = StepCase(seq, batch, layout, torch.bfloat16, get_optimizer("adamw"))
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    _begin(device)
    train(decoder, case, Batch(tokens, tokens), device, STEPS)


def _begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def main() -> int:
    case = json.loads(sys.argv[1])
    if case["choice"] is not None:
        devices.set_environment()
    else:  # PyTorch's own settings
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
            os.environ.pop(name, None)
    print(json.dumps(run_case(case, devices.select_device("cuda"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
