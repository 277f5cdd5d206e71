"""Eleven families of decoders taken apart: the pieces are the model, bit for bit, or the model is refused by name.

Every model here is the real class of transformers at a tiny size, with weights large enough that attention and norms
matter (transformers draws them so small that a missing mask would hardly show).
"""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CTRLConfig,
    GPT2Config,
    LlamaConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PreTrainedModel,
    logging,
)

from families import FAMILIES, LLAMA, MORE_FAMILIES, NEW, OLD, V
from lowmem.core.decoder import Decoder
from lowmem.core.layers import cast_explicitly
from lowmem.core.logits import LogitFunction
from lowmem.errors import InputError
from lowmem.models.build import build_model
from lowmem.models.compatibility import check_pieces
from reference import logits_of_pieces, mixed, model_of

logging.set_verbosity_error()

TIED = {"gpt2", "gpt_neo", "opt", "opt_projected", "bloom", "biogpt", "gpt_bigcode"}
HONOUR_DOCUMENT_MASK = {"gpt2", "gpt_neo", "gptj", "codegen", "gpt_bigcode", "llama", "gpt_neox", "qwen3"}
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(config) -> nn.Module:
    return model_of(config).eval()


def build_on_meta(config) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, V, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of_whole(model: nn.Module, input_ids) -> torch.Tensor:
    return model(input_ids=input_ids, use_cache=False).logits


# --- what is taken apart ---


@every_family
def test_the_pieces_logits_are_bitwise_those_of_the_whole_model(family):
    model = build(FAMILIES[family]())
    decoder = Decoder(model)
    for shape in ((2, 11), (1, 1), (3, 64)):
        input_ids = tokens(*shape)
        assert torch.equal(logits_of_pieces(decoder, input_ids), logits_of_whole(model, input_ids))
    check_pieces(decoder, V)


@every_family
def test_every_parameter_is_in_one_unit_on_meta_too_and_the_head_is_known_to_be_tied_or_not(family):
    config = FAMILIES[family]()
    model = build(config)
    decoder, meta = Decoder(model), Decoder(build_on_meta(config))
    assert [unit.name for unit in decoder.units] == ["embedding", "block 0", "block 1", "block 2", "final"]
    owned = {name: parameter for unit in decoder.units for name, parameter in unit.parameters.items()}
    assert sum(len(unit.parameters) for unit in decoder.units) == len(owned)
    assert owned.keys() == dict(model.named_parameters()).keys()
    assert all(owned[name] is parameter for name, parameter in model.named_parameters())
    for block, unit in zip(decoder.blocks, decoder.units[1:-1], strict=True):
        assert {id(p) for p in block.parameters()} == {id(p) for p in unit.parameters.values()}
    tied, meta_tied = (
        any(parameter is each.head_weight for parameter in each.units[0].parameters.values())
        for each in (decoder, meta)
    )
    assert tied == meta_tied == (family in TIED)
    assert decoder.head_weight.shape[0] == V
    assert (decoder.head_bias is not None) == (family in {"gptj", "codegen"})
    holder = decoder.units[0 if tied else -1]
    assert any(parameter is decoder.head_weight for parameter in holder.parameters.values())
    assert all(parameter.is_meta for unit in meta.units for parameter in unit.parameters.values())
    of_units, of_meta = ([(unit.name, list(unit.parameters)) for unit in each.units] for each in (decoder, meta))
    assert of_meta == of_units


def test_a_model_that_replaces_its_buffers_while_it_runs_is_refused():
    """CTRL's table of positions follows the device of what it computes with."""
    with pytest.raises(InputError, match="CTRLLMHeadModel: the model replaces its buffers while it runs"):
        Decoder(build_model(CTRLConfig(**OLD, dff=32)))


def test_blocks_that_give_lists_are_understood():
    """OpenAI's first GPT."""
    sizes = {key: size for key, size in OLD.items() if not key.endswith("_id")}
    check_pieces(Decoder(build(OpenAIGPTConfig(**sizes))), V)


def test_a_gpt2_whose_config_names_a_padding_token_is_taken_apart_on_meta_too():
    """Fine-tuned GPT-2s often do; transformers then looks for it among the input ids, which meta cannot answer."""
    config = GPT2Config(**{**OLD, "pad_token_id": 1})
    assert len(Decoder(build_on_meta(config)).units) == 5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_of_one_block_is_taken_apart(family):
    model = build(
        GPT2Config(**{**OLD, "n_layer": 1}) if family == "gpt2" else LlamaConfig(**{**LLAMA, "num_hidden_layers": 1})
    )
    decoder = Decoder(model)
    assert [unit.name for unit in decoder.units] == ["embedding", "block 0", "final"]
    assert torch.equal(logits_of_pieces(decoder, tokens(2, 7)), logits_of_whole(model, tokens(2, 7)))


