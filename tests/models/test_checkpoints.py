"""Checkpoints as people have them: names under wrappers, state_dicts in dictionaries, other heads, other files."""

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from families import FAMILIES
from lowmem.errors import InputError
from lowmem.models.build import build_model
from lowmem.models.load import read_weights

torch.manual_seed(0)
GPT2, LLAMA = FAMILIES["gpt2"](), FAMILIES["llama"]()
MODELS = {
    kind: AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for kind, config in (("gpt2", GPT2), ("llama", LLAMA))
}
HEAD = {"v_head.summary.weight": torch.zeros(1, 32), "v_head.summary.bias": torch.zeros(1)}


def under(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def each_block(wrapper):
    """Names weights as FSDP or torch.compile of single blocks does."""
    return lambda tensors: {
        re.sub(r"\.h\.(\d+)\.", rf".h.\1.{wrapper}", name): tensor for name, tensor in tensors.items()
    }


def within(*keys, **beside):
    def change(tensors):
        for key in reversed(keys):
            tensors = {key: tensors} | beside
        return tensors

    return change


TAKEN = {  # how the weights are saved: what is said
    "torch.compile": (under("_orig_mod."), "without _orig_mod."),
    "DDP": (under("module."), "without module."),
    "FSDP": (under("_fsdp_wrapped_module."), "without _fsdp_wrapped_module."),
    "DDP of compiled": (under("module._orig_mod."), "without _orig_mod. and module."),
    "compiled DDP": (under("_orig_mod.module."), "without _orig_mod. and module."),
    "Fabric": (under("_forward_module."), "without _forward_module."),
    "Lightning": (under("model."), "without model."),
    "Lightning of DDP": (under("model.module."), "without model.module."),
    "PEFT": (under("base_model.model."), "without base_model.model."),
    "TRL": (under("pretrained_model."), "without pretrained_model."),
    "doubled": (under("transformer."), "without transformer."),
    "TRL of PEFT": (under("pretrained_model.base_model.model."), "without pretrained_model.base_model.model."),
    "a policy": (under("policy."), "without policy."),
    "blocks": (each_block("_fsdp_wrapped_module."), "without _fsdp_wrapped_module."),
    "recomputed blocks": (each_block("_checkpoint_wrapped_module."), "without _checkpoint_wrapped_module."),
    "PPO": (lambda tensors: tensors | HEAD, "a head next to the language model (v_head.summary."),
    "PPO under DDP": (lambda tensors: under("module.")(tensors | HEAD), "without module."),
    "a reward model": (lambda tensors: tensors | {"score.weight": torch.zeros(2, 32)}, "score.weight"),
    "fp64": (lambda tensors: {name: tensor.double() for name, tensor in tensors.items()}, "are fp64, and rounded"),
}  # fmt: skip
NESTED = {
    "state_dict": (within("state_dict", epoch=3, optim_states=[{"state": {0: {"m": torch.ones(1)}}}]), "state_dict"),
    "model": (within("model", optimizer={"state": {}}, iter_num=torch.tensor(5)), "model"),
    "twice": (within("model", "state_dict"), "model.state_dict"),
    "module": (within("module", dp_world_size=1), "module"),
    "model_state_dict": (lambda tensors: {"model_state_dict": under("module.")(tensors)}, "without module."),
    "Lightning": (lambda tensors: {"state_dict": under("model._orig_mod.")(tensors), "loops": {}}, "_orig_mod. and "),
}  # fmt: skip


def read(folder: Path, config) -> tuple[dict, str]:
    said = []
    runs = read_weights(build_model(config), str(folder), said.append)
    return {name: values.clone() for name, values in runs}, "; ".join(said)


def assert_taken(folder: Path, kind: str, words: str) -> None:
    found, said = read(folder, MODELS[kind].config)
    for name, parameter in MODELS[kind].named_parameters():
        assert torch.equal(found[name], parameter), name
    assert words in said and len(found) == len(list(MODELS[kind].parameters()))


def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in MODELS[kind].named_parameters()}


CASES = {name: ("gpt2", *case) for name, case in TAKEN.items()}
CASES |= {
    f"Llama {name}": ("llama", *TAKEN[name])
    for name in ("torch.compile", "DDP of compiled", "Lightning", "PEFT", "PPO", "a reward model", "fp64")
}


@pytest.mark.parametrize(("kind", "change", "words"), CASES.values(), ids=CASES)
def test_weights_are_found_under_the_names_of_wrappers_and_beside_other_heads(tmp_path, kind, change, words):
    save_file(change(tensors_of(kind)), tmp_path / "model.safetensors")
    assert_taken(tmp_path, kind, words)


@pytest.mark.parametrize(("change", "words"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt"])
def test_a_state_dict_is_found_within_a_trainers_checkpoint(tmp_path, change, words, name):
    torch.save(change(tensors_of("gpt2")), tmp_path / name)
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    assert_taken(tmp_path, "gpt2", words)


REFUSED = {  # what is in the folder: the words of the sentence
    "lora": (
        lambda t: {
            "base_model.model." + name.replace("c_attn.", "c_attn.base_layer."): tensor for name, tensor in t.items()
        } | {"base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight": torch.zeros(2, 32)},
        ["adapters (LoRA) that are not merged", "merge_and_unload"],
    ),
    "two models": (
        lambda t: under("policy.")(t) | under("ref.")({name: tensor + 1 for name, tensor in t.items()}),
        ["40 unexpected (policy.", "more than this model, under policy: save only the model"],
    ),
    "Meta's names": (
        lambda t: {"layers.0.attention.wq.weight": torch.zeros(2), "tok_embeddings.weight": torch.zeros(2)},
        ["begin with layers, tok_embeddings are not", "converter"],
    ),
    "FSDP's pieces": (
        lambda t: {"_fsdp_wrapped_module._flat_param": torch.zeros(9)},
        ["FSDP's flattened pieces", "FULL_STATE_DICT"],
    ),
    "fp8": (
        lambda t: {name: tensor.to(torch.float8_e4m3fn) if tensor.dim() > 1 else tensor for name, tensor in t.items()},
        ["but F8_E4M3", "original precision"],
    ),
    "I8": (lambda t: t | {"transformer.h.0.mlp.c_fc.bias": torch.zeros(128, dtype=torch.int8)}, ["but I8", "quant"]),
    "GPTQ": (
        lambda t: t | {"transformer.h.0.mlp.c_fc.qweight": torch.zeros(2, 2, dtype=torch.int32)},
        ["qweight", "quantised"],
    ),
    "resized vocabulary": (
        lambda t: t | {"transformer.wte.weight": torch.zeros(64, 32)},
        ["[64, 32] in the file, [97, 32] in the config", 'set "vocab_size": 64 in config.json'],
    ),
    "resized vocabulary under a wrapper": (
        lambda t: under("module.")(t | {"transformer.wte.weight": torch.zeros(64, 32)}),
        ['set "vocab_size": 64 in config.json'],
    ),
    "of another model": (
        lambda t: {name: tensor for name, tensor in t.items() if ".h.1." not in name},
        ["12 missing", "use the config.json that came with the weights"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_is_refused_with_the_way_out(tmp_path, change, words):
    save_file(change(tensors_of("gpt2")), tmp_path / "model.safetensors")
    with pytest.raises(InputError) as refused:
        read(tmp_path, GPT2)
    assert all(part in str(refused.value) for part in words), refused.value
    assert ("use the config.json" in str(refused.value)) == ("use the config.json" in words[-1])


@pytest.mark.parametrize(
    ("head", "said"),
    [({}, 'hold no head: set "tie_word_emb'), (("model.embed_tokens.weight", "lm_head.weight"), '"vocab_size": 64')],
    ids=["missing", "resized"],
)
def test_a_missing_or_a_resized_head_is_named(tmp_path, head, said):
    tensors = tensors_of("llama")
    del tensors["lm_head.weight"]
    save_file(tensors | {name: torch.zeros(64, 32) for name in head}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=said):
        read(tmp_path, LLAMA)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value):
    tensors = {name: tensor.double() for name, tensor in tensors_of("gpt2").items()}
    tensors["transformer.h.1.ln_2.bias"][3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        InputError, match=r"model.safetensors: transformer.h.1.ln_2.bias has values that are NaN or inf"
    ):
        read(tmp_path, GPT2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}}, "several dictionaries of weights (mod"),
        ({"a": torch.eye(3).to_sparse()}, "a is stored as sparse_coo; save it dense"),
        ({"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": []}, "no state_dict: it holds state, param_groups"),
        ([torch.ones(1)], "is no state_dict: it holds list"),
        ({"args": argparse.Namespace(lr=1)}, "a Python object (argparse.Namespace)"),
        ({}, "it holds nothing"),
    ],
    ids=["two", "sparse", "an optimizer's", "a list", "an object", "nothing"],
)  # fmt: skip
def test_a_file_without_a_state_dict_is_named(tmp_path, content, words):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError) as refused:
        read(tmp_path, GPT2)
    assert words in str(refused.value)


def saved_in_two(folder: Path, names: list[str], index: str | None = None) -> None:
    tensors = tensors_of("gpt2")
    halves = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    for name, half in zip(names, halves, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(half, folder / name) if name.endswith("safetensors") else torch.save(half, folder / name)
    if index:
        weight_map = {key: name for name, half in zip(names, halves, strict=True) for key in half}
        (folder / index).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8-sig")


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["a/model-00001-of-00002.safetensors", "b/model-00002-of-00002.safetensors"], "model.safetensors.index.json"),
        (["ft-model-00001-of-00002.safetensors", "ft-model-00002-of-00002.safetensors"], None),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], None),
    ],
    ids=["subfolders", "safetensors without index", "bin without index"],
)
def test_shards_wherever_they_are(tmp_path, names, index):
    saved_in_two(tmp_path, names, index)
    torch.save({}, tmp_path / "training_args.bin")
    assert_taken(tmp_path, "gpt2", "" if index else "the weights are read from")


def test_safetensors_come_before_bin_files(tmp_path):
    save_file(tensors_of("gpt2"), tmp_path / "model.safetensors")
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert_taken(tmp_path, "gpt2", "")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors"], "lacks 1 of 3 weight files .m-00003-of-"),
        (["one.pt", "two.pt"], "several files that could be the weights .one.pt, two.pt"),
    ],
)
def test_files_that_leave_a_choice_or_a_gap_are_refused(tmp_path, names, said):
    saved_in_two(tmp_path, names)
    with pytest.raises(InputError, match=said):
        read(tmp_path, GPT2)


def test_a_weight_that_is_in_two_shards_must_be_the_same(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    saved_in_two(tmp_path, names)
    both = tensors_of("gpt2")
    save_file(both, tmp_path / names[1])
    assert_taken(tmp_path, "gpt2", "")
    both["transformer.wpe.weight"] += 1
    save_file(both, tmp_path / names[1])
    with pytest.raises(InputError, match="transformer.wpe.weight is in .* with different values"):
        read(tmp_path, GPT2)
