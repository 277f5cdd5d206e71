"""Turns settings into a model that is ready to train: the first half of a training run, and all of `lowmem.load`.

`ask` makes the planner's input, `plan_here` the plan, and `build` the model. `prepare` calls these, and also locks the
run folder and loads the data.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import getpid
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lowmem import device as devices
from lowmem.core.decoder import Decoder
from lowmem.core.encoder_decoder import decoder_start
from lowmem.core.homes import DiskStates
from lowmem.core.kernels import Kernels, fused, used_in
from lowmem.core.optimizers import Hyperparameters, get_optimizer
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.ranks import Ranks
from lowmem.core.states_folder import in_memory
from lowmem.core.step import TrainingStep
from lowmem.data.dataset import Data, load_data
from lowmem.data.tokenizer import load_tokenizer, tokenizer_blamed
from lowmem.distributed.launch import joined, local_ranks
from lowmem.errors import InputError
from lowmem.fields import option_name
from lowmem.limits import Budget, ram_available_bytes, ram_now_bytes, ram_peak_bytes, reset_ram_peak
from lowmem.models.build import load_config, make_decoder, own_generation_config, settings_for
from lowmem.models.compatibility import check_pieces
from lowmem.models.description import Rehearsal, rehearsed
from lowmem.models.load import random_weights, read_weights
from lowmem.planning.answer import answer
from lowmem.planning.plan import Plan
from lowmem.planning.planner import make_plan, timed_with
from lowmem.planning.process import process_aside
from lowmem.planning.question import Question, precision_and_card
from lowmem.planning.ram import Process
from lowmem.planning.simulated_ranks import Mesh
from lowmem.run.checkpoint import load_newest, newest_state
from lowmem.run.folder import check_disk, checkpoints_in, find_checkpoints, lock_run, step_of
from lowmem.run.identity import kernels_of, known_identity, refuse_another_run, run_identity
from lowmem.run.learning_rate import Course, course_of, longer, say_longer
from lowmem.run.loaded_model import LoadedModel
from lowmem.run.log import RunLog
from lowmem.run.recovery import Recovery, recovery_of
from lowmem.run.report import computed_share, opening_remarks
from lowmem.run.several_ranks import QuietLog, meshes, of_one_rank, plan_of_ranks, shared_data
from lowmem.run_folder import read_run_json
from lowmem.settings import Settings
from lowmem.units import counted

Say = Callable[[str], None]  # takes a sentence for the user
_FEW_STEPS = 10  # a run of whole epochs with fewer steps gets a warning
Weights = Iterator[tuple[str, Tensor]]  # name and fp32 CPU tensor of each parameter, whole or in pieces


@dataclass
class Session:
    """Holds everything that the training loop needs."""

    model: LoadedModel  # model.done: steps before the loop began
    data: Data
    rehearsal: Rehearsal  # files of the export, made before training
    log: RunLog
    budget: Budget
    recovery: Recovery  # makes room if GPU memory runs out
    identity: dict  # all that must be the same if the run is resumed (identity.py)
    course: Course  # of the learning rate
    eval_first: float | None = None  # held-out loss before the first step
    skipped: int = 0  # steps in a row without an update
    over_plan: bool = False  # whether the run has kept freed memory, and taken more RAM than planned
    resumed: Path | None = None  # the checkpoint from which the run goes on
    origin: str | None = None  # the DIR of --resume DIR, now or in an earlier start; None without it
    saved: set[int] = field(default_factory=set)  # steps whose checkpoints this run has written, also if removed

    @property
    def settings(self) -> Settings:
        return self.model.settings

    @property
    def step(self) -> TrainingStep:
        return self.model.step

    @property
    def ranks(self) -> Ranks:
        return self.step.store.ranks

    @property
    def steps(self) -> int:
        return self.identity["steps"]  # of the whole run

    @property
    def folder(self) -> Path:
        return Path(self.settings.out)


def ask(settings: Settings) -> Question:
    """Returns the planner's input: precision, card, the model's config, and `settings` adapted to this config."""
    precision, card = precision_and_card(settings)
    config = load_config(settings.model, settings.init)
    return Question(settings_for(settings, config), config, precision, card)


def plan_here(
    question: Question, device: torch.device, ranks: Ranks, aside: Callable, say: Say, saved: tuple[Path, dict] | None
) -> Plan:
    """Returns the plan for this machine and its free RAM. Rank 0 (the first process) makes it for all ranks, with
    `aside`, which calls a function in another process. `say` gets a sentence on a GPU or fused kernels that cannot be
    used. `saved`: the checkpoint to resume and the content of its state.json, or None."""
    fused_kernels = Kernels.NONE
    if device.type == "cuda":
        devices.take_workspaces(device)
        fused_kernels = kernels_here(question.precision, device, ranks, say)
        devices.forget_allocations(device)
    elif question.settings.device == "auto" and (why := devices.why_no_gpu()) is not None:
        say(f"this trains on the CPU, because PyTorch cannot use the GPU here: {why}")
    ram_free = -ranks.most(-ram_available_bytes()[0] // local_ranks())  # the least of all processes
    sharing, micro_batch = None, None
    if saved is not None:
        sharing, micro_batch = saved[1].get("sharing"), saved[1]["identity"]["micro_batch"]
        if (saved_kernels := kernels_of(saved[1]["identity"])) in fused_kernels:
            fused_kernels = saved_kernels
    process = Process(ram_now_bytes(), ram_peak_bytes())
    question = replace(question, ram_free_bytes=ram_free, process=process, fused_kernels=fused_kernels)
    possible = meshes(ranks.count, ranks.machines, ranks.alike, sharing)

    def make(share: Question) -> Plan:
        return ranks.on_first(partial(aside, make_plan, share))

    plan = plan_of_ranks(question, possible, ranks.on_machine, make, micro_batch)
    if plan.sharing < ranks.count:
        ranks.share_among(plan.sharing)
    return plan


def kernels_here(precision: str, device: torch.device, ranks: Ranks, say: Say) -> Kernels:
    """Returns the fused kernels for `precision` that run on all ranks' GPUs. `say` gets the reason if others do not."""

    def without(kernels: Kernels, reason: str) -> None:
        which = "" if kernels == wanted else f" of {' and '.join(kernels.names)}"
        say(f"without fused kernels{which}, which takes more memory and time: {reason}")

    wanted, here = used_in(precision), fused.running(device)
    for kernels, reason in fused.failures(device).items():
        if kernels & wanted:
            without(kernels & wanted, reason)
    elsewhere = Kernels.NONE
    for kernel in wanted:
        if ranks.most(int(kernel not in here)) and kernel in here:
            elsewhere |= kernel
    if elsewhere:
        without(elsewhere, "they do not run on another rank's GPU")
    return wanted & here & ~elsewhere


