"""Published configs, generation configs and tokenizers are exported as they came, mended aloud, or refused early."""

import copy
import json

import pytest
import test_load_and_export
import torch
import transformers
from test_load_and_export import export, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem.errors import InputError
from lowmem.models.build import build_model, load_config, own_generation_config
from lowmem.models.description import config_fields, rehearsed
from lowmem.models.export import BeyondRange, export_model

SAMPLING = {"temperature": 0.9, "top_p": 0.6}


gpt2 = test_load_and_export.gpt2


@pytest.mark.parametrize(("published", "said"), [
    ({"do_sample": False} | SAMPLING, "values without effect (temperature, top_p)"),
    (SAMPLING, "values without effect (temperature, top_p)"), ({"temperature": 0, "do_sample": False}, "(temperature)"),
    ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, "(early_stopping, length_penalty)"),
    ({"output_attentions": True, "return_dict_in_generate": False}, "(output_attentions)"),
    ({"pad_token_id": -1}, "(pad_token_id)"), ({"do_sample": True, "top_k": 0, "repetition_penalty": 1.1}, None),
    ({"forced_eos_token_id": 3, "suppress_tokens": [1], "cache_implementation": "hybrid"}, None),
    ({"chat_format": "chatml", "max_window_size": 100}, None), ({"num_return_sequences": 3}, "left out of the export"),
    ({"max_new_tokens": 0}, "left out of the export"), ([], "left out of the export"), ("{", "left out of the export"),
])  # fmt: skip
def test_a_published_generation_config_is_exported_as_it_came(published, said, gpt2, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    text = published if isinstance(published, str) else json.dumps(published)
    (tmp_path / "generation_config.json").write_text(f"\ufeff{text}")
    sentences: list[str] = []
    found = own_generation_config(str(tmp_path), "pretrained", sentences.append)
    sentences += rehearse(tmp_path / "rehearsal", gpt2.config, tiny_tokenizer(), found, torch.float32)
    assert not (tmp_path / "rehearsal").exists()
    assert (said is None and not sentences) or (len(sentences) == 1 and said in sentences[0])
    assert export(tmp_path / "model", gpt2, tokenizer=tiny_tokenizer(), generation_config=found) == []
    kept = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert kept["eos_token_id"] == 60
    if said is None or "left out" not in said:
        assert {name: kept[name] for name in published} == published
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def rehearse(*given) -> list[str]:
    with rehearsed(*given) as rehearsal:
        return rehearsal.remarks


@pytest.mark.parametrize(
    "published",
    [
        {"temperature": 0.7, "do_sample": False, "max_length": 50},  # values of generation, as version 4 kept them
        {"task_specific_params": {"text-generation": {"do_sample": True}}, "my": {"deep": [1, None]}},
        {"auto_map": {"AutoConfig": "x.Y"}, "architectures": ["GPT2Model"]},
        {"torch_dtype": "float16"},
    ],
)
def test_a_published_config_is_exported_and_loads(published, gpt2, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "dtype"} | published))
    config = load_config(str(tmp_path), "pretrained")
    assert rehearse(tmp_path / "rehearsal", config, None, None, torch.float32) == []
    assert export_model(tmp_path / "model", config, gpt2.named_parameters(), tokenizer=None, readme="") == []
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.float32
    kept = json.loads((tmp_path / "model/config.json").read_text())
    assert kept["dtype"] == kept["torch_dtype"] == "float32" and kept["architectures"] == ["GPT2LMHeadModel"]
    assert "auto_map" not in kept


LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA_3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("kind", "version_4"),
    [
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA_3}),
        ("gpt_neox", {"rotary_emb_base": 7.0, "rotary_pct": 0.5, "rope_scaling": None}),
        ("olmo", {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 8.0}}),
        ("gemma3_text", {"rope_theta": 7.0, "rope_local_base_freq": 70.0, "rope_scaling": LINEAR}),
    ],
)
def test_rotary_embeddings_are_spelled_as_both_versions_spell_them(kind, version_4):
    config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(version_4))
    fields = config_fields(config)
    assert {name: fields[name] for name in version_4} == version_4
    assert fields["rope_parameters"] == config.rope_parameters


