"""transformers 4 gives the logits and ids of transformers 5 for exported models. Needs `make transformers4`."""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from test_load_and_export import real_model
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lowmem.models.export import export_model
from tests.data.tokenizer_kinds import tokenizer as tokenizer_of

PYTHON = Path(__file__).parents[2] / ".venv-transformers4/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="transformers 4 is not here: make transformers4")

PROGRAM = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4."), transformers.__version__
torch.set_num_threads(1)
found = {}
for folder in json.loads(sys.argv[1]):
    try:
        if "model" in folder:
            model = AutoModelForCausalLM.from_pretrained(folder["model"]).eval()
            with torch.no_grad():
                found[folder["model"]] = [str(model.dtype), model(torch.tensor(folder["ids"])).logits.float().tolist()]
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder["tokenizer"])
            found[folder["tokenizer"]] = [tokenizer(folder["texts"]).input_ids, tokenizer.all_special_tokens,
                                          tokenizer.chat_template]
    except Exception as error:
        found[folder.get("model") or folder["tokenizer"]] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def in_version_4(asked: list[dict]) -> dict:
    done = subprocess.run([PYTHON, "-c", PROGRAM, json.dumps(asked)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------------------ logits

SIZE = dict(vocab_size=61, bos_token_id=0, eos_token_id=1, pad_token_id=1)
OLD = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZE)
NEW = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, **SIZE,
)  # fmt: skip
ALIKE = NEW | dict(num_key_value_heads=4)
LLAMA_3 = {
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 6.0, 8.0]}
BY_LAYER = dict(head_dim=8, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
CONFIGS = {  # as version 4 writes them; each with a theta that is not its family's
    "gpt2": ("gpt2", OLD),
    "gptj": ("gptj", OLD | dict(rotary_dim=4)),
    "gpt_neox": ("gpt_neox", ALIKE | dict(rotary_pct=0.5, rotary_emb_base=700)),
    "gpt_neox, linear": ("gpt_neox", ALIKE | dict(rotary_pct=0.5, rope_scaling={"type": "linear", "factor": 2.0})),
    "opt": ("opt", ALIKE | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "bloom": ("bloom", dict(hidden_size=32, n_layer=2, n_head=4, **SIZE)),
    "falcon": ("falcon", ALIKE | dict(rope_theta=700.0, new_decoder_architecture=False, alibi=False)),
    "falcon, alibi": ("falcon", ALIKE | dict(alibi=True)),
    "llama": ("llama", NEW),
    "llama, llama3": ("llama", NEW | dict(rope_theta=500000.0, rope_scaling=LLAMA_3)),
    "llama, yarn": ("llama", NEW | dict(rope_theta=700.0, rope_scaling=YARN)),
    "llama, linear": ("llama", NEW | dict(rope_scaling={"type": "linear", "factor": 3.0})),
    "llama, dynamic": ("llama", NEW | dict(
        rope_scaling={"rope_type": "dynamic", "factor": 3.0}, max_position_embeddings=16)),
    "llama, tied": ("llama", NEW | dict(tie_word_embeddings=True, rope_theta=700.0)),
    "mistral": ("mistral", NEW | dict(rope_theta=700.0, sliding_window=8, head_dim=8)),
    "qwen2": ("qwen2", NEW | dict(rope_theta=700.0, use_sliding_window=False, tie_word_embeddings=True)),
    "qwen2, yarn": ("qwen2", NEW | dict(rope_theta=700.0, rope_scaling=YARN)),
    "qwen3": ("qwen3", NEW | dict(rope_theta=700.0, head_dim=16)),
    "gemma": ("gemma", NEW | dict(rope_theta=700.0, head_dim=8)),
    "gemma2": ("gemma2", NEW | dict(rope_theta=700.0, **BY_LAYER, query_pre_attn_scalar=8)),
    "gemma3_text": ("gemma3_text", NEW | dict(
        rope_theta=700.0, rope_local_base_freq=70.0, rope_scaling={"rope_type": "linear", "factor": 8.0}, **BY_LAYER)),
    "olmo": ("olmo", NEW | dict(rope_theta=700.0, rope_scaling={"type": "linear", "factor": 2.0})),
    "olmo2": ("olmo2", NEW | dict(rope_theta=700.0)),
    "olmo3": ("olmo3", NEW | dict(
        rope_theta=500000.0, rope_scaling=YARN, **BY_LAYER)),
    "phi": ("phi", ALIKE | dict(rope_theta=700.0, partial_rotary_factor=0.5)),
    "phi3": ("phi3", NEW | dict(rope_theta=700.0)),
    "phi3, longrope": ("phi3", NEW | dict(rope_scaling=LONG, original_max_position_embeddings=8)),
    "stablelm": ("stablelm", NEW | dict(rope_theta=700.0, partial_rotary_factor=0.5)),
    "cohere": ("cohere", NEW | dict(rope_theta=700.0)),
    "cohere2": ("cohere2", NEW | dict(rope_theta=700.0, **BY_LAYER)),
    "starcoder2": ("starcoder2", NEW | dict(rope_theta=700.0)),
    "granite": ("granite", NEW | dict(rope_theta=700.0, logits_scaling=2.0, residual_multiplier=0.5)),
    "smollm3": ("smollm3", NEW | dict(rope_theta=700.0, no_rope_layers=[1, 0])),
    "glm4": ("glm4", NEW | dict(rope_theta=700.0, partial_rotary_factor=0.5, head_dim=8)),
    "nemotron": ("nemotron", NEW | dict(rope_theta=700.0, partial_rotary_factor=0.5)),
    "persimmon": ("persimmon", ALIKE | dict(rope_theta=700.0, partial_rotary_factor=0.5)),
    "helium": ("helium", NEW | dict(rope_theta=700.0, head_dim=8)),
    "exaone4": ("exaone4", NEW | dict(rope_theta=700.0, **BY_LAYER)),
    "ernie4_5": ("ernie4_5", NEW | dict(rope_theta=700.0, head_dim=8)),
    "seed_oss": ("seed_oss", NEW | dict(rope_theta=700.0, head_dim=8)),
    "modernbert-decoder": ("modernbert-decoder", ALIKE | dict(
        global_rope_theta=700.0, local_rope_theta=700.0, global_attn_every_n_layers=2)),
}  # fmt: skip
IDS = (torch.arange(2, 42) * 7 % 61).view(1, 40)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Every config's model as transformers 5 has it after the export, and what version 4 says of the same folders."""
    root, ours, asked = tmp_path_factory.mktemp("exported"), {}, []
    for number, (name, (kind, fields)) in enumerate(CONFIGS.items()):
        config, folder = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(fields))), root / str(number)
        real = real_model(config)
        with torch.no_grad():
            before = real(IDS).logits
        assert export_model(folder, config, real.named_parameters(), tokenizer=None, readme="") == []
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, before), name
        ours[name] = folder, before
        asked.append({"model": str(folder), "ids": IDS.tolist()})
    return ours, in_version_4(asked)


