"""Refuses bad settings before PyTorch and transformers are imported, which takes seconds. Uses no network, and writes
nothing except a converted GGUF file."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path

from lowmem.core.states_folder import check_states_folder
from lowmem.cudasim.gpus import card_named
from lowmem.data.records import Reading
from lowmem.data.sources import is_on_hub, open_source
from lowmem.errors import InputError, first_line
from lowmem.fields import each
from lowmem.models.gguf_cache import converted, is_gguf
from lowmem.models.recognize import is_hub_name, recognize
from lowmem.run.naming import with_run_folder
from lowmem.run_folder import no_folder_to_resume, not_writable, why_not_writable
from lowmem.settings import Settings


def check_run(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Returns `settings` with `out` set to the run's output folder. If `model` is a run folder or (without `plan_only`)
    a GGUF file, sets it to the folder of the model to train. `say` gets remarks on these changes. Raises InputError if
    training with these settings cannot work."""
    if settings.out is not None and is_hub_name(settings.model):
        if Path(settings.out) == Path(settings.model) and not Path(settings.out).exists():
            said = f"--out {settings.out} would be a folder that hides the hub's model of that name"
            raise InputError(f"{said}; choose another --out")
    settings = check_target(settings, say)
    with _paths_refused_in_a_sentence():
        remarks: list[str] = []
        settings = with_run_folder(settings, remarks.append)
        out = Path(settings.out)
        if not settings.plan_only:
            for held_out, specs in ((False, settings.data), (True, settings.eval_data)):
                for spec in filterfalse(is_on_hub, each(specs)):
                    open_source(spec, Reading.of(settings, held_out), out)
            named = None if settings.resume in ("auto", "never") else Path(settings.resume)
            if named is not None and not named.is_dir() and not (out / "checkpoints").is_dir():
                raise no_folder_to_resume(named)
        if settings.preview is not None:
            return settings
        if not settings.plan_only or not (out / "settings.json").exists():
            there = next(path for path in (out, *out.absolute().parents) if path.exists())
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                raise not_writable(out, os.strerror(errno.EACCES if there.is_dir() else errno.ENOTDIR))
        check_folders(settings)
    for remark in remarks:
        say(remark)
    return settings


def check_target(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Returns `settings`. If `model` is a run folder or (without `plan_only`) a GGUF file, sets it to the folder of the
    model to train. `say` gets remarks on this. Raises InputError if this machine, `gpu` or the model cannot be used."""
    if sys.platform == "win32":
        raise InputError("Windows lacks the limits and signals that a run needs; use WSL 2 there (wsl --install)")
    try:
        os.getcwd()
    except OSError:
        raise InputError("the current folder no longer exists; cd into another one, and run again") from None
    if settings.gpu is not None:
        card_named(settings.gpu)
    return with_recognized_model(settings, say)


def with_recognized_model(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Returns `settings` with `model` replaced in two cases: a run folder by its exported model, and a GGUF file by a
    folder with the converted model. With `plan_only`, a GGUF file is not converted. `say` gets remarks on the model.
    Raises InputError for a path without a model, and for a model that cannot be trained."""
    with _paths_refused_in_a_sentence():
        model, remark = recognize(settings.model, settings.init == "pretrained" and not settings.plan_only)
    if remark is not None:
        say(remark)
    if is_gguf(model) and not settings.plan_only:
        return replace(settings, model=converted(Path(model), say))
    return replace(settings, model=model)


def check_folders(settings: Settings) -> None:
    """Raises InputError if training cannot write into the folder of --out or of --states-folder, or if --out is the
    folder of the model itself."""
    if settings.plan_only:  # the folders may be on another machine
        return
    if os.path.isdir(settings.model) and os.path.realpath(settings.model) == os.path.realpath(settings.out):
        later = f"a later --model {settings.out} would mean the weights that are there now"
        raise InputError(f"--out {settings.out} is the folder of --model, so {later}; give another --out")
    if (reason := why_not_writable(Path(settings.out))) is not None:
        raise not_writable(settings.out, reason)
    if settings.states_folder is not None:  # under --states auto too: free RAM decides later whether it is needed
        check_states_folder(Path(settings.states_folder))


@contextmanager
def _paths_refused_in_a_sentence() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise InputError(f"{error.filename}: {error.strerror}; give another path") from None


@contextmanager
def packages_needed() -> Iterator[None]:
    """Turns an ImportError of another package in the `with` block into an InputError that names the package."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "lowmem"):
            raise
        missing = isinstance(error, ModuleNotFoundError)
        said = "is not installed" if missing else f"cannot be imported ({first_line(error)})"
        raise InputError(
            f"the package {package} {said} for {sys.executable}: run make setup and then .venv/bin/python, or "
            f"{Path(sys.executable).name} -m pip install -r requirements.txt"
        ) from None
