"""The training loop, once: plan, load, step, log, save, report. Both scripts and every experiment run this one."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lowmem import device as devices
from lowmem.core.batch import LEAST_POSITIONS, micro_batch_shapes
from lowmem.core.decoder import Decoder
from lowmem.core.homes import DiskStates
from lowmem.core.kernels import fused
from lowmem.core.optimizers import Hyperparameters, get_optimizer
from lowmem.core.parameters import Store
from lowmem.core.precision import WORKING_DTYPES, LossScale
from lowmem.core.states_folder import in_memory
from lowmem.core.step import StepAbandoned, TrainingStep, summed_loss
from lowmem.cudasim.gpus import Card
from lowmem.data.batches import PACKED, Batches
from lowmem.data.dataset import Data, load_data
from lowmem.data.tokenizer import load_tokenizer, tokenizer_blamed
from lowmem.errors import InputError, LowmemError, Stopped, first_few
from lowmem.limits import Budget, ram_available_bytes
from lowmem.models.build import decoder_start, fitted, load_config, make_decoder, own_generation_config
from lowmem.models.compatibility import check_pieces
from lowmem.models.description import Rehearsal, rehearsed
from lowmem.models.load import random_weights, read_weights
from lowmem.planning.plan import Plan
from lowmem.planning.planner import Question, make_plan, timed_with
from lowmem.planning.process import process_aside
from lowmem.planning.ram import Process
from lowmem.planning.target import planning_target
from lowmem.run.checkpoint import (
    NotSaved,
    check_disk,
    find_checkpoints,
    load_newest,
    lock_run,
    newest_state,
    refuse_differences,
    save_checkpoint,
)
from lowmem.run.ending import Ending, finish, take_best
from lowmem.run.learning_rate import course_of, longer, say_longer
from lowmem.run.log import RunLog, step_row, write_json
from lowmem.run.recovery import OutOfRoom, recovery_of, with_pageable_copies
from lowmem.run.report import (
    best_evaluation,
    config_identity,
    draw_plan,
    opening_remarks,
    run_identity,
    sample,
    settings_identity,
)
from lowmem.run.signals import StopRequest
from lowmem.run.terminal import output, say
from lowmem.run_folder import not_writable
from lowmem.settings import Settings
from lowmem.units import interval_seconds

SKIPPED_IN_A_ROW = 10  # steps without a finite gradient after which a run gives up


def run(settings: Settings, stop: StopRequest) -> None:
    """Plans, and unless that is all that was asked for, trains."""
    devices.set_environment()
    with nullcontext() if settings.plan_only else process_aside() as aside:  # before CUDA is asked for anything
        run_planned(settings, stop, aside)


def run_planned(settings: Settings, stop: StopRequest, aside: Callable | None) -> None:
    """`aside`: where training's plan is made (process.py)."""
    kind, precision, card = planning_target(settings)
    config = load_config(settings.model, settings.init)
    settings = fitted(settings, config)
    if settings.plan_only:
        plan = Question(settings, config, kind, precision, card).answer(make_plan)
        with output():
            print(plan.describe(), flush=True)
        if (Path(settings.out) / "settings.json").exists():
            say(f"{settings.out} holds a run, so its plan.json is left alone")
            return
        try:
            Path(settings.out).mkdir(parents=True, exist_ok=True)
            write_json(Path(settings.out) / "plan.json", plan.to_dict())
        except OSError as error:
            raise not_writable(settings.out, error.strerror) from None
        if (problem := draw_plan(plan, Path(settings.out))) is not None:
            say(problem)
        return
    with lock_run(Path(settings.out)):  # two runs with one --out: the second is told so at once
        plan_and_train(settings, config, kind, precision, card, stop, aside)


