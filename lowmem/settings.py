"""What a run is told: one frozen dataclass, checked where it is made, written beside the run as ``settings.json``.

Names carry their unit (``gpu_limit_bytes``). A combination that cannot run is refused by the constructor, so nobody
downstream checks again, and a run that would fail after an hour fails before anything is written. The command line
(lowmem/run/cli.py) and the scripts only fill this in: ``Settings(model="gpt2-xl", ram_limit_bytes=16 * GIB)``.

``None`` always means that nobody chose: the planner does (``micro_batch``, ``group``, ``segment_blocks``), the
environment does (``wandb``), or the thing is left out (``clip_norm``, ``save_every``, a memory cap).
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from lowmem.errors import InputError
from lowmem.units import GIB, MIB, format_size

DEFAULT_EPOCHS = 1.0  # the length of a run that was given neither steps nor epochs
MOST_TOKENS = 2**26  # of a step; four times Llama 3's largest. Planning takes longer the more there are


@dataclass(frozen=True)
class Settings:
    """Everything that a run can be told; raises InputError for what cannot run."""

    model: str = "gpt2-large"  # hub name or local folder
    init: Literal["pretrained", "random"] = "pretrained"  # random weights only for who asks: never by accident

    data: str = "python-stdlib"
    eval_data: str | None = None  # None: a share of `data` is held out
    eval_fraction: float = 0.01
    text_field: str = "text"
    train_on: Literal["completion", "all"] = "completion"
    seq: int = 1024  # tokens per sequence
    document_mask: bool = False  # GPT-2 was pretrained with packed documents that see each other

    batch: int = 64  # sequences per optimizer step
    steps: int | None = None  # optimizer steps; neither steps nor epochs: one pass over the data
    epochs: float | None = None
    fixed_batch: bool = False
    # For fine-tuning: about a tenth of the rate that models of this size were pretrained with (GPT-3's table has 2.5e-4
    # for 760M parameters, 2e-4 for 1.3B), so that what was learned stays. From random weights take 1e-4 to 1e-3.
    lr: float = 3e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: float = 0.03  # below 1 a share of the steps: Adam's second moments start from nothing
    weight_decay: float = 0.01  # AdamW's usual value; pretraining takes 0.1
    clip_norm: float | None = 1.0  # the global norm of the gradient; 0 is stored as None: off
    seed: int = 0
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    residual: Literal["fp32", "16bit"] = "fp32"  # of the residual stream, where `precision` is 16-bit
    device: Literal["auto", "cuda", "cpu"] = "auto"

    gpu_limit_bytes: int | None = 11 * GIB
    ram_limit_bytes: int | None = None
    micro_batch: int | None = None  # sequences that go through a block at once
    group: int | None = None  # micro-batches that pass a segment together
    segment_blocks: int | None = None  # consecutive blocks that are recomputed together
    recompute: Literal["auto", "on", "products", "off"] = "auto"
    states: Literal["auto", "resident", "streamed"] = "auto"
    plan_only: bool = False
    gpu: str | None = None  # a card of lowmem/simulate/gpus.py to plan for; None: the one that is here

    demo: bool = False
    out: str = "runs/gpt2-large"
    run_name: str | None = None
    resume: str = "auto"  # "auto", "never" or a folder
    save_every: int | None = None  # steps; None: at the end only
    keep_last: int = 2  # checkpoints
    eval_every: int | None = None  # steps; None: at the start and at the end only
    eval_batches: int = 8  # half a million tokens at the defaults
    log_every: int = 1  # steps
    sample_prompt: str | None = None
    wandb: Literal["disabled", "offline", "online"] | None = None  # None: WANDB_MODE, and without that disabled

    def __post_init__(self):
        for item in fields(self):
            object.__setattr__(self, item.name, _checked(item.name, item.type, getattr(self, item.name)))
        if self.clip_norm == 0:
            object.__setattr__(self, "clip_norm", None)
        for problem in self._problems():
            raise InputError(problem)

    def _problems(self) -> Iterator[str]:
        """One sentence for each thing that cannot run."""
        for name in _AT_LEAST_ONE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                yield f"{option_name(name)} {getattr(self, name)} is too small: it must be at least 1."
        if self.seq < 2:
            yield f"--seq {self.seq} is too short: a sequence needs 2 tokens, one to predict from and one to predict."
        for name in ("lr", "epochs"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                yield f"{option_name(name)} {getattr(self, name):g} must be more than 0."
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                yield f"{option_name(name)} {getattr(self, name):g} must not be negative."
        if not 0 <= self.seed < 2**32:
            yield f"--seed {self.seed} must be a whole number from 0 to {2**32 - 1}."
        if not 0 < self.eval_fraction < 1:
            yield f"--eval-fraction {self.eval_fraction:g} must lie between 0 and 1: it is the share that is held out."

        if self.steps is not None and self.epochs is not None:
            yield "--steps and --epochs both say how long the run is: give one of them."
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            yield f"--warmup-steps {self.warmup_steps:g} must be whole; below 1 it is a share of the steps."
        if self.steps is not None and self.warmup_steps > self.steps:
            yield f"--warmup-steps {self.warmup_steps:g} is longer than the run of {self.steps} steps."

        if self.batch * self.seq > MOST_TOKENS:
            yield (
                f"--batch {self.batch} x --seq {self.seq} are {self.batch * self.seq:,} tokens in a step; more than "
                f"{MOST_TOKENS:,} are not planned for: lower --batch."
            )
        if self.micro_batch is not None and self.batch % self.micro_batch:
            yield f"--batch {self.batch} cannot be cut into micro-batches of {self.micro_batch} (--micro-batch)."
        most = self.batch // (self.micro_batch or 1)
        if self.group is not None and most % self.group:
            yield f"--group {self.group} must divide the number of micro-batches, which is {most} here."

        for name in ("gpu_limit_bytes", "ram_limit_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < MIB:
                yield f"{option_name(name)} is {format_size(getattr(self, name))}: write a unit, as in 11GiB, or none."
        if self.gpu is not None and self.device == "cpu":
            yield f"--gpu {self.gpu} plans for a GPU and --device cpu asks for none: give one of them."
        for name in _TEXTS:
            if getattr(self, name) is not None and ("\0" in getattr(self, name) or not getattr(self, name).strip()):
                yield f"{option_name(name)} must not be empty."

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run: `steps`, or `epochs` (default 1) passes, the last step rounded up.

        Raises InputError if the warm-up is longer than that."""
        if self.steps is not None:
            return self.steps
        epochs = DEFAULT_EPOCHS if self.epochs is None else self.epochs
        steps = max(1, math.ceil(epochs * steps_per_epoch))
        if self.warmup_steps > steps:
            raise InputError(f"--warmup-steps {self.warmup_steps:g} is longer than the run of {steps} steps.")
        return steps


