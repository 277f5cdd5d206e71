"""Unpacks the files of another commit."""

import io
import subprocess
import tarfile
from pathlib import Path

from experiments.harness.rows import ROOT
from lowmem.errors import InputError


def unpacked(commit: str, folder: Path) -> Path:
    """Unpacks `commit` into `folder`, and returns `folder`. Raises InputError for an unknown commit."""
    result = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if result.returncode:
        raise InputError(f"{commit}: {result.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder
