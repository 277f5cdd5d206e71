"""Measures the most that the card can do: forward and backward of stock transformers, without optimizer or saving.

The recipe: fp32 weights under bf16 autocast, SDPA attention, PyTorch's own settings. The model's own loss copies all
logits several times, which decides under a small cap.

    eager      micro-batches of 1, 2, 4, ... until memory ends or speed has fallen twice
    compiled   torch.compile of the whole model, at the best eager micro-batch
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig

from experiments.harness.child import Result, Setting
from experiments.harness.measured import sixteen_bit
from lowmem.core.precision import WORKING_DTYPES
from lowmem.device import collect_garbage
from lowmem.errors import first_line
from lowmem.limits import Budget
from lowmem.models.build import build_model, load_config

REPEATS = 3
COMPILE_SECONDS = 100.0  # of the processor, planned
LARGEST_MICRO_BATCH = 32
SEQ = 1024
TINY_SEQ = 8
NOT_COMPILED = "the stand-in computes values under a dispatch mode, under which PyTorch compiles nothing"
_OURS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


def measure(setting: Setting, models: list[str], compiled: bool = True) -> Result:
    """Measures each model, way and micro-batch. The last row has the best of each; None if nothing fits."""
    device = stock_device(setting)
    values: dict = {"seq": TINY_SEQ if setting.dry_run else SEQ}
    checks: dict[str, bool] = {}
    for name in models:
        best = _search(setting, device, name)
        values[f"{name}, eager"] = best
        if compiled and best is not None:
            _forget(device)
            # Compiling takes a minute or more, so there is no search.
            values[f"{name}, compiled"] = found = _compiled(setting, device, name, best["micro_batch"])
            if not setting.stand_in:
                checks[f"{name}: compiles"] = "error" not in found
        _forget(device)
    return Result(values, checks)


def stock_device(setting: Setting) -> torch.device:
    """Sets up the device as PyTorch does by default, under the job's cap. Call it before CUDA starts."""
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
    """Returns the figures of the best eager micro-batch; None if not one sequence fits."""
    rows: list[dict] = []
    model = cache(partial(_stock_model, setting, device, name))  # not made where every case is done already
    most = 2 if setting.dry_run else LARGEST_MICRO_BATCH
    for micro_batch in (2**power for power in range(most.bit_length())):
        work = partial(_eager, setting, device, model, name, micro_batch)
        seconds = _planned_seconds(setting, name, micro_batch)
        row = setting.attempt(f"{name}, eager, micro-batch {micro_batch}", work, seconds).values
        if "fits" not in row:  # it has ended its process
            continue
        if not row["fits"]:
            break
        rows.append({key: row[key] for key in row if key not in ("model", "way", "fits")})
        if _fell_twice([row["sequences_per_second"] for row in rows]):
            break
    return max(rows, key=lambda row: row["sequences_per_second"], default=None)


def _eager(
    setting: Setting, device: torch.device, model: Callable[[], nn.Module], name: str, micro_batch: int
) -> Result:
    row = _unless_out_of_memory(device, lambda: _timed(setting, device, model(), micro_batch))
    described = {"model": name, "way": "eager", "fits": row is not None}
    return Result(described | (row or {"micro_batch": micro_batch}), {})


def _fell_twice(speeds: list[float]) -> bool:
    return len(speeds) >= 3 and speeds[-1] < speeds[-2] < speeds[-3]


def _compiled(setting: Setting, device: torch.device, name: str, micro_batch: int) -> dict:
    """Returns the figures of the compiled model, {"error": ...} or, on the stand-in, {"not_measured": ...}."""
    detail, described = f"{name}, compiled, micro-batch {micro_batch}", {"model": name, "way": "compiled"}

    def work() -> Result:
        if setting.stand_in:
            return Result(described | {"micro_batch": micro_batch, "not_measured": NOT_COMPILED}, {})
        try:
            model = _stock_model(setting, device, name)
            # in a dry run only what Dynamo does: code for the CPU would have to be compiled
            model.compile(dynamic=False, backend="eager" if setting.dry_run else "inductor")
            row = _timed(setting, device, model, micro_batch)
            row["compile_seconds"] = row.pop("first_seconds")
        except Exception as error:  # whatever the compilers raise, and out of memory
            row = {"micro_batch": micro_batch, "error": f"{type(error).__name__}: {first_line(error)[:300]}"}
        return Result(described | row, {"compiles": "error" not in row})

    found = setting.attempt(detail, work, COMPILE_SECONDS + _planned_seconds(setting, name, micro_batch))
    row = found.values or {"micro_batch": micro_batch, "error": "ended its process; its row says how"}
    return {key: row[key] for key in row if key not in ("model", "way")}


def _planned_seconds(setting: Setting, name: str, micro_batch: int) -> float:
    parameters = sum(parameter.numel() for parameter in build_model(_config(setting, name)).parameters())
    tokens = micro_batch * (TINY_SEQ if setting.dry_run else SEQ)
    return (1 + REPEATS) * 6 * parameters * tokens / setting.flops_per_second  # 6 FLOP per parameter and token


def _stock_model(setting: Setting, device: torch.device, name: str) -> nn.Module:
    with device:
        model = AutoModelForCausalLM.from_config(_config(setting, name), dtype=torch.float32)
    return model.train()


def _timed(setting: Setting, device: torch.device, model: nn.Module, micro_batch: int) -> dict:
    """Returns the median speed of forward and backward, after one that warms up (`first_seconds`), and the peaks."""
    seq = TINY_SEQ if setting.dry_run else SEQ
    tokens = torch.randint(0, model.config.vocab_size, (micro_batch, seq), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        with torch.autocast(device.type, WORKING_DTYPES[sixteen_bit(device)]):
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
