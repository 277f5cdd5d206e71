"""Architectures tried out without weights: a small copy says what the whole model would, and errors are laid at the
right door."""

import pytest
import torch
from transformers import CONFIG_MAPPING, BertConfig, GPT2Config, LlamaConfig, MambaConfig, OPTConfig

from lowmem.cudasim import cuda_ops
from lowmem.cudasim.gpus import CARDS
from lowmem.errors import InputError
from lowmem.models.build import load_config
from lowmem.models.compatibility import compare_small_copy
from lowmem.planning import gpu_plan, planner
from lowmem.planning.planner import make_plan
from lowmem.planning.question import Question
from lowmem.settings import Settings

SCAN = {"num_hidden_layers": 2, "hidden_size": 64, "state_size": 4, "vocab_size": 99}
OPT_350M = dict(word_embed_proj_dim=512, hidden_size=1024, num_attention_heads=16, do_layer_norm_before=False)
FALCON_RW = dict(alibi=True, multi_query=False, parallel_attn=False, num_attention_heads=32, hidden_size=2048)
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 99}


def compare(config, document_mask: bool = False, precision: str = "fp32") -> str | None:
    return compare_small_copy(config, document_mask, precision, residual="fp32")


@pytest.mark.quick(4)
@pytest.mark.parametrize(("kind", "fields"), [
    ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    ("gpt2", {"n_layer": 1, "n_embd": 12, "n_head": 1, "vocab_size": 7}), ("gptj", {}), ("opt", OPT_350M),
    ("falcon", FALCON_RW), ("llama", {"num_key_value_heads": 8}),
    ("llama", {"num_key_value_heads": 1, "vocab_size": 32_001, "pad_token_id": 32_000}),
    ("granite", {"logits_scaling": 8.0}),
    *((kind, {}) for kind in ("codegen", "gpt_neo", "mpt", "falcon", "qwen3", "mixtral", "gemma2", "cohere")),
])  # fmt: skip
def test_the_small_copy_of_a_decoder_of_any_size_comes_apart_in_either_precision(kind, fields, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the seed of all GPUs was set"))
    config = CONFIG_MAPPING[kind](**fields)
    before = config.to_dict()
    assert compare(config, precision="bf16") is None
    assert config.to_dict() == before


def test_what_the_pieces_cannot_express_is_refused_by_name_without_weights():
    with pytest.raises(InputError, match="BertLMHeadModel attends to later tokens"):
        compare(BertConfig())
    assert compare(BertConfig(is_decoder=True)) is None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_does_not_run_in_16_bit_is_refused_with_the_precision_that_may(precision):
    """Its convolution's bias is a vector, and so in fp32."""
    with pytest.raises(InputError, match="MambaForCausalLM does not run with matrices in .*; --precision fp32"):
        compare(MambaConfig(**SCAN), precision=precision)


def test_a_document_mask_is_refused_where_it_would_not_be_honoured():
    assert compare(GPT2Config(), document_mask=True) is None
    with pytest.raises(InputError, match="OPTForCausalLM does not honour a document mask"):
        compare(OPTConfig(), document_mask=True)


def test_a_copy_that_cannot_be_made_is_no_reason_to_refuse():
    said = compare(GPT2Config(n_embd=10, n_head=3))
    assert said.startswith("a small copy of it does not run (") and "divisible" in said


def test_the_random_numbers_of_a_run_are_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    compare(GPT2Config())
    assert torch.equal(torch.get_rng_state(), before)


# --- whose error it is


def planned(config, precision: str = "bf16"):
    settings = Settings(model="small", init="random", seq=16, batch=2)
    return make_plan(Question(settings, config, precision, CARDS["rtx3090"]))


def test_an_operator_that_refuses_what_the_architecture_gives_it_is_the_architectures_error(monkeypatch):
    monkeypatch.setattr(planner, "compare_small_copy", lambda *_: None)  # which would refuse it before
    with pytest.raises(InputError, match="small cannot be simulated in fp16, so it is not trained: Input type"):
        planned(MambaConfig(**SCAN), "fp16")


def test_an_error_of_ours_beneath_the_architectures_code_is_ours(monkeypatch):
    monkeypatch.setattr(cuda_ops, "_without_data", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        planned(LlamaConfig(**TINY))


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, KeyError])
def test_an_error_of_ours_above_it_is_ours(monkeypatch, error):
    def fastest(*_):
        raise error("a bug")

    monkeypatch.setattr(gpu_plan, "fastest_layout", fastest)
    with pytest.raises(error, match="a bug"):
        planned(load_config("gpt2-demo", "random"))
