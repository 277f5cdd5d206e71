"""Defines the Python interface, `import lowmem`: plans, whole runs, and a model for your own loop (docs/python.md).
Training in such a loop has no learning-rate schedule, pictures, report, signal handling or out-of-memory recovery."""

import json
import threading
import warnings
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from lowmem import device as devices
from lowmem.config_switches import remarks
from lowmem.core.precision import WORKING_DTYPES
from lowmem.data.chat_templates import set_chat_template
from lowmem.data.tokenizer import load_tokenizer
from lowmem.distributed.launch import joined
from lowmem.errors import InputError
from lowmem.files import MANIFEST
from lowmem.limits import Budget
from lowmem.models.build import own_generation_config
from lowmem.models.export import TRAINED, export_model
from lowmem.planning.plan import Plan
from lowmem.planning.process import process_aside
from lowmem.run.checkpoint import load_newest, newest_state
from lowmem.run.early import check_folders, with_recognized_model
from lowmem.run.environment import warnings_end_nothing
from lowmem.run.folder import checkpoints_in, lock_run, sweep
from lowmem.run.loaded_model import LoadedModel
from lowmem.run.naming import with_run_folder
from lowmem.run.prepare import ask, build, plan_here, write_weights
from lowmem.run.recovery import page_locked
from lowmem.run.several_ranks import plan_for
from lowmem.run.signals import StopRequest
from lowmem.run.train import run
from lowmem.run_folder import FOLDERS, is_run
from lowmem.settings import Settings


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)  # the warning names the line that called a function below


def _check_kind(settings: Settings) -> None:
    if not isinstance(settings, Settings):
        raise InputError(f"{settings!r} is no Settings: write lowmem.Settings(model=...)")


@warnings_end_nothing()
def plan(settings: Settings, gpus: int = 1, machines: int = 1) -> Plan:
    """Returns the plan (predicted memory and time) for training on the card that `settings.gpu` names; None: this
    machine. `gpus`: number of GPUs in each of `machines` machines, which all train one model; the plan is that of one
    GPU. Raises PlanError, which names the smallest caps that fit, if training does not fit under the memory caps.
    Raises InputError for a model that cannot be trained block by block."""
    _check_kind(settings)
    devices.set_environment()
    settings = with_recognized_model(replace(settings, plan_only=settings.gpu is not None), _warn)
    return plan_for(ask(settings), gpus, machines)


@warnings_end_nothing()
def train(settings: Settings) -> dict:
    """Does a whole training run, as `lowmem train` does, and returns the content of its report.json. In the main
    thread, SIGINT, SIGTERM or SIGHUP makes the run save a checkpoint and raise Stopped. Raises LowmemError for errors
    that a user can cause. Errors of the system, such as OSError or OutOfMemoryError, are not converted."""
    _check_kind(settings)
    if settings.plan_only:
        raise InputError("plan_only=True plans and trains nothing: call lowmem.plan(settings).")
    if settings.preview is not None:
        raise InputError("preview prints data and trains nothing: it is an option of the command, --preview.")
    settings = with_run_folder(with_recognized_model(settings, _warn), _warn)
    check_folders(settings)
    main_thread = threading.current_thread() is threading.main_thread()
    with StopRequest() if main_thread else nullcontext(StopRequest()) as stop:
        run(settings, stop)
    return json.loads((Path(settings.out) / "report.json").read_text(encoding="utf-8"))


