"""Checks on the card that placement and order of execution change no bit.

A small GPT-2 with dropout and clipping trains in every layout, and must equal the plain layout. Tensors are large
enough that a missing wait between streams shows. Kernels of other shapes are not covered.
"""

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from experiments.harness.child import Result, Setting
from experiments.harness.comparison import worst
from experiments.harness.measured import capped_device, kernels_of, precisions, sixteen_bit
from experiments.harness.trainings import ALL, IN_BACKWARD, LAYOUTS, PLAIN, UNCLIPPED, Outcome, Shape
from experiments.harness.trainings import train as train_step
from lowmem import device as devices

MOST_LOSS_ERROR = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}  # relative to fp32 on the CPU, over the first steps


def check(setting: Setting) -> Result:
    device = capped_device(setting)
    devices.make_deterministic(device)
    shape, plain_shape = Shape.of(setting.dry_run, dropout=0.1), Shape.of(setting.dry_run, dropout=0.0)
    cases: dict[str, Callable[[], Result]] = {}
    for (precision, base), found in itertools.groupby(arrangements(device, setting.dry_run), lambda case: case[:2]):
        # made once, when the first case asks for it: it may be another process's
        plain = functools.cache(partial(train, shape, device, precision, **PLAIN | base))
        for _, _, name, case in found:
            outcome = partial(train, shape, device, precision, **PLAIN | base | case)
            streamed = device.type == "cuda" and case.get("states_on_gpu", ALL) != ALL
            cases[f"{precision}, {name}"] = partial(_equal, plain, outcome, streamed)
    # Two wrong runs can agree, so losses without dropout must also follow fp32 on the CPU.
    truth = functools.cache(partial(train, plain_shape, torch.device("cpu"), "fp32", **PLAIN))
    for precision in precisions(device):
        outcome = partial(train, plain_shape, device, precision, **PLAIN)
        most = MOST_LOSS_ERROR[precision]
        cases[f"{precision} follows fp32 on the CPU"] = partial(_follows, truth, outcome, most)
    done = {name: setting.attempt(name, work).held for name, work in cases.items()}
    return Result({"parts": len(done)}, done)


def arrangements(device: torch.device, few: bool) -> list[tuple[str, dict, str, dict]]:
    """Returns (precision, changes to the plain layout, name, changes of the case) in all 16-bit precisions of the
    device."""
    half = sixteen_bit(device)
    found = [(name, {}, *case) for name in precisions(device) if name != "fp32" for case in LAYOUTS.items()]
    if find_spec("bitsandbytes"):
        found.append((half, {"optimizer": "adamw8bit"}, "8-bit, streamed, deferred", LAYOUTS["streamed, deferred"]))
    if half == "bf16":  # with fp16, updates wait until all gradients are known to be finite
        found += [(half, UNCLIPPED, name, case) for name, case in IN_BACKWARD.items()]
    return found[5::8] if few else found  # tests/core/test_step.py and tests/cuda/test_training.py have all of them


def _equal(plain: Callable[[], Outcome], outcome: Callable[[], Outcome], streamed: bool) -> Result:
    found = outcome()
    different = plain().differences(found)
    checks = {
        "every bit equal": not different,
        "every number finite": all(map(math.isfinite, found.losses + found.norms)),
    }
    if streamed:
        checks["page-locked"] = found.page_locked
    return Result({"different": len(different), "first": different[:5], "losses": found.losses}, checks)


def _follows(truth: Callable[[], Outcome], outcome: Callable[[], Outcome], most: float) -> Result:
    found = outcome()
    error = worst(abs(loss - true) / true for loss, true in zip(found.losses, truth().losses, strict=True))
    return Result({"error": error, "losses": found.losses}, {f"within {most:g}": error <= most})


def train(shape: Shape, device: torch.device, precision: str, **case) -> Outcome:
    """Trains `shape` from the same random weights each time."""
    step, store = shape.make_step(device=device, precision=precision, fused_kernels=kernels_of(device), **case)
    outcome = train_step(step, store, shape.batches())
    if device.type == "cuda":  # hooks and parameters hold each other: a run would stay on the card next to the next
        del step, store
        devices.collect_garbage()
    return outcome
