"""Remarks before a run, its identity, report.json and samples."""

import json
import math
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lowmem.config_switches import SWITCHES, as_given, remarks
from lowmem.core.decoder import Decoder
from lowmem.data.tokenizer import is_byte_level
from lowmem.errors import first_line
from lowmem.models.build import decoder_start
from lowmem.planning.plan import Plan
from lowmem.run.plots import draw, draw_memory
from lowmem.settings import Settings

SAMPLE_TOKENS = 64
_NOT_COMPUTED = {  # fields of a config.json on its origin and use, and not on the model
    *("_name_or_path", "architectures", "auto_map", "dtype", "task_specific_params", "torch_dtype"),
    *("transformers_version", "use_cache", *SWITCHES),
}


def settings_identity(settings: Settings) -> dict:
    """The part of `run_identity` that is known before data are read and anything is planned."""
    names = (
        *("model", "init", "seq", "batch", "document_mask", "pack", "fixed_batch", "lr", "schedule"),
        *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "clip_norm", "seed", "residual"),
        *("optimizer", "target_tokens"),
    )
    return {name: getattr(settings, name) for name in names}


def run_identity(settings: Settings, plan: Plan, steps: int, data_fingerprint: str) -> dict:
    """What must not differ between a checkpoint and the run that goes on from it, because it would change the bits."""
    return settings_identity(settings) | {
        "steps": steps,
        "device": plan.device,
        "precision": plan.precision,
        "micro_batch": plan.layout.micro_batch,
        "fused_kernels": plan.fused_kernels,
        "data": data_fingerprint,
    }


def config_identity(config: PretrainedConfig) -> dict:
    """The same of a model's config: every field, defaults too, that says what is computed."""
    fields = as_given(json.loads(config.to_json_string(use_diff=False)))
    return {name: value for name, value in fields.items() if name not in _NOT_COMPUTED}


def opening_remarks(settings: Settings, config: PretrainedConfig, tokenizer, device: torch.device) -> list[str]:
    """Sentences on what a user might not expect."""
    said = [f"training on {device_name(device)}"]
    if settings.init == "random":
        said.append("weights are random (--init random), not pretrained")
    if is_byte_level(tokenizer):
        said.append("the tokenizer is the byte-level one: a token is a byte (256, and one for the end of a text)")
    return said + remarks(config)


def device_name(device: torch.device) -> str:
    """The card's name, or what the processor calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"


def build_report(
    plan: dict, rows: list[dict], peaks: dict, device: str, sequences_per_step: int, eval_first: float | None,
    exported_step: int | None = None,
) -> dict:  # fmt: skip
    """report.json's content; a step's time is the median without the first, which also warms up. `exported_step`: after
    which the model in model/ is as it is, None for the last; `diverged` says whether that one is worse than at first.
    """
    step_ms = [row["step_ms"] for row in rows]
    seconds = statistics.median(step_ms[1:] or step_ms) / 1000 if rows else None
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    last = list(evaluated.values())[-1] if evaluated else eval_first
    exported = evaluated.get(exported_step, last)
    best = best_evaluation(rows, eval_first)
    return {
        "plan": plan,
        "measured": peaks
        | {"step_seconds": seconds, "sequences_per_second": sequences_per_step / seconds if seconds else None},
        "loss": {
            "first": rows[0]["loss"] if rows else None,
            "last": rows[-1]["loss"] if rows else None,
            "eval_first": eval_first,
            "eval_last": last,
            "eval_best": best.loss,
            "eval_best_step": best.step,
            "eval_exported": exported,
            "exported_step": exported_step if exported_step is not None or not rows else rows[-1]["step"],
            "diverged": bool(evaluated) and eval_first is not None and not exported <= eval_first,
        },
        "steps": len(rows),
        "device": device,
        "versions": versions(),
    }


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss: after which step (0: before the first), and how many came after."""

    step: int
    loss: float
    since: int

    def __str__(self) -> str:
        return f"{self.loss:.4f} after step {self.step}"


def best_evaluation(rows: list[dict], eval_first: float | None) -> Best:
    """Of a run with these rows of metrics.jsonl, and that loss before the first step; the first of equals."""
    losses = [(0, math.nan if eval_first is None else eval_first)]
    losses += [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    index = min(range(len(losses)), key=lambda index: math.inf if math.isnan(losses[index][1]) else losses[index][1])
    return Best(*losses[index], len(losses) - 1 - index)


def versions() -> dict[str, str]:
    """Of Python, the platform and the packages that a result depends on, where installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "transformers", "safetensors", "bitsandbytes"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # which says the build, too: +cpu, +cu130


def draw_plan(plan: Plan, folder: Path) -> str | None:
    """Draws memory.png of a plan without a run. Returns a sentence if it could not be drawn."""
    path = folder / "memory.png"
    return draw(path, lambda: draw_memory(plan.to_dict(), None, path, plan.timeline))


@torch.no_grad()
def sample(decoder: Decoder, tokenizer, prompt: str) -> str:
    """What the model makes of `prompt`, greedily, or why it does not, as a sentence."""
    tokenized = tokenizer(prompt, return_tensors="pt").to(decoder.head_weight.device)
    inputs = {name: tokenized[name] for name in ("input_ids", "attention_mask") if name in tokenized}
    if decoder.needs_sources:  # the prompt is a source; as in training, it has an end
        source = inputs["input_ids"][0].tolist()
        source += [tokenizer.eos_token_id] if source[-1:] != [tokenizer.eos_token_id] else []
        inputs = {
            "input_ids": tokenized["input_ids"].new_tensor([source]),
            "decoder_start_token_id": decoder_start(decoder.model.config),
        }
    elif not prompt.endswith(tokenizer.eos_token) and inputs["input_ids"][0, 1:].tolist()[-1:] == [
        tokenizer.eos_token_id
    ]:
        inputs = {name: values[:, :-1] for name, values in inputs.items()}  # of a tokenizer that ends every text
    prompt_tokens = inputs["input_ids"].shape[1]
    positions = getattr(decoder.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    if not 0 < prompt_tokens < positions:
        return f"no sample: --sample-prompt has {prompt_tokens} tokens, and the model goes on from 1 to {positions - 1}"
    decoder.model.eval()
    try:
        tokens = decoder.model.generate(
            **inputs,
            max_new_tokens=min(SAMPLE_TOKENS, positions - prompt_tokens),
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    except torch.OutOfMemoryError as error:
        return f"no sample: out of memory ({first_line(error)})"
    except (ValueError, TypeError, IndexError, RuntimeError) as error:  # models generate each in their own way
        return f"no sample: {first_line(error)}"
    # What decoders write shows its end; an encoder-decoder pads until its own.
    text = tokenizer.decode(tokens[0], skip_special_tokens=decoder.needs_sources)
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"sample: {shown}"  # a terminal would obey control characters