@every_family
def test_gradients_through_the_pieces_are_bitwise_those_of_the_whole_model(family):
    model = build(FAMILIES[family]())
    decoder = Decoder(model)
    input_ids = tokens(2, 9)
    model(input_ids=input_ids, use_cache=False).logits.square().sum().backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    logits_of_pieces(decoder, input_ids).square().sum().backward()
    for name, parameter in model.named_parameters():
        # A tied weight's two contributions may be added in either order: a + b is b + a.
        assert torch.equal(parameter.grad, whole[name]), name


@pytest.mark.quick(12)
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=["fp32 residual", "16-bit residual"])
@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_the_check_passes_in_16_bit(family, residual):
    model = mixed(build((FAMILIES | MORE_FAMILIES)[family]()), torch.bfloat16)
    cast_explicitly(model, residual)
    check_pieces(Decoder(model), V)


def test_the_check_passes_in_fp16_with_the_vocabulary_of_a_real_model():
    """Seen to fail: values made up for the comparison were not finite, so that every such model was refused."""
    model = mixed(build(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50_257)), torch.float16)
    cast_explicitly(model, torch.float16)
    check_pieces(Decoder(model), 50_257)


# --- what a model does to its logits ---


@pytest.mark.parametrize(("family", "function"), [
    ("gemma2", LogitFunction(3.0, 1 / 3)), ("nanochat", LogitFunction(15.0, 1 / 15)), ("cohere", LogitFunction(2.0)),
    ("granite", LogitFunction(2.0)), ("llama", LogitFunction()),
])  # fmt: skip
def test_a_factor_or_a_soft_cap_on_the_logits_is_found_with_and_without_weights(family, function):
    config = (FAMILIES | MORE_FAMILIES)[family]()
    decoder = Decoder(build(config))
    assert dataclasses.astuple(decoder.logit_function) == pytest.approx(dataclasses.astuple(function))
    assert Decoder(build_on_meta(config)).logit_function == decoder.logit_function
    whole = logits_of_whole(decoder.model, tokens(2, 8))
    assert (decoder.logit_function(logits_of_pieces(decoder, tokens(2, 8))) - whole).abs().max() < 1e-5
    check_pieces(decoder, V)


def test_a_function_of_the_logits_that_is_not_the_models_is_found_out_by_the_check():
    decoder = Decoder(build(MORE_FAMILIES["gemma2"]()))
    decoder.logit_function = LogitFunction(3.0, 0.34)
    with pytest.raises(InputError, match="Gemma2ForCausalLM cannot be trained in pieces"):
        check_pieces(decoder, V)


# --- documents packed into a row ---


