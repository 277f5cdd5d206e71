import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from lowmem.data import tokenizer as module
from lowmem.data.encoder import Encoder
from lowmem.data.tokenizer import byte_level_tokenizer, is_byte_level, load_tokenizer
from lowmem.errors import InputError

BYTES = byte_level_tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(module.hub, "is_reachable", lambda: False)


@given(TEXT)
@example("a <|endoftext|><|endoftext|> b")
@example("\x00 \r\n\t  é \u2028 😀 don't  ")
@settings(deadline=None)
def test_byte_level_ids_are_the_bytes_and_decode_without_loss(text):
    ids = BYTES(text, add_special_tokens=False)["input_ids"]
    assert BYTES.decode(ids) == text
    assert Encoder(BYTES)([text])[0].tolist() == ids  # the shortcut by bytes gives the tokenizer's own ids
    if "<|endoftext|>" not in text:
        assert ids == list(text.encode())


def test_byte_level_has_257_ids_and_survives_saving_and_loading(tmp_path):
    BYTES.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == 257 and loaded.eos_token_id == 256 and loaded.get_vocab() == BYTES.get_vocab()
    text = "naïve <|endoftext|> 😀\n"
    assert loaded(text)["input_ids"] == BYTES(text)["input_ids"] and loaded.decode(loaded(text)["input_ids"]) == text
    assert is_byte_level(loaded) and is_byte_level(load_tokenizer(str(tmp_path), "pretrained", 257))


def test_a_folders_own_tokenizer_is_used_for_either_init(tmp_path, bpe_tokenizer):
    bpe_tokenizer.save_pretrained(tmp_path)
    for init in ("random", "pretrained"):
        loaded = load_tokenizer(str(tmp_path), init, 400)
        assert loaded.get_vocab() == bpe_tokenizer.get_vocab() and not is_byte_level(loaded)


def test_random_weights_without_a_tokenizer_get_bytes_and_never_ask_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(module.hub, "is_reachable", lambda: pytest.fail("the hub was asked"))
    GPT2Config().save_pretrained(tmp_path)  # AutoTokenizer makes an empty GPT2Tokenizer of this
    assert is_byte_level(load_tokenizer(str(tmp_path), "random", 50257))
    assert is_byte_level(load_tokenizer("nobody/no-such-model", "random", 257))


def test_pretrained_without_a_tokenizer_is_refused_in_one_sentence(tmp_path, no_hub):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path), "pretrained", 50257)
    with pytest.raises(InputError, match="neither in the cache nor to be had from the hub"):
        load_tokenizer("nobody/no-such-model", "pretrained", 50257)


def test_a_broken_tokenizer_is_not_replaced_by_bytes(tmp_path, bpe_tokenizer):
    bpe_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(str(tmp_path), "random", 50257)


def test_a_model_with_too_few_ids_is_refused(tmp_path, no_hub):
    with pytest.raises(InputError, match="256"):
        load_tokenizer("nobody/no-such-model", "random", 256)


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path, bpe_tokenizer):
    PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path), "pretrained", 400)


def test_hub_is_unreachable_without_an_answer_and_when_offline_is_set(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not module.hub.is_reachable.__wrapped__()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(module.hub.urllib.request, "urlopen", lambda *_, **__: pytest.fail("the hub was asked"))
    assert not module.hub.is_reachable.__wrapped__()
