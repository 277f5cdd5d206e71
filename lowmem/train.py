"""The training loop, once: plan, load, step, log, save, report. Both scripts and every experiment call this one."""

import math
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lowmem import device as devices
from lowmem.adam import get_optimizer
from lowmem.blocks import Decoder
from lowmem.budget import Budget, ram_available_bytes
from lowmem.cards import measure_card
from lowmem.cli import parse_arguments
from lowmem.data import load_data
from lowmem.errors import CapExceeded, InputError, LowmemError, Stopped
from lowmem.log import RunLog, step_row, write_json
from lowmem.models import check_tokens, load_config, make_decoder
from lowmem.plan import Plan, card_for, make_plan, planned
from lowmem.precision import WORKING_DTYPES, LossScale, resolve_precision
from lowmem.report import draw_plan, finish, run_identity, said_aloud
from lowmem.resume import find_checkpoint, load_checkpoint, lock_run, save_checkpoint
from lowmem.schedule import learning_rate, warmup_updates
from lowmem.settings import Settings
from lowmem.signals import StopRequest
from lowmem.step import Step, mean_loss
from lowmem.store import Store
from lowmem.tokenizer import load_tokenizer
from lowmem.weights import random_weights, read_weights

SKIPPED_IN_A_ROW = 10  # steps without a finite gradient after which a run gives up


def main(defaults: Settings, arguments: list[str] | None = None) -> int:
    """A script's whole work; returns its exit code (errors.py)."""
    try:
        settings = parse_arguments(sys.argv[1:] if arguments is None else arguments, defaults)
        with StopRequest() as stop:
            run(settings, stop)
    except torch.OutOfMemoryError as error:
        return _fail(CapExceeded(f"out of GPU memory under --gpu-limit: {str(error).splitlines()[0]}"))
    except LowmemError as error:
        return _fail(error)
    except OSError as error:  # a full disk or quota, a folder that went away
        return _fail(
            LowmemError(f"{error.filename or settings.out}: {error.strerror or error}; what was saved is safe")
        )
    return 0


def _fail(error: LowmemError) -> int:
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return error.exit_code


def run(settings: Settings, stop: StopRequest) -> None:
    """Plans, and unless that is all that was asked for, trains."""
    devices.set_environment()
    config = load_config(settings.model, settings.init)
    check_tokens(config, settings.seq, largest_token_id=0)

    def decoder_in(precision: str) -> Decoder:
        return make_decoder(config, precision, settings.residual)

    if settings.plan_only:
        kind, precision, card = planned(settings)
        plan = make_plan(settings, lambda: decoder_in(precision), kind, precision, card)
        print(plan.describe())
        if (Path(settings.out) / "settings.json").exists():
            print(f"{settings.out} holds a run, so its plan.json is left alone", file=sys.stderr)
            return
        try:
            Path(settings.out).mkdir(parents=True, exist_ok=True)
            write_json(Path(settings.out) / "plan.json", plan.to_dict())
            draw_plan(plan, Path(settings.out))
        except OSError as error:
            raise InputError(f"--out {settings.out} cannot be written: {error.strerror}; give another folder") from None
        return
    device = devices.select_device(settings.device)
    precision = resolve_precision(settings.precision, device)
    card = measured = None
    if device.type == "cuda":
        card, measured = card_for(settings), measure_card(device)
        devices.forget_allocations(device)
    free = ram_available_bytes()[0]
    plan = make_plan(settings, lambda: decoder_in(precision), device.type, precision, card, free, measured)
    with lock_run(Path(settings.out)), closing(RunLog(Path(settings.out), settings)) as log:
        log.say(plan.describe())
        train(settings, config, decoder_in(precision), device, plan, stop, log)


