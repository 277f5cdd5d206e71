"""Files that a run wrote into a folder are no data; and a folder that hides a data set of the hub is named."""

import os
import shutil
from pathlib import Path

import pytest

from lowmem.data.records import Reading
from lowmem.data.sources import open_source
from lowmem.errors import InputError
from lowmem.run_folder import FILES, FOLDERS, is_run


@pytest.fixture
def project(finished, tmp_path, monkeypatch) -> Path:
    """A folder with a text, one in a folder, and a finished run; it is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "runs/x")
    Path("texts").mkdir()
    for name in ("book.txt", "texts/more.txt", "rows.json"):
        Path(name).write_text('[{"text": "the cat sat on the mat"}]')
    return tmp_path


def read(spec: str, out: str | None = None) -> list[str]:
    return [str(path) for path in open_source(spec, Reading(), out and Path(out)).content]


def test_all_that_a_run_writes_has_a_name_here(finished):
    assert is_run(finished)
    assert {path.name for path in finished.iterdir() if not path.name.startswith(".")} <= {*FILES, *FOLDERS}


@pytest.mark.parametrize("out", [None, "runs/x", "runs/y", "runs", "out"])
def test_a_folder_around_runs_is_read_without_them(project, out):
    texts = ["book.txt", "rows.json", "texts/more.txt"]
    assert read(".", out) == texts
    assert read(str(project), out) == [str(project / text) for text in texts]
    assert read("**/*.txt", out) == ["book.txt", "texts/more.txt"]
    assert read(f"{project}/**/*.json*", out) == [str(project / "rows.json")]
    named = "runs" if out == "runs" else "runs/x"
    assert open_source(".", Reading(), out and Path(out)).remark == f" (runs and models left out: {named})"


def test_a_run_folder_is_out_before_it_has_anything_in_it(project):
    Path("runs/new").mkdir()
    Path("runs/new/log.txt").write_text("of a run that has just begun")
    assert "runs/new/log.txt" in read(".") and "runs/new/log.txt" not in read(".", "runs/new")
    assert "runs/new/log.txt" not in read(".", str(project / "texts/../runs/new"))


@pytest.mark.parametrize("out", [".", "elsewhere"])
def test_a_run_folder_that_is_asked_for_gives_what_the_run_has_not_written(project, finished, out):
    shutil.copytree(finished, project, dirs_exist_ok=True)
    assert read(".", out) == ["book.txt", "rows.json", "texts/more.txt"]
    assert read("*.txt", out) == ["book.txt"]
    assert read("log.txt", out) == ["log.txt"]  # a file that is named is read


@pytest.mark.parametrize("spec", ["runs/x", "runs/x/", "runs/x/model", "runs/x/data", "runs/x/checkpoints", "new"])
def test_a_run_or_a_part_of_one_is_refused_as_data(project, spec):
    Path("new").mkdir()
    with pytest.raises(InputError, match="a run or a model is in this folder, and its files are no data"):
        read(spec, "new")


@pytest.mark.parametrize("part", ["checkpoints/step-00000003", "data", "model"])
def test_a_part_of_a_run_that_lies_elsewhere_is_no_data_either(project, finished, part):
    shutil.rmtree("runs")
    shutil.copytree(finished / part, "texts/part")
    assert read(".") == ["book.txt", "rows.json", "texts/more.txt"]
    assert "texts/part" in open_source(".", Reading()).remark


def test_a_plan_alone_takes_no_other_file_with_it(project, finished):
    shutil.copy(finished / "plan.json", "texts")
    assert read("texts") == ["texts/more.txt"]
    Path("texts/plan.json").write_text('{"text": "this is how we do it"}')
    assert read("texts") == ["texts/more.txt", "texts/plan.json"]


def test_files_of_wandb_and_links_to_runs_are_no_data(project):
    Path("wandb/offline-run-20260101_000000-abc/files").mkdir(parents=True)
    Path("wandb/offline-run-20260101_000000-abc/files/requirements.txt").write_text("torch")
    Path("linked").symlink_to("runs/x")
    assert read("**/*.txt") == ["book.txt", "texts/more.txt"]
    assert read(".") == ["book.txt", "rows.json", "texts/more.txt"]
    Path("wandb2").mkdir()
    Path("wandb2/a.txt").write_text("a text")
    assert "wandb2/a.txt" in read(".")


def test_the_file_that_the_output_goes_to_is_no_data(project):
    before = os.dup(1)
    try:
        with open("output.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            found = read(".")
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert found == ["book.txt", "rows.json", "texts/more.txt"]


def test_nothing_but_runs_is_refused_with_their_names(project):
    with pytest.raises(InputError, match=r"no file of the kinds .* \(runs and models left out: runs/x\)"):
        read("runs")
    for number in range(5):
        shutil.copytree("runs/x", f"runs/{number}")
    with pytest.raises(InputError, match=r"left out: runs/0, runs/1, runs/2, 3 more\)"):
        read("runs")


@pytest.mark.parametrize("name", ["wikitext", "codeparrot", "org/name"])
def test_a_folder_that_is_called_like_a_data_set_of_the_hub_is_said_to_hide_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    with pytest.raises(InputError, match=f"holds no file .*; this folder hides the hub's {name}: rename it"):
        open_source(name, Reading())
    Path(name, "a.txt").write_text("a text")
    said = "" if "/" in name else " (the folder here)"
    assert open_source(name, Reading()).remark == open_source(f"{name}=2", Reading()).remark == said
    assert open_source(f"./{name}", Reading()).remark == ""


def test_the_standard_library_is_not_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_source("python-stdlib", Reading()).remark == ""
    Path("python-stdlib").mkdir()
    assert open_source("python-stdlib", Reading()).remark == " (not the folder here, which is ./python-stdlib)"
