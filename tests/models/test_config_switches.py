"""Fields of a config.json that say how others ran the model: training runs in spite of them, and they come back."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from families import FAMILIES
from lowmem.config_switches import remarks
from lowmem.errors import InputError
from lowmem.models.build import load_config, make_decoder
from lowmem.models.compatibility import compare_small_copy
from lowmem.models.export import export_model
from lowmem.run.identity import config_identity

LLAMA = FAMILIES["llama"]()
EXPORTED = (
    {"gradient_checkpointing": True}, {"return_dict": False}, {"output_hidden_states": True},
    {"output_hidden_states": True, "return_dict": False}, {"output_attentions": True}, {"pad_token_id": -1},
    {"torchscript": True}, {"output_router_logits": True},
)  # fmt: skip
LEFT_OUT = (
    {"_attn_implementation": "flash_attention_2"}, {"attn_implementation": "flash_attention_3"},
    {"_attn_implementation": "flex_attention"}, {"bos_token_id": [1, 2]}, {"torch_dtype": "auto"},
    {"torch_dtype": "torch.float16"}, {"torch_dtype": "float8_e4m3fn"}, {"dtype": "int8"}, {"pad_token_id": 32000},
    {"use_return_dict": True}, {"quantization_config": {}}, {"use_cache": "true"},
    {"problem_type": "single_label_classification", "id2label": {"0": "x"}, "label2id": {"x": 0}},
)  # fmt: skip
UNTOUCHED = (
    {}, {"use_cache": False}, {"pad_token_id": 0}, {"quantization_config": None}, {"torch_dtype": "bfloat16"},
    {"problem_type": "regression"}, {"_attn_implementation": "eager"},
    {"_attn_implementation_internal": "flash_attention_2"}, {"pruned_heads": {}}, {"is_decoder": True},
    {"chunk_size_feed_forward": 2}, {"eos_token_id": [2, 5]},
    {"gradient_checkpointing": False, "return_dict": True, "output_attentions": False},
)  # fmt: skip


def config_of(tmp_path, **fields):
    given = {name: value for name, value in LLAMA.to_dict().items() if name not in ("dtype", *fields)} | fields
    (tmp_path / "config.json").write_text(json.dumps(given))
    return load_config(str(tmp_path), "pretrained")


def exported(tmp_path, config) -> dict:
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    export_model(tmp_path / "model", config, model.named_parameters(), tokenizer=None, readme="")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    return json.loads((tmp_path / "model" / "config.json").read_text())


@pytest.mark.quick(6)
@pytest.mark.parametrize("fields", [*EXPORTED, *LEFT_OUT, *UNTOUCHED], ids=json.dumps)
def test_the_model_is_trained_and_exported_and_what_was_set_is_said(tmp_path, fields):
    config = config_of(tmp_path, **fields)
    decoder = make_decoder(config, "fp32", "fp32")
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    decoder.model.load_state_dict(stock.state_dict(), assign=True)
    ids = torch.arange(3, 13)[None]
    assert torch.equal(decoder.logits(ids), stock.train()(ids).logits) or fields.get("_attn_implementation") == "eager"
    assert compare_small_copy(config, False, "fp32", "fp32") is None

    said, given = " ".join(remarks(config)), exported(tmp_path, config)
    assert not any(
        "own_switches" in text or "left_out" in text for text in map(json.dumps, (given, config_identity(config)))
    )
    if fields in UNTOUCHED:
        assert said == ""
        return
    name = next(iter(fields))
    assert f"config.json sets {name}={json.dumps(fields[name])}" in said and said.count("config.json") == 1
    if fields in EXPORTED:
        assert given | fields == given and "exported as it is" in said
    else:
        assert given.get(name) != fields[name] and "left out" in said


def test_switches_of_a_config_within_another(tmp_path):
    text = transformers.Gemma3TextConfig(num_hidden_layers=2, vocab_size=61, pad_token_id=61).to_dict()
    fields = {"model_type": "gemma3", "text_config": text | {"use_cache": False, "output_hidden_states": True}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(str(tmp_path), "random")
    assert config.text_config.output_hidden_states is False and config.text_config.pad_token_id is None
    assert remarks(config) == [
        "config.json sets output_hidden_states=true, which changes nothing in training and is exported as it is",
        "config.json sets pad_token_id=61, with which transformers loads no model here: it is left out",
    ]


def test_what_a_run_is_known_by_has_no_switches_and_the_padding_as_it_was_given(tmp_path):
    plain = config_identity(config_of(tmp_path, pad_token_id=-1))
    assert plain["pad_token_id"] == -1
    assert (
        config_identity(config_of(tmp_path, pad_token_id=-1, gradient_checkpointing=True, return_dict=False)) == plain
    )


def test_fields_that_transformers_refuses_are_named(tmp_path):
    for name, value in {"tie_word_embeddings": None, "eos_token_id": "2", "num_attention_heads": 3}.items():
        with pytest.raises(InputError, match=f"not a valid llama config.*{name.split('_')[-1]}"):
            config_of(tmp_path, **{name: value})


def test_the_first_name_of_longrope_is_read(tmp_path):
    """Phi-3-mini-128k as first published."""
    rope = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 6.0, 8.0]}
    fields = {"model_type": "phi3", "original_max_position_embeddings": 16, "pad_token_id": 0}
    wanted = config_of(tmp_path, **fields, rope_scaling=rope)
    found = config_of(tmp_path, **fields, rope_scaling=rope | {"type": "su"})
    assert found.to_dict() == wanted.to_dict() and found.rope_parameters["original_max_position_embeddings"] == 16
