"""What the card does at most: stock transformers, forward and backward, no optimizer, nothing saved, nothing clever.

A training step cannot be faster than its own forward and backward, so sequences per second here are what a run's are
divided by. The stock way: fp32 weights under bf16 autocast, SDPA attention as transformers and PyTorch choose it, the
model's own loss (which makes all logits, several times over: under a small cap that decides), gradients that add up as
in ordinary accumulation, PyTorch's own settings for allocator and cuBLAS.

    eager      micro-batches of 1, 2, 4, ... until memory ends or speed has fallen twice; the best one counts
    compiled   torch.compile of the whole model, for the micro-batch that was best: compiling takes a minute or more, so
               there is no search; it is timed apart, and where it fails (it wants a C compiler) the row says why

Rows are found out one by one: where time ends in the middle of compiling, the eager ones are there.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig

from experiments.harness.child import Result, Setting
from lowmem.budget import Budget
from lowmem.device import collect_garbage
from lowmem.models import load_config

REPEATS = 3
LARGEST_MICRO_BATCH = 32
SEQ = 1024
TINY_SEQ = 8
NOT_COMPILED = "the stand-in computes values under a dispatch mode, under which PyTorch compiles nothing"
_OURS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


def measure(setting: Setting, models: list[str], compiled: bool = True) -> Result:
    """A detail row per model, way and micro-batch; the last row has the best of each, None where nothing fits."""
    device = stock_device(setting)
    values: dict = {"seq": TINY_SEQ if setting.dry_run else SEQ}
    checks: dict[str, bool] = {}
    for name in models:
        best = _search(setting, device, name)
        values[f"{name}, eager"] = best
        if compiled and best is not None:
            _forget(device)
            values[f"{name}, compiled"] = found = _compiled(setting, device, name, best["micro_batch"])
            if not setting.stand_in:
                checks[f"{name}: compiles"] = "error" not in found
        _forget(device)
    return Result(values, checks)


def stock_device(setting: Setting) -> torch.device:
    """As PyTorch is out of the box, but for the job's cap. To be called before CUDA starts."""
    for variable in _OURS:
        os.environ.pop(variable, None)
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device(setting.device)
    Budget(device, setting.gpu_limit_bytes, None).apply()
    return device


def _config(setting: Setting, name: str) -> PretrainedConfig:
    if setting.dry_run:
        return GPT2Config(
            n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=TINY_SEQ, bos_token_id=0, eos_token_id=0
        )
    return load_config(name, "random")


def _search(setting: Setting, device: torch.device, name: str) -> dict | None:
    """Sequences per second, eager, of the best micro-batch and which that is; None where not one sequence fits."""
    rows: list[dict] = []
    model = _unless_out_of_memory(device, lambda: _stock_model(setting, device, name))
    most = 2 if setting.dry_run else LARGEST_MICRO_BATCH
    for micro_batch in (2**power for power in range(most.bit_length())):
        row = None
        if model is not None:
            row = _unless_out_of_memory(device, lambda size=micro_batch: _timed(setting, device, model, size))
        values = {"model": name, "way": "eager", "fits": row is not None} | (row or {"micro_batch": micro_batch})
        setting.record(f"{name}, eager, micro-batch {micro_batch}", values, {})
        if row is None:
            break
        rows.append(row)
        if _fell_twice([row["sequences_per_second"] for row in rows]):
            break
    return max(rows, key=lambda row: row["sequences_per_second"], default=None)


def _fell_twice(speeds: list[float]) -> bool:
    return len(speeds) >= 3 and speeds[-1] < speeds[-2] < speeds[-3]


def _compiled(setting: Setting, device: torch.device, name: str, micro_batch: int) -> dict:
    """The same of the compiled model, or {"error": ...}, or on the stand-in {"not_measured": ...}."""
    detail, described = f"{name}, compiled, micro-batch {micro_batch}", {"model": name, "way": "compiled"}
    if setting.stand_in:
        row = {"micro_batch": micro_batch, "not_measured": NOT_COMPILED}
        setting.record(detail, described | row, {})
        return row
    try:
        model = _stock_model(setting, device, name)
        # in a dry run only what Dynamo does: code for the CPU would have to be compiled
        model.compile(dynamic=False, backend="eager" if setting.dry_run else "inductor")
        row = _timed(setting, device, model, micro_batch)
        row["compile_seconds"] = row.pop("first_seconds")
    except Exception as error:  # whatever the compilers raise, and out of memory
        row = {"micro_batch": micro_batch, "error": f"{type(error).__name__}: {_first_line(error)}"}
    setting.record(detail, described | row, {"compiles": "error" not in row})
    return row


def _stock_model(setting: Setting, device: torch.device, name: str) -> nn.Module:
    with device:
        model = AutoModelForCausalLM.from_config(_config(setting, name), dtype=torch.float32)
    return model.train()


def _timed(setting: Setting, device: torch.device, model: nn.Module, micro_batch: int) -> dict:
    """Median speed of a forward and backward, after one that warms up (`first_seconds`), and the peaks."""
    seq = TINY_SEQ if setting.dry_run else SEQ
    tokens = torch.randint(0, model.config.vocab_size, (micro_batch, seq), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    row = {"micro_batch": micro_batch, "first_seconds": seconds[0]}
    row["sequences_per_second"] = micro_batch / statistics.median(seconds[1:])
    if device.type == "cuda":
        row["gpu_allocated_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        row["gpu_reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return row


def _unless_out_of_memory(device: torch.device, work: Callable):
    """What `work` returns, or None if the card's memory, or its cap, is too small for it."""
    try:
        return work()
    except torch.OutOfMemoryError:
        pass
    _forget(device)  # only here is the error gone, and with its traceback the tensors of the attempt
    return None


def _forget(device: torch.device) -> None:
    collect_garbage()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "nothing was said").splitlines()[0][:300]
