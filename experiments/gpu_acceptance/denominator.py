"""What the card does at most: stock transformers, forward and backward, no optimizer, nothing saved, nothing clever.

A training step cannot be faster than its own forward and backward, so sequences per second here are what a run's are
divided by. Two stock ways: fp32 weights under bf16 autocast, and weights that are bf16 to begin with (half the memory,
and no master weights: less than a training needs). The micro-batch doubles until memory ends; gradients add up, as in
ordinary accumulation. The model's own loss makes all logits, several times over: under a small cap that decides.

Everything CUDA here has never run on a GPU.
"""

import contextlib
import gc
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.gpu_acceptance.capped import capped_device
from experiments.gpu_acceptance.child import Result, Setting
from lowmem.models import load_config

REPEATS = 3


def measure(setting: Setting) -> Result:
    """A detail row per model, kind of weights and micro-batch; the last row has the best of each."""
    device = capped_device(setting)
    models, seq, most = (("gpt2-demo",), 32, 2) if setting.dry_run else (("gpt2-large", "gpt2-xl"), 1024, 32)
    best: dict[str, float | None] = {}
    for name in models:
        for weights in (torch.float32, torch.bfloat16):
            kind = f"{name}, " + ("bf16 autocast" if weights is torch.float32 else "bf16 weights")
            best[f"{kind}: sequences_per_second"] = _best(setting, device, name, weights, kind, seq, most)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return Result(best, {"something fits": any(best.values())})


def _best(
    setting: Setting, device: torch.device, name: str, weights: torch.dtype, kind: str, seq: int, most: int
) -> float | None:
    """Sequences per second of the fastest micro-batch; None where not even one sequence fits."""
    best, micro_batch = None, 1
    model = _unless_out_of_memory(_stock_model, name, weights, device)
    while model is not None and micro_batch <= most:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = _unless_out_of_memory(_seconds, model, device, micro_batch, seq)
        values = {"micro_batch": micro_batch, "seq": seq, "fits": seconds is not None}
        if seconds is not None:
            values["sequences_per_second"] = micro_batch / seconds
            best = max(best or 0.0, micro_batch / seconds)
        if device.type == "cuda":
            values["gpu_allocated_peak_bytes"] = torch.cuda.max_memory_allocated(device)
            values["gpu_reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
        setting.record(f"{kind}, micro-batch {micro_batch}", values, {})
        if seconds is None:
            break
        micro_batch *= 2
    return best


def _stock_model(name: str, weights: torch.dtype, device: torch.device) -> PreTrainedModel:
    with device:
        model = AutoModelForCausalLM.from_config(load_config(name, "random"), dtype=weights)
    return model.train()


def _seconds(model: PreTrainedModel, device: torch.device, micro_batch: int, seq: int) -> float:
    """Median time of a forward and backward, after one that warms up."""
    tokens = torch.randint(0, model.config.vocab_size, (micro_batch, seq), device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=model.dtype is torch.float32)
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        with autocast:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _unless_out_of_memory(function, *arguments):
    """What the call returns, or None if the card's memory, or its cap, is too small for it."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return function(*arguments)
    return None