@warnings_end_nothing()
def load(settings: Settings, resume: str | Path | None = None) -> LoadedModel:
    """Returns a model with its weights, planned for this machine. Load one model per process, because the GPU cap is
    set for the whole process. The RAM cap limits only the plan. A batch may have at most `settings.batch` sequences of
    `settings.seq` tokens. `resume`: a checkpoint, or a folder with checkpoints, whose newest undamaged one is loaded.
    Loads initial weights if `resume` is None or, with a UserWarning, has no checkpoint. Also warns if fused kernels or
    page-locked memory cannot be used. Raises LowmemError for errors that a user can cause, such as settings that only
    a run follows (`resume`, `plan_only`, `preview`)."""
    _check_kind(settings)
    if settings.resume not in ("auto", "never"):
        raise InputError(f"Settings(resume=...) is of lowmem.train: call lowmem.load(..., resume={settings.resume!r}).")
    if settings.trains_nothing:
        raise InputError("plan_only and preview train nothing: leave them out, or call lowmem.plan(settings).")
    devices.set_environment()
    said: list[str] = []
    settings = with_recognized_model(settings, said.append)
    with process_aside() as aside:
        ranks = ExitStack().enter_context(joined(settings.device))  # for as long as the process lives
        checkpoints = []
        if resume is not None:
            path = Path(resume).expanduser()
            checkpoints = ranks.on_first(lambda: [path] if (path / MANIFEST).exists() else _checkpoints_of(path))
            if not checkpoints:
                said.append(f"resume={str(resume)!r}: no checkpoint is there, so this begins with the first weights")
        saved = ranks.on_first(lambda: newest_state(checkpoints))
        question = ask(settings)
        settings, config = question.settings, question.config
        device = devices.select_device(settings.device)
        tokenizer = load_tokenizer(settings.model, settings.init, config.vocab_size)
        if settings.chat_template is not None:
            set_chat_template(tokenizer, settings.chat_template)
        plan = plan_here(question, device, ranks, aside, said.append, saved)
    budget = Budget(device, settings.gpu_limit_bytes, None)
    model, weights = build(question, plan, tokenizer, budget, ranks, said.append, weights=not checkpoints)
    if checkpoints:
        _, state = load_newest(checkpoints, model.step.store, model.identity(), said.append, required=True)
        model = model.resumed(state)
    else:
        write_weights(model, weights)
    model = page_locked(model, said.append)
    model.step.most = settings.batch, settings.seq, settings.target_tokens
    devices.keep_freed_memory(plan.keeps_freed_memory)
    for remark in (*said, *remarks(config)):
        _warn(remark)
    return model


def _checkpoints_of(folder: Path) -> list[Path]:
    """Returns the checkpoints in a run folder or a folder of checkpoints, newest first."""
    if folder.name == "checkpoints":
        folder = folder.parent
    if found := checkpoints_in(folder):
        return found
    # Removes the rest of a killed save, unless another run has locked the folder.
    with suppress(InputError), lock_run(folder):
        sweep(folder / "checkpoints")
    return checkpoints_in(folder / "checkpoints")


@warnings_end_nothing()
def export(model: LoadedModel, folder: str | Path) -> None:
    """Writes weights, config and tokenizer into `folder`, for transformers' `from_pretrained`. Replaces an older
    export. Raises InputError if `folder` has other files, or is one that a run of `lowmem train` writes. Raises
    LowmemError if a weight is too large for `model.settings.export_dtype`. Warns of weights that are not finite, and of
    files that could not be written."""
    folder = Path(folder).expanduser()
    if any(path.name in FOLDERS and is_run(path.parent) for path in (folder.absolute(), folder.resolve())):
        raise InputError(f"{folder} is in the folder of a run of the scripts, which writes there: give another one")
    about = folder / "README.md"  # every export has one
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, and an export is a folder: give a new one")
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not (about.is_file() and TRAINED in about.read_text("utf-8", "replace"))
    ):
        raise InputError(f"{folder} has other files, and an export replaces the whole folder: give a new one")
    model.step.flush()
    store = model.step.store
    write = partial(
        export_model, folder, model.config, order=store.names(), tokenizer=model.tokenizer,
        dtype=WORKING_DTYPES[model.settings.export_dtype],
        generation_config=own_generation_config(model.settings.model, model.settings.init),
        readme=f"# {model.plan.model}, {TRAINED}\n\n```\n{model.plan.describe()}\n```\n",
    )  # fmt: skip
    for problem in store.ranks.on_first(lambda: write(store.masters())):
        _warn(problem)
