"""The machine around a run: memory that is not there, a disk that is full."""

import errno
import itertools
import os
import shutil
from io import FileIO
from pathlib import Path

import pytest

import lowmem.planning.cpu_plan
import lowmem.run.checkpoint
import lowmem.run.prepare
import lowmem.run.saver
from lowmem.errors import PlanError
from lowmem.run import log
from lowmem.run.folder import check_disk
from lowmem.units import MIB
from runs import assert_same_run, at_call, failing, last_line, loss_rows, stopped_in_step, stored, weights


class Written(FileIO):
    """A file whose writes a test may make fail."""


def test_on_a_busier_machine_a_run_still_goes_on(train, tmp_path, monkeypatch):
    options = ["--micro-batch", "auto", "--batch", "64", "--steps", "2"]
    with stopped_in_step():
        assert train(tmp_path / "out", *options) == 75
    plan = stored(tmp_path / "out/plan.json")
    assert plan["choice"]["micro_batch"] == 64 and not plan["choice"]["recompute"]
    monkeypatch.setattr(lowmem.planning.cpu_plan, "CPU_TRAINING_BYTES", 0)
    free_bytes = sum(plan["breakdown"].values()) - plan["breakdown"]["process"] - MIB
    monkeypatch.setattr(lowmem.run.prepare, "ram_available_bytes", lambda: (free_bytes, "the machine's free memory"))
    assert train(tmp_path / "out", *options) == 0
    after = stored(tmp_path / "out/plan.json")["choice"]
    assert after["micro_batch"] == 64 and after["recompute"], "free memory may change what is kept, not the result"


@pytest.mark.exhaustive
def test_a_run_goes_on_with_its_micro_batch_if_the_plan_would_be_another_now(train, tmp_path, monkeypatch):
    options = ["--micro-batch", "auto", "--batch", "64", "--steps", "2", "--ram-limit", "8GiB"]  # plans it each time
    with stopped_in_step():
        assert train(tmp_path / "out", *options) == 75
    monkeypatch.setattr(lowmem.planning.cpu_plan, "CPU_MICRO_BATCH_TOKENS", 8 * 32)
    assert train(tmp_path / "new", *options) == 0
    assert train(tmp_path / "out", *options) == 0
    new, resumed = (stored(tmp_path / name / "plan.json")["choice"]["micro_batch"] for name in ("new", "out"))
    assert (new, resumed) == (8, 64)
    assert stored(tmp_path / "out/settings.json")["micro_batch"] is None


