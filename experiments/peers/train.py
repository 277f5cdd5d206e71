"""Runs one peer under the caps: ever smaller micro-batches, each in a separate process, until one fits.

The reference is trained first if its weights are not in the cache (8 bytes of disk per parameter). If the reference
does not fit on the card, distances are left out.
"""

# Imports no torch: this process must not hold a part of the GPU that is measured.
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.harness.child import OUTPUT_CHARACTERS, Result, Setting
from experiments.harness.comparison import divergence
from experiments.harness.rows import ROOT
from experiments.peers.case import Case
from experiments.peers.catalogue import PEERS
from lowmem.errors import InputError, LowmemError
from lowmem.settings import Settings

MICRO_BATCHES = (8, 4, 2, 1)  # the largest first: what fits with more is faster
DATA = "python-stdlib"
LEARNING_RATE = 1e-4  # constant; large enough that 20 steps from random weights go somewhere
REFERENCE, OURS = "plain", "lowmem"
TINY = {"model": "gpt2-demo", "seq": 32, "batch": 4, "steps": 3, "data": str(ROOT / "lowmem" / "core")}


def measure(
    setting: Setting,
    peer: str,
    model: str = "gpt2-large",
    seq: int = 1024,
    batch: int = 64,
    steps: int = 20,
    *,
    init: str = "random",
    data: str = DATA,
    micro_batches: tuple[int, ...] = MICRO_BATCHES,
    cache: Path | None = None,
) -> Result:
    """Returns the values of attempt.py for the largest of `micro_batches` (sequences) that fits, and records those
    tried before. `cache`: of weights, for the next peer; None: beside the scratch folder. Raises Unavailable if the
    peer cannot run here, InputError if no peer can, LowmemError if the peer fails."""
    PEERS[peer].check(setting.device)
    asked = TINY if setting.dry_run else {"model": model, "seq": seq, "batch": batch, "steps": steps, "data": data}
    settings = training_settings(setting, **asked, init=init)
    sizes = [size for size in micro_batches if settings.batch % size == 0]
    if not sizes:
        raise InputError(f"no micro-batch of {micro_batches} divides a batch of {settings.batch}; give another batch")
    cache = setting.scratch.parent / "weights" if cache is None else cache
    uncapped = replace(settings, gpu_limit_bytes=None, ram_limit_bytes=None)
    reference = Case(REFERENCE, uncapped, None, cache, setting.scratch)
    if peer == REFERENCE:
        values = _first_that_fits(setting, reference, sizes)
    else:
        if not reference.reference.exists() and not reference.no_reference.exists():
            values = _first_that_fits(setting, reference, sizes)
            setting.record("the reference", values, {})
            if not values["gpu_fits"]:
                reference.no_reference.parent.mkdir(parents=True, exist_ok=True)
                reference.no_reference.touch()  # no other peer needs to try it again
        case = replace(reference, peer=peer, settings=settings)
        values = _first_that_fits(setting, case, [None] if peer == OURS else sizes)
    return Result(values, _checks(values))


def training_settings(
    setting: Setting, *, model: str, init: str, data: str, seq: int, batch: int, steps: int
) -> Settings:
    """Returns the settings that all peers share. Raises InputError for impossible ones."""
    if steps < 2:
        raise InputError(f"--steps {steps} is too few: the first step warms up and is not timed, so give at least 2")
    return Settings(
        model=model, init=init, data=data, seq=seq, batch=batch, steps=steps, lr=LEARNING_RATE, schedule="constant",
        warmup_steps=0, device=setting.device, gpu_limit_bytes=setting.gpu_limit_bytes,
        ram_limit_bytes=setting.ram_limit_bytes,
    )  # fmt: skip


def _checks(values: dict) -> dict[str, bool]:
    checks = {}
    if "losses" in values:
        checks["the training does not diverge"] = divergence(values["losses"]) is None
    # A peer that does not fit is a result; if lowmem does not fit, that is a failure.
    if values["peer"] == OURS:
        checks["fits under both caps"] = values["gpu_fits"] and values["ram_fits"]
    return checks


def _first_that_fits(setting: Setting, case: Case, sizes: Sequence[int | None]) -> dict:
    """Returns the values of the first micro-batch that fits on the GPU, or of the last one."""
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=case.scratch) as scratch:
            values = _attempt(replace(case, micro_batch=size, scratch=Path(scratch)))
        # RAM does not depend on the micro-batch.
        if values["gpu_fits"] or size == sizes[-1]:
            break
        setting.record(f"{case.peer}, micro-batch {size}", values, {})
    return values


def _attempt(case: Case) -> dict:
    """Runs attempt.py in a separate process, and returns its values. Raises LowmemError, with its last words, if the
    process fails."""
    outcome, errors = case.scratch / "outcome.json", case.scratch / "stderr.txt"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # Trainer would take all there are
    with open(errors, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.peers.attempt", case.to_json(), str(outcome)],
            cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": first}, stdin=subprocess.PIPE, stdout=stderr,
            stderr=stderr,
        )  # fmt: skip
        try:
            code = process.wait()
        finally:
            process.stdin.close()  # which ends it, if this process is on its way out
    if code == 0:
        return json.loads(outcome.read_text())
    if code == -signal.SIGKILL:
        why = "killed by the system, as happens where RAM is exhausted"
        return case.identity | {"gpu_fits": True, "ram_fits": False, "why": why}
    said = errors.read_text(errors="replace")[-OUTPUT_CHARACTERS:].strip()
    print(said, file=sys.stderr)
    raise LowmemError(
        f"{case.peer} ended with exit code {code}: {said.splitlines()[-1] if said else 'nothing was said'}"
    )
