"""Run folders with links to another disk work; what cannot be a run's folder or a part of it is refused."""

import shutil

import pytest

from lowmem.errors import InputError
from lowmem.run.early import check_folders
from lowmem.run.folder import sweep
from lowmem.run_folder import FILES, FOLDERS
from lowmem.settings import Settings
from runs import content, stopped_in_step, weights

PARTS = ("data", "checkpoints", "model")


@pytest.mark.quick(1)
@pytest.mark.parametrize("parts", [PARTS, ("model", "")], ids="-".join)
def test_a_run_whose_parts_are_links_lives_as_any_other(train, finished, tmp_path, monkeypatch, parts):
    """It is stopped, goes on and ends, and starts again over the old files."""
    out, disk = tmp_path / "out", tmp_path / "disk"
    if "" in parts:  # the folder of the run itself
        out.symlink_to("disk/run")
    (disk / "run" if "" in parts else out).mkdir(parents=True)
    for part in filter(None, parts):
        (disk / part).mkdir(parents=True)
        (out / part).symlink_to(disk / part)
    with stopped_in_step():
        assert train(out) == 75
    for more in ([], ["--resume", "never"]):
        assert train(out, *more) == 0
        assert weights(out) == weights(finished)
        assert all((out / part).is_symlink() == (part in parts) for part in PARTS)
        assert content(out / "data") == content(finished / "data")
        assert content(out / "model").keys() == content(finished / "model").keys()
    assert not [path for path in (*out.iterdir(), *tmp_path.rglob(".*")) if path.name.startswith((".data", ".model"))]


def test_a_checkpoint_that_was_moved_behind_a_link_goes_as_a_link(tmp_path):
    (tmp_path / "disk/step-1").mkdir(parents=True)
    (tmp_path / "disk/step-1/state.json").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.tmp-step-00000001").symlink_to(tmp_path / "disk/step-1")
    sweep(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == [] and (tmp_path / "disk/step-1/state.json").exists()


def refused(out) -> str:
    with pytest.raises(InputError) as error:
        check_folders(Settings(out=str(out)))
    check_folders(Settings(out=str(out), plan_only=True))
    return str(error.value)


@pytest.mark.parametrize("name", [*FOLDERS, *FILES, ""])
def test_a_link_that_leads_nowhere_and_what_is_of_the_other_kind_are_refused(tmp_path, name):
    out = tmp_path / "out"
    path = out / name if name else out
    path.parent.mkdir(exist_ok=True)
    for target in ("nowhere", path.name):  # a link to itself leads nowhere, either
        path.symlink_to(target)
        assert f"{name or out} is a link to {target}, which is not there; give another" in refused(out)
        path.unlink()
    (tmp_path / "file").touch()
    if name in FILES:
        path.mkdir()
        assert f"{name} is a folder and no file" in refused(out)
    else:
        path.symlink_to(tmp_path / "file")
        assert f"{name or out} is a file and no folder" in refused(out)


def test_a_folder_behind_a_link_that_leads_nowhere_or_in_one_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    assert f"{tmp_path}/link is a link to nowhere, which is not there" in refused(tmp_path / "link/runs/x")
    (tmp_path / "disk\udcff/model").mkdir(parents=True)
    for name in ("out", "model"):  # the folder itself, and a part of it
        (tmp_path / name).symlink_to(tmp_path / f"disk\udcff{'/model' if name == 'model' else ''}")
        assert "disk\ufffd, and that name is not UTF-8" in refused(tmp_path / ("out" if name == "out" else ""))


@pytest.mark.parametrize("name", ["data", "model"])
def test_a_folder_that_no_run_has_written_is_not_replaced(tmp_path, finished, name):
    (tmp_path / name / "lost+found").mkdir(parents=True)
    check_folders(Settings(out=str(tmp_path)))  # as good as empty
    (tmp_path / name / "mine.txt").touch()
    assert f"it has a folder {name}, which a run would replace, but no settings.json and plan.json" in refused(tmp_path)
    check_folders(Settings(out=str(finished)))
    for kept, missing in (("plan", "settings"), ("settings", "plan")):
        shutil.copy(finished / f"{kept}.json", tmp_path)
        assert f"but no {missing}.json of a run" in refused(tmp_path)
        (tmp_path / f"{kept}.json").unlink()


@pytest.mark.parametrize("name", ["data", "model"])
def test_a_part_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "disk" / name).mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "disk" / name)
    with monkeypatch.context() as patch:
        patch.setattr("os.path.ismount", lambda path: str(path).endswith(f"disk/{name}"))
        assert f"a disk is mounted at {tmp_path}/disk/{name}" in refused(tmp_path / "out")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "the folder around that cannot be written" in refused(tmp_path / "out")