def test_a_disk_that_takes_no_rows_does_not_end_the_run_and_has_them_all_when_it_takes_some_again(
    finished, train, tmp_path, capsys, monkeypatch
):
    """The second row finds room for seven bytes, the third for all."""
    real, calls = FileIO.write, []

    def write(file, content):
        if not str(file.name).endswith("metrics.jsonl"):
            return real(file, content)
        calls.append(content)
        if len(calls) in (1, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, content[:7] if len(calls) == 2 else content)

    monkeypatch.setattr(
        log, "open", lambda *a, **k: Written(*a) if "ab" in a else open(*a, **k), raising=False
    )  # fmt: skip
    monkeypatch.setattr(Written, "write", write)
    assert train(tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "metrics.jsonl cannot be written: No space left on device; training goes on" in said
    assert loss_rows(tmp_path / "out") == loss_rows(finished)


def test_a_disk_of_states_without_room_is_refused_with_the_others_code(tmp_path):
    """Seen to fail: exit code 1, and only after the weights were built."""
    disk = {"one_being_written": 1, "checkpoints": 1, "export": 1, "beside_exported_weights": 1, "states": 2**60}
    with pytest.raises(
        PlanError, match="and 2 bytes for the model, and 1048576 TiB of states. Free some room, or give another --out"
    ):
        check_disk(tmp_path, disk, None, str(tmp_path / "states"))
    elsewhere = Path("/dev/shm/states")
    if not elsewhere.parent.is_dir() or elsewhere.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    check_disk(tmp_path, disk | {"states": 1}, None, str(elsewhere))
    said = "/dev/shm/states is on a disk with room for .* this run writes 1048576 TiB: 1048576 TiB of states"
    with pytest.raises(PlanError, match=said):
        check_disk(tmp_path, disk, None, str(elsewhere))


def test_a_run_that_the_disk_has_no_room_for_is_refused_before_it_trains(train, tmp_path, capsys, monkeypatch):
    """A run of three steps saves once, unless it is asked for more."""

    def room(size_bytes: int) -> None:
        usage = shutil._ntuple_diskusage(2**40, 0, size_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    room(46 * MIB)
    every_step = ("--save-every", "1")
    assert train(tmp_path / "out", *every_step) == 3
    sentence = last_line(capsys)
    assert "room for 46.0 MiB, and this run writes 49" in sentence and "--keep-last 1" in sentence
    assert not (tmp_path / "out").exists()
    assert train(tmp_path / "out", *every_step, "--keep-last", "1") == 0
    room(29 * MIB)
    assert train(tmp_path / "out", *every_step, "--keep-last", "1") == 0  # what it has written counts as room
    (tmp_path / "out/model").rename(tmp_path / "out/.model.partial")  # an export that was killed
    assert train(tmp_path / "out", *every_step, "--keep-last", "1") == 0
    room(31 * MIB)
    assert train(tmp_path / "once", "--save-every", "3", "--keep-last", "1000000") == 0
    room(12 * MIB)
    assert train(tmp_path / "little", "--save-every", "3") == 3
    plan = stored(tmp_path / "out/plan.json")["disk"]
    (checkpoint,) = (tmp_path / "out/checkpoints").iterdir()
    written = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert 0.99 * written < plan["one_being_written"] <= written
    assert 0.99 * len(weights(tmp_path / "out")) < plan["export"] <= len(weights(tmp_path / "out"))
    beside = sum(path.stat().st_size for path in (tmp_path / "out/model").iterdir() if path.suffix != ".safetensors")
    assert 0 < beside < plan["beside_exported_weights"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("step", "said"), [(2, "training goes on"), (3, "the model is exported")])
def test_a_checkpoint_that_does_not_fit_any_more_ends_neither_training_nor_the_export(
    finished, train, tmp_path, capsys, monkeypatch, step, said
):
    """Seen to fail: without `must=False`, and with the last save as one that must be made."""
    with monkeypatch.context() as patch:
        at_call(patch, lowmem.run.checkpoint, "_check_room", failing(errno.ENOSPC), step)
        assert train(tmp_path / "out", "--save-every", "1") == 0
    warning = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning"))
    assert f"step {step} could not be saved" in warning and said in warning
    assert weights(tmp_path / "out") == weights(finished)
    steps = {int(path.name[-8:]) for path in (tmp_path / "out/checkpoints").iterdir()}
    assert steps == {1, 3} if step == 2 else steps == {1, 2}
    assert train(tmp_path / "out") == 0
    assert_same_run(finished, tmp_path / "out")


def test_a_checkpoint_that_does_not_fit_when_a_signal_has_come_is_an_error(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lowmem.run.checkpoint, "_check_room", failing(errno.ENOSPC))
    with stopped_in_step(2):
        assert train(tmp_path / "out") == 1
    assert "step 2 could not be saved" in last_line(capsys)


def test_checkpoints_are_made_by_time(finished, train, tmp_path, monkeypatch):
    """Every half an hour by default; here a step takes twenty minutes."""
    minutes = itertools.count(step=10)
    monkeypatch.setattr(lowmem.run.saver.time, "monotonic", lambda: 60.0 * next(minutes))
    saved = []
    real = lowmem.run.saver.save_checkpoint
    monkeypatch.setattr(
        lowmem.run.saver, "save_checkpoint", lambda *a, **k: saved.append(a[2]["step"]) or real(*a, **k)
    )
    assert train(tmp_path / "out") == 0
    assert saved == [3]
    assert train(tmp_path / "other", "--save-every", "20min") == 0
    assert saved == [3, 2, 3]
    assert_same_run(finished, tmp_path / "out")
