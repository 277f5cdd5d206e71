"""Another commit's files, to run beside this one's."""

import io
import subprocess
import tarfile
from pathlib import Path

from experiments.harness.rows import ROOT
from lowmem.errors import InputError


def unpacked(commit: str, folder: Path) -> Path:
    """Puts the files of `commit` into `folder`. InputError, in git's words, if there is no such commit."""
    result = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if result.returncode:
        raise InputError(f"{commit}: {result.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder
