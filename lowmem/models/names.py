"""Matches the tensors of a checkpoint with the model's parameters, by name.

Names may lack the base model's prefix, be older ones, or have a prefix of torch.compile, DDP, FSDP, Lightning or PEFT.
A tied weight may have either or both of its names. A value or reward head is not loaded.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from operator import itemgetter

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lowmem.errors import InputError, some_of
from lowmem.models.entries import Entry, same_values

# Names that are not loaded. Older versions of transformers and other programs stored masks and rotary tables with the
# weights. T5's files have a table that no model uses.
_NOT_WEIGHTS = re.compile(
    r"(^|\.)((attn|attention|crossattention)\.(bias|masked_bias|causal_mask|scale_attn|embed_positions)"
    r"|rotary_emb\.\w+|inv_freq|position_ids|decoder\.version|_extra_state"
    r"|EncDecAttention\.relative_attention_bias\.weight)$"
)
# Modules that torch.compile, FSDP and others put around a module, at any depth.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module|_forward_module)\."
)
_OTHER_HEADS = re.compile(r"(^|\.)(v_head|value_head|score|reward_head|rm_head|regression_head|classifier|q_heads?)\.")
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|base_layer|modules_to_save|original_module)\.")
_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|weight_scale(_inv)?|weight_packed|SCB|absmax|quant_state\.\S+)$")


@dataclass
class _Fit:
    """Holds one way to match the names in the files of weights with the model's parameters."""

    prefix: str  # removed from the names in the files
    bare: dict[str, str]  # {name in the files: name without wrappers and `prefix`}
    target: dict[str, str] = field(default_factory=dict)  # {name in the files: name of the parameter}
    missing: list[str] = field(default_factory=list)  # parameters that are not in the files
    wrong: list[str] = field(default_factory=list)  # names in `target` with another shape than the parameter
    unexpected: list[str] = field(default_factory=list)  # names in the files that belong to no parameter
    heads: list[str] = field(default_factory=list)  # names of heads for other tasks, which are not loaded
    untrainable: list[str] = field(default_factory=list)  # names in `target` that are neither fp64, fp32, fp16 nor bf16
    converted: list[str] = field(default_factory=list)  # weights that transformers would merge or split

    def problems(self) -> int:
        return sum(map(len, (self.missing, self.wrong, self.unexpected, self.untrainable, self.converted)))


def match(model: PreTrainedModel, entries: dict[str, Entry], source: str) -> tuple[dict[str, Entry], list[str]]:
    """Returns {parameter: Entry}, in the order of `entries` {name in the files: Entry}, and remarks for the log. Raises
    InputError if names, shapes or dtypes do not fit, or two entries of a parameter differ. `source`: for messages."""
    fit = min(_fits(model, entries), key=_Fit.problems)
    if fit.problems():
        raise _refusal(model, entries, source, fit)
    matched: dict[str, Entry] = {}
    for name in (name for name in entries if name in fit.target):
        first = matched.setdefault(fit.target[name], entries[name])
        if not same_values(entries[name], first):
            raise _differing(model, name, entries[name], fit.target)
    return matched, _remarks(fit, entries, source)


def _fits(model: PreTrainedModel, entries: dict[str, Entry]) -> list[_Fit]:
    """Returns ways to match names in the files with the model's parameter names. The first only removes prefixes of
    wrappers, such as torch.compile. If it has problems, further ways also remove a prefix that many names share."""
    fit = _fit(model, entries, "")
    if not fit.problems():
        return [fit]
    parts = Counter(bare[: dot.end()] for bare in fit.bare.values() for dot in re.finditer(r"\.", bare))
    least = sum(1 for _ in model.parameters()) / 2
    shared = sorted((prefix for prefix, count in parts.items() if count >= least), key=len)
    return [fit, *(_fit(model, entries, prefix) for prefix in shared)]


