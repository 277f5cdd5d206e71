"""Fields of a config.json that say how others ran the model, and nothing of what it computes.

`gradient_checkpointing`, `return_dict`, `output_hidden_states` and the like reach published files when a trainer saves
its model. Training sets them as it needs them and says so. The user's own values come back in the exported config.json,
except those with which transformers cannot load a model here. An old name of a rotary embedding is read, too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lowmem.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OWN = "own_switches"  # a config's attribute: {field: the user's value}, of fields that training sets otherwise
LEFT_OUT = "left_out_switches"  # the same for fields that are not exported
_NEEDED = {  # the values that training can have; another value is taken out
    **dict.fromkeys(
        ("gradient_checkpointing", "output_hidden_states", "output_attentions", "torchscript"), (False, None)
    ),
    "return_dict": (True,),
}
_FOR_LOADING = {  # the values with which transformers can build a model here
    "use_return_dict": (),
    "quantization_config": (None,),
    **dict.fromkeys(("_attn_implementation", "attn_implementation"), (None, "eager", "sdpa")),
    "use_cache": (True, False, None),
}
_DTYPES = {"float32", "float", "float64", "double", "float16", "half", "bfloat16"}
SWITCHES = {*_NEEDED, *_FOR_LOADING}


def without_switches(fields: dict) -> dict:
    """The fields of a config.json as training needs them; OWN and LEFT_OUT in them hold the values taken out."""
    kept, taken = dict(fields), {OWN: {}, LEFT_OUT: {}}
    for name, value in fields.items():
        if isinstance(value, dict) and (name.endswith("_config") and name != "quantization_config"):
            kept[name] = without_switches(value)
        for needed, where in ((_NEEDED, OWN), (_FOR_LOADING, LEFT_OUT)):
            if name in needed and value not in needed[name]:
                taken[where][name] = kept.pop(name)
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if not (value is None or isinstance(value, dict) or value in _DTYPES):  # a dict has one for each part
            taken[LEFT_OUT][name] = kept.pop(name)
    if not isinstance(fields.get("bos_token_id"), int | None):  # as a list, which version 4 allowed
        taken[LEFT_OUT]["bos_token_id"] = kept.pop("bos_token_id")
    if _has_one_class(fields):
        taken[LEFT_OUT]["problem_type"] = kept.pop("problem_type")
    rope = fields.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("type") == "su":  # what the first Phi-3 called it; transformers 5 half knows
        kept["rope_scaling"] = rope | {"type": "longrope"}
    return kept | {where: found for where, found in taken.items() if found}


def _has_one_class(fields: dict) -> bool:
    """True for a classifier of a single class, which transformers refuses for any model."""
    labels = fields.get("id2label")
    one = len(labels) == 1 if isinstance(labels, dict) else fields.get("num_labels") == 1
    return one and fields.get("problem_type") == "single_label_classification"


def set_padding(config: PretrainedConfig, where: str) -> None:
    """A padding id that is no token of the model becomes None: training masks padding by position and never by id.
    InputError, with the config's path `where`, if the family insists on one."""
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
        found = OWN if pad == -1 else LEFT_OUT  # beyond the vocabulary transformers builds no model
        setattr(holder, found, {**getattr(holder, found, {}), "pad_token_id": pad})


def as_given(fields: dict) -> dict:
    """The fields of a config as JSON, with the user's own values."""
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("_config"):
            fields[name] = as_given(value)
    own = fields.pop(OWN, {})
    fields.pop(LEFT_OUT, None)
    return fields | own


def remarks(config: PretrainedConfig) -> list[str]:
    """Sentences on the fields that are set otherwise than in the user's config.json."""
    fields = json.loads(config.to_json_string(use_diff=False))
    parts = [fields, *(value for name, value in fields.items() if name.endswith("_config") and isinstance(value, dict))]
    own, left_out = (
        ", ".join(f"{name}={json.dumps(value)}" for part in parts for name, value in part.get(where, {}).items())
        for where in (OWN, LEFT_OUT)
    )
    said = []
    if own:
        said.append(f"config.json sets {own}, which changes nothing in training and is exported as it is")
    if left_out:
        said.append(f"config.json sets {left_out}, with which transformers loads no model here: it is left out")
    return said
