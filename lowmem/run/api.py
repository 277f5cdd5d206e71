"""What `import lowmem` offers beside the command line: plans, whole runs, and the step for a training loop of your own.

    model = lowmem.load(lowmem.Settings(model="gpt2", seq=512, batch=8, gpu_limit_bytes=6 * 2**30))
    result = model.step(lowmem.Batch(input_ids, labels), number, learning_rate=3e-5)
    lowmem.export(model, "my_model")

A loop of your own owns its data, its learning rates and its log; planning, loading, the exact streamed update and the
export are those of the scripts. What stays with the scripts: checkpoints and resuming, evaluation by schedule, the
pictures and the report, and what is done about memory that runs out.
"""

import json
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lowmem import device as devices
from lowmem.config_switches import remarks
from lowmem.core.decoder import Decoder
from lowmem.core.precision import WORKING_DTYPES
from lowmem.core.step import TrainingStep
from lowmem.data.chat_templates import set_chat_template
from lowmem.data.tokenizer import load_tokenizer
from lowmem.errors import InputError
from lowmem.limits import Budget
from lowmem.models.build import fitted, load_config, make_decoder, own_generation_config
from lowmem.models.compatibility import check_pieces
from lowmem.models.export import export_model
from lowmem.planning.plan import Plan
from lowmem.planning.planner import Question, make_plan
from lowmem.planning.process import process_aside
from lowmem.planning.target import planning_target
from lowmem.run.early import check_folders, with_recognized_model
from lowmem.run.environment import warnings_end_nothing
from lowmem.run.signals import StopRequest
from lowmem.run.train import initial_weights, make_step, page_locked, plan_for_here, run
from lowmem.settings import Settings


@dataclass(frozen=True)
class LoadedModel:
    """A model whose every parameter `step` trains; its updates may wait for the next step, or `step.flush()`.
    `decoder`: its pieces, whose parameters are views into flat tensors (`step.store`); `tokenizer`: None where a random
    model has none."""

    settings: Settings
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    plan: Plan
    decoder: Decoder
    step: TrainingStep


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=4)  # of a caller of one of the functions below


@warnings_end_nothing()
def plan(settings: Settings) -> Plan:
    """What training would take: on the card that `settings.gpu` names, for which no GPU is needed, or else on the
    device that is here, which is the CPU where there is no GPU. (`python -m lowmem.plan` takes a card from its table
    then.) No weights are loaded. PlanError, with the smallest caps that would do, where nothing fits; InputError for a
    model that cannot be trained in pieces."""
    devices.set_environment()
    settings = with_recognized_model(replace(settings, plan_only=settings.gpu is not None), _warn)
    kind, precision, card = planning_target(settings)
    config = load_config(settings.model, settings.init)
    settings = fitted(settings, config)
    return Question(settings, config, kind, precision, card).answer(make_plan)


@warnings_end_nothing()
def train(settings: Settings) -> dict:
    """A whole run, as the scripts make it; the content of its report.json. A signal saves and ends it (`Stopped`) where
    it is called in the main thread; a second one drops the step first, a third ends the process (signals.py).
    LowmemError for what the scripts say in a sentence; what the system refuses (OSError, OutOfMemoryError) comes as it
    is."""
    if settings.plan_only:
        raise InputError("plan_only=True plans and trains nothing: call lowmem.plan(settings).")
    settings = with_recognized_model(settings, _warn)
    check_folders(settings)
    main_thread = threading.current_thread() is threading.main_thread()
    with StopRequest() if main_thread else nullcontext(StopRequest()) as stop:
        run(settings, stop)
    return json.loads((Path(settings.out) / "report.json").read_text(encoding="utf-8"))


@warnings_end_nothing()
def load(settings: Settings) -> LoadedModel:
    """Plans for this machine under both caps, caps GPU memory, and loads the weights that `settings` name, piece by
    piece, into their places. RAM is planned for and not watched. For one model a process: the cap and deterministic
    kernels are settings of the whole process. Batches may not be larger than `settings.batch`, and of token ids it is
    not checked whether the vocabulary has them. UserWarning where there are no fused kernels, or no page-locked memory
    for what is streamed: steps take longer then. LowmemError as in `train`."""
    devices.set_environment()
    settings = with_recognized_model(replace(settings, plan_only=False), _warn)
    with process_aside() as aside:
        _, precision, card = planning_target(settings)
        config = load_config(settings.model, settings.init)
        settings = fitted(settings, config)
        device = devices.select_device(settings.device)
        tokenizer = load_tokenizer(settings.model, settings.init, config.vocab_size)
        if settings.chat_template is not None:
            set_chat_template(tokenizer, settings.chat_template)
        plan, no_kernels = plan_for_here(settings, config, device, precision, card, aside)
    Budget(device, settings.gpu_limit_bytes, settings.ram_limit_bytes).apply(plan.gpu_reserved_peak_bytes)
    devices.make_deterministic(device)
    decoder = make_decoder(config, precision, settings.residual, plan.fused_kernels)
    weights = initial_weights(settings, config, decoder, _warn)
    step = make_step(settings, decoder, device, plan)
    step.store.write(weights)
    check_pieces(decoder, config.vocab_size, settings.masks_documents)
    if device.type == "cuda":
        devices.release_freed_memory()
    plan, slow_copies = page_locked(step.store, plan)
    for remark in (no_kernels, slow_copies, *remarks(config)):
        if remark is not None:
            _warn(remark)
    return LoadedModel(settings, config, tokenizer, plan, decoder, step)


@warnings_end_nothing()
def export(model: LoadedModel, folder: str | Path) -> None:
    """Writes `folder` so that `AutoModelForCausalLM.from_pretrained` loads it, or an encoder-decoder
    `AutoModelForSeq2SeqLM`: the master weights in `settings.export_dtype`, the config and the tokenizer. LowmemError
    if that dtype cannot hold a weight; UserWarning for a weight that is not finite, and for a file that is not written.
    """
    model.step.flush()
    store = model.step.store
    problems = export_model(
        Path(folder).expanduser(), model.config, store.masters(), order=store.names(), tokenizer=model.tokenizer,
        dtype=WORKING_DTYPES[model.settings.export_dtype],
        generation_config=own_generation_config(model.settings.model, model.settings.init),
        readme=f"# {model.plan.model}, every parameter trained with lowmem\n\n```\n{model.plan.describe()}\n```\n",
    )  # fmt: skip
    for problem in problems:
        _warn(problem)