def in_words(plan: Plan, table: bool) -> str:
    """Formats the plan as text for people: some lines and, if `table`, a table."""
    return "\n".join([*answer(plan), *(["", plan.describe(), ""] if table else [])])


def make_step(settings: Settings, decoder: Decoder, device: torch.device, plan: Plan, ranks: Ranks) -> TrainingStep:
    """Returns a TrainingStep with the layout of `plan`. Allocates its flat weights, without values, and makes the
    decoder's parameters views of these."""
    optimizer = get_optimizer(settings.optimizer)
    disk_tensor = DiskStates(Path(settings.states_folder)).tensor if plan.layout.states_on_disk else None
    dtype = WORKING_DTYPES[plan.precision]
    store = Store(decoder, device, dtype, optimizer, plan.layout, disk_tensor=disk_tensor, ranks=ranks)
    hyper = Hyperparameters(
        weight_decay=settings.weight_decay, beta1=settings.adam_beta1, beta2=settings.adam_beta2,
        epsilon=settings.adam_epsilon,
    )  # fmt: skip
    loss_scale = LossScale(enabled=plan.precision == "fp16")
    return TrainingStep(decoder, store, hyper, clip_norm=settings.clip_norm, seed=settings.seed, loss_scale=loss_scale)


def build(
    question: Question, plan: Plan, tokenizer: PreTrainedTokenizerBase | None, budget: Budget, ranks: Ranks,
    say: Say, weights: bool,
) -> tuple[LoadedModel, Weights | None]:  # fmt: skip
    """Builds the model, without values in its weights. Returns it, and an iterator over initial weights for
    `write_weights` (None if `weights` is False). Caps the GPU memory of the process by `budget`. Raises InputError,
    before anything is allocated, if the weights' files do not fit the model."""
    settings, config = question.settings, question.config
    ranks.on_all(lambda: budget.apply(plan.gpu_reserved_peak_bytes, plan.allocator_bytes))
    devices.make_deterministic(budget.device)
    decoder = make_decoder(config, question.precision, settings.residual, plan.fused_kernels)
    found = initial_weights(settings, config, decoder, say) if weights else None
    step = make_step(settings, decoder, budget.device, plan, ranks)
    return LoadedModel(settings, config, tokenizer, plan, decoder, step), found