def packed_and_apart(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, T, V] of documents of 9, 4 and 11 tokens in one row, and of each document in a row of its own."""
    model = build(FAMILIES[family]())
    lengths = (9, 4, 11)
    documents = tokens(1, sum(lengths)).split(lengths, dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    numbers = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])[None]
    packed = logits_of_pieces(Decoder(model), torch.cat(documents, dim=1), positions, numbers)
    return packed, torch.cat([logits_of_whole(model, document) for document in documents], dim=1)


@pytest.mark.parametrize("family", sorted(HONOUR_DOCUMENT_MASK))
def test_with_a_document_mask_packed_logits_are_those_of_the_documents_apart(family):
    packed, apart = packed_and_apart(family)
    # Not bitwise: products and softmax run over other shapes. Worst seen: 5e-7 of the largest logit.
    torch.testing.assert_close(packed, apart, rtol=0, atol=2e-6 * apart.abs().max().item())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_document_numbers_documents_see_one_another(family):
    """So that the test above cannot pass by positions alone."""
    model = build(FAMILIES[family]())
    first, second = tokens(1, 6), tokens(1, 14)[:, 6:]
    positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
    row = torch.cat([first, second], dim=1)
    logits = logits_of_pieces(Decoder(model), row, positions)[:, 6:]
    apart = logits_of_whole(model, second)
    assert (logits - apart).abs().max() > 0.01 * apart.abs().max()


@every_family
def test_a_document_mask_is_honoured_or_refused(family):
    decoder = Decoder(build(FAMILIES[family]()))
    if family in HONOUR_DOCUMENT_MASK:
        check_pieces(decoder, V, document_mask=True)
    else:
        with pytest.raises(InputError, match=f"{decoder.architecture} does not honour a document mask"):
            check_pieces(decoder, V, document_mask=True)


# --- what is refused ---


@pytest.mark.parametrize(("change", "what"), [
    (lambda logits: logits + 1, "add"), (lambda logits: logits.softmax(-1), "_softmax"),
    (lambda logits: logits.tanh().tanh(), "tanh"), (lambda logits: logits * logits, "mul"),
    (lambda logits: logits[..., :50], "another shape"), (lambda logits: torch.ones_like(logits), "ones_like"),
])  # fmt: skip
def test_what_is_neither_a_factor_nor_a_cap_on_the_logits_is_refused_by_name(change, what):
    model = build(FAMILIES["llama"]())
    before = model.forward

    def forward(**keywords):
        output = before(**keywords)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    with pytest.raises(InputError, match=rf"LlamaForCausalLM cannot be trained in pieces: .* \({what}\)"):
        Decoder(model)


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def share(model):
    model.transformer.h[2].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight


def use_twice(model):
    model.transformer.h[1] = model.transformer.h[0]


def never_run(model):
    model.transformer.forward = lambda *_, **__: (torch.zeros(2, 3, 32),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (share, "GPT2LMHeadModel: blocks share parameters"),
        (use_twice, "GPT2LMHeadModel"),
        (never_run, "GPT2LMHeadModel"),
        (
            lambda model: setattr(model.transformer, "forgotten", nn.Linear(3, 3)),
            r"neither embedding, blocks nor head use transformer\.forgotten\.weight",
        ),
        (lambda model: model.set_output_embeddings(Scaled(32, V, bias=False)), "GPT2LMHeadModel: the head is Scaled"),
        (
            lambda model: setattr(model.transformer, "others", nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])),
            "found 2 lists of 3 blocks",
        ),
    ],
    ids=["shared", "used twice", "never run", "unused", "another head", "two lists"],
)
def test_a_model_that_does_not_split_is_refused_by_name(change, said):
    model = build(FAMILIES["gpt2"]())
    change(model)
    with pytest.raises(InputError, match=said):
        Decoder(model)


# --- the model is left as it was found ---


def assert_untouched(model: nn.Module, decoder: Decoder) -> None:
    assert model.transformer.h is decoder.blocks
    assert "forward" not in vars(model.lm_head)


def test_the_model_is_whole_again_after_every_use():
    model = build(FAMILIES["gpt2"]())
    before, names = logits_of_whole(model, tokens(2, 5)), list(model.state_dict())
    decoder = Decoder(model)
    assert_untouched(model, decoder)
    logits_of_pieces(decoder, tokens(2, 5))
    check_pieces(decoder, V, document_mask=True)
    assert_untouched(model, decoder)
    assert list(model.state_dict()) == names
    assert torch.equal(logits_of_whole(model, tokens(2, 5)), before)


def test_the_block_list_is_restored_after_an_exception():
    model = build(FAMILIES["gpt2"]())
    decoder = Decoder(model)
    with pytest.raises(IndexError):
        decoder.embed(torch.full((1, 3), V))  # a token that the vocabulary does not have
    assert_untouched(model, decoder)
    with pytest.raises(RuntimeError):
        decoder.final(torch.zeros(1, 3, 5))  # a hidden state of another width
    assert_untouched(model, decoder)
    assert torch.equal(logits_of_pieces(decoder, tokens(1, 4)), logits_of_whole(model, tokens(1, 4)))


def test_a_padding_id_in_the_config_gives_no_warning_here_and_one_elsewhere(monkeypatch):
    warned = []
    monkeypatch.setattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: warned.append(1))
    config = FAMILIES["gpt2"]()
    config.pad_token_id = 0
    model = build(config)
    decoder = Decoder(model)
    check_pieces(decoder, V)
    logits_of_pieces(decoder, torch.zeros(1, 4, dtype=torch.int64))
    assert not warned
    logits_of_whole(model, tokens(1, 4))
    assert warned


def test_transformers_own_guess_of_documents_is_restored():
    from transformers import masking_utils

    guess = masking_utils.find_packed_sequence_indices
    decoder = Decoder(build(FAMILIES["llama"]()))
    with pytest.raises(IndexError):
        decoder.embed(torch.full((1, 3), V), document_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert masking_utils.find_packed_sequence_indices is guess


def test_a_head_whose_forward_was_replaced_keeps_it():
    """As explicit casts do (precision.py)."""
    model = build(FAMILIES["gpt2"]())
    own = model.lm_head.forward = functools.partial(nn.Linear.forward, model.lm_head)
    decoder = Decoder(model)
    logits_of_pieces(decoder, tokens(1, 4))
    check_pieces(decoder, V)
    assert vars(model.lm_head)["forward"] is own


@pytest.mark.parametrize("training", [True, False])
def test_the_check_leaves_training_mode_as_it_was(training):
    decoder = Decoder(build(FAMILIES["gpt2"]()).train(training))
    check_pieces(decoder, V)
    assert decoder.model.training is training
    assert all(block.training is training for block in decoder.blocks)


def test_leaving_out_whole_blocks_at_random_is_refused():
    with pytest.raises(InputError, match="layerdrop"):
        Decoder(build(OPTConfig(**{**FAMILIES["opt"]().to_diff_dict(), "layerdrop": 0.1})))


def test_a_model_that_sees_later_tokens_is_refused_by_the_check():
    config = BertConfig(**NEW, intermediate_size=64, is_decoder=False)
    with pytest.raises(InputError, match="attends to later tokens"):
        check_pieces(Decoder(build(config)), V)
    check_pieces(Decoder(build(BertConfig(**NEW, intermediate_size=64, is_decoder=True))), V)
