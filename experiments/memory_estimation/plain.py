"""Two ordinary training steps of `transformers` on tensors without data. The first has no optimizer states yet.

    fp32    everything in fp32
    bf16    fp32 weights under autocast to bf16
    llmem   LLMem's own: fp16 weights in Colossal-AI's Gemini, recomputed block by block; fp32 masters and moments

Left out: data loader, logging, clipping, a Trainer's additions; for `llmem`, the chunks' rounding and the rotary tables
of transformers 4.29.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from lowmem.core.decoder import Decoder
from lowmem.cudasim.peak import record
from lowmem.cudasim.recorder import Recorder
from lowmem.cudasim.tape import Tape
from lowmem.models.build import build_model
from lowmem.planning.simulated_step import META, Target

RECIPES = ("fp32", "bf16", "llmem")
LOGITS_IN_FP32 = ("codegen", "gpt_neo")  # in transformers 4.29 whatever the weights are
_STEPS = 2


def record_plain(config: PretrainedConfig, seq: int, batch: int, recipe: str, target: Target) -> Tape:
    """Returns the tape of two steps of `batch` sequences of `seq` tokens on `target`. `recipe`: of RECIPES."""
    model = build_model(config).to(META)
    phase = ["forward"]
    run = _llmem_step if recipe == "llmem" else functools.partial(_ordinary_step, bf16=recipe == "bf16")
    return record(
        lambda recorder: run(model, _batch(seq, batch), recorder, phase), target.device_model, lambda frame: phase[0]
    ).tape


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # foreach is the default on CUDA, with temporaries as large as the weights; on meta, a loop over tensors is.
    return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)


def _batch(seq: int, batch: int) -> Tensor:
    return torch.zeros((batch, seq), dtype=torch.int64, device=META)


def _ordinary_step(model: nn.Module, tokens: Tensor, recorder: Recorder, phase: list[str], bf16: bool) -> None:
    _note(model, recorder)
    recorder.note(tokens, "batch")
    optimizer = make_optimizer(model)
    for _ in range(_STEPS):
        phase[0] = "forward"
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        phase[0] = "backward"
        loss.backward()
        phase[0] = "update"
        optimizer.step()
        optimizer.zero_grad()


def _llmem_step(model: nn.Module, tokens: Tensor, recorder: Recorder, phase: list[str]) -> None:
    masters = [torch.empty(p.shape, dtype=torch.float32, device=META) for p in model.parameters()]
    for tensor in masters:
        recorder.rename(tensor, "master_weights")
    with recorder.paused():
        model.half()
        in_fp32 = model.config.model_type in LOGITS_IN_FP32
        for block in Decoder(model).blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    _note(model, recorder)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_into_its_chunk)
    # They are made after the first backward; dp_real.py gives all cached memory back before, so they find none of it.
    phase[0] = "optimizer_states"
    # HybridAdam's fused kernel has no temporaries.
    moments = [torch.empty_like(master) for master in masters for _ in range(2)]
    for _ in range(_STEPS):
        phase[0] = "forward"
        logits = model(input_ids=tokens, use_cache=False).logits
        logits = logits.float() if in_fp32 else logits
        loss = _old_loss(logits, tokens)
        del logits
        phase[0] = "backward"
        loss.backward()
    del moments


def _into_its_chunk(parameter: nn.Parameter) -> None:
    # In Gemini, a gradient takes its weight's place.
    parameter.grad = None


def _old_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    # As in transformers 4.29: in the dtype of the logits, which are copied without the last position.
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), tokens[..., 1:].reshape(-1))


def _note(model: nn.Module, recorder: Recorder) -> None:
    for parameter in model.parameters():
        recorder.note(parameter, "weights")
    for buffer in model.buffers():
        recorder.note(buffer, "buffers")
