"""What is said of a run's folder that cannot be used, whoever finds it out."""

from pathlib import Path

from lowmem.errors import InputError


def not_writable(out: str | Path, reason: str | None) -> InputError:
    """`reason`: the system's, in its words."""
    return InputError(f"--out {out} cannot be written: {reason}; give another folder")


def no_folder_to_resume(path: str | Path) -> InputError:
    return InputError(f"--resume {path}: there is no such folder")