def initial_weights(settings: Settings, config: PretrainedConfig, decoder: Decoder, say: Say) -> Weights:
    """Returns an iterator over pretrained or random weights. `say` gets remarks on a model's files. Raises InputError
    if the files do not fit the model."""
    if settings.init == "pretrained":
        return read_weights(decoder.model, settings.model, say)
    return random_weights(config, settings.seed)


def write_weights(model: LoadedModel, weights: Weights) -> None:
    """Writes `weights` into the model. Raises InputError if the vectors among them differ between ranks (processes).
    Also raises it if embedding, blocks and head, run in turn, do not compute the logits of the whole model."""
    store = model.step.store
    store.write(weights)
    if store.ranks.count > 1:
        vectors = b"".join(part.working.view(torch.uint8).cpu().numpy() for part in store.parts if not part.is_matrices)
        if not store.ranks.agree_on(vectors):  # every process stores all vectors
            raise InputError(f"the processes of torchrun have read different weights of {model.settings.model}")
    check_pieces(model.decoder, model.config.vocab_size, model.settings.masks_documents)
    if store.device.type == "cuda":
        torch.cuda.empty_cache()  # frees memory that only this check needed


@contextmanager
def prepare(settings: Settings) -> Iterator[Session]:
    """Yields the Session of a run that is ready for its next step. Locks the run folder during the `with` block. If
    training is refused (InputError, PlanError), leaves nothing in the folder."""
    devices.set_environment()
    devices.release_freed_memory()  # garbage and the earlier peak of a notebook's process are not this run's
    reset_ram_peak()
    with ExitStack() as until_the_end:
        until_the_end.callback(devices.keep_freed_memory, False)
        with process_aside() as aside:  # forks, so it comes before CUDA starts
            ranks = until_the_end.enter_context(joined(settings.device))
            question = ask(settings)
            settings, config, folder = question.settings, question.config, Path(question.settings.out)
            share = of_one_rank(question, Mesh(ranks.count), ranks.on_machine)
            ranks.on_first(partial(until_the_end.enter_context, lock_run(folder)))
            log = RunLog(folder, settings) if ranks.rank == 0 else QuietLog(folder)
            until_the_end.enter_context(closing(log))
            checkpoints = ranks.on_first(lambda: find_checkpoints(folder, settings.resume, log.say))
            saved = ranks.on_first(lambda: newest_state(checkpoints))
            if saved is not None:  # a refusal here needs neither data nor a plan
                refuse_another_run(*saved, known_identity(settings, config))
            device = devices.select_device(settings.device)
            tokenizer = load_tokenizer(settings.model, settings.init, config.vocab_size)
            with tokenizer_blamed(settings.model):
                load = partial(load_data, settings, tokenizer, config.vocab_size, folder, decoder_start(config))
                data = shared_data(load, ranks)
            until_the_end.enter_context(closing(data))
            generation = own_generation_config(settings.model, settings.init, log.say)
            place = folder / ".model.rehearsal" if ranks.rank == 0 else Path(gettempdir(), f"lowmem-{getpid()}")
            written = rehearsed(place, config, tokenizer, generation, WORKING_DTYPES[settings.export_dtype])
            rehearsal = ranks.on_all(partial(until_the_end.enter_context, written))
            devices.release_freed_memory()  # tokenizing needed it, training does not
            plan = plan_here(question, device, ranks, aside, log.say, saved)
            if (lengths := data.train.typical_lengths()) is not None and ranks.count == 1:
                plan = aside(timed_with, plan, config, lengths)
        plan = replace(plan, steps=settings.total_steps(data.train.steps_per_epoch))
        _check_evaluations(settings, data, plan.steps, log.say)
        ranks.on_first(partial(check_disk, folder, plan.disk, plan.most_saves, settings.states_folder))
        if saved is None:
            _say_before_the_first_step(plan, data, rehearsal, log)
        _say_where_states_are(plan, ranks, log)
        identity = run_identity(config, plan, data.fingerprint)
        if not ranks.agree_on(identity):
            raise InputError(
                "the processes of torchrun have read different data, models or settings: each machine needs the same "
                "files under the same names, and the run folder on a disk that all share"
            )
        if saved is not None:
            refuse_another_run(*saved, identity)

        budget = Budget(device, settings.gpu_limit_bytes, share.settings.ram_limit_bytes)
        budget.enter("load")
        model, weights = build(question, plan, tokenizer, budget, ranks, log.say, weights=not checkpoints)
        recovery = recovery_of(model.step, plan, log.say)
        session = Session(model, data, rehearsal, log, budget, recovery, identity, course_of(identity))
        _fill(session, weights, checkpoints, resuming=saved is not None)
        yield session