def train(
    settings: Settings, config: PretrainedConfig, decoder: Decoder, device: torch.device, plan: Plan,
    stop: StopRequest, log: RunLog,
) -> None:  # fmt: skip
    """One run, from its data to its report."""
    folder = Path(settings.out)
    tokenizer = load_tokenizer(settings.model, settings.init, config.vocab_size)
    data = load_data(
        spec=settings.data, eval_spec=settings.eval_data, eval_fraction=settings.eval_fraction,
        text_field=settings.text_field, train_on=settings.train_on, tokenizer=tokenizer, seq=settings.seq,
        batch=settings.batch, steps=settings.steps, seed=settings.seed, document_mask=settings.document_mask,
        fixed_batch=settings.fixed_batch, vocabulary_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
    )  # fmt: skip
    steps = settings.total_steps(data.train.steps_per_epoch)
    identity = {"identity": run_identity(settings, plan, steps, data.fingerprint)}
    log.say(data.description)

    budget = Budget(device, settings.gpu_limit_bytes, settings.ram_limit_bytes)
    budget.apply()
    devices.make_deterministic(device)
    optimizer = get_optimizer(plan.optimizer)
    checkpoint = find_checkpoint(folder, settings.resume, log.say)
    if checkpoint is None:  # before anything is allocated: what does not fit is refused here
        pretrained = settings.init == "pretrained"
        weights = read_weights(decoder.model, settings.model) if pretrained else random_weights(config, settings.seed)
    store = Store(decoder, device, WORKING_DTYPES[plan.precision], optimizer, plan.resident_units)
    loss_scale = LossScale(enabled=plan.precision == "fp16")
    step = Step(
        decoder, store, optimizer, plan.schedule, clip_norm=settings.clip_norm, weight_decay=settings.weight_decay,
        seed=settings.seed, loss_scale=loss_scale,
    )  # fmt: skip
    for sentence in said_aloud(settings, tokenizer, device):
        log.say(sentence)
    if checkpoint is None:
        store.write(weights)
        decoder.check(config.vocab_size, settings.document_mask)
        if (folder / "report.json").exists():
            log.say(f"report.json, the pictures and model/ in {folder} are an earlier run's until this one ends")
        first, skipped, eval_first = 0, 0, mean_loss(step, data.evaluation, settings.eval_batches)
    else:
        state = load_checkpoint(checkpoint, store, identity)
        first, step.updates, eval_first = state["step"], state["updates"], state["eval_first"]
        skipped = state["skipped"]
        loss_scale.load(state["loss_scale"])
        log.say(f"going on from {checkpoint}: {first} of {steps} steps are done")
    if not store.page_lock():
        log.say("page-locked memory was refused: states are streamed from pageable memory, at about half the speed")
    write_json(folder / "plan.json", plan.to_dict())
    write_json(folder / "settings.json", asdict(settings))
    log.start(first, steps, plan.to_dict())

    def save(done: int) -> None:
        step.flush()
        state = {"step": done, "updates": step.updates, "loss_scale": loss_scale.state()}
        state |= {"skipped": skipped, "eval_first": eval_first}
        save_checkpoint(folder, store, state | identity, keep_last=settings.keep_last)
        if stop.requested and done < steps:
            raise Stopped(f"stopped by {stop.name} after step {done}; the same command goes on from there")

    if stop.requested:
        save(first)
    warmup = warmup_updates(settings.warmup_steps, steps)
    for done in range(first + 1, steps + 1):
        if skipped >= SKIPPED_IN_A_ROW:
            raise LowmemError(f"{skipped} steps in a row had no finite gradient; stopped at step {done - 1}")
        started = time.perf_counter()
        batch = data.train.batch(done - 1)
        rate = learning_rate(
            step.updates, peak=settings.lr, updates=steps, warmup_updates=warmup, schedule=settings.schedule
        )
        result = step(batch, done - 1, rate)
        evaluating = len(data.evaluation) and (done == steps or done % (settings.eval_every or steps) == 0)
        saving = done == steps or done % (settings.save_every or steps) == 0
        if evaluating or saving:
            step.flush()  # the update belongs to this step's time
        seconds = time.perf_counter() - started
        row = step_row(
            done, done / data.train.steps_per_epoch, batch.trained_tokens, rate, seconds, result, budget.peaks()
        )
        if evaluating:
            row["eval_loss"] = mean_loss(step, data.evaluation, settings.eval_batches)
        log.step(row)
        budget.check(f"step {done}")
        skipped = 0 if result.updated else skipped + 1
        if skipped:
            log.say(f"step {done}: the gradient's norm is {result.grad_norm}, so no update was made")
        if saving or stop.requested or skipped == SKIPPED_IN_A_ROW:
            save(done)
    if skipped and log.rows and not math.isfinite(log.rows[-1]["loss"]):
        raise LowmemError(f"the loss of the last step is {log.rows[-1]['loss']}: nothing was exported")
    finish(settings, config, decoder, store, tokenizer, log, budget, plan, eval_first)