@pytest.mark.parametrize("name", CONFIGS)
def test_version_4_computes_the_same_logits(name, exported):
    folder, expected = exported[0][name]
    answer = exported[1][str(folder)]
    assert isinstance(answer, list), answer
    assert answer[0] == "torch.float32"
    torch.testing.assert_close(torch.tensor(answer[1]), expected, rtol=1e-4, atol=2e-5)


# --------------------------------------------------------------------------------------------------------- tokenizers


TEXTS = ["hello", " the  cat", "the cat</s> sat\n\n on\tit", "été <|tool|> 12345", "<s>mat", "", "▁x "]


byte_level = partial(tokenizer_of, "gpt2")
metaspace = partial(tokenizer_of, "llama2", begins=True)  # byte fallback, a space before each text, <s> in front


def with_more(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>", AddedToken("<|call|>", lstrip=True)]})
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    return tokenizer


# A tokenizer, and what its published tokenizer_config.json has otherwise.
TOKENIZERS = {
    "byte-level": (byte_level, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "byte-level of version 5": (byte_level, {}),
    "gpt2": (byte_level, {"tokenizer_class": "GPT2Tokenizer"}),
    "gpt2 fast": (byte_level, {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}),
    "qwen2": (byte_level, {"tokenizer_class": "Qwen2Tokenizer", "split_special_tokens": False}),
    "bloom": (byte_level, {"tokenizer_class": "BloomTokenizerFast"}),
    "unknown": (byte_level, {"tokenizer_class": "SomebodysTokenizer"}),
    "byte-level llama": (byte_level, {"tokenizer_class": "LlamaTokenizerFast"}),
    "metaspace": (metaspace, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "llama": (metaspace, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}),
    "llama, legacy": (metaspace, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}),
    "llama without <s>": (metaspace, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}),
    "llama with </s>": (metaspace, {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}),
    "gemma": (metaspace, {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}),
    "more special tokens": (lambda: with_more(byte_level()), {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "more of version 5": (lambda: with_more(metaspace()), {}),
    "a template": (
        lambda: byte_level(template="{% for m in messages %}{{ m.content }}{% endfor %}"),
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Every tokenizer as it is trained with, its exported folder, and what version 4 says of that."""
    root, ours, asked = tmp_path_factory.mktemp("tokenizers"), {}, []
    config = transformers.CONFIG_MAPPING["llama"].from_dict(NEW | {"vocab_size": 700})
    real = real_model(config)
    for number, (name, (make, changes)) in enumerate(TOKENIZERS.items()):
        source, folder = root / f"{number}", root / f"{number}-out"
        make().save_pretrained(source)
        config.save_pretrained(source)
        path = source / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        tokenizer = AutoTokenizer.from_pretrained(source)
        assert export_model(folder, config, real.named_parameters(), tokenizer=tokenizer, readme="") == []
        ours[name] = folder, tokenizer
        asked.append({"tokenizer": str(folder), "texts": TEXTS})
    return ours, in_version_4(asked)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_both_versions_make_the_ids_that_were_trained(name, tokenizers):
    folder, tokenizer = tokenizers[0][name]
    ids, loaded = tokenizer(TEXTS)["input_ids"], AutoTokenizer.from_pretrained(folder)
    assert loaded(TEXTS)["input_ids"] == ids
    assert loaded.all_special_tokens == tokenizer.all_special_tokens
    assert loaded.chat_template == tokenizer.chat_template
    answer = tokenizers[1][str(folder)]
    assert isinstance(answer, list), answer
    assert answer[0] == ids
    assert set(tokenizer.extra_special_tokens) <= set(answer[1]) <= set(tokenizer.all_special_tokens)
    assert answer[2] == tokenizer.chat_template
