"""Whether two commits train the same weights, bit for bit: small runs on the CPU, by the script's own command line.

    python -m tests.same_weights                       the working tree against the parent of HEAD; minutes on one core
    python -m tests.same_weights --before COMMIT --only "bf16"

Each run of RUNS is made in both trees and compared: every exported tensor, every parameter's tensors in the newest
checkpoint (working weights, low halves, moments), the loss scale, and what metrics.jsonl says of each step but for
times and memory. Nothing is imported from the package, so that its code may be moved, renamed and rewritten. Only
options, plan.json, metrics.jsonl and the files of a run folder have to stay. A run says which of plan.json's choices it
is there for, so that none passes because it took an easier way. Ends with exit code 1 where anything differs or a run
fails.
"""

import hashlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, uint8

from experiments.harness.trees import unpacked
from lowmem.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "train_gpt2_large.py"
SEQ, BATCH, STEPS = 32, 8, 4
BLOCKS = 4
MICRO_BATCHES = 4
SECONDS = 300  # after which a process counts as hung
NOT_FIT, STOPPED = 3, 75  # exit codes
OF_THE_MACHINE = re.compile(r".*(_ms|_bytes|_per_second)")  # fields of a row of metrics.jsonl
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": BLOCKS, "n_embd": 48, "n_head": 4,
    "vocab_size": 257, "n_positions": 64, "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": BLOCKS, "hidden_size": 48,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 64, "bos_token_id": 256, "eos_token_id": 256, "tie_word_embeddings": False,
}  # fmt: skip
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
CONFIGS = {
    "gpt2": GPT2,  # tied, with its dropout of 0.1
    "gpt2, no dropout": GPT2 | NO_DROPOUT,
    "gpt2, untied": GPT2 | {"tie_word_embeddings": False},
    "gpt2, wide": GPT2 | {"n_embd": 512},  # whose gradients are more than what a process varies by
    "llama, untied": LLAMA,
}
OPTIONS = {
    "init": "random", "data": "text.jsonl", "seq": SEQ, "batch": BATCH, "micro-batch": BATCH // MICRO_BATCHES,
    "group": 1, "segment-blocks": 1, "steps": STEPS, "lr": 1e-3, "warmup-steps": 2, "clip-norm": 0.5, "seed": 7,
    "eval-fraction": 0.1, "eval-batches": 2, "device": "cpu", "precision": "fp32", "wandb": "disabled",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """`options`: what is not OPTIONS in its command, None for one that is left out; `takes`: what plan.json's `choice`
    has to say. `stopped`: whether it gets a SIGTERM after its first step and the same command is given again; `tight`:
    whether it gets the smallest --ram-limit that it can have; `needs`: a package without which there is no such run."""

    model: str = "gpt2"
    options: dict[str, str | int | float | None] = field(default_factory=dict)
    takes: dict[str, str | int | bool] = field(default_factory=dict)
    stopped: bool = False
    tight: bool = False
    needs: str | None = None


RUNS = {
    "fp32, clipped, updates deferred": Run(takes={"group": 1, "fate": "held", "optimizer": "adamw"}),
    "fp32, SGD, no dropout": Run("gpt2, no dropout", {"optimizer": "sgd", "lr": 0.1}, {"optimizer": "sgd"}),
    "fp32, forward and backward twice": Run(
        "gpt2, wide", {"group": None, "segment-blocks": None}, {"fate": "dropped", "group": MICRO_BATCHES}, tight=True
    ),
    "fp32, completions of unequal lengths, Llama, untied": Run("llama, untied", {"data": "answers.jsonl"}),
    "fp32, document mask, segments of 2 recomputed": Run(
        options={"document-mask": "on", "recompute": "on", "segment-blocks": 2},
        takes={"recompute": True, "segment_blocks": 2},
    ),
    "bf16, updates in backward, products kept": Run(
        options={"precision": "bf16", "clip-norm": 0, "group": MICRO_BATCHES, "recompute": "products"},
        takes={"precision": "bf16", "group": MICRO_BATCHES, "kept": 4},
    ),
    "bf16, not clipped, accumulated, nothing recomputed": Run(
        options={"precision": "bf16", "clip-norm": 0, "recompute": "off"}, takes={"group": 1, "recompute": False}
    ),
    "bf16, 16-bit residual stream, recomputed, states streamed": Run(
        options={"precision": "bf16", "residual": "16bit", "recompute": "on", "states": "streamed", "group": 2},
        takes={"residual": "16bit", "recompute": True, "states_on_gpu": 0},
    ),
    "bf16, 8-bit moments": Run(
        options={"precision": "bf16", "optimizer": "adamw8bit"}, takes={"state_bits": 8}, needs="bitsandbytes"
    ),
    "bf16, Llama, untied, document mask, products kept": Run(
        "llama, untied", {"precision": "bf16", "document-mask": "on", "recompute": "products"}, {"kept": 4}
    ),
    "fp16, whole batch as one group, recomputed": Run(
        options={"precision": "fp16", "group": MICRO_BATCHES, "recompute": "on"}, takes={"precision": "fp16"}
    ),
    "fp16, untied, nothing recomputed": Run(
        "gpt2, untied", {"precision": "fp16", "recompute": "off"}, {"precision": "fp16", "recompute": False}
    ),
    "fp16, stopped by SIGTERM and resumed": Run(options={"precision": "fp16", "steps": 40}, stopped=True),
}


class Failed(Exception):
    """A run that did not end as it should."""


def digests(tree: Path, run: Run, inputs: Path, out: Path) -> dict[str, str]:
    """Makes `run` with the sources in `tree`; by name the digest of everything that has to be the same."""
    options = OPTIONS | {"model": str(inputs / run.model), "out": str(out)} | run.options
    options["data"] = str(inputs / options["data"])
    command = [
        *(sys.executable, SCRIPT),
        *(word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))),
    ]
    if run.tight:
        refusal = _ended(_started([*command, "--ram-limit", "1MiB"], tree), NOT_FIT)
        command += ["--ram-limit", re.search(r"--ram-limit (\d+MiB)", refusal)[1]]
    if run.stopped:
        process = _started(command, tree)
        _wait_for_a_row(process, out / "metrics.jsonl")
        process.send_signal(signal.SIGTERM)
        _ended(process, STOPPED)
    _ended(_started(command, tree), 0)
    choice = json.loads((out / "plan.json").read_text())["choice"]
    for key, wanted in run.takes.items():
        if choice.get(key) != wanted:
            raise Failed(f"its plan has {key} {choice.get(key)} and not {wanted}")
    found = dict(found_in(out))
    if found["checkpoint: updates"] == "0":
        raise Failed("none of its steps updated anything")
    return found


