"""What tests of whole runs share: their options, what of a run folder is compared, and a process to measure.

conftest.py has the fixtures `text`, `train` and `finished`: two files of text, the Large script on them, and the folder
of a finished run. The model is that of --demo, at three steps of 4 x 32 tokens.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PretrainedConfig

import train_gpt2_large
import train_gpt2_xl
from lowmem.core.kernels import Kernels
from lowmem.core.step import TrainingStep
from lowmem.cudasim.gpus import Card
from lowmem.cudasim.recorder import Recorder
from lowmem.files import MANIFEST, write, write_manifest
from lowmem.models.compatibility import compare_small_copy
from lowmem.planning.plan import Plan
from lowmem.planning.planner import make_plan
from lowmem.planning.process import process_aside
from lowmem.planning.simulated_step import StepCase, Target, gpu_target
from lowmem.planning.simulations import Simulations
from lowmem.run.metrics import read_metrics
from lowmem.settings import Settings
from lowmem.units import GIB

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"large": train_gpt2_large, "xl": train_gpt2_xl}
SMALL = (
    *("--demo", "--steps", "3", "--seq", "32", "--batch", "4", "--micro-batch", "2", "--eval-batches", "1"),
    *("--device", "cpu"),
)
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB.\nmore lines"
# Of a row: what may differ between equal runs.
CLOCK = ("step_ms", "tokens_per_second", "computed_tokens_per_second", "ram_peak_bytes")


def stored(path: Path) -> dict:
    return json.loads(path.read_text())


def loss_rows(out: Path) -> list[dict]:
    return [{key: row[key] for key in row if key not in CLOCK} for row in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> bytes:
    return (out / "model/model.safetensors").read_bytes()


def failing(number: int) -> Mock:
    """A function that the system refuses, with this errno."""
    return Mock(side_effect=OSError(number, os.strerror(number)))


def write_rows(path: Path, rows: list[dict]) -> str:
    """Writes JSON lines; returns the path as an option's value."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rehash(checkpoint: Path) -> None:
    """Writes the manifest of a changed checkpoint anew, as if it had been saved like that."""
    (checkpoint / MANIFEST).unlink()
    entries = {}
    for path in list(checkpoint.iterdir()):
        kept = path.read_bytes()
        path.unlink()
        entries[path.name] = write(path, [kept])
    write_manifest(checkpoint, entries)


def assert_same_run(one: Path, other: Path) -> None:
    assert loss_rows(one) == loss_rows(other)
    assert weights(one) == weights(other)
    newest = max(path.name for path in (one / "checkpoints").iterdir())
    found = [content(folder / "checkpoints" / newest) for folder in (one, other)]  # m, v, loss scale, ...
    for files in found:
        files["state.json"] = json.loads(files["state.json"]) | {"resume": None}
        del files[MANIFEST]
    assert found[0] == found[1]


NOT_PLANNED = (
    *("out", "data", "steps", "lr", "schedule", "save_every", "keep_last", "eval_every", "resume", "keep_best"),
    *("patience", "sample_every", "sample_prompt", "sample_temperature"),
)
_PLANS: dict[tuple, Plan] = {}


@contextmanager
def remembering() -> Iterator[Callable]:
    """Replaces process_aside: a run without a cap of RAM gets the plan of an earlier run with the same planned
    settings. To plan takes longer than to train as little as these tests do. What is free counts where it is short."""
    with process_aside() as aside:

        def plan(function: Callable, *arguments):
            if function is not make_plan:
                return aside(function, *arguments)
            (question,) = arguments
            settings, free = question.settings, question.ram_free_bytes
            asked = replace(settings, **{name: getattr(Settings, name) for name in NOT_PLANNED})
            key = (asked, question.config.to_json_string(), question.precision, min(free, 2 * GIB))
            if question.card is not None or settings.ram_limit_bytes is not None or key not in _PLANS:
                _PLANS[key] = aside(function, question)
            return replace(_PLANS[key], settings=settings)

        yield plan


@contextmanager
def simulations_shared(*modules: ModuleType) -> Iterator[None]:
    """Makes `modules` simulate each model, step and card once: a simulation depends neither on a cap nor on the
    requested layout (simulations.py). A small copy of each model is compared once, too."""
    targets: dict[str, Target] = {}
    compared: dict[tuple, str | None] = {}
    made: dict[tuple, Simulations] = {}

    def target_of(card: Card, *fused_kernels: Kernels | None) -> Target:
        return targets.setdefault(f"{card} {fused_kernels}", gpu_target(card, *fused_kernels))

    def simulations_of(decoder: partial, base: StepCase, target: Target) -> Simulations:
        config, *how = decoder.args
        name = next((name for name, known in targets.items() if known is target), "cpu")
        key = config.to_json_string(), *how, str(decoder.keywords), str(base), name
        if key not in made:
            made[key] = Simulations(decoder, base, target)
        return made[key]

    def compared_once(config: PretrainedConfig, *how: bool | str) -> str | None:
        key = config.to_json_string(), *how
        if key not in compared:
            compared[key] = compare_small_copy(config, *how)
        return compared[key]

    shared = {"gpu_target": target_of, "Simulations": simulations_of, "compare_small_copy": compared_once}
    with ExitStack() as patches:
        for module in modules:
            there = {name: value for name, value in shared.items() if hasattr(module, name)}
            patches.enter_context(patch.multiple(module, **there))
        yield


def mapping_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping of this process that has `address` in it."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        head, *fields = mapping.splitlines()
        first, last = (int(number, 16) for number in head.split()[0].split("-"))
        if first <= address < last:
            return dict(field.split(":", 1) for field in fields)
    raise AssertionError(f"nothing is mapped at {address:#x}")


def last_line(capsys) -> str:
    """What a failed run says: the last line on stderr, with no traceback before it."""
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def simulated() -> bool:
    """Whether this is the plan's simulation of a step and not a step."""
    return any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack())


def at_call(patch: pytest.MonkeyPatch, owner: object, name: str, act, call: int = 1) -> None:
    """`act()` happens at the beginning of the `call`-th call of owner.name, which then goes on."""
    real, calls = getattr(owner, name), iter(range(1, 10_000))

    def acting(*arguments, **keywords):
        if not simulated() and next(calls) == call:
            act()
        return real(*arguments, **keywords)

    patch.setattr(owner, name, acting)


def interrupt(*_) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def run_out(*_, **__) -> None:
    """As PyTorch does where the GPU's memory is full."""
    raise torch.OutOfMemoryError(FULL)


@contextmanager
def stopped_in_step(number: int = 1) -> Iterator[None]:
    """A SIGTERM comes at the beginning of this step of the process."""
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, TrainingStep, "__call__", lambda: os.kill(os.getpid(), signal.SIGTERM), number)
        yield


def python(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Runs a Python process that finds the repository's package; `environment` is added to this process's."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


def measured_run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str, int, float]:
    """Exit code, stdout, stderr, peak RSS in bytes and seconds of a Python process in the repository."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        out, err = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, out, err, usage.ru_maxrss * 1024, time.monotonic() - started
