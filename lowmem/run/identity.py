"""Defines the identity of a training run: everything that its weights depend on, bit for bit. A checkpoint can only be
resumed with the same identity, which is saved in its state.json."""

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PretrainedConfig

from lowmem.config_switches import SWITCHES, as_given
from lowmem.core.kernels import Kernels, used_in
from lowmem.errors import InputError
from lowmem.fields import option_name
from lowmem.planning.plan import Plan
from lowmem.run.learning_rate import longer
from lowmem.settings import FIELD_NAMES, RUN, TOKENS, Settings, changed, marked

_NOT_COMPUTED = {  # fields of a config.json that do not change the computation
    *("_name_or_path", "architectures", "auto_map", "dtype", "task_specific_params", "torch_dtype"),
    *("transformers_version", "use_cache", *SWITCHES),
}
# Settings of the data; older checkpoints lack them. They name the reason if the hash of the data differs. Alone, a
# difference changes nothing: the same file may have another path.
_OF_DATA = marked(Settings, TOKENS).keys() - marked(Settings, RUN).keys()


def known_identity(settings: Settings, config: PretrainedConfig) -> dict:
    """Returns the settings and config fields that must be the same if training is resumed, {name: value}. Leaves out
    values that are known only with data and plan (`run_identity`)."""
    steps = {} if settings.steps is None else {"steps": settings.steps}
    return marked(settings, RUN) | steps | {"config": config_identity(config)}


def run_identity(config: PretrainedConfig, plan: Plan, data_fingerprint: str) -> dict:
    """Returns everything that must be the same if training is resumed, {name: value}. `data_fingerprint`: hash of the
    data."""
    return marked(plan.settings, RUN | TOKENS) | {
        "steps": plan.steps,
        "device": plan.device,
        "precision": plan.precision,
        "micro_batch": plan.layout.micro_batch,
        "fused_kernels": plan.fused_kernels.names,
        "data": data_fingerprint,
        "config": config_identity(config),
    }


def config_identity(config: PretrainedConfig) -> dict:
    """Returns {name: value} of all fields of the config that change the model's computation."""
    fields = as_given(json.loads(config.to_json_string(use_diff=False)))
    return {name: value for name, value in fields.items() if name not in _NOT_COMPUTED}


def kernels_of(identity: dict) -> Kernels:
    """Returns the fused kernels that a checkpoint's run used. `identity`: from the checkpoint's state.json."""
    said = identity.get("fused_kernels", False)
    if isinstance(said, bool):  # in older checkpoints: True if all kernels ran, else False
        return used_in(identity["precision"]) if said else Kernels.NONE
    return Kernels.named(said)


def refuse_another_run(checkpoint: Path, state: dict, identity: dict) -> None:
    """Raises InputError, which names every difference, if training cannot be resumed from `checkpoint`. `state`:
    content of its state.json. `identity`: {name: value} of the resuming run; names that it lacks are not compared."""
    saved = state.get("identity", {})
    if "fused_kernels" in saved:
        saved = saved | {"fused_kernels": kernels_of(saved).names}
    differences = list(_differences(saved, json.loads(json.dumps(identity | longer(saved, identity)))))
    if differences:
        raise InputError(
            f"refused to go on from {checkpoint}: {'; '.join(differences)}. Use the options of that run, or start a "
            "new one with another --out"
        )


def _differences(saved: dict, wanted: dict) -> Iterator[str]:
    of_data = _OF_DATA & saved.keys() if saved.get("data") != wanted.get("data") else set()
    for key, value in wanted.items():
        name = option_name(key) if key in FIELD_NAMES else key
        if key in _OF_DATA - of_data:
            continue
        if key not in saved:
            if key not in FIELD_NAMES or value != getattr(Settings, key):  # else an option newer than the checkpoint
                yield f"{name} is missing there"
        elif key == "config":  # another version of transformers may know other fields
            known = {field: value[field] for field in value if field in saved[key]}
            yield from (f"config.json's {difference}" for difference in _differences(saved[key], known))
        elif key == "data" and saved[key] != value:
            if all(saved[setting] == wanted[setting] for setting in of_data):
                yield "the data, their weights or the tokenizer have changed"
        elif key == "fused_kernels" and saved[key] != value:
            missing = Kernels.named(saved[key]) & ~Kernels.named(value)
            yield f"its fused kernels of {' and '.join(missing.names)} do not run here"
        elif saved[key] != value and key in FIELD_NAMES:
            yield changed(key, saved[key], value)
        elif saved[key] != value:
            old, new = (item if isinstance(item, str) else json.dumps(item) for item in (saved[key], value))
            yield f"{key} {old} -> {new}"
