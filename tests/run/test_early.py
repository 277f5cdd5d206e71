"""Refusals before PyTorch is imported, and the sentence if it cannot be imported."""

import ast
import errno
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lowmem.__main__ import main as lowmem_main
from lowmem.errors import InputError
from lowmem.run import early, plan_command
from lowmem.run.main import main
from lowmem.settings import Settings
from runs import ROOT, SCRIPTS, python

# Runs a program as its command does, and tells whether it has imported what takes seconds.
WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module("lowmem.plan", run_name="__main__") if sys.argv[0] == "lowmem.plan" else runpy.run_path(
        sys.argv[0], run_name="__main__")
except SystemExit as ended:
    print(ended.code, sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(("program", "said"), [
    ("train_gpt2_large.py --model no/such/folder", "'no/such/folder' is neither a folder here nor a name"),
    ("train_gpt2_large.py --data missing.txt", "missing.txt: no such file"),
    ("train_gpt2_large.py --eval-data missing.txt", "missing.txt: no such file"),
    ("train_gpt2_large.py --config missing.json", "--config missing.json: cannot be read"),
    ("train_gpt2_large.py --resume nowhere", "--resume nowhere: there is no such folder"),
    ("train_gpt2_large.py --out README.md/run", "README.md/run cannot be written: Not a directory"),
    ("train_gpt2_large.py --plan-only --out README.md", "README.md cannot be written: Not a directory"),
    ("train_gpt2_large.py --states-folder README.md", "folder README.md cannot be written: it is no folder"),
    ("train_gpt2_large.py --plan-only --gpu nonsense", "--gpu nonsense: there is no such card"),
    ("train_gpt2_large.py --model " + 300 * "a", "give another path"),
    ("lowmem.plan --model nonsense.json", "'nonsense.json' is neither a folder here"),
    ("lowmem.plan --model pyproject.toml", "pyproject.toml cannot be read as a config.json"),
    ("lowmem.plan --model gpt2 --gpu nonsense", "--gpu nonsense: there is no such card"), ("lowmem.plan --help", ""),
])  # fmt: skip
def test_what_leads_nowhere_is_refused_before_pytorch_is_imported(program, said):
    run = python("-c", WATCHED, *program.split())
    code = 2 if said else 0
    assert run.stdout.splitlines()[-1] == f"{code} []" and said in run.stderr and run.stderr.count("\n") <= 1, run


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"--out .*run cannot be written: Permission denied"):
        early.check_run(Settings(out=str(tmp_path / "run")), print)
    (tmp_path / "settings.json").touch()  # of a run, whose folder --plan-only leaves alone
    early.check_run(Settings(out=str(tmp_path), plan_only=True), print)