def plan_and_train(
    settings: Settings, config: PretrainedConfig, kind: str, precision: str, card: Card | None, stop: StopRequest,
    aside: Callable,
) -> None:  # fmt: skip
    """A run that has its folder to itself; what is refused here leaves nothing in it."""
    folder = Path(settings.out)
    with closing(RunLog(folder, settings)) as log:
        checkpoints = find_checkpoints(folder, settings.resume, log.say)
        going_on = newest_state(checkpoints)
        if going_on is not None:  # what is refused needs neither data nor a plan
            known = settings_identity(settings) | ({} if settings.steps is None else {"steps": settings.steps})
            check_same_run(*going_on, known | {"config": config_identity(config)})
        device = devices.select_device(settings.device)
        tokenizer = load_tokenizer(settings.model, settings.init, config.vocab_size)
        with ExitStack() as until_the_end:
            with tokenizer_blamed(settings.model):
                data = load_data(settings, tokenizer, config.vocab_size, folder, decoder_start(config))
            until_the_end.enter_context(closing(data))
            dtype = WORKING_DTYPES[settings.export_dtype]
            generation = own_generation_config(settings.model, settings.init, log.say)
            rehearsal = until_the_end.enter_context(
                rehearsed(folder / ".model.rehearsal", config, tokenizer, generation, dtype)
            )
            for remark in rehearsal.remarks:
                log.say(remark)
            devices.release_freed_memory()  # training does not hold what tokenizing took
            plan, remark = plan_for_here(settings, config, device, precision, card, aside)
            if (lengths := data.train.typical_lengths()) is not None:
                plan = aside(timed_with, plan, config, lengths)
            steps = settings.total_steps(data.train.steps_per_epoch)
            if not data.evaluations and (settings.keep_best or settings.patience):
                raise InputError("nothing is held out, so there is no best to find; give --eval-data, or more --data")
            check_disk(folder, plan.disk, most_saves(settings, plan, steps), settings.states_folder)
            log.say(plan.describe())
            if remark is not None:
                log.say(remark)
            if plan.layout.states_on_disk and (kind := in_memory(Path(settings.states_folder))) is not None:
                log.say(f"warning: --states-folder {settings.states_folder} is a {kind}, which keeps its files in RAM")
            decoder = make_decoder(config, precision, settings.residual, plan.fused_kernels)
            train(settings, config, decoder, device, plan, rehearsal, data, checkpoints, stop, log)


def evaluated(step: TrainingStep, evaluations: Sequence[Batches], limit: int) -> dict:
    """What a row of metrics.jsonl says of held-out texts, at most `limit` batches of each: loss per token in nats, and
    that of each by name where they are several; nothing where there is none."""
    sums = {batches.parts[0].name: summed_loss(step, batches, limit) for batches in evaluations}
    if not sums:
        return {}
    losses, tokens = zip(*sums.values(), strict=True)
    row = {"eval_loss": math.fsum(losses) / sum(tokens)}
    if len(sums) > 1:
        row["eval_losses"] = {name: loss / tokens for name, (loss, tokens) in sums.items()}
    return row


