"""Disturbs runs of a small model on this card: each must end with the bits of an undisturbed run.

Compared are losses and norms, the last checkpoint, and the exported weights.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from experiments.gpu_acceptance.scripted import remembering, run_script
from experiments.harness.child import Result, Setting
from experiments.harness.rows import ROOT
from lowmem.core.step import TrainingStep
from lowmem.errors import first_line
from lowmem.run import prepare
from lowmem.run.metrics import read_metrics
from lowmem.units import MIB

SCRIPT = "train_gpt2_large.py"
MICRO_BATCH = 2
OPTIONS = [
    *("--demo", "--data", str(ROOT / "experiments" / "harness"), "--eval-batches", "1", "--wandb", "disabled"),
    *("--steps", "4", "--save-every", "2", "--micro-batch", str(MICRO_BATCH), "--states", "streamed"),
]
SHAPE, TINY_SHAPE = ["--seq", "256", "--batch", "8"], ["--seq", "32", "--batch", "4"]
# Freeing the allocator's cache must not be enough to recover.
TIMES_OUT_OF_MEMORY = 2
KILLED_IN_STEP = 3  # the checkpoint before it is that of step 2
SAME = ("step", "loss", "grad_norm", "eval_loss", "learning_rate")  # columns of a run's log without times
GPU_LIMIT_BYTES = 512 * MIB  # the cap of these runs
SMALLEST_BLOCK, LARGE_PAGE = 512, 20 * MIB  # of the caching allocator
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


def check(setting: Setting) -> Result:
    cases: dict[str, Callable[[Setting], Result]] = {"undisturbed": undisturbed, "killed": killed}
    cases["out of memory"] = out_of_memory
    if setting.device == "cuda":
        cases["not page-locked"] = not_page_locked
    done = {name: setting.attempt(name, lambda case=case: case(setting)).held for name, case in cases.items()}
    return Result({"cases": len(done)}, done)


def undisturbed(setting: Setting) -> Result:
    """Trains without a disturbance, and loads the export with transformers."""
    kept: dict = {}
    out = setting.scratch / "undisturbed"
    code = run_script(SCRIPT, _arguments(setting, out), TrainingStep=remembering(prepare.TrainingStep, kept))
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl")]
    checks = {"exit code 0": code == 0}
    if code == 0:
        loaded, said = AutoModelForCausalLM.from_pretrained(
            out / "model", dtype=torch.float32, output_loading_info=True
        )
        weights = loaded.state_dict()
        masters = dict(kept["store"].masters())
        checks["the export loads"] = not said["missing_keys"] and not said["unexpected_keys"]
        checks["and is what was trained"] = all(torch.equal(weights[name], masters[name].cpu()) for name in masters)
        checks["the loss falls"] = losses[-1] < losses[0]
    return Result({"losses": losses, "exit_code": code}, checks)


def killed(setting: Setting) -> Result:
    """Kills a run by SIGKILL in the middle of a step, and resumes it."""
    out = setting.scratch / "killed"
    program = "from experiments.gpu_acceptance import life; life.train_until_killed()"
    process = subprocess.run([sys.executable, "-c", program, json.dumps(_arguments(setting, out))], cwd=ROOT)
    steps_before = len(read_metrics(out / "metrics.jsonl"))
    checkpoints = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    code = run_script(SCRIPT, _arguments(setting, out))
    checks = {"was killed": process.returncode == -signal.SIGKILL, "goes on to its end": code == 0}
    checks["from its checkpoint"] = "going on from" in _said(out) and bool(checkpoints)
    values = {"steps_before": steps_before, "checkpoints_before": checkpoints, "exit_code": code}
    return _compared(setting, "undisturbed", out, values, checks)


def train_until_killed() -> None:
    """Trains until KILLED_IN_STEP, then kills this process. Its arguments are the script's, as JSON."""

    class Killed(TrainingStep):
        def __call__(self, batch, number, *arguments):
            if number == KILLED_IN_STEP - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch, number, *arguments)

    sys.exit(run_script(SCRIPT, json.loads(sys.argv[1]), TrainingStep=Killed))


