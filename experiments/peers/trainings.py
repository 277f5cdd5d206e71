"""The peers' trainings, each set up as its documentation advises (catalogue.py), on the same weights and batches.

A training raises torch.OutOfMemoryError if the GPU, or its cap, is too small. On the CPU everything is fp32.
"""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from experiments.peers.case import Case
from experiments.peers.shared import batches, groups, inputs, load_model, saved_weights, single_process, wait_for
from lowmem.run import saver, train
from lowmem.run.metrics import read_metrics
from lowmem.run.signals import StopRequest


@dataclass(frozen=True)
class Trained:
    """Seconds and loss of every step. `master(name)`: a parameter's fp32 value on the CPU. `settings`: of the peer, for
    the row."""

    step_seconds: list[float]
    losses: list[float]
    master: Callable[[str], Tensor]
    settings: dict


def plain(case: Case) -> Trained:
    """Trains the reference: nothing recomputed, nothing offloaded."""
    model = load_model(case).to(case.device)
    optimizer = torch.optim.AdamW(groups(model, case.settings), lr=case.settings.lr, fused=True)
    seconds, losses = _steps(case, model, optimizer, autocast=True)
    return Trained(seconds, losses, _master_of(model), {"optimizer": "torch.optim.AdamW(fused=True)"} | _AUTOCAST)


def lowmem(case: Case) -> Trained:
    """Trains as the scripts do, but writes no checkpoint at the end."""
    out = case.scratch / "run"
    settings = replace(case.from_folder, out=str(out), micro_batch=case.micro_batch, resume="never", eval_batches=1)
    with patch.object(saver, "save_checkpoint"), StopRequest() as stop:
        train.run(replace(settings, wandb="disabled"), stop)
    rows = read_metrics(out / "metrics.jsonl")
    seconds, losses = [row["step_ms"] / 1000 for row in rows], [row["loss"] for row in rows]
    choice = json.loads((out / "plan.json").read_text())["choice"]
    return Trained(seconds, losses, saved_weights(out / "model"), choice)