def most_saves(settings: Settings, plan: Plan, steps: int) -> int | None:
    """How many checkpoints a run of so many steps writes; None where it saves by time and nobody knows a step's."""
    seconds, every = interval_seconds(settings.save_every), settings.save_every
    if seconds is not None and plan.step_seconds is None:
        return None
    if seconds is not None:
        every = max(int(seconds / plan.step_seconds), 1)
    return math.ceil(steps / every) + (steps // settings.eval_every if settings.keep_best else 0)


def computed_share(train: Batches, plan: Plan) -> list[str]:
    """A sentence on how much of what is computed is no padding, where rows are not full."""
    lengths = train.typical_lengths()
    if lengths is None:
        return []
    seq = train.parts[0].seq
    shapes = micro_batch_shapes(lengths, seq, plan.layout.micro_batch, LEAST_POSITIONS[plan.device])
    positions = sum(rows * width for rows, width in shapes)
    rows = "examples are laid into rows, which" if train.pack == PACKED else "rows of like lengths run together, which"
    return [
        f"{rows} computes {positions / (train.batch_rows * seq):.0%} of {train.batch_rows} x {seq} positions a step; "
        f"{sum(lengths) / positions:.0%} of that are tokens"
    ]


def check_same_run(checkpoint: Path, state: dict, identity: dict) -> None:
    """InputError where a run of that identity, or as much of it as is known, cannot go on from a checkpoint of that
    state."""
    refuse_differences(checkpoint, state, {"identity": identity | longer(state.get("identity", {}), identity)})


def plan_for_here(
    settings: Settings, config: PretrainedConfig, device: torch.device, precision: str, card: Card | None,
    aside: Callable,
) -> tuple[Plan, str | None]:  # fmt: skip
    """The plan for this machine as it is now, and why there are no fused kernels, None where there are."""
    no_kernel = None
    if device.type == "cuda":
        devices.take_workspaces(device)
        no_kernel = fused.why_not(device)
        devices.forget_allocations(device)
    free, process = ram_available_bytes()[0], Process.here()
    question = Question(settings, config, device.type, precision, card, free, no_kernel is None, process)
    plan = question.answer(partial(aside, make_plan))
    return plan, no_kernel and f"without fused kernels, which takes more memory and time: {no_kernel}"


def make_step(settings: Settings, decoder: Decoder, device: torch.device, plan: Plan) -> TrainingStep:
    """The step as it was planned; the parameters of `decoder` become its store's, which are still to be written."""
    optimizer = get_optimizer(settings.optimizer)
    disk_tensor = DiskStates(Path(settings.states_folder)).tensor if plan.layout.states_on_disk else None
    store = Store(decoder, device, WORKING_DTYPES[plan.precision], optimizer, plan.layout, disk_tensor=disk_tensor)
    hyper = Hyperparameters(
        weight_decay=settings.weight_decay, beta1=settings.adam_beta1, beta2=settings.adam_beta2,
        epsilon=settings.adam_epsilon,
    )  # fmt: skip
    return TrainingStep(
        decoder, store, hyper, clip_norm=settings.clip_norm, seed=settings.seed,
        loss_scale=LossScale(enabled=plan.precision == "fp16"),
    )  # fmt: skip


def initial_weights(
    settings: Settings, config: PretrainedConfig, decoder: Decoder, say: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter's name and fp32 CPU tensor, or runs of it; `say` gets remarks on a model's files. InputError if
    they do not fit it."""
    if settings.init == "pretrained":
        return read_weights(decoder.model, settings.model, say)
    return random_weights(config, settings.seed)


def page_locked(store: Store, plan: Plan) -> tuple[Plan, str | None]:
    """`plan` with the streamed states of `store` page-locked, and None; where that is refused, with the time that a
    step takes then, and a sentence on it."""
    if store.page_lock():
        return plan, None
    plan = with_pageable_copies(plan)
    return plan, (
        "page-locked memory was refused, so states are streamed from pageable memory: a step now takes about "
        f"{plan.step_seconds:.3g} s, {plan.waiting_seconds:.2g} s of it waiting for copies"
    )


def train(
    settings: Settings, config: PretrainedConfig, decoder: Decoder, device: torch.device, plan: Plan,
    rehearsal: Rehearsal, data: Data, checkpoints: list[Path], stop: StopRequest, log: RunLog,
) -> None:  # fmt: skip
    """One run, from its weights, or the newest of `checkpoints` that is whole, to its report."""
    folder = Path(settings.out)
    steps = settings.total_steps(data.train.steps_per_epoch)
    identity = run_identity(settings, plan, steps, data.fingerprint) | {"config": config_identity(config)}
    going_on = newest_state(checkpoints)
    same_run = partial(check_same_run, identity=identity)
    if going_on is not None:
        same_run(*going_on)
    for line in [*data.description.splitlines(), *computed_share(data.train, plan)]:
        log.say(line)

    budget = Budget(device, settings.gpu_limit_bytes, settings.ram_limit_bytes)
    budget.apply(plan.gpu_reserved_peak_bytes)
    budget.enter("load")
    devices.make_deterministic(device)
    # Before anything is allocated: what does not fit is refused here.
    weights = None if checkpoints else initial_weights(settings, config, decoder, log.say)
    step = make_step(settings, decoder, device, plan)
    store, loss_scale = step.store, step.loss_scale
    recovery = recovery_of(step, plan, log.say)

    def evaluate() -> dict:
        with budget.phase("evaluate"):
            return evaluated(step, data.evaluations, settings.eval_batches)

    def evaluation_after(done: int) -> dict:
        """What it adds to the step's row: nothing where it was abandoned, which the last one is not."""
        if done == steps:
            step.abandoned = None
            stop.now("the last evaluation, then saving and the export", "changes nothing")
        else:
            stop.now(f"the evaluation after step {done}, then saving", "drops it and saves")
        with suppress(StepAbandoned):
            return evaluate()
        return {}

    def take_sample(done: int, last: bool = False) -> None:
        step.flush()
        with budget.phase("evaluate"):
            log.sample(done, sample(decoder, rehearsal.tokenizer, settings.sample_prompt), last)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what steps take lies where it lay

    for sentence in opening_remarks(settings, config, rehearsal.tokenizer, device):
        log.say(sentence)
    loaded = load_newest(checkpoints, store, same_run, log.say, required=settings.resume != "auto")
    if loaded is None:
        store.write(weights or initial_weights(settings, config, decoder, log.say))
        check_pieces(decoder, config.vocab_size, settings.masks_documents)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what only that needed
        if (folder / "report.json").exists():
            log.say(f"report.json, the pictures and model/ in {folder} are an earlier run's until this one ends")
        first, skipped, held_out, course = 0, 0, evaluate(), course_of(identity)
        eval_first = held_out.get("eval_loss")
    else:
        checkpoint, state = loaded
        first, step.updates, eval_first = state["step"], state["updates"], state["eval_first"]
        skipped, held_out = state["skipped"], {}
        loss_scale.load(state["loss_scale"])
        recovery.resume(state["recoveries"])
        log.say(f"going on from {checkpoint}: {first} of {steps} steps are done")
        course = course_of(identity, state)
        if longer(state["identity"], identity):
            say_longer(course, state, log.say)
    if device.type == "cuda":
        devices.release_freed_memory()  # before states take up their room
    plan, remark = page_locked(store, plan)
    if remark is not None:
        log.say(remark)
    write_json(folder / "plan.json", plan.to_dict())
    write_json(folder / "settings.json", asdict(settings))
    data.keep()
    log.start(first, steps, plan.to_dict(), held_out)
    if first == 0 and settings.sample_prompt is not None:
        take_sample(0)

    ending, saved = Ending(log), None if loaded is None else first
    saved_at, interval = time.monotonic(), interval_seconds(settings.save_every)

    def out_of_patience() -> bool:
        return settings.patience is not None and best_evaluation(log.rows, eval_first).since >= settings.patience

    done, ended = first, first == steps or out_of_patience()

    def save(done: int, must: bool = True) -> None:
        """`must`: whether the run ends with what is saved here; else it goes on where the disk has no room."""
        nonlocal saved, saved_at
        stop.now(f"the save of step {done}", "changes nothing")
        step.flush()
        state = {"step": done, "updates": step.updates, "loss_scale": loss_scale.state()}
        state |= {"skipped": skipped, "eval_first": eval_first, "recoveries": recovery.measures}
        state |= {"identity": identity, "course": asdict(course)}
        try:
            if saved != done:
                with budget.phase("save"):
                    best = best_evaluation(log.rows, None).step if settings.keep_best else None
                    save_checkpoint(folder, store, state, keep_last=settings.keep_last, best=best)
            saved = done
        except NotSaved as error:
            if must or (stop.requested and not ended):
                raise
            goes_on = "the model is exported" if ended else "training goes on, and it is tried again"
            log.say(f"warning: {error.reason}; what was saved before is still there, and {goes_on}")
        saved_at = time.monotonic()
        if stop.requested and not ended:
            raise Stopped(f"stopped by {stop.name} after step {done}; the same command goes on from there")

    def save_at_last(number: int) -> None:
        """Before the run ends since memory has run out, which is what has to be said then."""
        with suppress(NotSaved, Stopped):
            save(number)

    budget.enter("train")
    if stop.requested:
        save(first)
    step.abandoned = lambda: stop.urgent
    seconds = plan.step_seconds
    for done in range(first + 1, first + 1 if ended else steps + 1):
        if skipped >= SKIPPED_IN_A_ROW:
            raise LowmemError(f"{skipped} steps in a row had no finite gradient; stopped at step {done - 1}")
        started = time.perf_counter()
        batch = data.train.batch(done - 1)
        rate = course.rate(step.updates)
        recovery.number = done
        about = "" if seconds is None else f", about {seconds:.2g} s"
        stop.now(f"step {done}{about}, then saving", "drops this step, unless it updates already, and saves")
        try:
            result = step(batch, done - 1, rate)
        except StepAbandoned:
            save(done - 1)
        except OutOfRoom:
            if not step.halfway:
                save_at_last(done - 1)
            raise
        evaluating = data.evaluations and (done == steps or done % (settings.eval_every or steps) == 0)
        due = done % settings.save_every == 0 if interval is None else time.monotonic() - saved_at >= interval
        saving = due or done == steps
        if evaluating or saving:
            step.flush()  # the update belongs to this step's time
        seconds = time.perf_counter() - started
        row = step_row(done, done / data.train.steps_per_epoch, batch, rate, seconds, result, budget.peaks())
        if evaluating:
            try:
                with ending.step("the last evaluation") if done == steps else nullcontext():
                    row |= evaluation_after(done)
            except OutOfRoom:
                log.step(row)
                save_at_last(done)
                raise
        log.step(row)
        ended = done == steps
        if "eval_loss" in row:
            saving |= settings.keep_best and best_evaluation(log.rows, None).step == done
            ended |= out_of_patience()
        if settings.sample_every is not None and done % settings.sample_every == 0 and not ended:
            take_sample(done)
        budget.check(f"step {done}")
        skipped = 0 if result.updated else skipped + 1
        if skipped:
            said = f"step {done}: the gradient's norm is {result.grad_norm}, so no update was made"
            texts = data.train.where(done - 1)
            log.say(f"{said}; its batch: {first_few(texts)} (all in log.txt)", f"{said}; its batch: {', '.join(texts)}")
        if saving or ended or stop.requested or skipped == SKIPPED_IN_A_ROW:
            with ending.step("the last save") if ended else nullcontext():
                save(done, must=False)
        if ended:
            break
    if skipped and log.rows and not math.isfinite(log.rows[-1]["loss"]):
        raise LowmemError(f"the loss of the last step is {log.rows[-1]['loss']}: nothing was exported")
    stop.now("the export; all steps are done and saved", "changes nothing")
    if out_of_patience():
        best = best_evaluation(log.rows, eval_first)
        said = f"the last {best.since} held-out losses are not below {best}; a higher --patience goes on"
        log.say(f"ended early, after {done} of {steps} steps: {said}")
    exported, best = done, best_evaluation(log.rows, None)
    if settings.keep_best and best.step not in (0, done):
        exported = take_best(ending, folder, store, best, done, same_run, log.say)
    if settings.sample_prompt is not None:
        with ending.step("the last sample"):
            take_sample(done, last=True)
    finish(ending, settings, config, store, rehearsal, log, budget, plan, eval_first, recovery.measures, exported)
