"""What the environment says to packages that a run imports, and what becomes of the run."""

import getpass
import os
import shlex
import subprocess
import sys
import warnings

import pytest

from lowmem.environment import variables_blamed, warnings_end_nothing
from lowmem.errors import InputError
from runs import ROOT


def failing_import(tmp_path, monkeypatch, code: str) -> None:
    (tmp_path / "odd_package.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_package", raising=False)
    with variables_blamed():
        import odd_package  # noqa: F401


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("float('wide')", "odd_package cannot be imported .*'wide'.*, perhaps for .* ODD_WIDTH; unset it"),
        ("open('/no/such/log')", "odd_package cannot be imported .*No such file.* ODD_LOG; unset it"),
        ("1 / 0", "odd_package cannot be imported .division by zero.* that it reads; unset those that are yours"),
    ],
)
def test_a_variable_that_a_package_cannot_read_is_named(tmp_path, monkeypatch, code, said):
    monkeypatch.setenv("ODD_WIDTH", "wide")
    monkeypatch.setenv("ODD_LOG", "/no/such/log")
    with pytest.raises(InputError, match=said):
        failing_import(tmp_path, monkeypatch, code)


def test_a_package_that_is_missing_is_not_the_environment_s_matter(tmp_path, monkeypatch):
    with pytest.raises(ModuleNotFoundError):
        failing_import(tmp_path, monkeypatch, "import nonesuch_package")


def test_a_user_without_a_name_gets_one(monkeypatch):
    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setenv("USER", "")
    with variables_blamed():
        assert getpass.getuser() == os.environ["USER"] == f"uid-{os.getuid()}"


def test_a_warning_is_no_error_inside_and_filters_are_what_they_were_outside():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with pytest.warns(UserWarning, match="loud"), warnings_end_nothing():
            warnings.warn("quiet", DeprecationWarning, stacklevel=2)
            warnings.warn("loud", UserWarning, stacklevel=2)
        assert warnings.filters == before
        with pytest.raises(UserWarning):
            warnings.warn("loud", UserWarning, stacklevel=2)


@pytest.mark.parametrize(
    ("variable", "program", "code", "said"),
    [
        ("TQDM_MININTERVAL=abc", "train_gpt2_large.py --out {out}", 2, "environment variable TQDM_MININTERVAL"),
        ("HF_HUB_ETAG_TIMEOUT=abc", "-m lowmem.plan --model gpt2", 2, "environment variable HF_HUB_ETAG_TIMEOUT"),
        ("TORCH_LOGS=nonsense", "train_gpt2_large.py --out {out}", 2, "environment variable TORCH_LOGS"),
        ("TQDM_NCOLS=wide", "-c 'import lowmem; lowmem.train'", 1, "environment variable TQDM_NCOLS"),
        ("TORCHINDUCTOR_CACHE_DIR=/proc/no", "-m lowmem.plan --model gpt2", 2, "torch cannot be imported"),
        ("PYTHONOPTIMIZE=2", "train_gpt2_large.py --out {out}", 2, "python -OO"),
        ("PYTHONWARNINGS=error", "-c 'import lowmem; lowmem.train'", 0, ""),
    ],
)
def test_what_a_variable_does_to_an_import_is_said_before_anything_is_written(tmp_path, variable, program, code, said):
    name, _, value = variable.partition("=")
    run = subprocess.run(
        [sys.executable, *shlex.split(program.format(out=tmp_path / "out"))],
        cwd=ROOT, env=os.environ | {name: value}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == code and said in run.stderr.rstrip().rpartition("\n")[2], run
    assert code == 1 or run.stderr.count("\n") <= 1
    assert list(tmp_path.iterdir()) == []
