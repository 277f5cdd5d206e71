"""The machine around a run: memory that is not there, a disk that is full."""

import errno
import os
import signal

from runs import at_call, last_line, stored

import lowmem.planning.planner
import lowmem.run.train
from lowmem.core.step import TrainingStep
from lowmem.run.log import RunLog
from lowmem.units import MIB


def test_on_a_busier_machine_a_run_still_goes_on(train, tmp_path, monkeypatch):
    options = ["--micro-batch", "auto", "--batch", "64", "--steps", "2"]
    with monkeypatch.context() as patch:
        at_call(patch, TrainingStep, "__call__", lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(tmp_path / "out", *options) == 75
    plan = stored(tmp_path / "out/plan.json")
    assert plan["choice"]["micro_batch"] == 64 and not plan["choice"]["recompute"]
    monkeypatch.setattr(lowmem.planning.planner, "CPU_TRAINING_BYTES", 0)
    free_bytes = sum(plan["breakdown"].values()) - plan["breakdown"]["process"] - MIB
    monkeypatch.setattr(lowmem.run.train, "ram_available_bytes", lambda: (free_bytes, "the machine's free memory"))
    assert train(tmp_path / "out", *options) == 0
    after = stored(tmp_path / "out/plan.json")["choice"]
    assert after["micro_batch"] == 64 and after["recompute"], "free memory may change what is kept, not the result"


def test_a_disk_that_is_full_when_a_row_is_written_is_said_in_a_sentence(train, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunLog, "step", full)
    assert train(tmp_path / "out") == 1
    assert "No space left on device" in last_line(capsys)
