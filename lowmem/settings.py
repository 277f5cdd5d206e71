"""Defines all settings of a training run: one frozen dataclass, which refuses combinations that cannot run.

Each field is also a command-line option (run/options.py). Fields whose names end with ``_bytes`` are sizes, and may be
given as texts such as "11GiB". ``None`` leaves the choice to the planner (``micro_batch``, ``group``,
``segment_blocks``), to the environment (``wandb``, ``report_to``) or to other settings (``out``). In ``clip_norm`` and
the memory caps, ``None`` means no limit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Flag, auto
from typing import Any, Literal

from lowmem.errors import InputError
from lowmem.fields import SAVE_EVERY, Specs, checked, option_name
from lowmem.units import GIB, format_size

TRACKERS = ("tensorboard", "wandb")  # programs that a run can report to
_ALONE = ("none", "all")  # values of --report-to that cannot be combined with others
DEFAULT_EPOCHS = 1.0  # the length of a run if neither steps nor epochs are given
MOST_TOKENS = 2**26  # per step: four times Llama 3's largest batch; more tokens make planning slow
AUTO = "auto, the planner chooses"  # shown for options that store "auto" as None


class Mark(Flag):
    """Names the results that depend on a setting. RUN: the trained weights; a resumed run is compared with its
    checkpoint. TOKENS: the tokens of a data set; tokens that were stored with another value are not used."""

    RUN = auto()
    TOKENS = auto()


RUN, TOKENS = Mark


def _option(default: Any, help: str, metavar: str = "", shown: str = "", marks: Mark | None = None) -> Any:
    """Returns a dataclass field with metadata, for --help and for resumed runs. `metavar`: a word for the value.
    `shown`: the default in words, if `default` is None. `marks`: the results that depend on the setting."""
    metadata = {"help": help, "metavar": metavar, "shown": shown, "marks": marks or Mark(0)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a training run. Raises InputError for values or combinations that cannot run."""

    # fmt: off
    model: str = _option(
        "gpt2-large", "name on the Hugging Face hub, a folder or a file", "NAME|DIR|FILE.gguf", marks=RUN)
    # Random weights must be asked for: never by accident.
    init: Literal["pretrained", "random"] = _option(
        "pretrained", "load the weights, or initialize them randomly, which needs no download", marks=RUN)
    demo: bool = _option(False, "train the small demonstration model; other options override its defaults")

    data: Specs = _option(
        "python-stdlib", "python-stdlib, wikitext, codeparrot, a hub dataset org/name[:config], or a file, folder or "
        "quoted pattern (.txt .md .py .jsonl .json .csv .parquet); several times for several, each with its weight",
        "SPEC[=X]")
    eval_data: Specs | None = _option(
        None, "held-out text, written like --data, without a weight", "SPEC", "a share of --data is held out", TOKENS)
    eval_fraction: float = _option(0.01, "share of --data that is held out; 0 holds nothing out", marks=TOKENS)
    split: str | None = _option(
        None, "the split of --data that is trained on, by the name that its publisher gave it", "NAME",
        "train, or the first one", marks=TOKENS)
    max_samples: int | None = _option(
        None, "train on the first N rows or documents of each --data", shown="all", marks=TOKENS)
    text_field: str = _option("text", "the column that holds the text", "NAME", marks=TOKENS)
    prompt_field: str = _option("prompt", "the column that holds the prompt", "NAME", marks=TOKENS)
    completion_field: str = _option(
        "completion", "the column that holds the answer to the prompt", "NAME", marks=TOKENS)
    messages_field: str = _option("messages", "the column that holds a conversation", "NAME", marks=TOKENS)
    train_on: Literal["completion", "all"] = _option(
        "completion", "for prompts with answers: learn only the answers, or everything", marks=TOKENS)
    chat_template: str | None = _option(
        None, "Jinja file that writes conversations as text; it is exported with the model", "FILE",
        "the tokenizer's own", marks=TOKENS)
    seq: int = _option(
        1024, "tokens per sequence; for an encoder-decoder, source and target together", marks=RUN | TOKENS)
    target_tokens: int | None = _option(
        None, "how many of these are the target's, for encoder-decoders", "N", "a quarter, for encoder-decoders",
        marks=RUN | TOKENS)
    # GPT-2 was pretrained with packed documents that see each other.
    document_mask: bool = _option(False, "whether attention stops at a packed document's end", marks=RUN)
    pack: Literal["padded", "sorted", "packed"] = _option(
        "sorted", "how examples shorter than --seq fill rows. sorted: each is padded; micro-batches have examples of "
        "similar lengths. packed: several share a row, without attention between them. padded: each is padded "
        "to the longest of its batch",
        marks=RUN)

    batch: int = _option(64, "sequences per optimizer step; the planner chooses micro-batches", marks=RUN)
    steps: int | None = _option(None, "optimizer steps", shown="as --epochs says")
    epochs: float | None = _option(None, "passes over the data, instead of --steps", shown="1, unless --steps is given")
    fixed_batch: bool = _option(False, "train on the first batch again and again: the loss must fall", marks=RUN)
    # For fine-tuning: about a tenth of the rate that models of this size were pretrained with (GPT-3's table has 2.5e-4
    # for 760M parameters, 2e-4 for 1.3B). From random weights use 1e-4 to 1e-3.
    lr: float = _option(3e-5, "highest learning rate", marks=RUN)
    schedule: Literal["cosine", "linear", "constant"] = _option(
        "cosine", "learning rate after the warm-up", marks=RUN)
    # Not 0: Adam's second moments start at zero.
    warmup_steps: float = _option(
        0.03, "steps until the learning rate is reached; below 1 a share of all steps", "N", marks=RUN)
    weight_decay: float = _option(0.01, "decoupled weight decay", marks=RUN)  # AdamW's default; pretraining uses 0.1
    adam_beta1: float = _option(0.9, "decay of AdamW's mean of gradients", marks=RUN)
    adam_beta2: float = _option(0.999, "decay of the mean of their squares; pretraining often uses 0.95", marks=RUN)
    adam_epsilon: float = _option(1e-8, "AdamW's epsilon", marks=RUN)
    clip_norm: float | None = _option(
        1.0, "largest global gradient norm; 0 switches clipping off", shown="0", marks=RUN)
    seed: int = _option(0, "seed of the data order, dropout and random weights", marks=RUN)
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = _option(
        "adamw", "adamw8bit keeps its states in 8 bits and needs bitsandbytes", marks=RUN)
    precision: Literal["auto", "bf16", "fp16", "fp32"] = _option(
        "auto", "dtype of the computation; master weights are always fp32. auto: bf16 if the GPU has it, else fp16; "
        "fp32 on the CPU")
    residual: Literal["fp32", "16bit"] = _option(
        "fp32", "dtype of the residual stream under bf16 and fp16; 16bit halves the saved block inputs and follows "
        "the fp32 loss curve less closely", marks=RUN)
    device: Literal["auto", "cuda", "cpu"] = _option("auto", "where to train; auto: a GPU if there is one")

    gpu_limit_bytes: int | None = _option(
        11 * GIB, "hard cap of GPU memory, such as 11GiB, 16G or 800MiB; none, and lowmem plan with --gpu: all "
        "of the card", shown="none")
    ram_limit_bytes: int | None = _option(
        None, "hard cap of RAM, page-locked memory included; none: no cap", shown="none")
    plan_only: bool = _option(False, "print the plan, with the predicted peaks of GPU memory and RAM; train nothing")
    preview: int | None = _option(
        None, "print the first N examples, with the tokens that are trained on; train nothing", shown="none")
    verbose: bool = _option(False, "also print the plan's table: all memory by name, in each phase of the run")
    gpu: str | None = _option(
        None, "plan for this card (rtx3060, t4, ...) and at most its memory, not for the card that is here", "CARD",
        "the card here")
    micro_batch: int | None = _option(None, "sequences that go through the model at once", shown=AUTO)
    group: int | None = _option(
        None, "micro-batches that pass a segment before the next segment runs; must divide their number", shown=AUTO)
    segment_blocks: int | None = _option(
        None, "consecutive blocks that are recomputed together", shown=AUTO)
    recompute: Literal["auto", "on", "products", "off"] = _option(
        "auto", "activations to compute again in the backward pass: all, all except matrix products and attention, or "
        "none")
    states: Literal["auto", "resident", "streamed", "disk"] = _option(
        "auto", "where optimizer states are: on the GPU (resident), in RAM (streamed), on a disk, or where the planner "
        "puts them (auto); no bit of the result depends on it. disk: all of them in --states-folder. streamed and "
        "auto: there only if RAM is too small")
    states_folder: str | None = _option(
        None, "a folder on a fast disk for optimizer states", "DIR", "none")
    disk_rate_bytes: int | None = _option(
        2 * GIB, "bytes per second that this disk reads and writes in all, for the plan", "SIZE")
    network_rate_bytes: int | None = _option(
        1_250_000_000, "with several machines: bytes per second that come to a machine from the others, for the "
        "predicted time", "SIZE")
    weights: Literal["auto", "resident", "streamed"] = _option(
        "auto", "16-bit weights of the blocks on the GPU, or in RAM and copied for each pass: the same bits; auto: in "
        "RAM if that is needed or faster")
    boundaries: Literal["auto", "resident", "streamed"] = _option(
        "auto", "saved block inputs on the GPU until backward, or in RAM: the same bits; auto: in RAM if that is "
        "needed or faster")
    gradients: Literal["auto", "resident", "streamed"] = _option(
        "auto", "gradients on the GPU until all are known and clipped, or in RAM: the same bits; resident: if they do "
        "not fit, forward and backward run twice")

    out: str | None = _option(
        None, "run folder: plan, metrics, checkpoints, model", "DIR", "runs/, with the names of model and data")
    run_name: str | None = _option(None, "name of the run in wandb", shown="the folder's name")
    resume: str = _option(
        "auto", "resume from the newest valid checkpoint in --out, never, or from the one in DIR", "auto|never|DIR")
    save_every: int | str = _option(
        SAVE_EVERY, "steps or time between checkpoints, such as 500, 30min or 2h; the last step is always saved",
        "N|TIME")
    keep_last: int = _option(2, "checkpoints that are kept")
    eval_every: int | None = _option(
        None, "steps between evaluations on held-out text", shown="at the start and at the end")
    eval_batches: int = _option(8, "batches that an evaluation reads")  # half a million tokens at the defaults
    keep_best: bool = _option(False, "also keep the checkpoint with the lowest held-out loss, and export that one")
    patience: int | None = _option(
        None, "end after so many evaluations in a row without a lower held-out loss", "N", "never")
    log_every: int | None = _option(
        None, "steps between the lines in log.txt and in piped output; metrics.jsonl has every step",
        shown="some 40 lines in all")
    export_dtype: Literal["fp32", "bf16", "fp16"] = _option(
        "fp32", "of the exported model's weights; checkpoints are always exact")
    sample_prompt: Specs | None = _option(
        None, "text to continue before the first step and at the end, or, with data of conversations, a question to "
        "answer; several times for several", "S", "none")
    sample_temperature: float = _option(0.0, "0 takes the likeliest token; higher values draw more freely")
    sample_every: int | None = _option(None, "steps between further samples", "N", "none in between")
    report_to: str | None = _option(
        None, "trackers next to metrics.jsonl, separated by commas", "none|tensorboard|wandb|all",
        "wandb if WANDB_MODE says so, or none")
    wandb: Literal["disabled", "offline", "online"] | None = _option(
        None, "logging to Weights & Biases", shown="WANDB_MODE, or online if --report-to names it, or disabled")
    # fmt: on

    def __post_init__(self):
        problems = []
        for item in fields(self):
            try:
                value = checked(item.name, item.type, getattr(self, item.name))
            except InputError as error:
                problems.append(str(error))
            else:
                object.__setattr__(self, item.name, value)
        if self.clip_norm == 0:
            object.__setattr__(self, "clip_norm", None)
        if problems := problems or list(self._problems()):
            raise InputError(" ".join(problems))

    def _problems(self) -> Iterator[str]:
        for chosen, words in _CONFLICTS:
            if all(getattr(self, name) == value for name, value in chosen.items()):
                first, value = next(iter(chosen.items()))
                yield f"{option_name(first)}{'' if value is None else f' {value}'} {words}."
        if self.target_tokens is not None and self.target_tokens >= self.seq:
            yield f"--target-tokens {self.target_tokens} of --seq {self.seq} leave no token for a source."
        if self.steps is not None and self.epochs is not None:
            yield "--steps and --epochs both set the length of the run: give one of them."
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            yield f"--warmup-steps {self.warmup_steps:g} must be whole; below 1 it is a share of the steps."
        if self.steps is not None and self.warmup_steps > self.steps:
            yield f"--warmup-steps {self.warmup_steps:g} is longer than the run of {self.steps} steps."
        for name in ("patience", "keep_best"):
            if getattr(self, name) and self.eval_every is None:
                yield f"{option_name(name)} compares evaluations: give --eval-every, the steps between two of them."
        for name in ("sample_every", "sample_temperature"):
            if getattr(self, name) and self.sample_prompt is None:
                yield f"{option_name(name)} needs a text to continue: give --sample-prompt."
        if (self.segment_blocks or 1) > 1 and self.recompute in ("off", "products"):
            said = f"--segment-blocks {self.segment_blocks} is for blocks that are recomputed whole"
            yield f"{said}: leave out --recompute {self.recompute}."
        if self.batch * self.seq > MOST_TOKENS:
            tokens = f"--batch {self.batch} x --seq {self.seq} are {self.batch * self.seq:,} tokens in a step"
            yield f"{tokens}; the planner takes at most {MOST_TOKENS:,}: lower --batch."
        if self.micro_batch is not None and self.batch % self.micro_batch:
            yield f"--batch {self.batch} cannot be cut into micro-batches of {self.micro_batch} (--micro-batch)."
        most = self.batch // (self.micro_batch or 1)
        if self.group is not None and most % self.group:
            yield f"--group {self.group} must divide the number of micro-batches, which is {most} here."
        if self.states == "resident" and self.states_folder is not None:
            yield "--states-folder is for streamed states: leave out --states resident."
        if self.gradients == "streamed" and self.clip_norm is None and self.precision != "fp16":
            yield "--gradients streamed is for gradients that wait to be clipped: leave out --clip-norm 0."
        for name in ("gradients", "boundaries"):  # else the planner makes the group the whole batch
            if getattr(self, name) == "streamed" and self.group not in (None, most) and self.micro_batch is not None:
                yield f"--{name} streamed takes the whole batch as one group: leave out --group."
        if self.plan_only and self.preview is not None:
            yield "--preview shows data and --plan-only a plan: give one of them."
        if self.gpu is not None and self.device == "cpu":
            yield f"--gpu {self.gpu} plans for a GPU and --device cpu asks for none: give one of them."
        named = self._reported_to()
        for name in named - {*TRACKERS, *_ALONE}:
            yield f"--report-to {self.report_to}: {name!r} is not one of none, {', '.join(TRACKERS)}, all."
        if len(named) > 1 and not named.isdisjoint(_ALONE):
            yield f"--report-to {self.report_to}: none and all cannot be combined with others."

    @property
    def masks_documents(self) -> bool:
        """Returns True if attention may have to stop at the ends of documents or examples that share a row."""
        return self.document_mask or self.pack == "packed"

    @property
    def trains_nothing(self) -> bool:
        return self.plan_only or self.preview is not None

    def _reported_to(self) -> set[str]:
        return set() if self.report_to is None else {name.strip().lower() for name in self.report_to.split(",")}

    def reports_to(self, tracker: str) -> bool:
        return not self._reported_to().isdisjoint({tracker, "all"})

    def total_steps(self, steps_per_epoch: int) -> int:
        """Returns the optimizer steps of the run: `steps`, else `epochs` (default 1) times `steps_per_epoch`, rounded
        up. Raises InputError if the warm-up is longer."""
        if self.steps is not None:
            return self.steps
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        steps = max(1, math.ceil(epochs * steps_per_epoch))
        if self.warmup_steps > steps:
            raise InputError(f"--warmup-steps {self.warmup_steps:g} is longer than the run of {steps} steps.")
        return steps