def test_one_frequency_for_full_and_sliding_attention_is_spelled_once():
    thetas = {"global_rope_theta": 700.0, "local_rope_theta": 700.0}
    fields = config_fields(transformers.CONFIG_MAPPING["modernbert-decoder"].from_dict(thetas))
    assert fields["global_rope_theta"] == 700.0 and "local_rope_theta" not in fields


def test_what_version_4_cannot_express_is_said(tmp_path):
    config = transformers.CONFIG_MAPPING["olmo3"].from_dict(
        dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
             layer_types=["sliding_attention", "full_attention"], rope_theta=7.0, eos_token_id=0, pad_token_id=0)
    )  # fmt: skip
    said = rehearse(tmp_path / "rehearsal", config, None, None, torch.float32)
    assert len(said) == 1 and "for transformers 5" in said[0]


@pytest.mark.parametrize("template", [{"default": "d", "a/b": "x"}, "\ud800"])
def test_a_tokenizer_that_cannot_be_saved_is_refused_before_training(template, gpt2, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="could not be exported after training: the tokenizer cannot be written"):
        rehearse(tmp_path / "rehearsal", gpt2.config, tokenizer, None, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizers_other_files_are_exported_as_they_are(gpt2, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    (tmp_path / "source/vocab.txt").write_bytes(b"\xef\xbb\xbf\xe9\n")  # Latin-1, and nothing reads it here
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    assert rehearse(tmp_path / "rehearsal", gpt2.config, tokenizer, None, torch.float32) == []
    assert export(tmp_path / "model", gpt2, tokenizer=tokenizer) == []
    assert (tmp_path / "model/vocab.txt").read_bytes() == b"\xe9\n"


def test_a_run_refuses_that_before_its_first_step(train, finished, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    for path in (finished / "model").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "model/tokenizer_config.json"
    templates = [{"name": name, "template": "x"} for name in ("default", "a/b")]
    (tmp_path / "model/chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    assert train(tmp_path / "out", "--model", str(tmp_path / "model"), "--init", "pretrained") == 2
    assert "Invalid chat template name: 'a/b'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_names_from_another_system_are_written_as_escapes(gpt2, tmp_path):
    assert export(tmp_path / "model", gpt2, readme="a command: --out o\udcff") == []
    assert "--out o\\udcff\n" in (tmp_path / "model/README.md").read_text()


def test_ids_that_a_tokenizer_does_not_have_stay_the_config_s(tmp_path):
    config = transformers.CONFIG_MAPPING["modernbert-decoder"]  # which takes no None for them
    config = config(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    bos_token_id=5, eos_token_id=3, pad_token_id=0, cls_token_id=5, sep_token_id=3)  # fmt: skip
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    parameters = build_model(config).named_parameters()
    zeros = ((name, torch.zeros(parameter.shape)) for name, parameter in parameters)
    assert export_model(tmp_path / "model", config, zeros, tokenizer=tokenizer, readme="") == []
    kept = json.loads((tmp_path / "model/config.json").read_text())
    assert (kept["bos_token_id"], kept["eos_token_id"]) == (5, 60)


# ------------------------------------------------------------------------------------------------------------- casts


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 70000.0), (torch.float16, -65520.0), (torch.bfloat16, 3.4e38)]
)
def test_a_weight_beyond_the_range_of_a_dtype_is_named_and_nothing_is_written(dtype, value, gpt2, tmp_path):
    with pytest.raises(BeyondRange, match=r"transformer.h.1.ln_2.bias holds [\d.e+]+, and b?float16 ends at"):
        export(tmp_path / "model", gpt2, with_value(gpt2, value), dtype=dtype)
    assert list(tmp_path.iterdir()) == []
    assert export(tmp_path / "model", gpt2, with_value(gpt2, value)) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_that_is_not_finite_is_exported_and_named(dtype, value, gpt2, tmp_path):
    found = export(tmp_path / "model", gpt2, with_value(gpt2, value), dtype=dtype)
    assert found == ["NaN or infinity in 1 tensors (transformer.h.1.ln_2.bias)"]
    assert not AutoModelForCausalLM.from_pretrained(tmp_path / "model").get_parameter(BIAS).isfinite().all()


BIAS = "transformer.h.1.ln_2.bias"


def with_value(model, value: float):
    for name, parameter in model.named_parameters():
        values = parameter.detach().clone()
        if name == BIAS:
            values[3] = value
        yield name, values
