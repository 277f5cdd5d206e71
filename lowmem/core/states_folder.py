"""Opens and checks the folder for optimizer states on a disk. Needs no PyTorch, which takes seconds to import."""

import os
import tempfile
from contextlib import suppress
from io import RawIOBase
from pathlib import Path

from lowmem.errors import InputError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def open_states_file(folder: Path) -> RawIOBase:
    """Opens a new unlinked temporary file in `folder`, which is created if missing. Raises InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, prefix="lowmem-states-", buffering=0)
    except OSError as error:
        # If a file is there, the system's words are "File exists", which sounds as if it should not.
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise InputError(f"--states-folder {folder} cannot be written: {reason}") from None


def check_states_folder(folder: Path) -> None:
    """Raises InputError if no file can be created in `folder`. Leaves no new folder behind."""
    missing = [path for path in (folder, *folder.absolute().parents) if not os.path.exists(path)]
    try:
        open_states_file(folder).close()
    finally:
        for path in missing:  # the innermost comes first
            with suppress(OSError):  # the check did not make it, or another run has put a file into it
                path.rmdir()


def in_memory(folder: Path) -> str | None:
    """Returns the file system of `folder`, such as "tmpfs", if it keeps files in RAM; otherwise None."""
    import psutil

    mounts = [each for each in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda mount: len(Path(mount.mountpoint).parts)).fstype if mounts else None
    return kind if kind in MEMORY_FILE_SYSTEMS else None
