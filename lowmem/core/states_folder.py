"""The folder that states on a disk lie in: how their file is made, and whether it can be.

Whether it can be is asked before a run reads its data, which takes minutes, and so before PyTorch is there, which takes
seconds to import: nothing here needs it.
"""

import os
import tempfile
from contextlib import suppress
from io import RawIOBase
from pathlib import Path

from lowmem.errors import InputError


def open_states_file(folder: Path) -> RawIOBase:
    """A new file without a name in `folder`, which is made if need be. InputError where that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, prefix="lowmem-states-", buffering=0)
    except OSError as error:
        # Of a file in its place the system says that it exists, which sounds as if it should not.
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise InputError(f"--states-folder {folder} cannot be written: {reason}") from None


def check_states_folder(folder: Path) -> None:
    """InputError where open_states_file would raise it. What has to be made to find that out is gone afterwards."""
    missing = [path for path in (folder, *folder.absolute().parents) if not os.path.exists(path)]
    try:
        open_states_file(folder).close()
    finally:
        for path in missing:  # the innermost comes first
            with suppress(OSError):  # it was never made, or another run has put something into it
                path.rmdir()
