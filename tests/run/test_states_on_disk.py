"""Whole runs with states on a disk: the same run, wherever they are; one sentence if the disk has no room."""

import errno
import os
from types import SimpleNamespace

import pytest

import lowmem.run.prepare
from lowmem.core.step import TrainingStep
from runs import assert_same_run, at_call, failing, last_line, stopped_in_step, stored


@pytest.fixture
def on_disk(tmp_path) -> list[str]:
    return ["--states", "disk", "--states-folder", str(tmp_path / "fast" / "states")]


def test_a_run_is_the_same_with_its_states_on_a_disk_and_leaves_nothing_there(finished, train, tmp_path, on_disk):
    assert train(tmp_path / "out", *on_disk) == 0
    assert_same_run(tmp_path / "out", finished)
    plan = stored(tmp_path / "out/plan.json")
    assert plan["choice"]["states_on_disk"] > 0 and plan["disk"]["states"] > 10**6
    assert list((tmp_path / "fast" / "states").iterdir()) == []


@pytest.fixture
def interrupted(finished, train, monkeypatch):
    """Makes a run that is stopped and goes on with other options, and holds it to the one that was never stopped."""

    def run(out, before: list[str], after: list[str]) -> dict:
        """The plan with which it has gone on."""
        with stopped_in_step(2):
            assert train(out, *before) == 75
        assert train(out, *after) == 0
        assert_same_run(out, finished)
        return stored(out / "plan.json")

    return run


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_with_its_states_elsewhere(interrupted, tmp_path, on_disk):
    interrupted(tmp_path / "0", on_disk, [])
    interrupted(tmp_path / "1", [], on_disk)


@pytest.mark.exhaustive
def test_gradients_that_wait_in_ram_beside_the_others_change_nothing_also_on_the_way(interrupted, tmp_path, on_disk):
    streamed = ["--gradients", "streamed"]
    held = interrupted(tmp_path / "0", streamed, [])
    in_ram = interrupted(tmp_path / "1", [], [*streamed, *on_disk])
    for plan, there in ((held, False), (in_ram, True)):
        assert ("streamed_gradients" in plan["ram_breakdown"], plan["choice"]["fate"] == "sent") == (there, there)


def test_a_folder_in_ram_is_warned_of(train, tmp_path, on_disk, monkeypatch, capsys):
    monkeypatch.setattr(lowmem.run.prepare, "in_memory", lambda folder: "tmpfs")
    assert train(tmp_path / "out", *on_disk) == 0
    assert "is a tmpfs, which keeps its files in RAM" in capsys.readouterr().err


@pytest.mark.parametrize("needed, said", [("checkpoints", "of states"), ("states", "free some room there")])
def test_a_disk_without_room_is_refused_before_the_first_step(
    train, tmp_path, on_disk, monkeypatch, capsys, needed, said
):
    """Checkpoints and states together can be too much, or the states by themselves when their file is made."""
    if needed == "checkpoints":
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4 * 10**6))
    else:
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    assert train(tmp_path / "out", *on_disk) in (1, 3)
    assert said in last_line(capsys)
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_a_disk_that_fails_in_a_step_is_one_sentence_and_the_same_command_goes_on(
    finished, train, tmp_path, on_disk, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        at_call(patch, TrainingStep, "__call__", lambda: patch.setattr(os, "preadv", failing(errno.EIO)), call=2)
        assert train(tmp_path / "out", *on_disk, "--save-every", "1") == 1
    assert "failed: Input/output error; the same command goes on from the newest checkpoint" in last_line(capsys)
    assert train(tmp_path / "out", *on_disk, "--save-every", "1") == 0
    assert_same_run(tmp_path / "out", finished)
