import gzip
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from lowmem.data import tokenizer as module
from lowmem.data.encoder import Encoder
from lowmem.data.tokenizer import byte_level_tokenizer, is_byte_level, load_tokenizer, tokenizer_blamed
from lowmem.errors import InputError
from tests.data.loading import POINTER, load

BYTES = byte_level_tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(module.hub, "why_unreachable", lambda: "no network")


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
    monkeypatch.setattr(module.hub, "why_unreachable", lambda: pytest.fail("the hub was asked"))
    GPT2Config().save_pretrained(tmp_path)  # AutoTokenizer makes an empty GPT2Tokenizer of this
    assert is_byte_level(load_tokenizer(str(tmp_path), "random", 50257))
    assert is_byte_level(load_tokenizer("nobody/no-such-model", "random", 257))


def test_pretrained_without_a_tokenizer_is_refused_in_one_sentence(tmp_path, no_hub):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path), "pretrained", 50257)
    with pytest.raises(InputError, match="neither in the cache nor to be had from the hub .no network"):
        load_tokenizer("nobody/no-such-model", "pretrained", 50257)


def in_file(name: str, old: str, new: str):
    """Changes a file of a tokenizer's folder."""

    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def with_files_alone(**files: bytes):
    """Leaves nothing of a tokenizer but its config and `files`, whose names have __ for a dot."""

    def change(folder):
        (folder / "tokenizer.json").unlink()
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)

    return change


LFS = POINTER.encode()
SPM = b"\n\x05rubbish"
BROKEN = {  # what is done to a folder with a tokenizer: what is said of it
    "cut": (with_files_alone(tokenizer__json=b"{"), ["tokenizer.json is not JSON", "again, complete"]),
    "of a newer version": (
        in_file("tokenizer.json", '"type": "BPE"', '"type": "BPE9"'),
        ["untagged enum", "(tokenizers ", "pip install --upgrade transformers tokenizers"],
    ),
    "sentencepiece": (with_files_alone(tokenizer__model=SPM), ["needs the package sentencepiece", "; pip install"]),
    "spiece": (with_files_alone(spiece__model=SPM), ["needs the package sentencepiece", "; pip install"]),
    "tekken": (with_files_alone(tekken__json=b'{"config": {}}'), ["the package mistral-common, ", "; pip install"]),
    "tiktoken": (with_files_alone(qwen__tiktoken=b"IQ== 0\n"), ["the package tiktoken", "pip install tiktoken"]),
    "no merges": (
        with_files_alone(tokenizer_config__json=b'{"tokenizer_class": "GPTNeoXTokenizer"}', vocab__json=b'{"a": 0}'),
        ["`merges`", "its vocabulary is only in vocab.json", "copy the model's tokenizer.json"],
    ),
    "bad regex": (
        in_file(
            "tokenizer.json",
            '"pre_tokenizer": {',
            '"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false},'
            '"x": {',
        ),
        ["cannot be read: Oniguruma error", "damaged or of a newer version"],
    ),
    "a length that is none": (
        in_file("tokenizer_config.json", '"model_max_length": 1', '"model_max_length": "512", "x": 1'),
        ["not supported between instances of 'int' and 'str' (TypeError)"],
    ),
    "a package": (
        with_files_alone(tokenizer_config__json=b'{"tokenizer_class": "XLMTokenizer"}', vocab__json=b"{}"),
        ["the package sacremoses", "pip install sacremoses"],
    ),
    "code of its own": (
        with_files_alone(
            tokenizer_config__json=b'{"tokenizer_class": "QWenTokenizer", '
            b'"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", null]}}',
            tokenization_qwen__py=b"",
        ),
        ["Python code from its repository, which is not run here"],
    ),
    "pointer": (with_files_alone(tokenizer__json=LFS), ["tokenizer.json is a Git LFS pointer", "git lfs pull"]),
    "compressed": (with_files_alone(tokenizer__json=gzip.compress(b"{}")), ["tokenizer.json is compressed with gzip"]),
    "config pointer": (with_files_alone(tokenizer_config__json=LFS), ["config.json is a Git LFS pointer"]),
    "empty vocabulary": (
        with_files_alone(tokenizer_config__json=b'{"tokenizer_class": "T5Tokenizer"}'),
        ["holds no tokenizer"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("break_it", "said"), BROKEN.values(), ids=BROKEN)
def test_the_reason_why_a_tokenizer_cannot_be_read_is_the_librarys(
    tmp_path, monkeypatch, capfd, bpe_tokenizer, break_it, said
):
    monkeypatch.setattr(module, "_is_installed", lambda package: False)
    bpe_tokenizer.save_pretrained(tmp_path)
    break_it(tmp_path)
    with pytest.raises(InputError) as refused:
        load_tokenizer(str(tmp_path), "pretrained", 50257)
    assert all(words in str(refused.value) for words in said), refused.value
    assert "\n" not in str(refused.value) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["no model for unknown words", "panic"])
def test_a_text_that_a_tokenizer_cannot_take_is_no_traceback(kind):
    class PanicException(BaseException):
        pass

    said = "the tokenizer of m cannot read the data: .*; its tokenizer.json, or the class"
    with pytest.raises(InputError, match=said), tokenizer_blamed("m"):
        if kind == "panic":
            raise PanicException("index out of bounds")
        Tokenizer(models.WordPiece({"a": 0})).encode("€")
    with pytest.raises(ValueError), tokenizer_blamed("m"):
        raise ValueError


def test_a_broken_tokenizer_is_not_replaced_by_bytes(tmp_path, bpe_tokenizer):
    bpe_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(str(tmp_path), "random", 50257)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_byte_order_marks_change_nothing(tmp_path, bpe_tokenizer, name):
    GPT2Config().save_pretrained(tmp_path)
    bpe_tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text((tmp_path / name).read_text(), encoding="utf-8-sig")
    loaded = load_tokenizer(str(tmp_path), "pretrained", 400)
    assert loaded.get_vocab() == bpe_tokenizer.get_vocab() and loaded.name_or_path == str(tmp_path)
    loaded.save_pretrained(tmp_path / "saved")


END = "<|endoftext|>"
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {END: {"id": END, "ids": [9999], "tokens": [END]}},
}  # fmt: skip