def _fit(model: PreTrainedModel, entries: dict[str, Entry], prefix: str) -> _Fit:
    parameters = dict(model.named_parameters())
    own_name = {id(parameter): name for name, parameter in parameters.items()}
    aliases = {name: own_name[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    fit = _Fit(prefix, {name: _WRAPPERS.sub("", name).removeprefix(prefix) for name in entries})
    for name, bare in sorted(fit.bare.items(), key=itemgetter(1)):  # some renamings want the names sorted
        renamed, conversion = rename_source_key(bare, renamings, converters)
        own = aliases.get(renamed) or aliases.get(f"{model.base_model_prefix}.{renamed}")
        if conversion is not None:
            fit.converted.append(name)
        elif own:
            fit.target[name] = own
            if entries[name].shape != parameters[own].shape:
                fit.wrong.append(name)
            if entries[name].dtype is None:
                fit.untrainable.append(name)
        elif _OTHER_HEADS.search(bare):
            fit.heads.append(name)
        elif not _NOT_WEIGHTS.search(bare):
            fit.unexpected.append(name)
    found = set(fit.target.values())
    fit.missing = [name for name in parameters if name not in found]
    return fit


def _remarks(fit: _Fit, entries: dict[str, Entry], source: str) -> list[str]:
    wrappers = {f"{found}." for name in fit.target for found in _WRAPPERS.findall(name)}
    left_off = [*sorted(wrappers), *([fit.prefix] if fit.prefix else [])]
    remarks = []
    if renamed := sum(fit.bare[name] != name for name in fit.target):
        remarks.append(f"the names of {renamed} weights in {source} are taken without {' and '.join(left_off)}")
    if fit.heads:
        remarks.append(f"{source} holds a head next to the language model ({some_of(fit.heads)}), which is left out")
    if double := sum(entries[name].stored in ("F64", "float64") for name in fit.target):
        remarks.append(f"{double} weights in {source} are fp64, and rounded to fp32")
    return remarks


def _refusal(model: PreTrainedModel, entries: dict[str, Entry], source: str, fit: _Fit) -> InputError:
    parameters = dict(model.named_parameters())
    sizes = {name: (list(entries[name].shape), list(parameters[fit.target[name]].shape)) for name in fit.wrong}
    wrong = [f"{name}: {there} in the file, {here} in the config" for name, (there, here) in sizes.items()]
    wrong += [f"{name}: neither fp32, fp16 nor bf16, but {entries[name].stored}" for name in fit.untrainable]
    unexpected = fit.unexpected + fit.heads
    problems = {"missing": fit.missing, "unexpected": unexpected, "unfit": wrong, "merged or split": fit.converted}
    found = [f"{len(names)} {problem} ({some_of(names)})" for problem, names in problems.items() if names]
    advice = _advice(model, fit, sizes)
    return InputError(f"the weights in {source} do not fit {type(model).__name__}: {'; '.join(found)}; {advice}")


def _advice(model: PreTrainedModel, fit: _Fit, sizes: dict[str, tuple[list, list]]) -> str:
    """Returns the end of an error message: advice on weights that do not fit. `sizes`: {name in the files: (shape in
    the file, shape in the model)} for each parameter of another shape."""
    if fit.converted:
        return "transformers converts these weights on load, which reading them one by one cannot do"
    if any(map(_ADAPTER.search, fit.bare)):
        return "they hold adapters (LoRA) that are not merged: merge_and_unload, then save_pretrained (peft)"
    if any(name.endswith("_flat_param") for name in fit.bare):
        return "they are FSDP's flattened pieces: save the full state_dict there (StateDictType.FULL_STATE_DICT)"
    if fit.untrainable or any(map(_QUANTISED.search, fit.unexpected)):
        return "they are quantised or integers: choose the model in its original precision"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    head = {names[id(parameter)] for parameter in model.get_output_embeddings().parameters()}
    vocabulary = head | {names[id(parameter)] for parameter in model.get_input_embeddings().parameters()}
    rows = {there[0] for there, here in sizes.values() if there[1:] == here[1:] and there}
    if len(rows) == 1 and {fit.target[name] for name in sizes} <= vocabulary:
        return f'set "vocab_size": {rows.pop()} in config.json'
    if fit.missing and set(fit.missing) <= head and not fit.unexpected and not sizes:
        return 'they hold no head: set "tie_word_embeddings": true in config.json if the model shares its embedding\'s'
    own = {part for name, _ in model.named_parameters(remove_duplicate=False) for part in name.split(".")[:2]}
    begin = sorted({fit.bare[name].split(".")[0] for name in fit.unexpected})
    if fit.unexpected and not fit.missing and own.isdisjoint(begin):
        return f"the files hold more than this model, under {some_of(begin)}: save only the model (save_pretrained)"
    if fit.unexpected and (not fit.target or own.isdisjoint(begin)):
        return (
            f"names that begin with {some_of(begin)} are not those of this architecture in transformers: "
            "save them under its names (save_pretrained), or with the converter of the program that wrote them"
        )
    return "use the config.json that came with the weights, or --init random"


def _differing(model: PreTrainedModel, name: str, entry: Entry, target: dict[str, str]) -> InputError:
    others = [other for other in target if target[other] == target[name] and other != name]
    tied = model.all_tied_weights_keys
    if target[name] not in {*tied, *tied.values()}:
        return InputError(
            f"{entry.path}: {name} and {some_of(others)} are the same weight with different values; leave one"
        )
    advice = 'set "tie_word_embeddings": false in config.json if they are meant to differ'
    if model.config.is_encoder_decoder:  # transformers 5 ties it whatever the config says
        advice = "a T5 with a head of its own (version 1.1, FLAN) cannot be trained here"
    return InputError(f"{entry.path}: {name} differs from the weight that the config ties it to; {advice}")
