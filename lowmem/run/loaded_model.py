"""Defines the model that a training loop trains, evaluates and saves (docs/python.md)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lowmem.core.batch import Batch
from lowmem.core.decoder import Decoder
from lowmem.core.parameters import Store
from lowmem.core.step import TrainingStep
from lowmem.errors import InputError
from lowmem.planning.plan import Plan
from lowmem.run.checkpoint import save_checkpoint
from lowmem.run.folder import checkpoint_of, checkpoints_in, step_of
from lowmem.run.identity import run_identity
from lowmem.run.learning_rate import COURSE
from lowmem.run_folder import is_run
from lowmem.settings import TOKENS, Settings, marked

_OF_THE_LOOP = {*COURSE, "warmup_steps", "data", "fixed_batch", "batch", "pack", *marked(Settings, TOKENS)}


@dataclass(frozen=True)
class LoadedModel:
    """Holds a model that is ready to train. `step(...)` trains every parameter; some optimizer updates stay pending
    until the next step or `step.flush()`. `decoder`: embedding, blocks and head, whose parameters are views of flat
    tensors (`step.store`). `tokenizer`: a byte-level one if a random model has none. `done`: number of steps in the
    loaded checkpoint, or 0."""

    settings: Settings
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    plan: Plan
    decoder: Decoder
    step: TrainingStep
    done: int = 0
    __reduce__ = Store.__reduce__  # refuses a copy before the decoder's copy takes memory

    def evaluate(self, batches: Iterable[Batch | Mapping]) -> float:
        """Returns the mean loss in nats over all tokens with a label. A batch is a Batch, or a dict as transformers'
        models take it. Raises InputError if no token has a label."""
        if isinstance(batches, Batch | Mapping):
            raise InputError("evaluate takes several batches: give a list, [batch]")
        sums = [self.step.evaluate(batch) for batch in batches]
        tokens = sum(tokens for _, tokens in sums)
        if not tokens:
            raise InputError("there is no token with a label to evaluate on")
        return math.fsum(loss for loss, _ in sums) / tokens

    def save(self, folder: str | Path, done: int, keep_last: int | None = None) -> Path:
        """Saves weights and optimizer states after `done` steps as folder/checkpoints/step-..., and returns that path.
        `lowmem.load(settings, resume=folder)` goes on with the same bits, if batches and rates are the same. Keeps the
        newest `keep_last` checkpoints (None: `settings.keep_last`). After the first save, a kill at any moment leaves a
        valid one. Raises InputError if `folder` is a run folder of `lowmem train`, or has checkpoints of another loop
        with more steps. Raises LowmemError, with earlier checkpoints intact, if the disk is full."""
        folder = Path(folder).expanduser()
        if type(done) is not int or done < 0:
            raise InputError(f"{done!r} steps: give a whole number, at least 0.")
        keep_last = self.settings.keep_last if keep_last is None else keep_last
        if type(keep_last) is not int or keep_last < 1:
            raise InputError(f"keep_last={keep_last!r}: give a whole number, at least 1.")
        if is_run(folder):
            raise InputError(f"{folder} is the folder of a run of the scripts, which save there: give another folder")
        newest = next(iter(checkpoints_in(folder / "checkpoints")), None)
        own = 0 < self.done <= done and checkpoint_of(folder, self.done).exists()  # this model goes on from there
        if newest is not None and step_of(newest) > done and not own:  # a save removes later checkpoints
            raise InputError(f"{newest} has more steps than {done}: load(..., resume={folder!s}), or another folder")
        self.step.flush()
        state = self.state(done) | {"skipped": 0, "eval_first": None, "recoveries": [], "identity": self.identity()}
        store = self.step.store
        return store.ranks.on_first(partial(save_checkpoint, folder, store, state, keep_last=keep_last))

    def state(self, done: int) -> dict:
        """Returns the counters of training after `done` steps, for state.json: steps, optimizer updates, loss scale."""
        counters = {"step": done, "updates": self.step.updates, "loss_scale": self.step.loss_scale.state()}
        ranks = self.step.store.ranks  # with several machines, the bits depend on the number that share a model
        return counters | ({"sharing": ranks.sharing} if ranks.machines > 1 else {})

    def resumed(self, state: dict) -> "LoadedModel":
        """Returns the model with the counters of training in `state`, a result of load_checkpoint."""
        self.step.updates = state["updates"]
        self.step.loss_scale.load(state["loss_scale"])
        return replace(self, done=state["step"])

    def identity(self) -> dict:
        """Returns {name: value} of all that must be equal in a checkpoint and in the run that resumes it. Leaves out
        settings that your own loop chooses, such as data and learning rate."""
        identity = run_identity(self.config, self.plan, "")
        return {name: value for name, value in identity.items() if name not in _OF_THE_LOOP}