def _check_evaluations(settings: Settings, data: Data, steps: int, say: Say) -> None:
    """Raises InputError if nothing is held out for --keep-best or --patience. `say` gets a sentence if other options of
    evaluations do nothing."""
    names = " and ".join(option_name(name) for name in ("keep_best", "patience") if getattr(settings, name))
    if not data.evaluations and names:
        ways = "--eval-data, a larger --eval-fraction, or more --data"
        raise InputError(f"nothing is held out, so there is no best to find; give {ways}")
    if not data.evaluations and settings.eval_every is not None:
        say("nothing is held out, so --eval-every does nothing")
    elif names and settings.eval_every >= steps:
        run = f"the run has {counted(steps, 'steps')}"
        say(f"{names}: only the last step is evaluated, because --eval-every is {settings.eval_every} and {run}")


def _say_where_states_are(plan: Plan, ranks: Ranks, log: RunLog) -> None:
    if ranks.count > 1:
        stored = "each machine stores the model" if plan.sharing < ranks.count else "they store the model together"
        log.say(f"{ranks.count} ranks train together, and {stored}; this plan is one rank's")
    states_folder = plan.settings.states_folder
    if plan.layout.states_on_disk and (kind := in_memory(Path(states_folder))) is not None:
        log.say(f"warning: --states-folder {states_folder} is a {kind}, which keeps its files in RAM")


def _say_before_the_first_step(plan: Plan, data: Data, rehearsal: Rehearsal, log: RunLog) -> None:
    # log.txt always gets the plan's table.
    log.say(in_words(plan, plan.settings.verbose), in_words(plan, table=True))
    for line in [*data.description.splitlines(), *computed_share(data.train, plan), *rehearsal.remarks]:
        log.say(line)
    if plan.settings.steps is None and plan.steps < _FEW_STEPS and (plan.settings.epochs or 1) >= 1:
        steps, rows = counted(plan.steps, "steps"), counted(data.train.rows, "rows")
        step = f"a step {plan.settings.batch}; a smaller --batch makes more"
        log.say(f"warning: {steps} in all: an epoch has {rows}, {step}")


def _fill(session: Session, weights: Weights | None, checkpoints: list[Path], resuming: bool) -> None:
    """Loads the newest undamaged checkpoint into the session, with the run's counters and log. If none is loaded,
    writes the initial `weights` into the model; None: reads them first. `resuming`: True if a checkpoint was found, so
    that plan and data are not printed yet."""
    model, settings, log, identity = session.model, session.settings, session.log, session.identity
    loaded = load_newest(checkpoints, model.step.store, identity, log.say, required=settings.resume != "auto")
    if loaded is None:
        if resuming:
            _say_before_the_first_step(model.plan, session.data, session.rehearsal, log)
        for sentence in opening_remarks(settings.init, model.config, model.tokenizer, model.step.store.device):
            log.say(sentence)
        write_weights(model, weights or initial_weights(settings, model.config, model.decoder, log.say))
        if (session.folder / "report.json").exists():
            log.say(f"report.json, the pictures and model/ in {session.folder} are from an earlier run until this ends")
        return
    checkpoint, state = loaded
    session.model, session.resumed = model.resumed(state), checkpoint
    session.recovery.resume(state["recoveries"])
    session.origin = state.get("resume") if settings.resume == "auto" else str(Path(settings.resume).resolve())
    here = checkpoints_in(session.folder / "checkpoints")
    session.saved = {step_of(path) for path in here if _is_own(path, session)}
    session.course = course_of(identity, state)
    session.eval_first, session.skipped = state["eval_first"], state["skipped"]
    log.resume(state)
    said = f"going on from {checkpoint}: {state['step']} of {session.steps} steps are done"
    log.say("; ".join([said, *answer(model.plan, done=state["step"])]))
    if longer(state["identity"], identity):
        say_longer(session.course, state, log.say)


def _is_own(path: Path, session: Session) -> bool:
    """Returns True if `path` is the loaded checkpoint, or an older one of the same run."""
    older = step_of(path) < session.model.done and read_run_json(path / "state.json").get("resume") == session.origin
    return older or path.resolve() == session.resumed.resolve()