def out_of_memory(setting: Setting) -> Result:
    """Takes the card's memory up to the cap in a run's first step, so that the run has to recover."""
    out, reference = setting.scratch / "out_of_memory", "undisturbed"
    ran_out: list[str] = []

    class Squeezed(TrainingStep):
        def _attempt(self, *arguments):
            if len(ran_out) == TIMES_OUT_OF_MEMORY:
                return super()._attempt(*arguments)
            taken: list[Tensor] = []
            try:
                _take_all_memory(setting, taken)
                return super()._attempt(*arguments)
            except torch.OutOfMemoryError as error:
                ran_out.append(first_line(error))
                raise
            finally:
                taken.clear()

    code = run_script(SCRIPT, _arguments(setting, out), TrainingStep=Squeezed)
    measures = json.loads((out / "report.json").read_text())["out_of_memory"] if code == 0 else []
    micro_batch = measures[-1]["micro_batch"] if measures else MICRO_BATCH
    # Then sums have another order: compare with a run that had this micro-batch from the start.
    if micro_batch != MICRO_BATCH:
        reference = f"micro-batches of {micro_batch}"
        run_script(SCRIPT, [*_arguments(setting, setting.scratch / reference), "--micro-batch", str(micro_batch)])
    values = {"errors": ran_out, "measures": [measure["measure"] for measure in measures]}
    values |= {"compared_with": reference, "exit_code": code}
    checks = {"ran out of memory": len(ran_out) == TIMES_OUT_OF_MEMORY, "recovers": code == 0 and bool(measures)}
    return _compared(setting, reference, out, values, checks)


def _take_all_memory(setting: Setting, taken: list[Tensor]) -> None:
    if setting.device != "cuda":
        raise torch.OutOfMemoryError("imitated: there is no cap on the CPU")
    # A request from 10 MiB on is held against the cap before it is rounded to pages of 20 MiB. Such are not made here
    # but in whole pages, or what is reserved would pass the cap, which ends a run.
    in_pages = [LARGE_PAGE << power for power in range((GPU_LIMIT_BYTES // LARGE_PAGE).bit_length())]
    small = [SMALLEST_BLOCK << power for power in range(15)]  # up to 8 MiB
    for size in reversed(small + in_pages):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def not_page_locked(setting: Setting) -> Result:
    """Makes CUDA refuse to register the states' memory, so that copies use pageable memory."""
    out, runtime = setting.scratch / "not_page_locked", torch.cuda.cudart()
    register, answers = runtime.cudaHostRegister, []

    def refuse(address: int, size_bytes: int, flags: int) -> int:
        # The second registration is refused, and leaves an error for the next kernel. Unregistered, the memory is
        # pageable.
        register(address, size_bytes, flags)
        answers.append(int(register(address, size_bytes, flags)))
        runtime.cudaHostUnregister(address)
        return answers[-1]

    with patch.object(runtime, "cudaHostRegister", refuse):
        code = run_script(SCRIPT, _arguments(setting, out))
    values = {"refused": len(answers), "errors": sorted(set(answers)), "exit_code": code}
    checks = {
        "every request was refused": bool(answers) and set(answers) == {ALREADY_REGISTERED},
        "it is said": "page-locked memory was refused" in _said(out),
    }
    return _compared(setting, "undisturbed", out, values, checks)


def _arguments(setting: Setting, out: Path) -> list[str]:
    shape = TINY_SHAPE if setting.dry_run else SHAPE
    return [*OPTIONS, *shape, "--gpu-limit", str(GPU_LIMIT_BYTES), "--device", setting.device, "--out", str(out)]


def _said(out: Path) -> str:
    return (out / "log.txt").read_text() if (out / "log.txt").exists() else ""


def _compared(setting: Setting, reference: str, out: Path, values: dict, checks: dict[str, bool]) -> Result:
    different = differences(setting.scratch / reference, out)
    return Result(values | {"different": different[:5]}, checks | {"every bit equal": not different})


def differences(one: Path, other: Path) -> list[str]:
    """Names everything that is not bitwise equal in two finished run folders."""
    contents = [_content(folder) for folder in (one, other)]
    names = sorted(contents[0].keys() | contents[1].keys())
    found = [name for name in names if contents[0].get(name) != contents[1].get(name)]
    return found if names else ["there is nothing to compare"]


def _content(folder: Path) -> dict[str, object]:
    newest = max((folder / "checkpoints").glob("step-*"), default=folder)
    paths = [*newest.rglob("*.bin"), *newest.rglob("*.safetensors"), *(folder / "model").glob("*.safetensors")]
    found: dict[str, object] = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    for row in read_metrics(folder / "metrics.jsonl"):
        found[f"row {row['step']}"] = repr([row.get(name) for name in SAME])
    return found