def marked(settings: Any, marks: Mark) -> dict[str, Any]:
    """Returns {name: value} of the settings with one of `marks`. `settings`: any object with the fields of Settings."""
    return {item.name: getattr(settings, item.name) for item in fields(Settings) if marks & item.metadata["marks"]}


def in_words(name: str, value: Any) -> str:
    """Formats the value of the setting `name` as text for --help and for the report."""
    if value is None:
        return Settings.__dataclass_fields__[name].metadata["shown"] or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes"):
        return format_size(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def changed(name: str, old: Any, new: Any) -> str:
    """Formats a change of the setting `name` from `old` to `new`: "--clip-norm 1.0 -> 0"."""
    old, new = (
        "not given" if value is None and getattr(Settings, name) is None else in_words(name, value)
        for value in (old, new)
    )
    return f"{option_name(name)} {old} -> {new}"


FIELD_NAMES = tuple(item.name for item in fields(Settings))
_CONFLICTS = (  # ({field: value} that cannot be combined, the refusal's text after the first field)
    ({"weights": "streamed", "states": "resident"}, "updates weights with their states: leave out --states resident"),
    ({"weights": "streamed", "recompute": "off"}, "recomputes blocks in backward: leave out --recompute off"),
    ({"boundaries": "streamed", "recompute": "off"}, "is for blocks that are recomputed: leave out --recompute off"),
    ({"gradients": "streamed", "states": "resident"}, "needs streamed states: leave out --states resident"),
    ({"states": "disk", "states_folder": None}, "needs a folder on a disk: give --states-folder"),
    ({"disk_rate_bytes": None}, "must be a size, the bytes that a disk reads and writes in a second, as in 2GiB"),
    ({"network_rate_bytes": None}, "must be a size, the bytes that come to a machine in a second, as in 1GiB"),
)

# Defaults with --demo, in place of a script's: a small model from random weights, for minutes on two CPU cores.
DEMO = {
    **{"model": "gpt2-demo", "init": "random"},
    **{"seq": 256, "batch": 16, "micro_batch": 8, "steps": 150, "lr": 1e-3, "eval_every": 50, "eval_batches": 4},
}