@pytest.mark.parametrize(("change", "number"), [
    (lambda fields: fields["model"]["vocab"].update({"q": 2**32 - 1}), 2**32 - 1),
    (lambda fields: fields.update(post_processor=TEMPLATE), 9999),
], ids=["beyond int32", "without a token"])  # fmt: skip
def test_ids_that_no_model_has_are_refused(tmp_path, change, number):
    """Seen to fail: ended in a traceback."""
    BYTES.save_pretrained(tmp_path / "model")
    fields = json.loads((tmp_path / "model/tokenizer.json").read_text())
    change(fields)
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(fields))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("quick quick " * 40)
    with pytest.raises(InputError, match=f"the tokenizer gives token id {number}"):
        load(tmp_path / "a.txt", tokenizer)


def test_a_model_with_too_few_ids_is_refused(tmp_path, no_hub):
    with pytest.raises(InputError, match="256"):
        load_tokenizer("nobody/no-such-model", "random", 256)


@pytest.mark.parametrize("end", [None, ""])  # the second: in the first conversions of LLaMA
def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path, bpe_tokenizer, end):
    PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": end}))
    with pytest.raises(InputError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path), "pretrained", 400)


def test_hub_is_unreachable_without_an_answer_and_when_offline_is_set(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "refused" in module.hub.why_unreachable.__wrapped__()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: pytest.fail("the hub was asked"))
    assert module.hub.why_unreachable.__wrapped__() == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize("fields", [{"torch_dtype": "auto"}, {"use_return_dict": True}, {"bos_token_id": [1]}], ids=str)
def test_switches_in_the_models_config_do_not_stop_its_tokenizer(tmp_path, bpe_tokenizer, fields):
    config = {name: value for name, value in GPT2Config().to_dict().items() if name != "dtype"}
    bpe_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    assert load_tokenizer(str(tmp_path), "pretrained", 400).get_vocab() == bpe_tokenizer.get_vocab()
