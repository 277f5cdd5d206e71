"""A run ends well, and with the same bits, whatever its environment says. Each of these values was tried alone, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import ROOT, SMALL, content, weights

NOTEBOOK = {  # what a kernel leaves to the programs that it starts, and rc files of others
    **{"MPLBACKEND": "module://matplotlib_inline.backend_inline", "MPLCONFIGDIR": "/proc/nope", "TERM": "xterm-color"},
    **{"COLUMNS": "0", "LINES": "x", "FORCE_COLOR": "1", "NO_COLOR": "1", "PYTHONIOENCODING": "ascii:strict"},
}
CONTAINER = {  # no home, no place to write, no locale, a name for nobody
    **{
        "HOME": "/nonexistent",
        "XDG_CACHE_HOME": "/proc/nope",
        "XDG_CONFIG_HOME": "/proc/nope",
        "HF_HOME": "/proc/nope",
    },
    **{"TORCH_HOME": "/proc/nope", "TRITON_CACHE_DIR": "/proc/nope", "HF_DATASETS_CACHE": "/proc/nope", "USER": ""},
    **{"LC_ALL": "xx_YY", "LANG": "tr_TR", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "garbage"},
    **{"HTTPS_PROXY": "garbage", "REQUESTS_CA_BUNDLE": "/nope", "SSL_CERT_FILE": "/nope", "LOWMEM_PLANS": "/proc/nope"},
}
SWITCHES = {  # of packages, as people leave them in their shells
    **{
        "TRANSFORMERS_VERBOSITY": "garbage",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "garbage",
        "TQDM_DISABLE": "1",
    },
    **{"HF_ENDPOINT": "not a url", "HF_TOKEN": "a\nb", "HF_HUB_VERBOSITY": "loud", "HF_DATASETS_OFFLINE": "garbage"},
    **{"TOKENIZERS_PARALLELISM": "maybe", "RAYON_NUM_THREADS": "abc", "TORCH_COMPILE_DISABLE": "1", "USE_TORCH": "0"},
    **{"PYTORCH_ALLOC_CONF": "garbage", "CUBLAS_WORKSPACE_CONFIG": "garbage", "CUDA_VISIBLE_DEVICES": "garbage"},
    **{"WANDB_MODE": "garbage", "WANDB_DIR": "/proc/nope", "WANDB_PROJECT": "a/b", "NCCL_DEBUG": "INFO"},
    **{"ACCELERATE_USE_FSDP": "true", "SLURM_NTASKS": "2", "PYTHONWARNINGS": "error", "PYTHONOPTIMIZE": "1"},
}
FULL = {"stdin": subprocess.DEVNULL, "stdout": "/dev/full", "stderr": "/dev/full"}


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
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"LOWMEM_PLANS": "off"} | environment, check=False, **quiet | opened
    )  # fmt: skip
    assert run.returncode == 0, run
    assert b"Traceback" not in (run.stderr or b"")
    assert weights(tmp_path / "out") == weights(finished)
    assert content(tmp_path / "out/data") == content(finished / "data")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in Path(finished).iterdir()}
