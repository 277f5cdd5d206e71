"""The table of all options: how each is written, read and explained, and which other names it answers to.

Every field of Settings is an option. Who comes from another trainer types what they know: nanoGPT's, litgpt's,
torchtune's, Hugging Face's and TRL's names are hidden aliases. Names that mean something else here, such as
``--batch_size``, are refused with the reason: training on another batch than intended costs more than an error.

Names stand here with dashes; the command line takes them with underscores too (lowmem/run/cli.py).
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from lowmem.settings import option_name
from lowmem.units import parse_size

Parse = Callable[[str], object]  # from what was typed to the value; ValueError says what is wrong


def text(typed: str) -> str:
    return typed


def integer(typed: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]{1,18}", typed) is None:
        raise ValueError(f"{typed!r} is not a whole number")
    return int(typed)


def number(typed: str) -> float:
    try:
        return float(typed)  # nan and inf are refused by Settings
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


def resume(typed: str) -> str:
    return {"true": "auto", "false": "never"}.get(typed.lower(), typed)  # what Hugging Face's users type


def optional(word: str, parse: Parse) -> Parse:
    """`parse`, but `word` stands for None."""
    return lambda typed: None if typed.lower() == word else parse(typed)


def one_of(*names: str, **synonyms: str) -> Parse:
    """One of `names`, or a name that another trainer has for it."""

    def parse(typed: str) -> str:
        name = synonyms.get(typed.lower().replace("-", "_"), typed.lower())
        if name not in names:
            raise ValueError(f"{typed!r} is not one of {', '.join(names)}")
        return name

    return parse


def flag_for(value: str) -> Parse:
    """A flag such as ``--bf16``, which here is a value of another option."""

    def parse(typed: str) -> str:
        if not switch(typed):
            raise ValueError("it can only be switched on; leave it out instead")
        return value

    return parse


class Option(NamedTuple):
    field: str
    metavar: str
    parse: Parse
    help: str
    aliases: str = ""  # with dashes, separated by spaces; the underscored forms follow
    if_none: str = ""  # how --help shows a default of None


AUTO = "auto, the planner chooses"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw8bit"}
OPTIMIZERS["adamw_bnb_8bit"] = "adamw8bit"

# fmt: off
GROUPS = {
    "model": (
        Option("model", "NAME|DIR", text, "model on the Hugging Face hub, or a local folder",
               "model-name-or-path model-name pretrained-model-name-or-path base-model"),
        Option("init", "pretrained|random", one_of("pretrained", "random"),
               "load the weights, or draw them: random needs no download"),
        Option("demo", "on|off", switch, "train the small demonstration model; options that you type still hold"),
    ),
    "data": (
        Option("data", "SPEC", text, "python-stdlib, wikitext, codeparrot, a hub dataset org/name[:config], or a file "
               "or folder (.txt .py .jsonl .json .csv .parquet)",
               "dataset-name dataset dataset-path data-path train-file train-data"),
        Option("eval_data", "SPEC", text, "held-out text, written like --data", "validation-file eval-file "
               "eval-dataset validation-data val-data", "a share of --data is held out"),
        Option("eval_fraction", "X", number, "share of --data that is held out, between 0 and 1",
               "val-fraction val-split-fraction test-size"),
        Option("text_field", "NAME", text, "the column that holds the text", "dataset-text-field text-column "
               "text-column-name"),
        Option("train_on", "completion|all", one_of("completion", "all"),
               "for prompts with answers: learn the answers only, or everything"),
        Option("seq", "N", integer, "tokens per sequence", "block-size max-length max-seq-length max-seq-len seq-len "
               "seq-length sequence-length sequence-len context-length"),
        Option("document_mask", "on|off", switch, "whether attention stops at a packed document's end"),
    ),
    "training": (
        Option("batch", "N", integer, "sequences per optimizer step; how they are cut up is the planner's matter",
               "global-batch-size effective-batch-size"),
        Option("steps", "N", integer, "optimizer steps", "max-steps max-iters num-steps num-iterations train-steps "
               "max-train-steps", "as --epochs says"),
        Option("epochs", "X", number, "passes over the data, instead of --steps", "num-train-epochs num-epochs "
               "max-epochs", "1, where --steps says nothing"),
        Option("fixed_batch", "on|off", switch, "train on the first batch again and again: the loss must fall"),
        Option("lr", "X", number, "highest learning rate", "learning-rate"),
        Option("schedule", "cosine|linear|constant",
               one_of("cosine", "linear", "constant", constant_with_warmup="constant"),
               "course of the learning rate after the warm-up", "lr-scheduler-type lr-scheduler lr-schedule"),
        Option("warmup_steps", "N", number, "steps until the learning rate is reached; below 1 a share of all steps",
               "warmup-iters lr-warmup-steps lr-warmup-iters num-warmup-steps"),
        Option("weight_decay", "X", number, "decoupled weight decay"),
        Option("clip_norm", "X", number, "largest global norm of the gradient; 0 switches clipping off",
               "max-grad-norm grad-clip max-norm gradient-clip-val gradient-clipping clip-grad-norm", "0"),
        Option("seed", "N", integer, "of the order of the data, dropout and random weights", "random-seed"),
        Option("optimizer", "adamw|adamw8bit|sgd", one_of("adamw", "adamw8bit", "sgd", **OPTIMIZERS),
               "adamw8bit keeps its states in 8 bits and needs bitsandbytes", "optim"),
        Option("precision", "auto|bf16|fp16|fp32", one_of("auto", "bf16", "fp16", "fp32", **DTYPES),
               "of the computation; master weights are fp32 always. auto: bf16 where the GPU has it, fp16 on older "
               "ones, fp32 on the CPU", "dtype mixed-precision"),
        Option("residual", "fp32|16bit", one_of("fp32", "16bit"), "of the residual stream under bf16 and fp16; 16bit "
               "halves what recompute saves and follows the fp32 loss curve less closely"),
        Option("device", "auto|cuda|cpu", one_of("auto", "cuda", "cpu"), "where to train; auto: a GPU if there is one"),
    ),
    "memory": (
        Option("gpu_limit_bytes", "SIZE", optional("none", parse_size), "hard cap of GPU memory, such as 11GiB, 16G or "
               "800MiB; none: no cap", "gpu-limit-bytes gpu-memory-limit max-gpu-memory vram-limit", "none"),
        Option("ram_limit_bytes", "SIZE", optional("none", parse_size), "hard cap of RAM, page-locked memory included; "
               "none: no cap", "ram-limit-bytes cpu-memory-limit max-cpu-memory host-memory-limit", "none"),
        Option("plan_only", "on|off", switch, "print the plan and both predicted peaks, train nothing", "dry-run"),
        Option("gpu", "CARD", text, "plan for this card (rtx3060, t4, ...) and for no more memory than it has, instead "
               "of for the one that is here", "", "the card here"),
        Option("micro_batch", "N|auto", optional("auto", integer), "sequences that go through the model at once",
               "per-device-train-batch-size micro-batch-size device-batch-size", AUTO),
        Option("group", "N|auto", optional("auto", integer), "micro-batches that pass a segment before the next "
               "segment runs; must divide their number", "", AUTO),
        Option("segment_blocks", "N|auto", optional("auto", integer), "consecutive blocks that are recomputed together",
               "", AUTO),
        Option("recompute", "auto|on|products|off", one_of("auto", "on", "products", "off"), "compute activations "
               "again in the backward pass: all of them, all but matrix products and attention, or none"),
        Option("states", "auto|resident|streamed", one_of("auto", "resident", "streamed"), "optimizer states on the "
               "GPU, or in RAM and brought over for each update: the same result, bit for bit"),
    ),
    "run folder": (
        Option("out", "DIR", text, "run folder: plan, metrics, checkpoints, model", "output-dir out-dir run-dir"),
        Option("run_name", "S", text, "name of the run in wandb", "wandb-run-name wandb-name "
               "experiment-name", "the folder's name"),
        Option("resume", "auto|never|DIR", resume, "go on from the newest valid checkpoint in --out, never, or from "
               "the one in DIR", "resume-from-checkpoint resume-from"),
        Option("save_every", "N", integer, "steps between checkpoints", "save-steps save-interval checkpoint-every "
               "checkpointing-steps", "one at the end"),
        Option("keep_last", "N", integer, "checkpoints that are kept", "save-total-limit keep-last-n"),
        Option("eval_every", "N", integer, "steps between evaluations on held-out text", "eval-steps eval-interval",
               "at the start and at the end"),
        Option("eval_batches", "N", integer, "batches that an evaluation reads", "eval-iters max-eval-batches"),
        Option("log_every", "N", integer, "steps between printed lines; metrics.jsonl has every step", "logging-steps "
               "log-interval log-every-n-steps"),
        Option("sample_prompt", "S", text, "text to continue at the end of the run", "", "none"),
        Option("wandb", "disabled|offline|online", one_of("disabled", "offline", "online"), "logging to Weights & "
               "Biases", "wandb-mode", "WANDB_MODE, or disabled"),
    ),
}
# fmt: on

OPTIONS = {option.field: option for options in GROUPS.values() for option in options}

# Aliases whose values are read in another way than the option's own: flags, and shares.
FLAGS = {"bf16": ("precision", "bf16"), "fp16": ("precision", "fp16")}
FLAGS.update({"use-cpu": ("device", "cpu"), "no-cuda": ("device", "cpu")})
SPECIAL_ALIASES: dict[str, tuple[str, Parse]] = {
    **dict.fromkeys(("warmup-ratio", "warmup-fraction", "lr-warmup-fraction"), ("warmup_steps", share)),
    **{flag: (field, flag_for(value)) for flag, (field, value) in FLAGS.items()},
}

REFUSED = {
    name: reason
    for names, reason in (
        (
            "batch-size train-batch-size",
            "trainers disagree on what it means; use --batch for the sequences per optimizer step, and --micro-batch "
            "for those that go through the model at once (the planner chooses them otherwise)",
        ),
        (
            "eval-batch-size per-device-eval-batch-size",
            "evaluation takes as many sequences at once as training does; --eval-batches says how much it reads",
        ),
        (
            "gradient-accumulation-steps gradient-accumulation-iters grad-accum-steps accumulate-grad-batches",
            "it follows from --batch, the sequences per optimizer step, and --micro-batch, those that run at once",
        ),
        (
            "gradient-checkpointing activation-checkpointing enable-activation-checkpointing",
            "the planner recomputes where the caps ask for it; --recompute on, products or off overrules it",
        ),
        (
            "load-in-4bit load-in-8bit quantize quantization use-lora lora use-peft lora-r lora-rank lora-alpha qlora",
            "every parameter is trained here, with fp32 master weights; to use less memory set --gpu-limit and "
            "--ram-limit, or take --optimizer adamw8bit",
        ),
        ("report-to wandb-log", "use --wandb online, offline or disabled; metrics.jsonl is always written"),
        ("wandb-project wandb-entity", "set the environment variable WANDB_PROJECT or WANDB_ENTITY"),
        ("dataset-config-name dataset-config", "write it behind the dataset's name: --data org/name:config"),
        ("validation-split-percentage", "use --eval-fraction with a share: 0.05 is 5 percent"),
        (
            "gpus num-gpus n-gpus nproc-per-node",
            "training is on one GPU; python -m lowmem.plan --gpus N says which of PyTorch's ways suits several",
        ),
        ("init-from", "use --model for the weights to start from, --init random for none, --resume to go on"),
    )
    for name in names.split()
}


def _accepted_names() -> dict[str, tuple[str, Parse]]:
    """Every name of every option, with dashes -> its field, and how its value is read."""
    return SPECIAL_ALIASES | {
        name: (option.field, option.parse)
        for option in OPTIONS.values()
        for name in (option_name(option.field)[2:], *option.aliases.split())
    }


NAMES = _accepted_names()
