"""Removes two kinds of fields from a config.json: those that training overrides, and those that prevent loading.

Training overrides fields that do not change the model's function, such as `gradient_checkpointing`; the export restores
the user's values. The export lacks fields with which transformers cannot load a model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lowmem.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Two attributes of a config. Each is {field: the user's value}.
OWN = "own_switches"  # training overrides these values; the export has them again
LEFT_OUT = "left_out_switches"  # values that are not exported
_OFF = ("gradient_checkpointing", "output_hidden_states", "output_attentions", "output_router_logits", "torchscript")
_NEEDED = dict.fromkeys(_OFF, (False, None)) | {"return_dict": (True,)}  # {field: values that are kept}
_DTYPES = (None, "float32", "float", "float64", "double", "float16", "half", "bfloat16")
_FOR_LOADING = {  # {field: values with which transformers can build a model here}
    "use_return_dict": (),
    "quantization_config": (None,),
    **dict.fromkeys(("_attn_implementation", "attn_implementation"), (None, "eager", "sdpa")),
    "use_cache": (True, False, None),
}
SWITCHES = {*_NEEDED, *_FOR_LOADING}


def without_switches(fields: dict) -> dict:
    """Returns the `fields` of a config.json without those that training overrides or that prevent loading. These are in
    the result under the keys OWN and LEFT_OUT, respectively. Does the same in nested configs (`*_config`). Renames the
    rope type "su" to "longrope"."""
    kept, taken = dict(fields), {OWN: {}, LEFT_OUT: {}}
    for name, value in fields.items():
        if name in _NEEDED and value not in _NEEDED[name]:
            taken[OWN][name] = kept.pop(name)
        elif _prevents_loading(name, value, fields):
            taken[LEFT_OUT][name] = kept.pop(name)
        elif isinstance(value, dict) and name.endswith("_config"):
            kept[name] = without_switches(value)
    rope = fields.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("type") == "su":  # in the first Phi-3; not fully known to transformers 5
        kept["rope_scaling"] = rope | {"type": "longrope"}
    return kept | {where: found for where, found in taken.items() if found}


def _prevents_loading(name: str, value: object, fields: dict) -> bool:
    if name in ("dtype", "torch_dtype"):
        return not isinstance(value, dict) and value not in _DTYPES  # a dict has a dtype for each part
    if name == "bos_token_id":
        return not isinstance(value, int | None)  # transformers 4 allowed a list
    if name == "problem_type":  # transformers refuses a classifier of one class, for any model
        labels = fields.get("id2label")
        one = len(labels) == 1 if isinstance(labels, dict) else fields.get("num_labels") == 1
        return one and value == "single_label_classification"
    return name in _FOR_LOADING and value not in _FOR_LOADING[name]


def set_padding(config: PretrainedConfig, where: str) -> None:
    """Sets `pad_token_id` in the config to None if that id is outside the vocabulary: training masks padding by
    position. Stores an old id of -1 in the attribute OWN, which the export restores; any other in LEFT_OUT, which is
    not exported. Raises InputError, beginning with `where`, if the config does not accept None."""
    text = config.get_text_config()
    for holder in {id(holder): holder for holder in (config, text)}.values():
        pad, size = getattr(holder, "pad_token_id", None), getattr(text, "vocab_size", None)
        if not isinstance(pad, int) or size is None or 0 <= pad < size:
            continue
        try:
            holder.pad_token_id = None
        except Exception as error:  # fields of some families may not be None
            raise InputError(
                f"{where}: pad_token_id is {pad}, and the model has {size} ids; set it to one of them"
            ) from error
        # An old id of -1 is exported again.
        found = OWN if pad == -1 else LEFT_OUT  # with any other id, transformers builds no model
        setattr(holder, found, {**getattr(holder, found, {}), "pad_token_id": pad})


def as_given(fields: dict) -> dict:
    """Returns the `fields` of a config for the export. Restores values that training has overridden (OWN). Leaves out
    fields with which transformers cannot load a model (LEFT_OUT)."""
    given = {name: value for name, value in fields.items() if name not in (OWN, LEFT_OUT)}
    for name, value in given.items():
        if isinstance(value, dict) and name.endswith("_config"):
            given[name] = as_given(value)
    return given | fields.get(OWN, {})


def remarks(config: PretrainedConfig) -> list[str]:
    """Returns remarks for the user on fields that training overrides, and on fields that are not exported."""
    fields = json.loads(config.to_json_string(use_diff=False))
    parts = [fields, *(value for name, value in fields.items() if name.endswith("_config") and isinstance(value, dict))]
    own, left_out = (
        ", ".join(f"{name}={json.dumps(value)}" for part in parts for name, value in part.get(where, {}).items())
        for where in (OWN, LEFT_OUT)
    )
    sentences = {
        f"config.json sets {own}, which changes nothing in training and is exported as it is": own,
        f"config.json sets {left_out}, with which transformers loads no model here: it is left out": left_out,
    }
    return [sentence for sentence, found in sentences.items() if found]
