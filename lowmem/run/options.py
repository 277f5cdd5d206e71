"""Lists the names of all options, and the functions that parse their values. Every field of Settings is an option.

Other trainers' names are hidden aliases if they mean the same. Names that mean something else here are refused with the
reason: training on another batch than intended costs more than an error.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from functools import partial
from typing import get_args

from lowmem.fields import kind_of, may_be_several, option_name
from lowmem.run.batch_option import ACCUMULATION, AT_ONCE, PER_DEVICE
from lowmem.settings import AUTO, Settings
from lowmem.units import parse_interval, parse_size

Parse = Callable[[str], object]  # from the typed text to the value; ValueError says what is wrong
NOTHING = object()  # the value of a flag that is switched off: as if it were not given


def integer(typed: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,18}", typed) is None:
        wrong = "has too many digits" if re.fullmatch(r"[+-]?[0-9]+", typed) else "is not a whole number"
        raise ValueError(f"{typed!r} {wrong}")
    return int(typed)


def count(typed: str) -> int:
    if integer(typed) < 1:
        raise ValueError(f"{typed!r} is too small: it must be at least 1")
    return int(typed)


def number(typed: str) -> float:
    try:
        return float(typed)  # Settings refuses nan and inf
    except ValueError:
        raise ValueError(f"{typed!r} is not a number") from None


def share(typed: str) -> float:
    value = number(typed)
    if not 0 <= value < 1:
        raise ValueError(f"{typed!r} is not a share: it must be at least 0 and below 1")
    return value


def switch(typed: str) -> bool:
    if typed.lower() not in ("on", "true", "yes", "1", "off", "false", "no", "0"):
        raise ValueError(f"{typed!r} is neither on nor off")
    return typed.lower() in ("on", "true", "yes", "1")


def optional(word: str, parse: Parse) -> Parse:
    """Returns a parser like `parse`, except that `word` means None."""
    return lambda typed: None if typed.lower() == word else parse(typed)


def one_of(names: Sequence[str], synonyms: dict[str, str], typed: str) -> str:
    """Returns the one of `names` that the user has typed, ignoring case. `synonyms`: {another word: one of `names`}.
    Raises ValueError for any other text."""
    name = synonyms.get(typed.lower().replace("-", "_"), typed.lower())
    if name not in names:
        raise ValueError(f"{typed!r} is not one of {', '.join(names)}")
    return name


def flag_for(value: str, typed: str) -> object:
    """Returns `value`, the meaning of a flag such as ``--bf16``, if `typed` means on. If it means off, returns NOTHING:
    the flag then counts as not given."""
    return value if switch(typed) else NOTHING


# Titles of the groups in --help, by the first field of each.
TITLES = {"model": "model", "data": "data", "batch": "training", "gpu_limit_bytes": "memory", "out": "run folder"}

ALIASES = {  # {field: other names of its option, separated by spaces}
    "model": "model-name-or-path model-name pretrained-model-name-or-path base-model",
    "data": "dataset-name dataset dataset-path data-path train-file train-data",
    "eval_data": "validation-file eval-file eval-dataset validation-data val-data",
    "eval_fraction": "val-fraction val-split-fraction test-size val-size val-set-size",
    "split": "dataset-train-split train-split dataset-split train-on-split",
    "text_field": "dataset-text-field text-column-name",
    "prompt_field": "prompt-column prompt-key",
    "completion_field": "completion-column response-field response-column response-key",
    "messages_field": "messages-column field-messages messages-key",
    "chat_template": "chat-template-path",
    "seq": "block-size max-length max-seq-length max-seq-len seq-len seq-length sequence-length sequence-len "
    "context-length cutoff-len",
    "batch": "global-batch-size effective-batch-size",
    "steps": "max-steps max-iters num-steps num-iterations train-steps max-train-steps",
    "epochs": "num-train-epochs num-epochs max-epochs",
    "lr": "learning-rate",
    "schedule": "lr-schedule",
    "warmup_steps": "warmup-iters lr-warmup-steps lr-warmup-iters num-warmup-steps",
    "clip_norm": "max-grad-norm grad-clip max-norm gradient-clip-val gradient-clipping clip-grad-norm",
    "seed": "random-seed",
    "optimizer": "optim",
    "export_dtype": "save-dtype export-precision",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "adam-eps epsilon eps",
    "precision": "dtype mixed-precision",
    "gpu_limit_bytes": "gpu-limit-bytes gpu-memory-limit max-gpu-memory vram-limit",
    "ram_limit_bytes": "ram-limit-bytes cpu-memory-limit max-cpu-memory host-memory-limit",
    "disk_rate_bytes": "disk-rate-bytes",
    "network_rate_bytes": "network-rate-bytes",
    "states_folder": "nvme-path",
    "plan_only": "dry-run",
    "out": "output-dir out-dir run-dir",
    "run_name": "wandb-run-name wandb-name experiment-name",
    "resume": "resume-from-checkpoint resume-from",
    "save_every": "save-steps save-interval checkpoint-every checkpointing-steps",
    "keep_last": "save-total-limit keep-last-n",
    "eval_every": "eval-steps eval-interval",
    "eval_batches": "eval-iters max-eval-batches",
    "keep_best": "load-best-model-at-end save-best",
    "patience": "early-stopping-patience",
    "log_every": "logging-steps log-interval log-every-n-steps",
    "sample_prompt": "prompt",
    "report_to": "log-with logger-name",
    "wandb": "wandb-mode",
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
SYNONYMS = {  # {field: {other word, in lower case with underscores: value}}
    "schedule": {"constant_with_warmup": "constant"},
    "precision": _DTYPES | {"no": "fp32"},  # of accelerate's mixed_precision
    "export_dtype": _DTYPES,
    "recompute": {"true": "on", "false": "off"},  # JSON has these two words
    "clip_norm": {"none": "0"},  # as in --gpu-limit
    "resume": {"true": "auto", "false": "never"},  # from Hugging Face's Trainer
    "optimizer": {
        **{"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
        **{"adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit"},
        **{"paged_adamw_8bit": "adamw8bit", "paged_adamw": "adamw", "paged_adamw_32bit": "adamw"},  # equal results
    },
}


def _typed(item: Field) -> tuple[str, Parse]:
    """Returns the placeholder or choices that --help shows for a field of Settings, and the parser of its value."""
    kind, _ = kind_of(item.type)
    synonyms = SYNONYMS.get(item.name, {})
    if item.name.endswith("_bytes"):
        return "SIZE", optional("none", parse_size)
    if item.type == int | str:
        return "N|TIME", parse_interval
    if item.metadata["shown"] == AUTO:
        return "N|auto", optional("auto", integer)
    if choices := get_args(kind):
        return "|".join(choices), partial(one_of, choices, synonyms)
    shown, parse = {bool: ("on|off", switch), int: ("N", integer), float: ("X", number), str: ("S", str)}[kind]
    return shown, (lambda typed: parse(synonyms.get(typed.lower(), typed))) if synonyms else parse


OPTIONS = {item.name: _typed(item) for item in fields(Settings)}
SEVERAL = {item.name for item in fields(Settings) if may_be_several(item.type)}  # may be typed more than once


def scheduler(typed: str) -> str:
    if typed.lower() == "constant":
        raise ValueError("'constant' has no warm-up there; give --schedule constant, and --warmup-steps 0 for none")
    return OPTIONS["schedule"][1](typed)


# Aliases whose values are read in another way than the option's own: flags, shares, and parts of a batch.
FLAGS = {"bf16": ("precision", "bf16"), "fp16": ("precision", "fp16"), "wandb-log": ("report_to", "wandb")}
FLAGS |= dict.fromkeys(("use-cpu", "no-cuda"), ("device", "cpu"))
FLAGS |= dict.fromkeys(("packing", "packed", "sample-packing", "neat-packing"), ("pack", "packed"))
SPECIAL_ALIASES: dict[str, tuple[str, Parse]] = {
    **dict.fromkeys(("warmup-ratio", "warmup-fraction", "lr-warmup-fraction"), ("warmup_steps", share)),
    **dict.fromkeys(("lr-scheduler-type", "lr-scheduler"), ("schedule", scheduler)),
    **{flag: (field, partial(flag_for, value)) for flag, (field, value) in FLAGS.items()},
    "per-device-train-batch-size": (PER_DEVICE, count),
    **dict.fromkeys(("micro-batch-size", "device-batch-size"), (AT_ONCE, count)),
    **dict.fromkeys(
        ("gradient-accumulation-steps", "gradient-accumulation-iters", "grad-accum-steps", "accumulate-grad-batches"),
        (ACCUMULATION, count),
    ),
}

_REASONS = {  # {names that would mislead: the reason, or what to use instead}
    "batch-size train-batch-size": "trainers disagree on its meaning; use --batch for the sequences per optimizer step "
    "and --micro-batch for those that go through the model at once",
    "eval-batch-size per-device-eval-batch-size": "an evaluation takes as many sequences at once as training; "
    "--eval-batches limits how much it reads",
    "total-batch-size tokens-per-step": "--batch counts sequences: divide the tokens per step by --seq",
    "auto-find-batch-size": "the planner always chooses how many sequences run at once; --batch stays as it is",
    "gradient-checkpointing activation-checkpointing enable-activation-checkpointing": "the planner recomputes if the "
    "caps require it; overrule it with --recompute on, products or off",
    "load-in-4bit load-in-8bit quantize quantization use-lora lora use-peft lora-r lora-rank lora-alpha qlora "
    "finetuning-type adapter freeze-layers": "every parameter is trained here, with fp32 master weights; to use less "
    "memory set --gpu-limit and --ram-limit, or take --optimizer adamw8bit",
    "deepspeed fsdp fsdp-config zero-stage strategy": "the planner puts into RAM whatever does not fit under "
    "--gpu-limit; for several GPUs start the command with torchrun (docs/several-gpus.md)",
    "gpus num-gpus n-gpus devices num-nodes nnodes num-processes nproc-per-node": "start the command with torchrun "
    "--nproc-per-node N for several GPUs (docs/several-gpus.md); lowmem plan --gpus N says what they take",
    "init-from": "use --model for pretrained weights, --init random for none, --resume for a checkpoint",
    "early-stopping early-stopping-threshold": "use --patience with a number of evaluations",
    "betas adam-betas": "use --adam-beta1 and --adam-beta2",
    "wandb-project wandb-entity": "set the environment variable WANDB_PROJECT or WANDB_ENTITY",
    "dataset-config-name dataset-config": "append it to the dataset's name: --data org/name:config",
    "validation-split-percentage": "use --eval-fraction with a share: 0.05 is 5 percent",
    "eval-strategy evaluation-strategy": "use --eval-every N; the first and the last step are always evaluated",
    "save-strategy save-only-model": "use --save-every with steps or a time; the last step is always saved",
    "overwrite-output-dir": "a stopped run in --out is resumed; --resume never starts from step 0",
    "min-lr min-lr-ratio decay-lr lr-decay-iters lr-decay-steps": "--schedule cosine and linear fall to 0 after the "
    "last step, and constant does not fall",
    "compile torch-compile": "compiled blocks cannot be planned; fused kernels need no option",
    "assistant-only-loss completion-only-loss train-on-inputs train-on-input train-on-prompt mask-prompt "
    "response-template": "use --train-on completion for the answers alone, or --train-on all",
    "template prompt-template prompt-style": "conversations use the chat template of the model's tokenizer, or "
    "--chat-template FILE",
    "max-train-samples": "run_clm.py counts blocks of tokens there; --max-samples counts rows or documents",
    "max-eval-samples": "use --eval-batches, the batches that an evaluation reads",
    "text-column summary-column target-column": "in summarization these are source and target; use --prompt-field and "
    "--completion-field, or --text-field for plain text",
    "torch-dtype": "weights are always loaded as fp32 masters; --precision is the dtype of the computation, and "
    "--export-dtype that of the exported model",
    "offload-folder offload-dir": "accelerate puts weights there; here optimizer states that RAM has no room for go to "
    "--states-folder",
    "tokenizer-name tokenizer tokenizer-path": "the tokenizer is the model's own, from its folder or hub repository",
    "config-name dropout attention-dropout": "change the model's config.json, and give its folder as --model",
    "trust-remote-code": "code from the hub is never run; choose a model that is part of transformers",
    "do-train do-eval do-predict": "a run trains, and evaluates if --eval-fraction or --eval-data holds text out",
    "dataloader-num-workers dataloader-pin-memory num-workers": "tokens are read from files, without workers",
    "group-by-length": "rows of like lengths share a micro-batch unless --pack says otherwise",
    "attn-implementation use-flash-attention flash-attention": "PyTorch's fused attention computes if the model has it",
    "tf32": "products in fp32 are exact; --precision is the dtype of the computation",
    "neftune-noise-alpha label-smoothing label-smoothing-factor": "the plain loss is trained",
    "push-to-hub hub-model-id": "upload the folder model/ of a run with hf upload",
    "logging-dir": "trackers write into the run folder, --out",
    "revision model-revision": "fetch it with hf download NAME --revision REVISION --local-dir DIR, and give --model "
    "DIR",
}
REFUSED = {name: reason for names, reason in _REASONS.items() for name in names.split()}

# Every name of every option: {name with dashes: (field, parser of the value)}.
NAMES = SPECIAL_ALIASES | {
    name: (field, parse)
    for field, (_, parse) in OPTIONS.items()
    for name in (option_name(field)[2:], *ALIASES.get(field, "").split())
}
