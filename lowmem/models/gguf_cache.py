"""Converts a GGUF file to an ordinary Hugging Face folder, once, and finds that folder again.

Folders are in HF_HOME/lowmem, under the hash of the file's content. Must not import PyTorch.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from lowmem.errors import InputError, LowmemError
from lowmem.text_files import refuse_pointer

SUFFIX = ".gguf"
_PACKAGES = ("gguf", "accelerate")  # transformers reads these files with them


def is_gguf(model: str) -> bool:
    return model.endswith(SUFFIX) and Path(model).is_file()


def check_gguf(path: Path) -> None:
    """Raises InputError if `path` is no GGUF file, or if a package that reads GGUF files is missing."""
    if not path.is_file():
        raise InputError(f"{path} is no file here; check the path")
    if not refuse_pointer(path).startswith(b"GGUF"):
        raise InputError(f"{path} is not a GGUF file, since it does not begin with the letters GGUF; download it again")
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        needed = " and ".join(missing)
        raise InputError(f"{path} is a GGUF file, which is read with {needed}; pip install {' '.join(missing)}")


def converted(path: Path, say: Callable[[str], None]) -> str:
    """Returns the folder with the fp32 weights, tokenizer and chat template of the GGUF file `path`. Converts the file
    if needed; a killed process leaves no unfinished folder. Calls `say` with sentences for the user. Raises InputError
    if the file cannot be converted."""
    from filelock import FileLock
    from huggingface_hub import constants
    from xxhash import xxh3_128

    check_gguf(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxh3_128).hexdigest()
    folder = Path(constants.HF_HOME, "lowmem", digest[:16], path.stem)  # the last part names run folders
    if folder.is_dir():
        say(f"{path.name} was converted to fp32 before, in {folder}")
        return str(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}, so the fp32 copy of {path.name} cannot be stored; set HF_HOME to "
            "another folder"
        ) from None
    with FileLock(folder.parent / "lock"):
        if not folder.is_dir():
            _convert_aside(path, folder, say)
    return str(folder)


def _convert_aside(path: Path, folder: Path, say: Callable[[str], None]) -> None:
    # In another process, because the conversion needs the whole fp32 model in RAM.
    command = [sys.executable, "-m", "lowmem.models.gguf_conversion", path, folder]
    silent = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment = os.environ | silent | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads would fill up
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                for line in process.stdout:
                    say(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
        errors.seek(0)
        error = errors.read().strip()
    if process.returncode == InputError.exit_code:
        raise InputError(error)
    if process.returncode < 0:
        ended = signal.Signals(-process.returncode).name
        raise LowmemError(
            f"the conversion of {path} was ended by {ended}, perhaps because RAM ran out: it takes about 4 bytes for "
            "each parameter and 1 GiB"
        )
    if process.returncode:
        raise LowmemError(f"the conversion of {path} failed: {error.splitlines()[-1] if error else 'without a reason'}")
