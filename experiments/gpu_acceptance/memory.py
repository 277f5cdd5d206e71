"""Compares predicted with measured GPU memory, for models of ten families.

    lowmem   three steps of the planner's choice for BATCH x SEQ tokens under the job's cap
    plain    transformers and torch.optim.AdamW, PLAIN_BATCH sequences (experiments/memory_estimation)

An error is (predicted - measured) / measured. Weights are random, because no memory depends on them. Other processes
plan while the GPU measures, so seconds are worth little.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process

import torch
import transformers
from transformers import CONFIG_MAPPING, GPT2Config, LlamaConfig, PretrainedConfig

from experiments.gpu_acceptance.denominator import stock_device
from experiments.gpu_acceptance.plans import bars
from experiments.harness.child import Result, Setting, named
from experiments.harness.measured import error, measure, prepared, sixteen_bit, train
from experiments.harness.models import MODELS
from lowmem import device as devices
from lowmem.core.batch import Batch
from lowmem.core.kernels import Kernels
from lowmem.core.optimizers import OPTIMIZERS
from lowmem.core.precision import WORKING_DTYPES
from lowmem.cudasim.gpus import CARDS, Card
from lowmem.cudasim.tape import under_cap
from lowmem.errors import InputError, LowmemError, PlanError
from lowmem.models.build import load_config, make_decoder
from lowmem.planning.plan import Plan
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question, card_for
from lowmem.planning.simulated_step import StepCase
from lowmem.settings import Settings

SEQ, BATCH, PLAIN_BATCH = 1024, 16, 2
TINY_SEQ, TINY_BATCH = 16, 2
STEPS = 3
A_CARD = CARDS["rtx3060"]  # for a dry run
_ESTIMATION = "experiments.memory_estimation"
MORE = {  # type and what differs from its defaults, as in the models' config.json
    "pythia-410m": ("gpt_neox", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "vocab_size": 50304,
    }),
    "pythia-1.4b": ("gpt_neox", {
        "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 8192,
        "vocab_size": 50304,
    }),
    "qwen3-0.6b": ("qwen3", {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
TINY = {
    "tiny-gpt2": GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=257, n_positions=TINY_SEQ, bos_token_id=0, eos_token_id=0
    ),
    "tiny-llama": LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=176, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=TINY_SEQ,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Predicted:
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    at_peak: dict[str, int]


def lowmem(setting: Setting, models: Sequence[str]) -> Result:
    device, card, target = prepared(setting)
    seq, batch = (TINY_SEQ, TINY_BATCH) if setting.dry_run else (SEQ, BATCH)
    precision = "fp32" if setting.dry_run else sixteen_bit(device)

    def case_of(name: str) -> tuple:
        settings = Settings(
            model=name, init="random", seq=seq, batch=batch, gpu_limit_bytes=setting.gpu_limit_bytes, plan_only=True
        )
        return settings, precision, card or A_CARD, target.fused_kernels

    def measured(name: str, plan: Plan | str) -> Result:
        if isinstance(plan, str):
            return Result({"model": name, "method": "lowmem", "not_measured": plan}, {})
        found = measure(partial(_run_lowmem, plan, device), device, setting.gpu_limit_bytes)
        predicted = _Predicted(plan.gpu_allocated_peak_bytes, plan.gpu_reserved_peak_bytes, plan.gpu_breakdown)
        values, checks = _compared(predicted, found)
        values = _case(plan.settings, "lowmem") | values
        values |= {"parameters": plan.parameters, "choice": plan.to_dict()["choice"]}
        if found is not None:
            values["measured_step_seconds"] = found.returned.step_seconds
            values["predicted_step_seconds"] = plan.step_seconds
        # a page of the allocator is much of a tiny model, and a plan of a GPU none of the CPU
        return Result(values, {} if setting.dry_run else checks)

    def seconds(plan: Plan | str) -> float:
        return STEPS * plan.step_seconds if isinstance(plan, Plan) else 0.0

    return _of_all(setting, _predictions(setting, models, _planned, case_of), measured, seconds)


def plain(setting: Setting, models: Sequence[str]) -> Result:
    device, recipe, card = stock_device(setting), "fp32", A_CARD
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as the simulation takes it
        # the estimation has no recipe of fp16, which is what cards without bf16 would take
        recipe, card = ("bf16" if sixteen_bit(device) == "bf16" else "fp32"), card_for(Settings())
    seq, batch = (TINY_SEQ, TINY_BATCH) if setting.dry_run else (SEQ, PLAIN_BATCH)
    run_plain = named(f"{_ESTIMATION}.measure:run_plain")

    def measured(name: str, predicted: _Predicted | str) -> Result:
        case = {"model": name, "method": f"plain {recipe}", "seq": seq, "batch": batch}
        if isinstance(predicted, str):
            return Result(case | {"not_measured": predicted}, {})
        config = _config(name)
        found = measure(partial(run_plain, config, seq, batch, recipe, device), device, setting.gpu_limit_bytes)
        return Result(case | {"limit_bytes": setting.gpu_limit_bytes} | _compared(predicted, found)[0], {})

    predictions = _predictions(setting, models, _plain_memory, lambda name: (seq, batch, recipe, card))
    found = _of_all(setting, predictions, measured, lambda predicted: 0.0)  # two sequences: the floor is enough
    return Result(found.values, found.checks | {"something was measured": found.values["models"] > 0})


def _of_all(setting: Setting, predictions: Iterator[tuple], measured: Callable, seconds: Callable) -> Result:
    """Runs a case per model: `measured(name, prediction)`, planned to take `seconds(prediction)`. A prediction that is
    an exception ends only its own case."""

    def work(name: str, predicted) -> Result:
        if isinstance(predicted, Exception):
            raise predicted
        return measured(name, predicted)

    found = {
        name: setting.attempt(name, partial(work, name, predicted), seconds(predicted))
        for name, predicted in predictions
    }
    errors = [result.values["allocated_error"] for result in found.values() if "allocated_error" in result.values]
    return Result(_summary(errors), {name: result.held for name, result in found.items()})


def _run_lowmem(plan: Plan, device: torch.device):
    settings = plan.settings
    config = _config(settings.model)
    decoder = make_decoder(config, plan.precision, settings.residual, plan.fused_kernels)
    case = StepCase(
        settings.seq, settings.batch, plan.layout, WORKING_DTYPES[plan.precision], OPTIMIZERS[settings.optimizer],
        settings.clip_norm,
    )  # fmt: skip
    ids, labels = torch.randint(0, decoder.model.config.vocab_size, (2, settings.batch, settings.seq))
    return train(decoder, case, Batch(ids, labels), device, STEPS)


def _compared(predicted: _Predicted, found) -> tuple[dict, dict[str, bool]]:
    values: dict = {
        "predicted_allocated_peak_bytes": predicted.allocated_peak_bytes,
        "predicted_reserved_peak_bytes": predicted.reserved_peak_bytes,
        "predicted_at_peak": predicted.at_peak,
        "completes": found is not None,
    }
    if found is None:
        return values, {"completes": False}
    allocated = error(predicted.allocated_peak_bytes, found.allocated_peak_bytes)
    reserved = error(predicted.reserved_peak_bytes, found.reserved_peak_bytes)
    values |= {
        "allocated_error": allocated,
        "reserved_error": reserved,
        "measured_allocated_peak_bytes": found.allocated_peak_bytes,
        "measured_reserved_peak_bytes": found.reserved_peak_bytes,
    }
    return values, bars(allocated, reserved) | {"began with nothing reserved": found.left_bytes == 0}


def _summary(errors: list[float]) -> dict:
    absolute = [abs(found) for found in errors]
    return {
        "models": len(errors),
        "mean_absolute_allocated_error": sum(absolute) / len(errors) if errors else None,
        "lowest_error": min(errors, default=None),
        "highest_error": max(errors, default=None),
    }


def _case(settings: Settings, method: str) -> dict:
    return {
        "model": settings.model, "method": method, "seq": settings.seq, "batch": settings.batch,
        "limit_bytes": settings.gpu_limit_bytes,
    }  # fmt: skip


def _config(name: str) -> PretrainedConfig:
    if name in TINY:
        return TINY[name]
    if name in MORE:
        kind, fields = MORE[name]
        return CONFIG_MAPPING[kind](**fields)
    return MODELS[name].config() if name in MODELS else load_config(name, "random")


def _planned(name: str, settings: Settings, precision: str, card: Card, fused_kernels: Kernels) -> Plan | str:
    try:
        return make_plan(Question(settings, _config(name), precision, card, fused_kernels=fused_kernels))
    except (InputError, PlanError) as refusal:
        return str(refusal)


def _plain_memory(name: str, seq: int, batch: int, recipe: str, card: Card) -> _Predicted | str:
    record_plain, target = named(f"{_ESTIMATION}.plain:record_plain"), named(f"{_ESTIMATION}.estimate:plain_target")
    try:
        memory = under_cap(record_plain(_config(name), seq, batch, recipe, target(card)), expandable_segments=False)
        return _Predicted(memory.allocated_peak_bytes, memory.reserved_peak_bytes, memory.at_peak)
    except LowmemError as refusal:
        return str(refusal)


def _predictions(
    setting: Setting, models: Sequence[str], predict: Callable, case_of: Callable[[str], tuple]
) -> Iterator[tuple]:
    """Yields (model, prediction) in order, made in other processes; no prediction for models done earlier in this
    job."""
    if setting.dry_run:
        yield from ((name, predict(name, *case_of(name))) for name in TINY)
        return
    workers = max(1, min(len(models), (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker) as pool:
        waiting = [
            (name, None if setting.passed(name) else pool.submit(predict, name, *case_of(name))) for name in models
        ]
        for name, future in waiting:
            yield name, "is done" if future is None else future.exception() or future.result()


def _begin_worker() -> None:
    torch.set_num_threads(1)
    devices.set_environment()
    transformers.logging.set_verbosity_error()

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
