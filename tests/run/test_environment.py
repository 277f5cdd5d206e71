"""Environment variables and streams of other programs: a run ends well with the same bits, or names the variable."""

import getpass
import logging
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lowmem.errors import InputError
from lowmem.run import environment as run_environment
from lowmem.run.environment import variables_blamed, warnings_end_nothing
from runs import ROOT, SMALL, content, python, weights

# A run has all values of a table. If it fails, halve the table to find the value.
NOTEBOOK = {  # a kernel passes these on to programs; rc files set others
    **{"MPLBACKEND": "module://matplotlib_inline.backend_inline", "MPLCONFIGDIR": "/proc/nope", "TERM": "xterm-color"},
    **{"COLUMNS": "0", "LINES": "x", "FORCE_COLOR": "1", "NO_COLOR": "1", "PYTHONIOENCODING": "ascii:strict"},
}
CONTAINER = {  # no home, no folder for caches, no locale, no name of the user
    **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TORCH_HOME"), "/proc/nope"),
    **{"TRITON_CACHE_DIR": "/proc/nope", "HF_DATASETS_CACHE": "/proc/nope", "USER": ""},
    **{"LC_ALL": "xx_YY", "LANG": "tr_TR", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "garbage"},
    **{"HTTPS_PROXY": "garbage", "REQUESTS_CA_BUNDLE": "/nope", "SSL_CERT_FILE": "/nope"},
}
SWITCHES = {  # of packages, as people set them in their shells
    **{"TRANSFORMERS_VERBOSITY": "garbage", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "garbage"},
    "TQDM_DISABLE": "1",
    **{"HF_ENDPOINT": "not a url", "HF_TOKEN": "a\nb", "HF_HUB_VERBOSITY": "loud", "HF_DATASETS_OFFLINE": "garbage"},
    **{"TOKENIZERS_PARALLELISM": "maybe", "RAYON_NUM_THREADS": "abc", "TORCH_COMPILE_DISABLE": "1", "USE_TORCH": "0"},
    **{"PYTORCH_ALLOC_CONF": "garbage", "CUBLAS_WORKSPACE_CONFIG": "garbage", "CUDA_VISIBLE_DEVICES": "garbage"},
    **{"WANDB_MODE": "garbage", "WANDB_DIR": "/proc/nope", "WANDB_PROJECT": "a/b", "NCCL_DEBUG": "INFO"},
    **{"ACCELERATE_USE_FSDP": "true", "SLURM_NTASKS": "2", "PYTHONWARNINGS": "error", "PYTHONOPTIMIZE": "1"},
}
FULL = {"stdin": subprocess.DEVNULL, "stdout": "/dev/full", "stderr": "/dev/full"}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("environment", "streams"),
    [(NOTEBOOK, {}), (CONTAINER, {}), (SWITCHES, {}), ({}, FULL), ({}, "closed")],
    ids=["notebook", "container", "switches", "full", "closed"],
)
def test_the_environment_changes_nothing(text, finished, tmp_path, environment, streams):
    command = [sys.executable, str(ROOT / "train_gpt2_large.py"), *SMALL, "--data", str(text), "--out", "out"]
    command += ["--report-to", "none"]
    if streams == "closed":
        command, streams = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], {}
    opened = {name: open(path, "w") if isinstance(path, str) else path for name, path in streams.items()}  # noqa: SIM115
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, check=False, **quiet | opened)
    assert run.returncode == 0, run
    assert b"Traceback" not in (run.stderr or b"")
    assert weights(tmp_path / "out") == weights(finished)
    assert content(tmp_path / "out/data") == content(finished / "data")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in Path(finished).iterdir()}


def failing_import(tmp_path, monkeypatch, code: str) -> None:
    (tmp_path / "odd_package.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_package", raising=False)
    with variables_blamed():
        import odd_package  # noqa: F401


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("float('wide')", "odd_package cannot be imported .*'wide'.*, perhaps because of .* ODD_WIDTH; unset it"),
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


@pytest.mark.quick(2)
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
    run = python(*shlex.split(program.format(out=tmp_path / "out")), **{name: value})
    assert run.returncode == code and said in run.stderr.rstrip().rpartition("\n")[2], run
    assert code == 1 or run.stderr.count("\n") <= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("running", "spins"), [(0, "10000"), (3, "0")])
def test_threads_that_wait_sleep_at_once_if_other_threads_run(running, spins, monkeypatch):
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(run_environment, "_other_running_threads", lambda: running)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    run_environment.limit_waiting_of_threads()
    assert os.environ["GOMP_SPINCOUNT"] == spins


def test_waiting_threads_are_set_before_pytorch_and_not_over_the_users_choice():
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    program = f"import os, lowmem; lowmem.Settings; print(*(os.environ.get(name) for name in {names}))"
    unset = {name: value for name, value in os.environ.items() if name not in names}
    printed = []
    for before, variables in (
        ("", {}),
        ("", {"GOMP_SPINCOUNT": "7"}),
        ("", {"OMP_WAIT_POLICY": "active"}),
        ("import sys; sys.modules['torch'] = None; ", {}),  # as if it were imported
    ):
        command = [sys.executable, "-c", before + program]
        result = subprocess.run(command, env=unset | variables, cwd=ROOT, capture_output=True, text=True, check=True)
        printed.append(result.stdout.split())
    assert printed[0] in (["None", "0"], ["None", "10000"])
    assert printed[1:] == [["None", "7"], ["active", "None"], ["None", "None"]]


def test_two_misleading_messages_of_other_packages_are_dropped_and_no_others(bpe_tokenizer, monkeypatch, caplog):
    """That of transformers by its own code; that of bitsandbytes comes on import, on processors with bf16 products."""
    names = "transformers.tokenization_utils_base", "bitsandbytes.backends.cpu.ops"
    monkeypatch.setattr(bpe_tokenizer, "model_max_length", 4)
    monkeypatch.setattr(bpe_tokenizer, "deprecation_warnings", {})
    for name in names:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
        monkeypatch.setattr(logging.getLogger(name), "_cache", {})
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)
    with warnings_end_nothing():
        assert len(bpe_tokenizer("one two three four five six")["input_ids"]) > 4
        notice = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure ..."
        logging.getLogger(names[1]).warning(notice, "no module named kernels")
        for name in names:
            logging.getLogger(name).warning("something else: %s", name)
    assert list(dict.fromkeys(caplog.messages)) == [f"something else: {name}" for name in names]