def test_a_folder_that_may_not_be_read_is_refused_by_every_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stat = Path.stat

    def refused(path, **keywords):
        if path.name in ("settings.json", "plan.json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **keywords)

    monkeypatch.setattr(Path, "stat", refused)
    (tmp_path / "a.txt").write_text("text")
    commands = {
        "train --model gpt2-demo --init random --data a.txt": "/settings.json: Permission denied; give another path",
        "plan --model gpt2-demo --seq 64 --batch 2 --gpu rtx3060 --out runs": "cannot be written: Permission denied",
        "report runs": "runs is no run folder",
    }
    for command, said in commands.items():
        assert lowmem_main(command.split()) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_states_folder_is_asked_of_runs_alone_and_nothing_is_left_of_the_question(tmp_path):
    (tmp_path / "file").touch()
    there = tmp_path / "there"
    there.mkdir()
    plain = Settings(out=str(tmp_path / "out"))
    for folder in (there, there / "new" / "states"):
        early.check_run(replace(plain, states_folder=str(folder)), print)
    long = there / "new" / ("a" * 300)  # what is around it can be made, and it cannot
    with pytest.raises(InputError, match="--states-folder .*aaa cannot be written: File name too long"):
        early.check_run(replace(plain, states_folder=str(long)), print)
    for folder, said in ((tmp_path / "file", "it is no folder"), (tmp_path / "file/states", "Not a directory")):
        with pytest.raises(InputError, match=f"--states-folder {folder} cannot be written: {said}"):
            early.check_run(replace(plain, states="auto", states_folder=str(folder)), print)
    early.check_run(replace(plain, states_folder=str(tmp_path / "file"), plan_only=True), print)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file", there]


def test_the_models_own_folder_is_no_run_folder(tmp_path, monkeypatch):
    """A run's folder stays one, also if its own export is the model."""
    monkeypatch.chdir(tmp_path)
    config = '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    for folder in ("mine", "run/model"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text(config)
    for name in ("settings.json", "plan.json"):
        Path("run", name).write_text('{"fits": true, "tokens_per_step": 1, "predicted": {}}')
    Path("link").symlink_to("mine")
    for model, out in (("mine", "./mine/"), ("mine", "link"), ("run", "run/model"), ("run/model", "run/model")):
        with pytest.raises(InputError, match=f"--out {out} is the folder of --model, so a later --model {out} would"):
            early.check_run(Settings(model=model, init="random", out=out), print)
    for model, out in (("run", "run"), ("run/model", "run"), ("mine", "new"), ("mine", "mine/run")):
        early.check_run(Settings(model=model, init="random", out=out), print)


def test_a_current_folder_that_is_gone_is_said_to_be(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(SCRIPTS["large"].SETTINGS, ["--out", str(tmp_path / "out")]) == 2
    assert plan_command.main(["--model", "gpt2"]) == 2
    assert capsys.readouterr().err.count("the current folder no longer exists") == 2


def test_windows_is_said_to_need_wsl(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(SCRIPTS["large"].SETTINGS, ["--out", str(tmp_path / "out")]) == 2
    assert plan_command.main(["--model", "gpt2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("WSL 2" in error for error in errors)


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize("program", ["train_gpt2_large.py", "-m lowmem.plan --model gpt2"])
def test_a_package_that_is_not_installed_is_named_with_the_command(tmp_path, package, program):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')")
    run = python(*program.split(), PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert f"the package {package} is not installed" in run.stderr and "make setup" in run.stderr
    assert "pip install -r requirements.txt" in run.stderr


def test_a_package_that_cannot_be_loaded_is_named_with_the_reason_and_our_own_mistakes_are_not():
    with pytest.raises(InputError, match=r"the package torch cannot be imported \(libcudart"), early.packages_needed():
        raise ImportError("libcudart.so.12: cannot open shared object file", name="torch")
    for name in ("lowmem.nothing", None):
        with pytest.raises(ImportError), early.packages_needed():
            raise ImportError("a name is misspelt", name=name)


OLD_PYTHON = """
import runpy, sys
sys.version_info = (3, 10, 4, "final", 0)
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["train_gpt2_large", "train_gpt2_xl", "lowmem", "lowmem.plan", "lowmem.allocator"])
def test_an_older_python_is_refused_in_a_sentence(program):
    run = python("-c", OLD_PYTHON, program)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert "lowmem needs Python 3.11 or newer" in run.stderr and "3.10" in run.stderr and "make setup" in run.stderr


@pytest.mark.parametrize("file", ["train_gpt2_large.py", "train_gpt2_xl.py", "lowmem/__init__.py"])
def test_what_runs_before_that_is_said_is_understood_by_an_older_python(file):
    """These files are read whole before their first line runs; all others are imported by them, and later."""
    ast.parse((ROOT / file).read_text(encoding="utf-8"), file, feature_version=(3, 8))
    first = ast.parse(Path(ROOT / "lowmem/__init__.py").read_text(encoding="utf-8")).body[1:3]
    assert isinstance(first[0], ast.Import) and isinstance(first[1], ast.If)