FIELD_NAMES = tuple(item.name for item in fields(Settings))
_AT_LEAST_ONE = (
    *("batch", "steps", "micro_batch", "group", "segment_blocks"),
    *("save_every", "keep_last", "eval_every", "eval_batches", "log_every"),
)
_TEXTS = ("gpu", "model", "data", "eval_data", "text_field", "out", "run_name", "resume")

# What --demo puts in place of a script's defaults: a small model from random weights, minutes on two CPU cores.
DEMO = {
    **{"model": "gpt2-demo", "init": "random", "out": "runs/demo"},
    **{"seq": 256, "batch": 16, "micro_batch": 8, "steps": 150, "lr": 1e-3, "eval_every": 50, "eval_batches": 4},
}


def option_name(name: str) -> str:
    """The command-line option that sets the field `name`."""
    return "--" + name.removesuffix("_bytes").replace("_", "-")


def read_json_object(text: str, source: str) -> dict[str, object]:
    """The JSON object in `text`; raises InputError, with the line where the text stops being JSON."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{source}:{error.lineno}: not valid JSON: {error.msg}.") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets thousands deep
        raise InputError(f"{source}: not settings: a number is too long or the nesting too deep.") from None
    if not isinstance(values, dict):
        raise InputError(f'{source}: settings are one JSON object, such as {{"steps": 100}}.')
    return values


def _checked(name: str, hint: object, value: object) -> object:
    """`value` as the field `name` holds it (numbers as float where `hint` says so); raises InputError."""
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for choice in choices:
        if get_origin(choice) is Literal:
            if isinstance(value, str) and value in get_args(choice):
                return value
        elif choice is float and type(value) in (int, float):
            if abs(value) < sys.float_info.max:  # neither nan nor inf, nor an int that is too large for a float
                return float(value)
        elif type(value) is choice:
            return value
    wanted = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    kinds = [wanted.get(choice) or " or ".join(get_args(choice)) for choice in choices if choice is not type(None)]
    raise InputError(f"{option_name(name)}: {value!r} is not {' or '.join(kinds)}.")