def hf_trainer(case: Case, optim: str) -> Trained:
    """Trains with transformers' Trainer and one of bitsandbytes' optimizers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_begin(self, *_, **__):
            started.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            wait_for(case.device)
            seconds.append(time.perf_counter() - started[-1])

        def on_log(self, arguments, state, control, logs, **_):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    started: list[float] = []
    seconds: list[float] = []
    losses: list[float] = []
    settings, cuda = case.settings, case.device.type == "cuda"
    chosen = {
        "optim": optim,
        "bf16": cuda,
        "gradient_checkpointing": True,
        "per_device_train_batch_size": case.micro_batch,
        "gradient_accumulation_steps": settings.batch // case.micro_batch,
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.clip_norm,
        "max_steps": settings.steps,
    }
    model = load_model(case)
    arguments = TrainingArguments(
        output_dir=str(case.scratch / "trainer"), use_cpu=not cuda, train_sampling_strategy="sequential",
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, **chosen,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=_Sequences(case), callbacks=[Watch()]).train()
    return Trained(seconds, losses, _master_of(model), chosen)


class _Sequences(torch.utils.data.Dataset):
    def __init__(self, case: Case):
        self._rows, self._settings = batches(case), case.settings
        self._step, self._batch = None, None

    def __len__(self) -> int:
        return self._settings.steps * self._settings.batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self._settings.batch)
        if step != self._step:
            self._step, self._batch = step, self._rows.batch(step)
        return {name: tensor[row] for name, tensor in inputs(self._batch, torch.device("cpu")).items()}


def deepspeed(case: Case, stage: int) -> Trained:
    """Trains with ZeRO: the optimizer, and in stage 3 the parameters, in RAM. The first use on a machine builds the CPU
    optimizer, which takes minutes."""
    single_process(case.device, case.scratch)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    settings, cuda = case.settings, case.device.type == "cuda"
    offloaded = {"device": "cpu", "pin_memory": cuda}
    zero = {"stage": stage, "offload_optimizer": offloaded, "overlap_comm": True, "contiguous_gradients": True}
    adam = {"lr": settings.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": settings.weight_decay}
    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": settings.batch // case.micro_batch,
        "gradient_clipping": settings.clip_norm,
        "bf16": {"enabled": cuda},
        "zero_optimization": zero | ({"offload_param": offloaded} if stage == 3 else {}),
        "optimizer": {"type": "AdamW", "params": adam},
    }
    if stage == 3:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(config)  # while it lives, from_pretrained loads into partitions  # noqa: F841
    model = load_model(case)
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model, settings), config=config)

    def step(pieces: list[dict]) -> float:
        loss = 0.0
        for piece in pieces:
            micro_loss = engine(**piece).loss
            engine.backward(micro_loss)
            engine.step()
            loss += micro_loss.detach()
        return float(loss) / len(pieces)

    seconds, losses = _timed(case, step)
    parameters = dict(model.named_parameters())
    return Trained(seconds, losses, lambda name: safe_get_full_fp32_param(parameters[name]).float().cpu(), config)


def torchao_cpu_offload(case: Case) -> Trained:
    """Trains in bf16 and updates on the CPU, parameter by parameter. Has never run."""
    from torchao.optim import CPUOffloadOptimizer

    model = load_model(case, torch.bfloat16).to(case.device)
    model.gradient_checkpointing_enable()
    optimizer = CPUOffloadOptimizer(
        groups(model, case.settings), torch.optim.AdamW, offload_gradients=False, fused=True, lr=case.settings.lr
    )
    seconds, losses = _steps(case, model, optimizer, clip=False)
    chosen = {"weights": "bf16", "offload_gradients": False, "fused": True, "clip_norm": None}
    return Trained(seconds, losses, _master_of(model), chosen)


def flashoptim(case: Case) -> Trained:
    """Trains with 8-bit moments and 24-bit masters, all on the GPU. Has never run."""
    from flashoptim import FlashAdamW, cast_model, reconstruct_fp32_param

    model = load_model(case).to(case.device)
    cast_model(model, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    optimizer = FlashAdamW(groups(model, case.settings), lr=case.settings.lr)
    seconds, losses = _steps(case, model, optimizer)
    parameters = dict(model.named_parameters())

    def master(name: str) -> Tensor:
        parameter = parameters[name].detach()
        low = optimizer.state[parameters[name]].get("error_bits")
        return (parameter.float() if low is None else reconstruct_fp32_param(parameter, low)).cpu()

    return Trained(seconds, losses, master, {"weights": "bf16", "master_weight_bits": 24, "gradient_release": False})


def fsdp2_cpu_offload(case: Case) -> Trained:
    """Trains with PyTorch's fully_shard over one device; all that is not in use is in RAM."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    single_process(case.device, case.scratch)
    cuda = case.device.type == "cuda"
    model = load_model(case)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how = {
        "mesh": init_device_mesh(case.device.type, (1,)),
        "mp_policy": lower if cuda else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),  # page-locking needs a GPU
    }
    decoder = model.base_model
    (blocks,) = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    norm = [child for child in decoder.children() if "Norm" in type(child).__name__]
    for block in blocks:
        fully_shard(block, **how)
    # A tied weight must be in one group: wte alone would leave the head behind.
    fully_shard([model.get_input_embeddings(), *norm, model.get_output_embeddings()], **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(groups(model, case.settings), lr=case.settings.lr, fused=True)
    seconds, losses = _steps(case, model, optimizer, before_piece=model.set_requires_gradient_sync)
    parameters = dict(model.named_parameters())
    chosen = {"policy": repr(how["mp_policy"]), "pin_memory": cuda, "gradient_sync": "at the last micro-batch"}
    return Trained(seconds, losses, lambda name: parameters[name].detach().full_tensor().float().cpu(), chosen)


TRAININGS: dict[str, Callable[[Case], Trained]] = {
    "plain": plain,
    "lowmem": lowmem,
    "hf_trainer_adamw_bnb_8bit": lambda case: hf_trainer(case, "adamw_bnb_8bit"),
    "hf_trainer_paged_adamw_8bit": lambda case: hf_trainer(case, "paged_adamw_8bit"),
    "deepspeed_zero2_offload": lambda case: deepspeed(case, 2),
    "deepspeed_zero3_offload": lambda case: deepspeed(case, 3),
    "torchao_cpu_offload": torchao_cpu_offload,
    "flashoptim": flashoptim,
    "fsdp2_cpu_offload": fsdp2_cpu_offload,
}
_AUTOCAST = {"weights": "fp32", "autocast": "bf16 on a GPU, none on the CPU"}


def _steps(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    autocast: bool = False,
    clip: bool = True,
    before_piece: Callable[[bool], None] | None = None,
) -> tuple[list[float], list[float]]:
    """Runs PyTorch's own loop with gradient accumulation; returns seconds and losses. `before_piece` gets, before each
    micro-batch, whether it is the step's last."""
    casts = autocast and case.device.type == "cuda"

    def step(pieces: list[dict]) -> float:
        loss = 0.0
        for number, piece in enumerate(pieces, start=1):
            if before_piece is not None:
                before_piece(number == len(pieces))
            with torch.autocast("cuda", torch.bfloat16) if casts else nullcontext():
                micro_loss = model(**piece).loss / len(pieces)
            micro_loss.backward()
            loss += micro_loss.detach()
        if clip and case.settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return _timed(case, step)


def _timed(case: Case, step: Callable[[list[dict]], float]) -> tuple[list[float], list[float]]:
    rows, seconds, losses = batches(case), [], []
    for number in range(case.settings.steps):
        started = time.perf_counter()
        pieces = rows.batch(number).micro_batches(case.micro_batch)
        losses.append(step([inputs(piece, case.device) for piece in pieces]))
        wait_for(case.device)
        seconds.append(time.perf_counter() - started)
    return seconds, losses


def _master_of(model: nn.Module) -> Callable[[str], Tensor]:
    return lambda name: model.get_parameter(name).detach().float().cpu()