def found_in(out: Path) -> Iterator[tuple[str, str]]:
    """(name, digest) of all that has to be the same of the run folder `out`."""
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            if not OF_THE_MACHINE.fullmatch(key):
                yield f"step {row['step']}: {key}", repr(value)
    for path in sorted((out / "model").glob("*.safetensors")):
        for name, tensor, _ in _tensors(path):
            yield f"exported {name}", _digest(tensor)
    newest = max((out / "checkpoints").iterdir(), key=lambda path: path.name)
    state = json.loads((newest / "state.json").read_text())
    for key in ("step", "updates", "loss_scale", "skipped"):
        yield f"checkpoint: {key}", repr(state.get(key))
    for path in sorted(newest.glob("*.safetensors")):
        for name, flat, places in _tensors(path):
            for parameter, (start, *shape) in places.items():
                per = math.ceil(_entries(path, "working") / len(flat))  # parameters that share an entry
                stop = start + math.prod(shape)
                yield f"checkpoint: {name} of {parameter}", _digest(flat[start // per : math.ceil(stop / per)])


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of what is not the same in both."""
    return [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]


def compared(run: Run, before: Path, after: Path, inputs: Path) -> tuple[int, list[str]]:
    """How many things are compared of a run in two trees, and the names of those that differ."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, tree in (("before", before), ("after", after)):
            try:
                found.append(digests(tree, run, inputs, Path(scratch) / name))
            except Failed as error:
                raise Failed(f"{name}: {error}") from None
    return len(found[0]), differences(*found)


def write_inputs(folder: Path) -> None:
    """A config.json for each of CONFIGS, and two files of data: text to be packed, several documents to a row, and
    answers of unequal lengths."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    texts = [f"{number}: " + f"{number * 7919 % 1000} " * (number % 6) for number in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    answers = [{"prompt": f"{n} + 1 =", "completion": " " + str(n + 1) * (1 + n % 5)} for n in range(200)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))


def tree_of(commit: str, folder: Path) -> Path:
    """The files of `commit`, in `folder`; `commit` may be a folder itself, which is taken as it is."""
    return Path(commit).resolve() if Path(commit).is_dir() else unpacked(commit, folder)


def _started(command: list[str], tree: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    environment |= {"HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _ended(process: subprocess.Popen, code: int) -> str:
    """What it said on stderr, when it has ended with exit code `code`."""
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Failed(f"hung for {SECONDS} s") from None
    if process.returncode != code:
        said = errors.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise Failed(f"ended with exit code {process.returncode} and not {code}: {said[0]}")
    return errors


def _wait_for_a_row(process: subprocess.Popen, metrics: Path) -> None:
    until = time.monotonic() + SECONDS
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None or time.monotonic() > until:
            return  # _ended says what is wrong
        time.sleep(0.01)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor, dict[str, list[int]]]]:
    """Name and tensor of all in a .safetensors file; for a checkpoint's flat ones, [start, *shape] by parameter."""
    with safe_open(path, "pt") as file:
        places = json.loads((file.metadata() or {}).get("parameters", "{}"))
        for name in file.keys():
            yield name, file.get_tensor(name), places


def _entries(path: Path, name: str) -> int:
    with safe_open(path, "pt") as file:
        return file.get_slice(name).get_shape()[0]


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().flatten().view(uint8).numpy()
    return f"{tensor.dtype} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m tests.same_weights", description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="HEAD~1", metavar="COMMIT", help="or a folder (%(default)s)")
    parser.add_argument("--after", default=str(ROOT), metavar="COMMIT", help="or a folder (the working tree)")
    parser.add_argument("--only", default="", metavar="TEXT", help="the runs whose name has TEXT in it")
    options = parser.parse_args(arguments)
    chosen = {name: run for name, run in RUNS.items() if options.only in name}
    if not chosen:
        parser.error(f"no run has {options.only!r} in its name; there are {list(RUNS)}")
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("before", "after", "inputs")]
        for folder in folders:
            folder.mkdir()
        *folders, inputs = folders
        write_inputs(inputs)
        try:
            before, after = (tree_of(*pair) for pair in zip((options.before, options.after), folders, strict=True))
        except InputError as error:
            parser.error(str(error))
        for name, run in chosen.items():
            if run.needs is not None and importlib.util.find_spec(run.needs) is None:
                print(f"left out   {name}: there is no {run.needs} here", flush=True)
                continue
            try:
                number, different = compared(run, before, after, inputs)
            except Failed as error:
                number, different = 0, [str(error)]
            bad += bool(different)
            said = f"{number} things" if not different else f"{len(different)} of {number}: {', '.join(different[:3])}"
            print(f"{'DIFFERENT' if different else 'same     '}  {name}: {said}", flush=True)
    print(f"{len(chosen)} runs, {bad} not the same")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
